"""Batches of any size through the compiled scoring kernel, and back to the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import function_heads, inputs, scoring, stacking, whitened_prototypes
from fdc_jax.calibration.foreign import ForeignReference, foreign_coefficients
from fdc_jax.calibration.head_rows import head_kind, head_rows
from fdc_jax.calibration.settings import Settings
from fdc_jax.calibration.statistics import Task
from fdc_jax.calibration.terms import (
    TaskLogits,
    Terms,
    ViewEvidence,
    Weights,
    Whitened,
    WhitenedView,
)
from fdc_jax.calibration.whitening import WithinClass

# Rows per call; smaller batches are padded to a power of two, so that shapes recur.
MAX_ROWS = 256
MIN_ROWS = 8


class Scorer:
    """Padded statistics of all tasks on the device, and the kernel over them.

    Args:
        settings: of the calibrator.
        tasks: fitted tasks.
        heads: one per task, all of one type.
        references: foreign reference per view.
        shared: what all tasks share of each view for the whitened metric; none for the cosine.
    """

    def __init__(
        self,
        settings: Settings,
        tasks: Sequence[Task],
        heads: Sequence[Any],
        references: Sequence[ForeignReference | None],
        shared: Sequence[WithinClass] = (),
    ):
        self.settings, self.tasks, self.heads = settings, list(tasks), list(heads)
        self.views = [
            stacking.stack_view([task.views[view] for task in tasks])
            for view in range(len(tasks[0].views))
        ]
        self.prototypes = whitened_prototypes.of_all_tasks(
            shared, tasks, settings.affinity_shrinkage
        )
        foreign = [jnp.asarray(foreign_coefficients(each)) for each in references]
        self.calibration = scoring.Calibration(
            foreign[0], foreign[-1], jnp.float32(settings.attenuation)
        )
        self.head_arrays, self.normalised = None, False
        if head_kind(heads[0], "head of task 0") != "function":
            width = len(tasks[0].views[0].mean)
            rows = [
                head_rows(head, f"head of task {task}", width) for task, head in enumerate(heads)
            ]
            self.normalised = rows[0].normalised
            self.head_arrays = stacking.stack_heads(rows, self.views[0].basis, settings.attenuation)

    def terms(
        self,
        adapted: Float[np.ndarray | Array, "n d"],
        pretrained: Float[np.ndarray | Array, "n e"] | None,
    ) -> Terms:
        """Returns the terms of a batch, dispatched in pieces and fetched together.

        Raises:
            InputError: a feature is not finite.
        """
        pieces = [
            self._piece(adapted[start : start + MAX_ROWS], pretrained, start)
            for start in range(0, max(len(adapted), 1), MAX_ROWS)
        ]
        joined = jax.tree.map(
            lambda *parts: np.concatenate(parts)[: len(adapted)], *jax.device_get(pieces)
        )
        inputs.check_rows("adapted features", joined.adapted_energy)
        if joined.pretrained_energy is not None:
            inputs.check_rows("pretrained features", joined.pretrained_energy)
        if joined.raw is not None and joined.filtered is not None:
            raw, filtered = TaskLogits(*joined.raw), TaskLogits(*joined.filtered)
        else:
            raw, filtered = function_heads.function_logits_of_tasks(
                self.heads,
                adapted,
                self.views[0].basis,
                self.calibration.attenuation,
                [len(task.classes) for task in self.tasks],
            )
        count, settings, frozen = len(self.tasks), self.settings, joined.pretrained
        return Terms(
            raw_logits=raw.of_tasks(count),
            filtered_logits=filtered.of_tasks(count),
            adapted=ViewEvidence(*joined.adapted).of_tasks(count),
            pretrained=frozen and ViewEvidence(*frozen).of_tasks(count),
            raw_scale=np.array([task.raw_scale for task in self.tasks], np.float32),
            filtered_scale=np.array([task.filtered_scale for task in self.tasks], np.float32),
            weights=Weights(
                settings.rlc_weight,
                settings.pac_weight,
                settings.adapted_view_weight,
                settings.pretrained_view_weight,
            ),
            classes=[task.classes for task in self.tasks],
            affinity=settings.affinity,
            paper_affinity=settings.paper_affinity,
            whitened=self._whitened(joined) if self.prototypes else None,
        )

    def _whitened(self, joined: scoring.BatchTerms) -> Whitened:
        count = len(self.tasks)

        def view(index: int, cosines: Any) -> WhitenedView | None:
            if cosines is None:
                return None
            own = [task.views[index].whitened for task in self.tasks]
            mean, std = (
                np.array([getattr(each, name) for each in own], np.float32)
                for name in ("mean", "std")
            )
            return WhitenedView(cosines[:, :count], mean, std)

        def of_tasks(rows: Any) -> Any:
            return None if rows is None else rows[:, :count]

        adapted = view(0, joined.adapted_cosines)
        assert adapted is not None
        return Whitened(
            adapted,
            view(1, joined.pretrained_cosines),
            of_tasks(joined.raw_rows),
            of_tasks(joined.filtered_rows),
        )

    def _piece(
        self, adapted: np.ndarray | Array, pretrained: np.ndarray | Array | None, start: int
    ) -> scoring.BatchTerms:
        rows = len(adapted)
        padded = min(MAX_ROWS, max(MIN_ROWS, 1 << max(rows - 1, 0).bit_length()))
        frozen = None
        if pretrained is not None:
            frozen = inputs.padded_rows(pretrained[start : start + rows], padded)
        return scoring.score_terms(
            self.head_arrays,
            self.views[0],
            None if frozen is None else self.views[1],
            self.calibration,
            inputs.padded_rows(adapted, padded),
            frozen,
            self.prototypes,
            normalised=self.normalised,
            neighbours=self.settings.neighbours,
            all_rows=bool(self.prototypes),
            nearest=self.settings.affinity_reference == "nearest",
        )
