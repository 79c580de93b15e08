"""Measurements of a batch by FDC, from which its scores with any components follow."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import compiled, fdc
from fdc_jax.calibration.calibrator import Scores, within_tasks
from fdc_jax.calibration.compiled import Blocks
from fdc_jax.calibration.settings import COMPONENTS, Settings, Switches, on_device


class Terms(NamedTuple):
    """Measurements of a batch against all tasks; `fuse` combines them under any switches."""

    blocks: Blocks
    measured: Sequence[Sequence[fdc.Measured]]  # by block and view, on the device
    tasks: Sequence[fdc.PackedTasks]  # by view
    ratios: Sequence[tuple[Any, ...]]  # `fdc.log_ratio` by view
    settings: Settings
    classes: Sequence[Int[np.ndarray, " c"]]

    def fuse(self, *on: bool, **switches: bool) -> Scores:
        """Returns the scores with some components on, by fields of `Switches`.

        Without any they are the raw logits.
        """
        numbers = on_device(self.settings, Switches(*on, **switches))
        common = self.tasks, self.ratios, *numbers
        scores, rows = self.blocks.gather([fdc.fuse(block, *common) for block in self.measured])
        count = len(self.classes)
        return Scores(scores[:, :count], rows[:, :count], self.classes)

    def components(self) -> dict[str, Scores]:
        """Returns the scores of `COMPONENTS`; those of one view only if there are two."""
        single = len(self.tasks) == 1
        names = [name for name in COMPONENTS if not (single and "view" in name)]
        return {name: self.fuse(**COMPONENTS[name]) for name in names}

    def standardised(self, view: int) -> tuple[Float[np.ndarray, "n tasks"], ...]:
        """Returns u_t and q_t in one view."""
        numbers = jax.device_put((self.settings.neighbours, False))
        parts = [_evidence(block[view], self.tasks[view], *numbers) for block in self.measured]
        return tuple(part[:, : len(self.classes)] for part in self.blocks.gather(parts))

    def by_class(self) -> Float[np.ndarray, "n classes"]:
        """Returns S_t - (largest filtered logit of t - the class's own); not in the paper."""
        gamma = jax.device_put(self.settings.attenuation)
        parts = [_filtered(block[0], self.tasks[0], gamma) for block in self.measured]
        logits = self.blocks.gather(parts)
        by_task = [logits[:, task, : len(rows)] for task, rows in enumerate(self.classes)]
        return within_tasks(self.fuse().task_scores, by_task)


_evidence = jax.jit(fdc.evidence)
_filtered = jax.jit(fdc.filtered)


def of(calibrator: fdc.FDC, adapted: Any, pretrained: Any = None) -> Terms:
    """Returns the measurements of a batch against all tasks (lines 15 to 17); see `FDC.score`."""
    blocks, (tasks, ratios) = calibrator.batch(adapted, pretrained)
    measured = compiled.map_blocks(partial(fdc.measure_views, tasks), *blocks)
    return Terms(blocks[0], measured, tasks, ratios, calibrator.settings, calibrator.classes)
