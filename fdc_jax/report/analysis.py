"""Analyses of a run's saved features: no training, the paper's diagnostics, sweeps of FDC.

Results are kept in the user's cache folder, so that a second report takes seconds.
"""

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from jaxtyping import Int

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import FDC, Settings
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.files import user_cache
from fdc_jax.report import diagnostics

Sweep = Mapping[str, Sequence[float]]

# The paper's values, everything else at its default ("Hyperparameter Analysis of TSF and PAC"); of
# `neighbours` all that are feasible.
VALUES: Sweep = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
    "neighbours": (),
}
# Comparators on the features of the pretrained encoder alone: what no training comes to. With fewer
# random features than in the RanPAC paper (10,000), which take minutes and gigabytes.
UNTRAINED: dict[str, dict[str, Any]] = {
    "ncm-pretrained": {},
    "ranpac-pretrained": {"projections": 2_000},
}
_OF_EVERY_SEED = ("similarity", "residual_contributions")
_OF_THE_FIRST = ("residual_distributions", "prototype_geometry")


def sweep_of(flags: Sequence[str]) -> Sweep:
    """Returns values by setting of flags such as `attenuation:0.1,0.3`; by default the paper's.

    `all` stands for the paper's values of all settings, `none` for no setting.

    Raises:
        InputError: no such setting, or no such values.
    """
    sweep: dict[str, Sequence[float]] = {}
    for flag in flags:
        name, _, listed = flag.partition(":")
        try:
            number = int if name == "neighbours" else float
            values = [number(value) for value in listed.split(",") if value]
            for value in values:
                FDC(**{name: value})
            given = {"all": VALUES, "none": {}}.get(flag)
            sweep |= {name: values or VALUES[name]} if given is None else given
        except (KeyError, ValueError, InputError) as error:
            raise InputError(
                f"--sweep: expected one of {', '.join((*VALUES, 'all'))}, or one with values as "
                f"attenuation:0.1,0.3, found {flag!r} ({error})"
            ) from error
    return sweep


def of_run(run: Any, sweep: Sweep, first: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns diagnostics by name, and numbers by quantity.

    Args:
        run: one seed, as `fdc_jax.open_run` returns it.
        sweep: values of settings of FDC by name; none stand for all that are feasible.
        first: True for the seed whose distributions and prototypes are drawn.

    Raises:
        InputError: the run has no saved features, or no labels with them.
    """
    folder, fields = run.folder / "features", dataclasses.fields(Settings)
    config = {field.name: run.results["config"].get(f"fdc.{field.name}") for field in fields}
    settings = {name: value for name, value in config.items() if value is not None}
    results = _kept(_diagnosed, folder, settings, (*_OF_EVERY_SEED, *_OF_THE_FIRST * first))
    numbers: dict[str, float] = {}
    if "similarity" in results:
        ranks = results["similarity"].corr(method="spearman")["error"].drop("error")
        numbers |= ranks.add_prefix("correlation:").to_dict()
    means = results["residual_contributions"].mean()
    numbers |= means.add_prefix("contribution:").to_dict()
    for parameter, values in sweep.items():
        if not values:  # Classes without images have no prototype.
            sizes = [len(np.unique(task.labels)) for task in _features(folder).tasks]
            values = range(1, min(sizes) + 1)
        for value in values:
            numbers |= _kept(refitted, folder, settings, parameter, value)
    return results, numbers


def untrained(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns columns of labels such as `ncm-pretrained_label`, a row per test image.

    Empty if the run has no saved features of E_0, or if they are not of its predictions.
    """
    folder = run.folder / "features"
    if not ((folder / "test_pretrained.npy").exists() and run.predictions_file.exists()):
        return {}
    true, labels = _kept(_untrained, folder)
    return labels if np.array_equal(true, run.predictions["label"]) else {}


# Functions of saved features ---------------------------------------------------------------------


@functools.cache
def _code() -> str:
    """Returns a digest of the code that results depend on."""
    package = Path(calibration.__file__).parents[1]
    files = [f for room in ("calibration", "features") for f in (package / room).rglob("*.py")]
    files += [Path(__file__), Path(diagnostics.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _kept(function: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    """Returns the result of a function of a folder of saved features and of further arguments.

    It is computed only if the features or the code have changed since the last time.
    """
    test = folder / "test_adapted.npy"
    changed = test.stat().st_mtime_ns if test.exists() else 0
    folder = folder.absolute()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="joblib")
            memory: Any = joblib.Memory(user_cache() / "report", verbose=0)
            return memory.cache(_called)(function, folder, changed, _code(), *arguments)
    except OSError:  # The disk of the cache is full, for instance.
        return function(folder, *arguments)


def _called(
    function: Callable[..., Any], folder: Path, changed: int, code: str, *arguments: Any
) -> Any:
    return function(folder, *arguments)


def _features(folder: Path) -> FeatureSet:
    if not (folder / "test_adapted.npy").exists():
        raise InputError("no saved features; the run had save_features off")
    features = feature_files.load(folder)
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
    """Returns `diagnostics` of FDC by name; of a single task there is no similarity."""
    features = _features(folder)
    fdc = features.fit(FDC(**settings))
    possible = [name for name in names if name != "similarity" or len(features.tasks) > 1]
    return {name: getattr(diagnostics, name)(features, fdc) for name in possible}


def refitted(
    folder: Path, settings: dict[str, Any], parameter: str, value: float
) -> dict[str, float]:
    """Refits FDC with one changed setting; returns accuracies in percent by quantity.

    `neighbours` also gives `nearest`, with affinities standardised over the candidate tasks of each
    input ("PAC Neighborhood Size").
    """
    features = _features(folder)
    fdc = features.fit(FDC(**{**settings, parameter: value}))
    terms = fdc.terms(features.test_adapted, features.test_pretrained)
    scores = {parameter: terms.fuse()}
    if parameter == "neighbours":
        scores["nearest"] = terms.fuse(nearest=True)
    labels: Any = features.test_labels
    return {f"{name}={value:g}": evaluation.accuracy(labels, s.label) for name, s in scores.items()}
