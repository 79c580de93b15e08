"""Second pass over a task: its own moments, score scales and foreign residuals.

Two passes are needed because a residual is measured against the finished PCA basis and an affinity
against the finished prototypes (Algorithm 1, lines 5 to 10).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import inputs, scoring, stacking, whitening
from fdc_jax.calibration.earlier import EarlierTasks
from fdc_jax.calibration.function_heads import function_logits
from fdc_jax.calibration.head_rows import HeadRows
from fdc_jax.calibration.statistics import FirstPass, Task, ViewStatistics, population_moments
from fdc_jax.calibration.terms import TaskLogits
from fdc_jax.errors import InputError


def second_pass(
    source: inputs.Source,
    task: int,
    first: FirstPass,
    head: Any,
    rows: HeadRows | None,
    earlier: Sequence[EarlierTasks],
    attenuation: float,
    neighbours: int,
    prototypes: Sequence[whitening.Prototypes] = (),
) -> tuple[Task, list[Float[np.ndarray, "earlier n"]]]:
    """Measures every sample of a task against itself and against the earlier tasks.

    Args:
        source: the task's samples, the same as in the first pass.
        task: index for messages.
        first: results of the first pass.
        head: the task's head.
        rows: the same head as rows and bias, None unless it is a built-in one.
        earlier: earlier tasks, per view.
        attenuation: gamma of TSF.
        neighbours: K of PAC.
        prototypes: the task's own, per view, in the within-class metric of this moment; none where
            the calibrator does not use it.

    Returns:
        What is kept of the task and, per view, the standardised residuals of its samples against
        every earlier task.

    Raises:
        InputError: the source gave other samples than in the first pass.
    """
    drafts = [
        ViewStatistics(*shape, first.class_counts, 0.0, 1.0, 0.0, 1.0) for shape in first.shapes
    ]
    views = [stacking.stack_view([draft]) for draft in drafts]
    gamma = jnp.float32(attenuation)
    heads = None if rows is None else stacking.stack_heads([rows], views[0].basis, attenuation)
    own: list[list[scoring.Measures]] = [[] for _ in views]
    maxima: list[tuple[TaskLogits, TaskLogits]] = []
    foreign: list[list[Array]] = [[] for _ in views]
    cosines: list[list[Array]] = [[] for _ in prototypes]
    sizes: list[int] = []
    counts = np.zeros_like(first.class_counts)
    for block in inputs.blocks(source, task):
        counts += (block.labels[:, None] == first.classes).sum(axis=0)
        sizes.append(block.rows)
        features = [block.adapted] if len(views) == 1 else [block.adapted, block.pretrained]
        for view, values in enumerate(map(jnp.asarray, features)):
            own[view].append(
                _measure(
                    views[view],
                    heads if view == 0 else None,
                    values,
                    gamma,
                    normalised=rows is not None and rows.normalised,
                    neighbours=neighbours,
                )
            )
            if prototypes:
                cosines[view].append(whitening.largest_cosine(prototypes[view], values))
            near = first.shapes[view].mean
            foreign[view].append(earlier[view].residual_ratios(values, block.rows, near))
        if rows is None:
            maxima.append(
                function_logits(
                    head,
                    block.adapted[: block.rows],
                    views[0].basis[0],
                    gamma,
                    len(counts),
                    f"head of task {task}",
                )
            )
    if sum(sizes) != first.class_counts.sum() or (counts != first.class_counts).any():
        raise InputError(
            f"source of task {task}: the second pass gave other samples than the first "
            f"({sum(sizes)} rows, {first.class_counts.sum()} before); it must start again at every "
            "call"
        )
    statistics, residuals = [], []
    for view, draft in enumerate(drafts):
        ratio = _gather([batch.ratio for batch in own[view]], sizes)[0]
        distance = _gather([batch.distance for batch in own[view]], sizes)[0]
        whitened = None
        if prototypes:
            own_cosines = _gather([each[:, None] for each in cosines[view]], sizes)[0]
            mean, std = population_moments(own_cosines)
            floored = max(std, whitening.DEVIATION_FLOOR)
            whitened = whitening.TaskAffinity(first.within[view][1], mean, floored)
        statistics.append(
            ViewStatistics(
                *draft[:4], *population_moments(ratio), *population_moments(distance), whitened
            )
        )
        residuals.append(earlier[view].standardise(_gather(foreign[view], sizes)))
    if rows is None:
        raw = np.concatenate([batch[0].logit for batch in maxima])
        filtered = np.concatenate([batch[1].logit for batch in maxima])
    else:
        raw = _gather([batch.raw.logit for batch in own[0] if batch.raw], sizes)[0]
        filtered = _gather([batch.filtered.logit for batch in own[0] if batch.filtered], sizes)[0]
    fitted = Task(
        statistics,
        first.classes,
        sum(sizes),
        population_moments(raw)[1],
        population_moments(filtered)[1],
    )
    return fitted, residuals


_measure = partial(jax.jit, static_argnames=("normalised", "neighbours"))(scoring.measure)


def _gather(batches: Sequence[Array], sizes: Sequence[int]) -> Float[np.ndarray, "tasks n"]:
    """Fetches [block, tasks] results and drops the padding rows."""
    fetched = jax.device_get(list(batches))
    kept = [batch[:size] for batch, size in zip(fetched, sizes, strict=True)]
    return np.concatenate(kept).T
