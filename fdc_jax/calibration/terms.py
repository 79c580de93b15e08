"""Fusion of logits and evidence into calibrated task scores (Eq. dual-main)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration.scores import Scores


class TaskLogits(NamedTuple):
    """Largest logit of each head and the head row it came from."""

    logit: Float[np.ndarray, "n tasks"]
    row: Int[np.ndarray, "n tasks"]

    def of_tasks(self, count: int) -> "TaskLogits":
        """Returns the first tasks alone."""
        return TaskLogits(self.logit[:, :count], self.row[:, :count])


class ViewEvidence(NamedTuple):
    """tanh of the RLC and PAC arguments in one view: corrections in units of the score scale."""

    rlc: Float[np.ndarray, "n tasks"]
    pac: Float[np.ndarray, "n tasks"]

    def of_tasks(self, count: int) -> "ViewEvidence":
        """Returns the first tasks alone."""
        return ViewEvidence(self.rlc[:, :count], self.pac[:, :count])


class Weights(NamedTuple):
    """Correction and view weights: alpha, beta, w_T and w_0 of Eq. dual-main."""

    rlc: float
    pac: float
    adapted_view: float
    pretrained_view: float


@dataclass(frozen=True)
class Terms:
    """Everything the score of a sample and task is made of, so that any combination costs no pass.

    Attributes:
        raw_logits: logits of the heads as they are.
        filtered_logits: logits with TSF.
        adapted: evidence of the adapted view.
        pretrained: evidence of the pretrained view; None when that view is not in use.
        raw_scale: sigma_t without TSF.
        filtered_scale: sigma_t with TSF.
        weights: correction and view weights.
        classes: labels of each task's head rows, in row order.
    """

    raw_logits: TaskLogits
    filtered_logits: TaskLogits
    adapted: ViewEvidence
    pretrained: ViewEvidence | None
    raw_scale: Float[np.ndarray, " tasks"]
    filtered_scale: Float[np.ndarray, " tasks"]
    weights: Weights
    classes: Sequence[Int[np.ndarray, " c"]]

    def fuse(
        self,
        tsf: bool = True,
        rlc: bool = True,
        pac: bool = True,
        adapted_view: bool = True,
        pretrained_view: bool = True,
    ) -> Scores:
        """Returns the scores with the named components switched on.

        Without TSF both the logits and the score scales are the raw ones (paper, "Test-Time
        Calibration"); with everything switched off the scores are the raw logits themselves.
        """
        logits, scale = (
            (self.filtered_logits, self.filtered_scale)
            if tsf
            else (self.raw_logits, self.raw_scale)
        )
        views = [
            (self.weights.adapted_view, self.adapted if adapted_view else None),
            (self.weights.pretrained_view, self.pretrained if pretrained_view else None),
        ]
        scores = logits.logit
        for weight, evidence in views:
            if evidence is None:
                continue
            if pac:
                scores = scores + np.float32(weight * self.weights.pac) * scale * evidence.pac
            if rlc:
                scores = scores - np.float32(weight * self.weights.rlc) * scale * evidence.rlc
        return Scores(scores, logits.row, self.classes)

    def raw(self) -> Scores:
        """Returns the largest raw logits as scores (Eq. raw)."""
        return self.fuse(False, False, False, False, False)
