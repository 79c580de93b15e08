"""Analyses of saved features: calibrators without training, the paper's diagnostics, sweeps of FDC.

The user's cache folder keeps the results.
"""

import functools
import hashlib
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
from jaxtyping import Int

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import FDC, Settings
from fdc_jax.calibration import sweep as together
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.files import ArrayFolder, file_state, user_cache
from fdc_jax.report import diagnostics, quantities

Sweep = Mapping[str, Sequence[float]]

# The paper's values ("Hyperparameter Analysis of TSF and PAC"); of `neighbours` all possible ones.
VALUES: Sweep = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
    "neighbours": (),
}
# Comparators on features of the pretrained encoder alone. The 10,000 random features of the RanPAC
# paper take minutes and gigabytes.
UNTRAINED: dict[str, dict[str, Any]] = {
    "gaussians-pretrained": {},  # the answer of a run before training
    "ncm-pretrained": {},
    "ranpac-pretrained": {"projections": 2_000},
}
OF_EVERY_SEED = ("similarity", "residual_contributions")
OF_THE_FIRST = ("residual_distributions", "prototype_geometry")


def sweep_of(flags: Sequence[str]) -> Sweep:
    """Returns the values by setting of flags such as `attenuation:0.1,0.3`, `all` or `none`.

    Raises:
        InputError: unknown setting, or values out of its range.
    """
    sweep: dict[str, Sequence[float]] = {}
    for flag in flags:
        name, _, listed = flag.partition(":")
        try:
            number = int if name == "neighbours" else float
            values = [number(value) for value in listed.split(",") if value]
            for value in values:
                FDC(**{name: value})
            several = {"all": VALUES, "none": {}}.get(flag)
            sweep |= {name: values or VALUES[name]} if several is None else several
        except (KeyError, ValueError, InputError) as error:
            raise InputError(
                f"--sweep: expected one of {', '.join((*VALUES, 'all'))}, or one with values as "
                f"attenuation:0.1,0.3, found {flag!r} ({error})"
            ) from error
    return sweep


def of_run(run: Any, sweep: Sweep, first: bool) -> tuple[dict[str, Any], pd.DataFrame]:
    """Returns diagnostics by name, and numbers as `quantities.measured`, of an opened run.

    Args:
        run: one seed.
        sweep: values of settings of FDC by name; an empty list stands for all possible values.
        first: True for the seed whose distributions and prototypes are drawn.

    Raises:
        InputError: the run has no saved features, or no labels with them.
    """
    folder = run.features_folder
    config = run.results.config
    fields = [name for name in Settings.__struct_fields__ if f"fdc.{name}" in config]
    settings = {name: config[f"fdc.{name}"] for name in fields}
    results = cached(_diagnosed, folder, settings, (*OF_EVERY_SEED, *OF_THE_FIRST * first))
    numbers = {"contribution": results["residual_contributions"].mean()}
    if "similarity" in results:
        numbers["correlation"] = diagnostics.correlations(results["similarity"])
    if sweep:
        pairs = tuple((parameter, tuple(values)) for parameter, values in sweep.items())
        accuracies = cached(swept, folder, settings, pairs)
        numbers |= {name: {FDC.name: value} for name, value in accuracies.items()}
    return results, quantities.frame(numbers)


@functools.lru_cache(1000)  # many numbers of a run ask for them
def untrained_labels(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns the labels of test images by column, such as `ncm-pretrained_label`.

    Empty if the run has no saved features of E_0 for its predictions.
    """
    folder = run.features_folder
    saved = folder.is_file() or (folder / "test_pretrained.npy").exists()
    if not (saved and run.predictions_file.exists()):
        return {}
    true, labels = cached(_untrained, folder)
    return labels if np.array_equal(true, run.predictions["label"]) else {}


# Functions of saved features ---------------------------------------------------------------------


@functools.cache
def _code() -> str:
    """Returns a checksum of the code that results depend on."""
    package = Path(calibration.__file__).parents[1]
    files = [Path(__file__), Path(diagnostics.__file__)]
    for room in ("calibration", "features"):
        files += (package / room).rglob("*.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def cached(function: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    """Returns `function(folder, *arguments)`, from the cache if features and code are the same."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.npy"))
    states = {str(path): file_state(path) for path in files}
    folder = folder.absolute()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="joblib")
            memory: Any = joblib.Memory(user_cache() / "report", verbose=0)
            return memory.cache(_called)(function, folder, states, _code(), *arguments)
    except OSError:  # The disk of the cache is full, for instance.
        return function(folder, *arguments)


def _called(
    function: Callable[..., Any], folder: Path, states: Any, code: str, *arguments: Any
) -> Any:
    return function(folder, *arguments)


def _features(folder: Path) -> FeatureSet:
    if not (folder.is_file() or (folder / "test_adapted.npy").exists()):
        raise InputError("no saved features; the run had save_features off")
    features = feature_files.load(folder, renumbered=True)
    if features.test_labels is None:
        raise InputError("test_labels: absent from the saved features")
    return features


def _untrained(folder: Path) -> tuple[Any, dict[str, Int[np.ndarray, " n"]]]:
    labels = {}
    try:
        features = _features(folder)
        for name, settings in UNTRAINED.items():
            fitted = features.fit(calibration.make(name, **settings))
            scores = fitted.score(features.test_adapted, features.test_pretrained)
            labels[f"{name}_label"] = scores.label
    except InputError:
        return None, {}
    return features.test_labels, labels


def _diagnosed(folder: Path, settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns `diagnostics` of FDC by name; a single task has no similarity."""
    features, fdc = _features(folder), FDC(**settings)
    fdc.doubts = None  # The run has named a head like chance.
    features.fit(fdc)
    possible = [name for name in names if name != "similarity" or len(features.tasks) > 1]
    return {name: getattr(diagnostics, name)(features, fdc) for name in possible}


def swept(
    folder: Path, settings: dict[str, Any], values: Sequence[tuple[str, Sequence[float]]]
) -> dict[str, float]:
    """Returns the accuracies in percent, by quantity, of FDC with one changed setting each.

    One pass over the features gives all of them; those on validation images start with
    `validation_`. A parameter without values has all possible ones.
    `neighbours` also gives `nearest`, with affinities standardised over the candidate tasks of each
    input ("PAC Neighborhood Size").
    """
    features, changes = _features(folder), []
    for parameter, given in values:
        # A class without images has no prototype.
        fewest = min(len(np.unique(task.labels)) for task in features.tasks)
        changes += [(parameter, value) for value in given or range(1, fewest + 1)]
    fdc = together.Sweep([{**settings, parameter: value} for parameter, value in changes])
    fdc.doubts = None  # The run has named a head like chance.
    features.fit(fdc)
    names = ("test_adapted", "test_pretrained", "test_labels")
    tested: Any = {"": operator.attrgetter(*names)(features)}
    if (folder / "validation").is_dir():
        tested["validation_"] = map(ArrayFolder(folder / "validation").get, names)
    numbers = {}
    for prefix, (adapted, pretrained, labels) in tested.items():
        measured = fdc.terms(adapted, pretrained)
        for (parameter, value), terms in zip(changes, measured, strict=True):
            label = terms.fuse().label
            numbers[f"{prefix}{parameter}={value:g}"] = evaluation.accuracy(labels, label)
            if parameter == "neighbours" and not prefix:
                nearest = terms.fuse(nearest=True).label
                numbers[f"nearest={value:g}"] = evaluation.accuracy(labels, nearest)
    return numbers
