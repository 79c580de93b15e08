"""The foreign reference of RLC (lines 7 and 13).

p_O and p_F are the same for all tasks, so that the ratio depends on a standardised residual u
alone. Pairs (j, t) of tasks leave their means of u and u^2 in sums of each task t. Up to `EXACT`
residuals of a view are kept, which is the paper's line 13.

Not in the paper, for long streams: of more residuals a histogram is kept, in bins of equal width in
arcsinh u, which moves tau by less than half a bin. And a task is measured against all earlier ones
up to `EARLIER`, beyond that against as many, drawn at random by its number alone, whose pairs then
stand for all of the task's pairs: pairs still weigh the same, and the means are without bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdc_jax.calibration import inputs
from fdc_jax.calibration.equations import SCALE_FLOOR, energy, log_ratio, residual_ratio

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EARLIER = 64
NOTE = f"RLC's reference measures each task against {EARLIER} earlier ones, drawn by its number"
EXACT = 2**20
# |rho - m| <= 1 over a deviation of at least 1e-6 is below sinh(15); bins are 2.9e-5 wide.
BINS, LARGEST = 2**20, 15.0


class Foreign(NamedTuple):
    """The reference p_F = N(mean, variance) and tau of one view; with one task p_F is p_O."""

    mean: float = 0.0
    variance: float = 1.0
    scale: float = 1.0


class Residuals(NamedTuple):
    """F^v, what is kept of the residuals of some tasks in one view."""

    # Columns: pairs (j, t), and the sums over j of the mean of u_j and of u_j^2.
    pairs: Float[np.ndarray, "tasks 3"] = np.zeros((0, 3))
    values: Float[np.ndarray, " k"] = np.zeros(0, np.float32)  # u, or the middles of bins
    weights: Float[np.ndarray, " k"] = np.zeros(0)  # residuals that each of them stands for
    count: int = 0  # residuals that were measured

    def and_of(self, other: Residuals) -> Residuals:
        """Joins the residuals of further tasks; bins are the same in whatever order."""
        pairs, values, weights = (
            np.concatenate(each) for each in zip(self[:3], other[:3], strict=True)
        )
        count = self.count + other.count
        if count > EXACT:
            places = (np.arcsinh(values.astype(np.float64)) + LARGEST) * (BINS / (2 * LARGEST))
            held = np.bincount(places.astype(np.int64), weights, BINS)
            bins = np.flatnonzero(held)
            values = np.sinh((bins + 0.5) * (2 * LARGEST / BINS) - LARGEST).astype(np.float32)
            weights = held[bins]
        return Residuals(pairs, values, weights, count)

    def reference(self) -> Foreign:
        """Fits mu_F and V_F, pairs of tasks weighing the same, and tau (Eq. foreign, line 13)."""
        pairs, total, squares = self.pairs.sum(axis=0)
        if not pairs:
            return Foreign()
        mean = float(total / pairs)
        variance = max(float(squares / pairs - mean * mean), SCALE_FLOOR)
        ratios = np.abs(log_ratio(self.values.astype(np.float64), mean, variance))
        return Foreign(mean, variance, max(median(ratios, self.weights), SCALE_FLOOR))


def earlier_tasks(task: int) -> Int[np.ndarray, " k"]:
    """Returns the tasks that a task is measured against, ascending."""
    if task <= EARLIER:
        return np.arange(task)
    return np.sort(np.random.default_rng(task).choice(task, EARLIER, replace=False))


def residuals(features: Float[np.ndarray, "n d"], tasks: Sequence[Any], view: int) -> Residuals:
    """Measures u_j of a task's features in one view against its earlier tasks j (line 7)."""
    if not (task := len(tasks)):
        return Residuals(np.zeros((1, 3)))
    chosen = [tasks[j].views[view] for j in earlier_tasks(task)]
    weight, origin = task / len(chosen), np.mean([each.mean for each in chosen], axis=0)
    sums, found = np.zeros(2), Residuals()
    for _, block in inputs.blocks(features):
        near = block - origin
        squares, u = energy(near), np.empty((len(chosen), len(block)), np.float32)
        for row, known in zip(u, chosen, strict=True):
            ratio = residual_ratio(near, squares, known.mean - origin, known.basis)[0]
            row[:] = (ratio - known.residual[0]) / known.residual[1]
        wide = u.astype(np.float64)
        sums += wide.sum(), (wide * wide).sum()
        many = Residuals(found.pairs, u.ravel(), np.full(u.size, weight), u.size)
        found = found.and_of(many)
    return found._replace(pairs=np.array([[task, *(weight * sums / len(features))]]))


def appended(known: Sequence[Residuals], new: Sequence[Residuals]) -> list[Residuals]:
    """Returns F^v of each view, of tasks and of further ones."""
    pairs = zip(known or [Residuals() for _ in new], new, strict=True)
    return [each.and_of(other) for each, other in pairs]


def median(values: Float[np.ndarray, " k"], weights: Float[np.ndarray, " k"]) -> float:
    """Returns the weighted median."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    first, last = (np.searchsorted(reached, reached[-1] / 2, side) for side in ("left", "right"))
    return float(values[order[[first, min(last, len(order) - 1)]]].mean())
