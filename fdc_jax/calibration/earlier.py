"""Residuals of a task's samples against the tasks before it (Algorithm 1, line 7)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import measures
from fdc_jax.calibration.moments import SAMPLE_STEP
from fdc_jax.calibration.statistics import ViewStatistics

# Earlier tasks per call: compiled once, whatever their number.
GROUP = 16


class EarlierTasks:
    """Means and bases of the tasks seen so far in one view, in groups on the device."""

    def __init__(self) -> None:
        self.groups: list[tuple[Float[Array, "k d"], Float[Array, "k r d"]]] = []
        self.tasks: list[ViewStatistics] = []

    def update(self, tasks: Sequence[ViewStatistics]) -> None:
        """Appends new tasks; only the last, unfinished group is built anew."""
        first = len(self.tasks) - len(self.tasks) % GROUP
        del self.groups[first // GROUP :]
        self.tasks = list(tasks)
        for start in range(first, len(tasks), GROUP):
            group = tasks[start : start + GROUP]
            width = len(group[0].mean)
            # Coarse padding of the rank and of the group: few shapes, few compilations.
            rank = min(-(-max(1, *(len(task.basis) for task in group)) // 32) * 32, width)
            size = 1 << (len(group) - 1).bit_length()
            means = np.zeros((size, width), np.float32)
            bases = np.zeros((size, rank, width), np.float32)
            for row, task in enumerate(group):
                means[row] = task.mean
                bases[row, : len(task.basis)] = task.basis
            self.groups.append((jnp.asarray(means), jnp.asarray(bases)))

    def residual_ratios(
        self, features: Float[Array, "n d"], rows: int, near: Float[np.ndarray, " d"]
    ) -> Float[Array, "m tasks"]:
        """Returns residual ratios against all earlier tasks, computed asynchronously.

        Args:
            features: a block.
            rows: number of its samples; the rest is padding, of which the result may hold less.
            near: a point amid the samples, such as their task's mean.
        """
        if len(self.tasks) >= GROUP:
            # Less padding now saves more than the compilations that other shapes cost.
            features = features[: -(-rows // SAMPLE_STEP) * SAMPLE_STEP]
        parts = [_ratios(features, near, means, bases) for means, bases in self.groups]
        if not parts:
            return jnp.zeros((features.shape[0], 0))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def standardise(self, ratios: Float[np.ndarray, "padded n"]) -> Float[np.ndarray, "tasks n"]:
        """Returns u_j of Eq. residual for every earlier task j, by j's own moments."""
        count = len(self.tasks)
        means = np.array([task.residual_mean for task in self.tasks])
        stds = np.array([task.residual_std for task in self.tasks])
        wide = ratios[:count].astype(np.float64)
        return np.ascontiguousarray((wide - means[:, None]) / stds[:, None], np.float32)


@jax.jit
def _ratios(
    features: Float[Array, "n d"],
    near: Float[Array, " d"],
    means: Float[Array, "k d"],
    bases: Float[Array, "k r d"],
) -> Float[Array, "n k"]:
    """Measures features against a group of tasks with one matrix product.

    Features and means are both taken relative to a point amid the features, so that a common offset
    costs no digits: (h - m) U = (h - a) U - (m - a) U.
    """
    tasks, rank, width = bases.shape
    flat = measures.products(features - near, bases.reshape(tasks * rank, width))
    of_means = jnp.einsum("krd,kd->kr", bases, means - near, precision=jax.lax.Precision.HIGHEST)
    inside = measures.energy(flat.reshape(-1, tasks, rank) - of_means)
    total = measures.energy(features[:, None] - means)
    return jnp.maximum(total - inside, 0.0) / jnp.maximum(total, measures.ENERGY_FLOOR)
