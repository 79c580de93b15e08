"""Fusion of logits and evidence into calibrated task scores (Eq. dual-main)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.settings import PAPER_AFFINITY, Affinity
from fdc_jax.errors import InputError

# Share of the mean score scale that the unit of a head's scores is at least, class by class.
LEAST_UNIT = 0.1


class TaskLogits(NamedTuple):
    """Largest logit of each head and the head row it came from."""

    logit: Float[np.ndarray, "n tasks"]
    row: Int[np.ndarray, "n tasks"]

    def of_tasks(self, count: int) -> "TaskLogits":
        """Returns the first tasks alone."""
        return TaskLogits(self.logit[:, :count], self.row[:, :count])


class ViewEvidence(NamedTuple):
    """Corrections of one view in units of the score scale.

    Attributes:
        rlc: tanh of the RLC argument.
        affinity: the standardised affinity, whose tanh is the PAC evidence.
    """

    rlc: Float[np.ndarray, "n tasks"]
    affinity: Float[np.ndarray, "n tasks"]

    @property
    def pac(self) -> Float[np.ndarray, "n tasks"]:
        """The paper's PAC evidence."""
        return np.tanh(self.affinity)

    def of_tasks(self, count: int) -> "ViewEvidence":
        """Returns the first tasks alone."""
        return ViewEvidence(self.rlc[:, :count], self.affinity[:, :count])


class WhitenedView(NamedTuple):
    """Cosines of one view in the within-class metric, and how each task's own ones were spread.

    Attributes:
        cosines: minus infinity where there is no class.
        mean: of each task's own largest cosines.
        std: their standard deviation.
    """

    cosines: Float[np.ndarray, "n tasks c"]
    mean: Float[np.ndarray, " tasks"]
    std: Float[np.ndarray, " tasks"]

    def affinity(self, reference: str, scope: str) -> Float[np.ndarray, "n tasks c"]:
        """Returns standardised affinities; with scope `task`, one per task, in a last axis of 1."""
        mean, std = self.mean, self.std
        if reference == "pooled":
            mean, std = np.mean(mean, keepdims=True), np.mean(std, keepdims=True)
        found = self.cosines if scope == "class" else self.cosines.max(axis=2, keepdims=True)
        return ((found - mean[:, None]) / std[:, None]).astype(np.float32)


class Whitened(NamedTuple):
    """What the whitened affinity adds to the terms; `None` for logits of heads without rows.

    Attributes:
        adapted: of the adapted view.
        pretrained: of the pretrained view; None when that view is not in use.
        raw_logits: of every class of every head, minus infinity beyond.
        filtered_logits: the same with TSF.
    """

    adapted: WhitenedView
    pretrained: WhitenedView | None
    raw_logits: Float[np.ndarray, "n tasks c"] | None
    filtered_logits: Float[np.ndarray, "n tasks c"] | None


class Weights(NamedTuple):
    """Correction and view weights: alpha, beta, w_T and w_0 of Eq. dual-main."""

    rlc: float
    pac: float
    adapted_view: float
    pretrained_view: float


class _View(NamedTuple):
    """One view that is switched on: its weight, and what it says."""

    weight: float
    evidence: ViewEvidence
    whitened: WhitenedView | None

    def affinity_evidence(
        self, affinity: Affinity, weight: float
    ) -> Float[np.ndarray, "n tasks c"]:
        """Returns weighted evidence; with scope `task`, one per task, in a last axis of 1."""
        if affinity.metric == "cosine":
            found = self.evidence.affinity[..., None]
        else:
            assert self.whitened is not None
            found = self.whitened.affinity(affinity.reference, affinity.scope)
        if affinity.evidence == "tanh":
            found = np.tanh(found)
        return np.float32(self.weight * weight) * found


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
        affinity: how `fuse` turns affinities into evidence unless it is told otherwise.
        paper_affinity: the paper's way.
        whitened: None unless the calibrator was fitted for the whitened metric.
    """

    raw_logits: TaskLogits
    filtered_logits: TaskLogits
    adapted: ViewEvidence
    pretrained: ViewEvidence | None
    raw_scale: Float[np.ndarray, " tasks"]
    filtered_scale: Float[np.ndarray, " tasks"]
    weights: Weights
    classes: Sequence[Int[np.ndarray, " c"]]
    affinity: Affinity = PAPER_AFFINITY
    paper_affinity: Affinity = PAPER_AFFINITY
    whitened: Whitened | None = None

    def fuse(
        self,
        tsf: bool = True,
        rlc: bool = True,
        pac: bool = True,
        adapted_view: bool = True,
        pretrained_view: bool = True,
        affinity: Affinity | None = None,
    ) -> Scores:
        """Returns the scores with the named components switched on.

        Without TSF both the logits and the score scales are the raw ones (paper, "Test-Time
        Calibration"); with everything switched off the scores are the raw logits themselves.

        Args:
            tsf: filter the logits.
            rlc: use residual evidence.
            pac: use affinities.
            adapted_view: use the evidence of the adapted view.
            pretrained_view: use the evidence of the pretrained view.
            affinity: how affinities become evidence; by default as the calibrator was set.

        Raises:
            InputError: an affinity for which the calibrator was not fitted.
        """
        affinity = affinity or self.affinity
        self._check(affinity)
        logits, scale = (
            (self.filtered_logits, self.filtered_scale)
            if tsf
            else (self.raw_logits, self.raw_scale)
        )
        used = self._views(adapted_view, pretrained_view)
        by_class = pac and affinity.scope == "class"
        scores = logits.logit
        closeness: Any = np.float32(0.0)
        for view in used:
            if pac and view.weight * self.weights.pac:
                found = view.affinity_evidence(affinity, self.weights.pac)
                if by_class:
                    closeness = closeness + found
                else:
                    scores = scores + scale * found[..., 0]
            if rlc:
                weight = np.float32(view.weight * self.weights.rlc)
                scores = scores - weight * scale * view.evidence.rlc
        if not by_class or not used:
            return Scores(scores, logits.row, self.classes)
        assert self.whitened is not None
        rows = self.whitened.filtered_logits if tsf else self.whitened.raw_logits
        assert rows is not None
        # What is common to the classes of a task is in `scores` already.
        each = _class_scores(rows, scores - logits.logit, closeness, scale)
        return Scores(each.max(axis=2), each.argmax(axis=2).astype(np.int32), self.classes)

    def raw(self) -> Scores:
        """Returns the largest raw logits as scores (Eq. raw)."""
        return self.fuse(False, False, False, False, False)

    def _check(self, affinity: Affinity) -> None:
        """Raises InputError for an affinity for which the calibrator was not fitted."""
        affinity.check()
        if affinity.metric == "whitened" and self.whitened is None:
            raise InputError("affinity: expected a calibrator fitted with affinity_metric whitened")
        if affinity.metric == "cosine" and affinity.reference != self.paper_affinity.reference:
            raise InputError(
                f"affinity_reference: expected {self.paper_affinity.reference}, as the calibrator "
                f"was set, found {affinity.reference}"
            )
        if affinity.scope == "class" and self.whitened and self.whitened.raw_logits is None:
            raise InputError(
                "affinity_scope class needs the logit of every class; expected built-in heads, "
                "found functions"
            )

    def _views(self, adapted: bool, pretrained: bool) -> list[_View]:
        """Returns the views that are switched on, as far as there are."""
        weights, whitened = self.weights, self.whitened
        views = []
        if adapted:
            own = whitened and whitened.adapted
            views.append(_View(weights.adapted_view, self.adapted, own))
        if pretrained and self.pretrained is not None:
            own = whitened and whitened.pretrained
            views.append(_View(weights.pretrained_view, self.pretrained, own))
        return views


def _class_scores(
    rows: Float[np.ndarray, "n tasks c"],
    corrections: Float[np.ndarray, "n tasks"],
    closeness: Float[np.ndarray, "n tasks c"] | np.float32,
    scale: Float[np.ndarray, " tasks"],
) -> Float[np.ndarray, "n tasks c"]:
    """Returns one score a class in units of the score scale, so that no head counts more.

    A head that says the same of all its images, as of a single one, must not count without end.

    Args:
        rows: logit of each class.
        corrections: common to the classes of a task, as logits are.
        closeness: of each class, in units of the score scale.
        scale: sigma_t.
    """
    units = np.maximum(scale, np.float32(LEAST_UNIT) * scale.mean())[:, None]
    return (rows + corrections[..., None]) / units + closeness
