"""The methods of the command under their names, and how one is fitted and scored."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fdc_jax import calibration
from fdc_jax.calibration import CALIBRATORS, Scores, Terms, comparators, drift
from fdc_jax.errors import InputError
from fdc_jax.features.feature_files import FeatureSet

VIEW_WEIGHTS = ("adapted_view_weight", "pretrained_view_weight")


class Settings(NamedTuple):
    """What the command line says about methods: FDC's arguments, and two of RanPAC and AnaCP."""

    fdc: dict[str, float | int]
    projections: int
    seed: int

    def of(self, method: str) -> dict[str, Any]:
        """Returns those that a method has."""
        if method == "transported":  # Of FDC's, the weights of the views.
            return {
                name: self.fdc[name] for name in VIEW_WEIGHTS if name in self.fdc
            } | CALIBRATORS[method]
        if method in CALIBRATORS:
            return self.fdc | CALIBRATORS[method]
        if method.startswith(("ranpac", "anacp")):
            return {"projections": self.projections, "seed": self.seed}
        return {}


class Outcome(NamedTuple):
    """One method on one feature file; `terms` for FDC and its variants alone."""

    scores: Scores
    calibrator: Any
    terms: Terms | None
    fit_seconds: float
    score_seconds: float


# In the order of the table. A suffix names the view or the variant; see each class for formulas.
METHODS: dict[str, Callable[..., Any]] = {
    "raw": comparators.Raw,
    **dict.fromkeys(CALIBRATORS, lambda **settings: calibration.from_settings(settings)),
    "ls": comparators.LogitStandardisation,
    "energy": comparators.Energy,
    "msp": comparators.MaximumSoftmax,
    "entropy": comparators.NegativeEntropy,
    "wa": comparators.WeightAligning,
    "wa-symmetric": lambda: comparators.WeightAligning(variant="symmetric"),
    "vim": comparators.VirtualLogitMatching,
    "ncm": comparators.NearestClassMean,
    "ncm-pretrained": lambda: comparators.NearestClassMean("pretrained"),
    "nme": comparators.NearestMeanOfExemplars,
    "nme-pretrained": lambda: comparators.NearestMeanOfExemplars("pretrained"),
    "mahalanobis": comparators.Mahalanobis,
    "mahalanobis-pretrained": lambda: comparators.Mahalanobis("pretrained"),
    "mahalanobis-task": lambda: comparators.Mahalanobis(variant="per_task"),
    "mahalanobis-relative": lambda: comparators.Mahalanobis(variant="relative"),
    "fecam": comparators.FeCAM,
    "fecam-pretrained": lambda: comparators.FeCAM("pretrained"),
    "fecam-pilot": lambda: comparators.FeCAM(variant="pilot"),
    "ridge": lambda: comparators.RanPAC(variant="linear"),
    "ridge-pretrained": lambda: comparators.RanPAC("pretrained", variant="linear"),
    "ranpac": comparators.RanPAC,
    "ranpac-pretrained": lambda **settings: comparators.RanPAC("pretrained", **settings),
    "ranpac-pilot": lambda **settings: comparators.RanPAC(variant="pilot", **settings),
    "anacp": comparators.AnaCP,
    "anacp-pretrained": lambda **settings: comparators.AnaCP("pretrained", **settings),
}


def moved(features: FeatureSet) -> FeatureSet:
    """Returns features of which those of earlier encoders are moved to where the last one has them.

    Every task's map (`calibration.drift`) moves the adapted features of all tasks before it. So any
    method sees statistics that follow the encoder, also those that an affine map cannot move.

    Raises:
        InputError: the file lacks `train_previous_t`.
    """
    adapted = [task.adapted for task in features.tasks]
    for t, task in enumerate(features.tasks[1:], start=1):
        if task.previous is None:
            raise InputError(
                f"train_previous_{t}: missing; expected, as statistics follow the encoder, "
                "features of the task's samples by the encoder before it"
            )
        by = drift.fit_map(np.asarray(task.previous), np.asarray(task.adapted))
        adapted[:t] = [by.move(each).astype(np.float32) for each in adapted[:t]]
    pairs = zip(features.tasks, adapted, strict=True)
    return features._replace(tasks=tuple(task._replace(adapted=each) for task, each in pairs))


def run(name: str, features: FeatureSet, settings: Settings, plain: bool = False) -> Outcome:
    """Fits a method of `METHODS` task by task and scores all test features with the final heads.

    With `plain`, FDC and its variants compute with NumPy alone.

    Raises:
        InputError: the method does not apply to these features.
    """
    method, terms = METHODS[name](**settings.of(name)), None
    if plain and name in CALIBRATORS:
        method = method.to_numpy()
    start = time.perf_counter()
    features.fit(method)
    fitted = time.perf_counter()
    if name in CALIBRATORS:
        terms = method.terms(features.test_adapted, features.test_pretrained)
        scores = terms.scores()
    else:
        scores = method.score(features.test_adapted, features.test_pretrained)
    scored = time.perf_counter()
    unfit = ~np.isfinite(scores.task_scores).any(axis=1)
    if unfit.any():
        raise InputError(f"{name}: no finite score for test row {int(np.argmax(unfit))}")
    return Outcome(scores, method, terms, fitted - start, scored - fitted)
