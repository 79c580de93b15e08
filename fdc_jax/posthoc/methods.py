"""The methods of the command under their names, and how one is fitted and scored."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fdc_jax import calibration
from fdc_jax.calibration import Scores, Terms, comparators
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet


class Settings(NamedTuple):
    """What the command line says about methods: FDC's arguments, and two of the others."""

    fdc: dict[str, float | int]
    projections: int
    seed: int


class Outcome(NamedTuple):
    """One method on one feature file; `calibrator` and `terms` for FDC and its variants alone."""

    scores: Scores
    calibrator: calibration.FDC | None
    terms: Terms | None
    storage_bytes: int
    fit_seconds: float
    score_seconds: float


def _by_view(make: Callable[[Settings, str], Any], name: str) -> dict[str, Callable]:
    return {
        name: lambda settings: make(settings, "adapted"),
        f"{name}-pretrained": lambda settings: make(settings, "pretrained"),
    }


# FDC's, which are beyond the paper (docs/beyond.md), as further arguments of `FDC`.
VARIANTS: dict[str, dict[str, Any]] = {"whitened": WHITENED, "whitened-classes": WHITENED_CLASSES}


def _variant(name: str) -> Callable[[Settings], Any]:
    return lambda settings: calibration.FDC(**settings.fdc, **VARIANTS[name])


# In the order of the table. A suffix names the view or the variant; see each class for formulas.
METHODS: dict[str, Callable[[Settings], Any]] = {
    "raw": lambda settings: comparators.Raw(),
    "fdc": lambda settings: calibration.FDC(**settings.fdc),  # pyright: ignore
    **{name: _variant(name) for name in VARIANTS},
    "ls": lambda settings: comparators.LogitStandardisation(),
    "energy": lambda settings: comparators.Energy(),
    "msp": lambda settings: comparators.MaximumSoftmax(),
    "entropy": lambda settings: comparators.NegativeEntropy(),
    "wa": lambda settings: comparators.WeightAligning("sequential"),
    "wa-symmetric": lambda settings: comparators.WeightAligning("symmetric"),
    "vim": lambda settings: comparators.VirtualLogitMatching(),
    **_by_view(lambda settings, view: comparators.NearestClassMean(view), "ncm"),
    **_by_view(lambda settings, view: comparators.NearestMeanOfExemplars(view), "nme"),
    **_by_view(lambda settings, view: comparators.Mahalanobis(view), "mahalanobis"),
    "mahalanobis-task": lambda settings: comparators.Mahalanobis(variant="per_task"),
    "mahalanobis-relative": lambda settings: comparators.Mahalanobis(variant="relative"),
    **_by_view(lambda settings, view: comparators.FeCAM(view), "fecam"),
    "fecam-pilot": lambda settings: comparators.FeCAM(variant="pilot"),
    **_by_view(
        lambda settings, view: comparators.RanPAC(
            view, projections=settings.projections, seed=settings.seed
        ),
        "ranpac",
    ),
    "ranpac-pilot": lambda settings: comparators.RanPAC(
        variant="pilot", projections=settings.projections, seed=settings.seed
    ),
    **_by_view(
        lambda settings, view: comparators.AnaCP(
            view, projections=settings.projections, seed=settings.seed
        ),
        "anacp",
    ),
}


def run(name: str, features: FeatureSet, settings: Settings) -> Outcome:
    """Fits a method task by task and scores all test features, with the final heads if there are.

    Raises:
        InputError: the method is unknown, or does not apply to these features.
    """
    if name not in METHODS:
        raise InputError(f"method: expected all or one of {', '.join(METHODS)}; found {name}")
    method = METHODS[name](settings)
    start = time.perf_counter()
    features.fit(method)
    fitted = time.perf_counter()
    calibrator = terms = None
    if isinstance(method, calibration.FDC):
        calibrator = method
        terms = method.terms(features.test_adapted, features.test_pretrained)
        scores = terms.fuse()
    else:
        scores = method.score(features.test_adapted, features.test_pretrained)
    scored = time.perf_counter()
    unfit = ~np.isfinite(scores.task_scores).any(axis=1)
    if unfit.any():
        raise InputError(f"{name}: no finite score for test row {int(np.argmax(unfit))}")
    return Outcome(scores, calibrator, terms, method.storage_bytes, fitted - start, scored - fitted)
