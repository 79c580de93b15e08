"""Statistics of one task in one view, collected in two passes (Algorithm 1, lines 5 to 11)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.calibration import inputs, measures, moments, whitening
from fdc_jax.calibration.whitening import TaskAffinity
from fdc_jax.errors import InputError


class ViewStatistics(NamedTuple):
    """What is kept of a task in one view.

    The affinity of Eq. par is kept as cosine distance, one minus the affinity, whose digits survive
    in float32 when all features point nearly the same way.

    Attributes:
        mean: mean feature m_t.
        basis: principal directions U_t as rows; possibly none.
        prototypes: unit class prototypes p_{t,c}, zero rows for classes without an image.
        class_counts: images per class.
        residual_mean: mean of the task's own residual ratios.
        residual_std: their population standard deviation, at least 1e-6.
        distance_mean: one minus the mean of the task's own affinities.
        distance_std: population standard deviation of its own affinities, at least 1e-6.
        whitened: its affinity in the within-class metric, where the calibrator uses that.
    """

    mean: Float[np.ndarray, " d"]
    basis: Float[np.ndarray, "r d"]
    prototypes: Float[np.ndarray, "c d"]
    class_counts: Int[np.ndarray, " c"]
    residual_mean: float
    residual_std: float
    distance_mean: float
    distance_std: float
    whitened: TaskAffinity | None = None


class Task(NamedTuple):
    """What is kept of a task.

    Attributes:
        views: statistics of the adapted view and, when in use, of the pretrained view.
        classes: label of each head row.
        samples: number of training samples.
        raw_scale: population std of the head's largest logit on the task, at least 1e-6.
        filtered_scale: the same with TSF; sigma_t of Algorithm 1, line 10.
    """

    views: list[ViewStatistics]
    classes: Int[np.ndarray, " c"]
    samples: int
    raw_scale: float
    filtered_scale: float


class Shape(NamedTuple):
    """First-pass result: what determines the second pass."""

    mean: Float[np.ndarray, " d"]
    basis: Float[np.ndarray, "r d"]
    prototypes: Float[np.ndarray, "c d"]


class FirstPass(NamedTuple):
    """First-pass results of all views of a task, adapted view first.

    `within` holds, per view, the scatter about the class means and these means, where asked for.
    """

    shapes: list[Shape]
    classes: Int[np.ndarray, " c"]
    class_counts: Int[np.ndarray, " c"]
    within: list[tuple[Array, Float[np.ndarray, "c d"]]]


def population_moments(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns mean and population standard deviation, floored at 1e-6, computed in float64."""
    wide = np.asarray(values, np.float64)
    return float(wide.mean()), max(float(wide.std()), measures.SCALE_FLOOR)


def first_pass(
    blocks: Iterable[inputs.Block],
    task: int,
    retained_energy: float,
    num_classes: int,
    classes: Int[np.ndarray, " c"] | None,
    earlier: Sequence[Int[np.ndarray, " c"]],
    within_class: bool = False,
) -> FirstPass:
    """Fits task means, PCA bases and prototypes of all views in one walk over the samples.

    Args:
        blocks: the task's samples, at least one.
        task: index for messages.
        retained_energy: eta of Eq. task-pca.
        num_classes: rows of the head.
        classes: label of each head row; by default the distinct labels, ascending.
        earlier: labels of earlier tasks.
        within_class: collect what the whitened affinity needs, too.

    Raises:
        InputError: labels that do not fit the head or the earlier tasks.
    """
    slots = _Slots(task, num_classes, classes, earlier)
    capacity = 1 << (num_classes - 1).bit_length()
    held: tuple[list[np.ndarray], np.ndarray] | None = None
    running: list[moments.Moments] = []
    spread: list[whitening.Sums] = []
    count = 0
    for block in blocks:
        index = np.full(inputs.BLOCK_ROWS, -1, np.int32)
        index[: block.rows] = slots.index(block.labels, count)
        count += block.rows
        views = [block.adapted] + ([] if block.pretrained is None else [block.pretrained])
        if within_class and spread:
            spread = [
                whitening.add_sums(view, features, index)
                for view, features in zip(spread, views, strict=True)
            ]
        elif within_class:
            spread = [whitening.first_sums(features, index, capacity) for features in views]
        if held is None:
            held = views, index
            continue
        running = running or _started(*held, capacity)
        running = [
            moments.add_moments(view, features, index)
            for view, features in zip(running, views, strict=True)
        ]
    if held is None:
        raise InputError(f"task {task}: expected at least one sample, found none")
    order, labels = slots.rows()
    counts = slots.counts[order]
    found = _components(running, count) if running else _of_one_block(*held, count, capacity)
    shapes = []
    for view in found:
        energies = np.asarray(view.energies)
        if not np.isfinite(energies).all():
            raise InputError(f"task {task}: features are too large for float32 statistics")
        rank = moments.retained_rank(energies, retained_energy, count)
        leading = np.asarray(view.directions)[:rank]
        shapes.append(
            Shape(
                np.asarray(view.mean),
                # The components of samples are not orthonormal yet.
                moments.retained_basis(leading)
                if len(energies) < len(view.mean)
                else np.ascontiguousarray(leading),
                moments.prototypes(np.asarray(view.class_totals)[order], counts),
            )
        )
    in_slots = np.zeros(capacity, np.float32)
    in_slots[: len(slots.counts)] = slots.counts
    within = []
    for sums in spread:
        scatter, means = whitening.within_class(sums, in_slots)
        within.append((scatter, np.asarray(means)[order]))
    return FirstPass(shapes, labels, counts, within)


def _started(
    views: Sequence[np.ndarray], index: Int[np.ndarray, " n"], capacity: int
) -> list[moments.Moments]:
    return [moments.first_moments(features, index, capacity) for features in views]


def _of_one_block(
    views: Sequence[np.ndarray], index: Int[np.ndarray, " n"], count: int, capacity: int
) -> list[moments.Components]:
    """Decomposes a task that is one block, each width in the cheaper way."""
    rows = [moments.sample_rows(count, features.shape[1]) for features in views]
    if len(views) == 2 and views[0].shape == views[1].shape and rows[0]:
        both = np.stack([features[: rows[0]] for features in views])
        return _each(_batched_sample_components(both, index[: rows[0]], capacity))
    if not any(rows):
        return _components(_started(views, index, capacity), count)
    return [
        moments.sample_components(features[:size], index[:size], capacity)
        if size
        else _components(_started([features], index, capacity), count)[0]
        for features, size in zip(views, rows, strict=True)
    ]


def _components(running: Sequence[moments.Moments], count: int) -> list[moments.Components]:
    """Decomposes the views together where their widths agree."""
    size = jnp.float32(count)
    if len(running) == 2 and running[0].origin.shape == running[1].origin.shape:
        both = jax.tree.map(lambda *views: jnp.stack(views), *running)
        parts = _each(_batched_components(both, size))
    else:
        parts = [moments.principal_components(view, size) for view in running]
    return [
        moments.Components(part[0], part[1], part[2], view.class_totals)
        for part, view in zip(parts, running, strict=True)
    ]


def _each(both: Any) -> list[Any]:
    """Takes the results of two views apart."""
    return [jax.tree.map(lambda part, v=view: part[v], both) for view in range(2)]


_batched_components = jax.jit(jax.vmap(moments.principal_components, in_axes=(0, None)))
_batched_sample_components = jax.jit(
    jax.vmap(moments.sample_components, in_axes=(0, None, None)), static_argnums=2
)


class _Slots:
    """Numbers the labels of a task: head rows when these are named, else by first appearance."""

    def __init__(
        self,
        task: int,
        num_classes: int,
        classes: Int[np.ndarray, " c"] | None,
        earlier: Sequence[Int[np.ndarray, " c"]],
    ):
        self.task, self.num_classes, self.named, self.earlier = task, num_classes, classes, earlier
        self.labels: dict[int, int] = {}
        self.counts = np.zeros(num_classes, np.int64)
        if classes is not None:
            inputs.check_disjoint(classes, earlier, task)
            self.labels = {int(label): row for row, label in enumerate(classes)}

    def index(self, labels: Int[np.ndarray, " n"], start: int) -> Int[np.ndarray, " n"]:
        values, inverse = np.unique(labels, return_inverse=True)
        for value in values.tolist():
            if value in self.labels:
                continue
            row = start + int(np.argmax(labels == value))
            if self.named is not None:
                raise InputError(
                    f"labels of task {self.task}: label {value} at row {row} is none of the "
                    f"head's classes"
                )
            inputs.check_disjoint(np.array([value]), self.earlier, self.task)
            if len(self.labels) == self.num_classes:
                raise InputError(
                    f"labels of task {self.task}: label {value} at row {row} is one more than the "
                    f"{self.num_classes} classes of the head"
                )
            self.labels[value] = len(self.labels)
        index = np.array([self.labels[value] for value in values.tolist()], np.int32)[inverse]
        self.counts += np.bincount(index, minlength=self.num_classes)
        return index

    def rows(self) -> tuple[Int[np.ndarray, " c"], Int[np.ndarray, " c"]]:
        """Returns the slot and the label of each head row."""
        if self.named is not None:
            return np.arange(self.num_classes), self.named
        if len(self.labels) != self.num_classes:
            raise InputError(
                f"labels of task {self.task}: found {len(self.labels)} classes, the head has "
                f"{self.num_classes} rows; name their labels with classes"
            )
        labels = np.array(sorted(self.labels), np.int64)
        return np.array([self.labels[label] for label in labels.tolist()]), labels
