"""The analyses of a run: which there are, what each needs, and their results from disk or anew."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fdc_jax import calibration, feature_files
from fdc_jax.calibration.settings import Settings
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.report import beyond, cache, confusion, diagnostics, measurements, selection, sweeps
from fdc_jax.report.measurements import Fit
from fdc_jax.report.spectra import TaskSpectrum, spectra

# Key of the result under which stands why others are absent.
MISSING = "missing"


class Run(Protocol):
    """What is read of a run folder; `fdc_jax.report.runs.RunFolder` is one."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def results(self) -> dict[str, Any]:
        """Its `results.json`."""
        ...

    @property
    def features_path(self) -> Path | None:
        """Its saved features, if there are."""
        ...

    def predictions(self) -> dict[str, np.ndarray]:
        """Columns of its `predictions.npz`, empty without it."""
        ...


class _Inputs:
    """Features of a run and what all analyses of them share, read when first needed."""

    def __init__(self, path: Path, settings: Settings):
        self.path, self.settings = path, settings

    @cached_property
    def features(self) -> FeatureSet:
        return feature_files.load(self.path)

    @cached_property
    def spectra(self) -> list[TaskSpectrum]:
        return spectra(self.features)

    @cached_property
    def fit(self) -> Fit:
        return measurements.fit(self.features, [self.settings], self.spectra)


def _sweep(parameter: str) -> Callable[[_Inputs], dict[str, Any]]:
    return lambda run: sweeps.sweep(
        run.features, run.settings, parameter, sweeps.VALUES.get(parameter), run.spectra
    )


# By name; see each function for what it returns.
_OF_FEATURES: dict[str, Callable[[_Inputs], dict[str, Any]]] = {
    "sweep_attenuation": _sweep("attenuation"),
    "sweep_retained_energy": _sweep("retained_energy"),
    "sweep_neighbours": _sweep("neighbours"),
    "similarity": lambda run: diagnostics.similarity(run.features, run.settings, run.fit),
    "residual_contributions": lambda run: diagnostics.residual_contributions(
        run.features, run.settings, run.fit
    ),
    "residual_distributions": lambda run: diagnostics.residual_distributions(
        run.features, run.settings, run.fit
    ),
    "prototype_geometry": lambda run: diagnostics.prototype_geometry(run.features, run.spectra),
    "logit_standardisation": lambda run: diagnostics.logit_standardisation(run.features),
    "selection": lambda run: selection.half_accuracies(run.features, run.settings._asdict()),
    "storage": lambda run: storage(run.features),
    "beyond": lambda run: beyond.accuracies(run.features, run.settings),
}
_OF_PREDICTIONS = {"task_confusion": confusion.task_confusion}

ANALYSES = (*_OF_FEATURES, *_OF_PREDICTIONS)


def analyse(
    run: Run,
    names: Sequence[str] = ANALYSES,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns analyses of a run by their names, each from `<run>/analysis` where it is still valid.

    An analysis that this run does not allow is absent; why is said under `missing`, a dictionary
    from its name to one line, which itself is absent where nothing is missing.

    Args:
        run: a finished run.
        names: of `ANALYSES`.
        progress: told the name of each analysis that is computed rather than read.

    Raises:
        InputError: an unknown name.
    """
    for name in names:
        if name not in ANALYSES:
            raise InputError(f"analysis: expected one of {', '.join(ANALYSES)}; found {name!r}")
    found: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    shared: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = _analysis(run, name, progress or (lambda name: None), shared)
        except InputError as error:
            missing[name] = str(error)
    return found | ({MISSING: missing} if missing else {})


def _analysis(
    run: Run, name: str, progress: Callable[[str], None], shared: dict[str, Any]
) -> dict[str, Any]:
    """Reads or computes one analysis; `shared` is filled for the next ones of the same run."""
    folder = run.path / "analysis"
    key: dict[str, Any]
    if name in _OF_PREDICTIONS:
        columns = run.predictions()
        if not columns:
            raise InputError("no predictions.npz")
        key = {"predictions": cache.checksum(run.path / "predictions.npz", folder)}
        compute = partial(_OF_PREDICTIONS[name], columns)
    else:
        if run.features_path is None:
            raise InputError("no saved features; the run had save_features off or is unfinished")
        if not shared:
            shared["inputs"] = _Inputs(run.features_path, settings_of(run.results))
            shared["checksum"] = cache.checksum(run.features_path, folder)
        inputs = shared["inputs"]
        key = {"features": shared["checksum"], "settings": inputs.settings._asdict()}
        key["values"] = sweeps.VALUES.get(name.removeprefix("sweep_"))
        compute = partial(_OF_FEATURES[name], inputs)

    def announced() -> dict[str, Any]:
        progress(name)
        return compute()

    return cache.cached(folder, name, key, announced)


def settings_of(results: dict[str, Any]) -> Settings:
    """Returns the settings of FDC that a run had; fields that its time did not know are defaults.

    The affinity is the paper's, as in the numbers of a run that also has the whitened one.

    Raises:
        InputError: a field that FDC does not know, or a value outside its range.
    """
    given = selection.fdc_settings(results.get("config", {}))
    unknown = set(given) - set(Settings._fields)
    if unknown:
        raise InputError(f"results.json: config: unknown field fdc.{min(unknown)}")
    settings = calibration.FDC(**given).settings
    affinity = settings.paper_affinity._asdict()
    return settings._replace(**{f"affinity_{name}": value for name, value in affinity.items()})


def storage(features: FeatureSet) -> dict[str, int]:
    """Returns the bytes of saved features: of training and test images, by view, and altogether.

    Heads and labels are not counted.
    """
    found = {
        "train_adapted_bytes": sum(task.adapted.nbytes for task in features.tasks),
        "train_pretrained_bytes": sum(
            task.pretrained.nbytes for task in features.tasks if task.pretrained is not None
        ),
        "test_adapted_bytes": features.test_adapted.nbytes,
        "test_pretrained_bytes": 0
        if features.test_pretrained is None
        else features.test_pretrained.nbytes,
    }
    return found | {"total_bytes": sum(found.values())}
