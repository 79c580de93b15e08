"""The numbers that FDC is configured with, and their ranges."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fdc_jax.errors import InputError

NUMBERS = (
    "retained_energy",
    "attenuation",
    "rlc_weight",
    "pac_weight",
    "adapted_view_weight",
    "pretrained_view_weight",
    "affinity_shrinkage",
)
METRICS = ("cosine", "whitened")
EVIDENCES = ("tanh", "linear")
SCOPES = ("task", "class")
# Below the first, float32 cannot factorise the covariance of few images; above the second, nothing
# is left of it.
SHRINKAGES = (1e-4, 1e4)
# By metric, whose moments standardise an affinity.
REFERENCES = {"cosine": ("own", "nearest"), "whitened": ("own", "pooled")}


class Affinity(NamedTuple):
    """How closeness to prototypes becomes evidence. The defaults are the paper's.

    Attributes:
        metric: `cosine` of the features, or `whitened`, in the within-class metric.
        evidence: `tanh` of the standardised affinity, or the affinity itself, `linear`.
        reference: the moments that standardise: the task's `own`; over the candidate tasks of an
            input, `nearest`; or, of the whitened metric, which all tasks share, the mean of all
            tasks' own moments, `pooled`.
        scope: each `task` gets the affinity of its nearest class, or each `class` gets its own,
            before the maximum over classes.
    """

    metric: str = "cosine"
    evidence: str = "tanh"
    reference: str = "own"
    scope: str = "task"

    def check(self) -> None:
        """Raises InputError unless the four words are known and go together."""
        for name, known in (("metric", METRICS), ("evidence", EVIDENCES), ("scope", SCOPES)):
            _check_word(f"affinity_{name}", getattr(self, name), known)
        if self.reference not in REFERENCES[self.metric]:
            raise InputError(
                f"affinity_reference: expected one of {', '.join(REFERENCES[self.metric])} with "
                f"affinity_metric {self.metric}, found {self.reference!r}"
            )
        if self.scope == "class" and self.metric != "whitened":
            raise InputError(
                "affinity_scope: expected task with affinity_metric cosine, found class"
            )


PAPER_AFFINITY = Affinity()


class Settings(NamedTuple):
    """Settings of a calibrator under their names in `FDC`."""

    retained_energy: float
    attenuation: float
    rlc_weight: float
    pac_weight: float
    adapted_view_weight: float
    pretrained_view_weight: float
    neighbours: int
    affinity_reference: str
    affinity_metric: str = "cosine"
    affinity_evidence: str = "tanh"
    affinity_scope: str = "task"
    affinity_shrinkage: float = 0.05

    @property
    def affinity(self) -> Affinity:
        """What these settings say about affinities."""
        return Affinity(
            self.affinity_metric,
            self.affinity_evidence,
            self.affinity_reference,
            self.affinity_scope,
        )

    @property
    def paper_affinity(self) -> Affinity:
        """The paper's affinity, in the standardisation that is set where it has one."""
        if self.affinity_reference == "nearest":
            return PAPER_AFFINITY._replace(reference="nearest")
        return PAPER_AFFINITY

    def checked(self) -> "Settings":
        """Returns the settings as plain numbers.

        Raises:
            InputError: one is outside its range.
        """
        for field in NUMBERS:
            value = getattr(self, field)
            try:
                valid = not _is_truth(value) and math.isfinite(value) and value >= 0.0
            except TypeError:
                valid = False
            if not valid:
                raise InputError(f"{field}: expected a finite number from 0, found {value!r}")
        if not 0.0 < self.retained_energy <= 1.0:
            raise InputError(f"retained_energy: expected 0 < x <= 1, found {self.retained_energy}")
        if self.attenuation > 1.0:
            raise InputError(f"attenuation: expected 0 <= x <= 1, found {self.attenuation}")
        try:
            whole = int(self.neighbours) == self.neighbours >= 1 and not _is_truth(self.neighbours)
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise InputError(f"neighbours: expected a count from 1, found {self.neighbours!r}")
        self.affinity.check()
        least, most = SHRINKAGES
        if not least <= self.affinity_shrinkage <= most:
            raise InputError(
                f"affinity_shrinkage: expected {least:g} to {most:g}, found "
                f"{self.affinity_shrinkage:g}"
            )
        if self.affinity_metric == "whitened" and self.neighbours != 1:
            raise InputError(
                f"neighbours: expected 1 with affinity_metric whitened, found {self.neighbours}"
            )
        numbers = {field: float(getattr(self, field)) for field in NUMBERS}
        return self._replace(**numbers, neighbours=int(self.neighbours))


def _check_word(field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{field}: expected one of {', '.join(known)}, found {value!r}")


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_)
