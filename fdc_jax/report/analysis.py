"""Analyses of the saved features of runs: the paper's diagnostics and sweeps of FDC's settings."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdc_jax import evaluation
from fdc_jax.calibration import FDC, Settings
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.report import diagnostics
from fdc_jax.report.kept import kept
from fdc_jax.report.runs import Group

# The paper's values, everything else at its default ("Hyperparameter Analysis of TSF and PAC"); of
# `neighbours` all that are feasible.
VALUES: dict[str, Sequence[float]] = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
    "neighbours": (),
}

_OF_EVERY_SEED = ("similarity", "residual_contributions")
_OF_THE_FIRST = ("residual_distributions", "prototype_geometry")

Sweep = Mapping[str, Sequence[float]]


def sweep_of(flags: Sequence[str]) -> Sweep:
    """Returns values by setting of flags such as `attenuation:0.1,0.3`; by default the paper's.

    `all` stands for the paper's values of all settings, `none` for no setting.

    Raises:
        InputError: no such setting, or no such values.
    """
    found: dict[str, Sequence[float]] = {}
    for flag in flags:
        name, _, listed = flag.partition(":")
        try:
            number = int if name == "neighbours" else float
            values = [number(value) for value in listed.split(",") if value]
            for value in values:
                FDC(**{name: value})
            given = {"all": VALUES, "none": {}}.get(flag)
            found |= {name: values or VALUES[name]} if given is None else given
        except (KeyError, ValueError, InputError) as error:
            known = ", ".join((*VALUES, "all"))
            example = "with values as attenuation:0.1,0.3"
            raise InputError(
                f"--sweep: expected one of {known}, or one {example}, found {flag!r} ({error})"
            ) from error
    return found


def analyse(group: Group, sweep: Sweep | None = None) -> None:
    """Fills the analyses of a group and their numbers, and a line per reason why some are missing.

    Args:
        group: of `runs.load`.
        sweep: values of settings of FDC by name. By default the paper's, for the learner whose
            sweeps the paper shows.
    """
    if sweep is None:
        sweep = VALUES if group.learner == "cumulative_lora" else {}
    missing: dict[str, None] = {}
    for run in group.runs:
        folder, settings = run.folder / "features", _settings(run)
        try:
            names = (*_OF_EVERY_SEED, *_OF_THE_FIRST * (run is group.runs[0]))
            results = _diagnosed(folder, settings, names)
            if "similarity" not in results:
                missing["no similarity: a single task"] = None
            for name, value in results.items():
                group.analyses.setdefault(name, []).append(value)
            quantities = dict(_summaries(results))
            for parameter, values in sweep.items():
                for value in values or range(1, _feasible(folder) + 1):
                    quantities |= accuracies(folder, settings, parameter, value)
        except InputError as error:
            missing[f"no diagnostics or sweeps: {error}"] = None
            continue
        for name, value in quantities.items():
            group.numbers.loc[run.results["seed"], name] = value
    group.missing.extend(missing)


def _settings(run: Any) -> dict[str, Any]:
    """Returns the settings of a run's FDC; a field that the run does not have is the default."""
    fields = [field.name for field in dataclasses.fields(Settings)]
    values = {name: run.results["config"].get(f"fdc.{name}") for name in fields}
    return {name: value for name, value in values.items() if value is not None}


def _features(folder: Path) -> FeatureSet:
    if not (folder / "test_adapted.npy").exists():
        raise InputError("no saved features; the run had save_features off")
    features = feature_files.load(folder)
    if features.test_labels is None:
        raise InputError("test_labels: absent from the saved features")
    return features


def _feasible(folder: Path) -> int:
    """Returns the largest K: classes without images have no prototype."""
    return min(len(np.unique(task.labels)) for task in _features(folder).tasks)


@kept
def _diagnosed(folder: Path, settings: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns diagnostics by name; those that need more tasks than there are, are absent."""
    features = _features(folder)
    fdc, results = features.fit(FDC(**settings)), {}
    for name in names:
        if name != "similarity" or len(features.tasks) > 1:
            results[name] = getattr(diagnostics, name)(features, fdc)
    return results


def _summaries(results: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yields the numbers that sum up diagnostics, by name of a quantity."""
    if "similarity" in results:
        ranks = results["similarity"].corr(method="spearman")["error"].drop("error")
        yield from ((f"correlation:{name}", value) for name, value in ranks.items())
    means = results["residual_contributions"].mean()
    yield from ((f"contribution:{side}", value) for side, value in means.items())


@kept
def accuracies(
    folder: Path, settings: dict[str, Any], parameter: str, value: float
) -> dict[str, float]:
    """Refits FDC with one changed setting; returns accuracies in percent by quantity.

    Args:
        folder: saved features of a whole stream, with test labels.
        settings: FDC's.
        parameter: `attenuation`, `retained_energy` or `neighbours`. The latter also gives
            `nearest`, with affinities standardised over the candidate tasks of each input ("PAC
            Neighborhood Size").
        value: of the parameter.
    """
    features, changed = _features(folder), FDC(**{**settings, parameter: value})
    terms = features.fit(changed).terms(features.test_adapted, features.test_pretrained)
    by_name = {parameter: terms.fuse()}
    if parameter == "neighbours":
        by_name["nearest"] = terms.fuse(nearest=True)
    assert features.test_labels is not None  # `_features` has checked.
    return {
        f"{name}={value:g}": evaluation.accuracy(features.test_labels, scores.label)
        for name, scores in by_name.items()
    }
