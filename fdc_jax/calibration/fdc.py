"""Feature Distribution Calibration: Algorithm 1 of the paper from top to bottom.

The settings; the statistics that are collected when a task was learned; the calibration of a test
input; the scores; and `FDC`, which walks over tasks. Equations and line numbers are the paper's.

A view is an encoder: "adapted" (E_t while learning, E_T at the end) or "pretrained" (E_0). Features
are rows, [n, d]. What is measured of a feature is a function of it and of one task, written once
for `jax.numpy` and `numpy`: JAX maps it over tasks with `vmap` and compiles it once per shape,
NumPy takes one task after the other. Ranks, classes and tasks are padded to few sizes: a zero basis
row, a prototype at infinite distance and a bias of minus infinity change nothing.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fdc_jax.calibration import inputs
from fdc_jax.calibration.batching import fetch, jnp, off_tpus, over_tasks, place, run, stack
from fdc_jax.calibration.scores import Scores
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, namespace, products, unit
from fdc_jax.machine.files import write_npz

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_LOGGER = logging.getLogger("fdc_jax.calibration")

# Floors of the paper, "Test-Time Calibration".
SCALE_FLOOR = 1e-6
ENERGY_FLOOR = 1e-12
# Energies nearer than this share of the whole count as equal, so that a share reached but for
# rounding is reached.
ENERGY_TOLERANCE = 1e-6
# Rows per call of the scoring kernel; fewer are padded to a power of two, at least 8.
MAX_ROWS = 256


# Settings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings of FDC; the defaults are the paper's.

    Attributes:
        retained_energy: eta, share of a task's variance that its subspace keeps, in (0, 1].
        attenuation: gamma, how much of a feature outside the subspace TSF removes, in [0, 1].
        rlc_weight: alpha.
        pac_weight: beta.
        adapted_view_weight: w_T.
        pretrained_view_weight: w_0; with 0 the pretrained features may be left out when scoring.
        neighbours: K, class prototypes whose cosines PAC averages.
        affinity_reference: "own" standardises affinities by the task's training moments; "nearest"
            by their moments over the candidate tasks of each input (paper, "PAC Neighborhood
            Size").

    Raises InputError when one is outside its range.
    """

    retained_energy: float = 0.75
    attenuation: float = 0.5
    rlc_weight: float = 1.0
    pac_weight: float = 1.0
    adapted_view_weight: float = 1.0
    pretrained_view_weight: float = 1.0
    neighbours: int = 1
    affinity_reference: str = "own"

    REFERENCES: ClassVar[tuple[str, ...]] = ("own", "nearest")

    @property
    def entry(self) -> str:
        """Name of what is beyond the paper in `score`; of the paper's FDC, none."""
        return ""

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind in (str, bool):
                continue
            least, what = (1, "count") if kind is int else (0, "finite number")
            real = issubclass(type(value), Real) and not isinstance(value, bool)
            if not (real and math.isfinite(value) and kind(value) == value >= least):
                raise InputError(f"{field.name}: expected a {what} from {least}, found {value!r}")
            object.__setattr__(self, field.name, kind(value))
        if not 0.0 < self.retained_energy <= 1.0:
            raise InputError(f"retained_energy: expected 0 < x <= 1, found {self.retained_energy}")
        if self.attenuation > 1.0:
            raise InputError(f"attenuation: expected 0 <= x <= 1, found {self.attenuation}")
        check_word("affinity_reference", self.affinity_reference, self.REFERENCES)


def check_word(field: str, value: object, known: Sequence[str]) -> None:
    """Raises InputError unless a setting is one of the known words."""
    if value not in known:
        raise InputError(f"{field}: expected one of {', '.join(known)}, found {value!r}")


# Training-time statistics (lines 1 to 13) --------------------------------------------------------


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
        distance_std: their population standard deviation, at least 1e-6.
    """

    mean: Float[np.ndarray, " d"]
    basis: Float[np.ndarray, "r d"]
    prototypes: Float[np.ndarray, "c d"]
    class_counts: Int[np.ndarray, " c"]
    residual_mean: float = 0.0
    residual_std: float = 1.0
    distance_mean: float = 0.0
    distance_std: float = 1.0


class Task(NamedTuple):
    """What is kept of a task.

    Attributes:
        views: statistics of the adapted view and, when in use, of the pretrained view.
        classes: label of each head row.
        samples: number of training samples.
        raw_scale: population std of the head's largest logit on the task, at least 1e-6.
        filtered_scale: the same with TSF; sigma_t of line 10.
    """

    views: list[ViewStatistics]
    classes: Int[np.ndarray, " c"]
    samples: int
    raw_scale: float
    filtered_scale: float


class Sums:
    """Float64 sums over a task's features in one view, block by block (line 6).

    As long as there are fewer samples than dimensions, these are held instead of their scatter,
    which takes no less memory: PCA then needs the smaller matrix of their inner products.
    """

    def __init__(self, width: int):
        self.width, self.count = width, 0
        self.origin, self._total = np.zeros(width), np.zeros(width)
        self._held: list[Float[np.ndarray, "n d"]] | None = []
        self._scatter = np.zeros(0)
        self._directions: dict[int, Float[np.ndarray, " d"]] = {}

    def add(self, features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> None:
        """Adds a block."""
        wide = features.astype(np.float64)
        if not self.count:
            self.origin = wide.mean(axis=0)  # Equal features then have exactly no variance.
        shifted = wide - self.origin
        self.count += len(wide)
        self._total += shifted.sum(axis=0)
        for label, total in class_sums(unit(wide), labels).items():
            self._directions[label] = self._directions.get(label, 0.0) + total
        if self._held is None:
            self._scatter += shifted.T @ shifted
            return
        self._held.append(shifted)
        if self.count >= self.width:
            self._scatter, self._held = self.scatter, None

    @property
    def mean(self) -> Float[np.ndarray, " d"]:
        """m_t."""
        return self.origin + self._total / self.count

    @property
    def scatter(self) -> Float[np.ndarray, "d d"]:
        """Sum over samples of the outer product of feature minus `origin`."""
        if self._held is None:
            return self._scatter
        held = np.concatenate(self._held)
        return held.T @ held

    def prototypes(self, classes: Int[np.ndarray, " c"]) -> Float[np.ndarray, "c d"]:
        """Returns the renormalised means of unit features (Eq. proto); zero for empty classes."""
        none = np.zeros(self.width)
        return unit(np.stack([self._directions.get(label, none) for label in classes.tolist()]))

    def basis(self, share: float) -> Float[np.ndarray, "r d"]:
        """Returns U_t, which keeps a share eta of the variance, as rows (Eq. task-pca)."""
        energies, directions = self.decomposed()
        return directions(retained_rank(energies, share, self.count))

    def decomposed(
        self,
    ) -> tuple[Float[np.ndarray, " k"], Callable[[int], Float[np.ndarray, "r d"]]]:
        """Returns variances, descending, and what gives so many of their directions as rows.

        The covariance, or with fewer samples than dimensions the matrix of inner products, is
        decomposed in float32 (`jnp.linalg.eigh`). With X the centred samples and X X^T v = s v, the
        eigenvector of X^T X is X^T v; QR in float64 takes out of it what rounding left of the ones
        before it.
        """
        shift = self._total / self.count
        if self._held is None:
            energies, vectors = eigh(self._scatter / self.count - np.outer(shift, shift))
            return energies, lambda rank: vectors[:rank].copy()
        centred = np.concatenate(self._held) - shift
        energies, vectors = eigh(gram(centred) / self.count)

        def directions(rank: int) -> Float[np.ndarray, "r d"]:
            leading = vectors[:rank] @ centred
            return np.ascontiguousarray(np.linalg.qr(leading.T)[0].T, np.float32)

        return energies, directions


def gram(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n n"]:
    """Returns all inner products of rows, multiplied in float32 near a scale of one."""
    scale = np.abs(rows).max() or 1.0
    narrow = (rows / scale).astype(np.float32)
    return scale**2 * (narrow @ narrow.T).astype(np.float64)


def class_sums(
    rows: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]
) -> dict[int, Float[np.ndarray, " d"]]:
    """Returns the sum of the rows of each label."""
    values, inverse = np.unique(labels, return_inverse=True)
    members = (inverse == np.arange(len(values))[:, None]).astype(rows.dtype)
    return dict(zip(values.tolist(), members @ rows, strict=True))


def eigh(matrix: Float[np.ndarray, "k k"]) -> tuple[np.ndarray, np.ndarray]:
    """Returns eigenvalues of a symmetric matrix, descending, and its eigenvectors as rows."""
    # Numbers near one, whatever the features' unit; and few sizes, since each compiles anew. The
    # padding's own eigenvalues are zero.
    size, scale = len(matrix), np.trace(matrix) or 1.0
    padded = np.zeros((-(-size // 64) * 64,) * 2, np.float32)
    padded[:size, :size] = matrix / scale
    values, vectors = map(np.asarray, jnp.linalg.eigh(padded))
    return scale * values[::-1][:size].astype(np.float64), vectors.T[::-1][:size, :size]


def retained_rank(energies: Float[np.ndarray, " k"], share: float, count: int) -> int:
    """Returns the fewest leading components with at least `share` of the variance (Eq. task-pca).

    `energies` descend; negative ones are rounding. Features without any variance (one sample, or
    all equal) have rank 0: their subspace is the task mean alone. `count` samples span at most
    `count` - 1 directions, so rounding noise beyond those is never retained.
    """
    energies = np.clip(np.asarray(energies, np.float64), 0.0, None)
    total = energies.sum()
    if total <= 0.0 or count < 2:
        return 0
    short = np.cumsum(energies) / total < share - ENERGY_TOLERANCE
    return min(int(short.sum()) + 1, count - 1, len(energies))


def population_moments(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns mean and population standard deviation, floored at 1e-6, computed in float64."""
    wide = np.asarray(values, np.float64)
    return float(wide.mean()), max(float(wide.std()), SCALE_FLOOR)


class ForeignReference(NamedTuple):
    """Moments of p_F and the scale tau of the log-likelihood ratio, in one view (Eq. foreign)."""

    mean: float
    variance: float
    scale: float


def fit_foreign_reference(
    residuals: Sequence[Float[np.ndarray, "earlier n"]],
) -> ForeignReference | None:
    """Fits the foreign reference of one view (Eq. foreign, line 13).

    `residuals` are, for each task, its features' standardised residuals against every earlier task.
    Mean and variance weight every pair of tasks equally; the scale is the median absolute
    log-likelihood ratio over all samples. None with fewer than two tasks.
    """
    tasks = [task for task in residuals if task.size]
    if not tasks:
        return None
    means = np.concatenate([task.mean(axis=1, dtype=np.float64) for task in tasks])
    variances = np.concatenate([task.var(axis=1, dtype=np.float64) for task in tasks])
    mean = float(means.mean())
    variance = max(float(np.mean(variances + (means - mean) ** 2)), SCALE_FLOOR)
    llr = llr_coefficients(ForeignReference(mean, variance, 1.0))
    # Rounding keeps the order, so the median of the rounded ratios is the rounded median.
    ratios = [np.abs(rlc_argument(np.float64(task), llr)).astype(np.float32) for task in tasks]
    median = np.median(np.concatenate([each.ravel() for each in ratios]), overwrite_input=True)
    return ForeignReference(mean, variance, max(float(median), SCALE_FLOOR))


def llr_coefficients(reference: ForeignReference | None) -> Float[np.ndarray, " 3"]:
    """Returns (a, b, c) such that log(p_F(u) / p_O(u)) / tau = a u^2 + b u + c (Eq. llr).

    p_F = N(mean, variance) and p_O = N(0, 1). Without a foreign reference all are zero, and so is
    RLC.
    """
    if reference is None:
        return np.zeros(3)
    mean, variance, scale = reference
    quadratic = 0.5 - 0.5 / variance
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return np.array([quadratic, mean / variance, constant]) / scale


# What is measured of a feature against one task (lines 7, 10, 16 and 17) -------------------------


def energy(vectors: Float[Any, "... d"]) -> Float[Any, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


def filter_features(
    features: Float[Any, "n d"], basis: Float[Any, "r d"], attenuation: Float[Any, ""]
) -> Float[Any, "n d"]:
    """Returns (1 - gamma) h + gamma (h U) U^T (Eq. osp), the linear map of TSF on rows h.

    The map is symmetric: applied to weight rows it folds TSF into a linear head (line 9).
    """
    inside = products(products(features, basis), basis.T)
    return (1.0 - attenuation) * features + attenuation * inside


def residual_ratio(
    features: Float[Any, "n d"], mean: Float[Any, " d"], basis: Float[Any, "r d"]
) -> tuple[Float[Any, " n"], Float[Any, "n r"]]:
    """Returns rho_t, the share of centred energy outside the subspace, and coordinates in it.

    Eq. residual. Centring before any square keeps the ratio exact to float32 however far the mean
    is from zero.
    """
    xp = namespace(features, basis)
    centred = features - mean
    coordinates = products(centred, basis)
    total = energy(centred)
    outside = xp.maximum(total - energy(coordinates), 0.0)
    return outside / xp.maximum(total, ENERGY_FLOOR), coordinates


def prototype_frame(
    prototypes: Float[np.ndarray, "c d"], present: Bool[np.ndarray, " c"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns centre [d], offsets [c, d] and constants [c] as `prototype_distances` takes them."""
    wide = prototypes.astype(np.float64)
    centre = wide[present].mean(axis=0).astype(np.float32)
    offsets = np.where(present[:, None], wide - centre, 0.0)
    # A class whose unit features cancel has no direction: its cosine is 0, its distance 1.
    missing = 0.5 * (1.0 - wide.any(axis=1))
    constants = np.where(present, 0.5 * energy(offsets) + missing, np.inf)
    return centre, offsets.astype(np.float32), constants.astype(np.float32)


def prototype_distances(
    units: Float[Any, "n d"],
    centre: Float[Any, " d"],
    offsets: Float[Any, "c d"],
    constants: Float[Any, " c"],
) -> Float[Any, "n c"]:
    """Returns one minus the cosine of every feature to every prototype of a task (Eq. par).

    The cosine distance of unit vectors is half their squared distance. Expanding that square
    around a point amid the prototypes keeps the digits that 1 - cos would cancel where all
    features point nearly the same way. A feature of length zero has cosine 0 to everything; the
    constant of a class without samples is infinite. See `prototype_frame`.
    """
    xp = namespace(units, offsets)
    centred = units - centre
    distances = 0.5 * energy(centred)[:, None] + constants - products(centred, offsets)
    directed = energy(units)[:, None] > 0.5
    return xp.where(directed | xp.isinf(constants), distances, 1.0)


def nearest_distance(distances: Float[Any, "n c"], neighbours: int) -> Float[Any, " n"]:
    """Returns one minus A_{t,K} of "PAC Neighborhood Size": the mean of the K least distances."""
    xp = namespace(distances)
    if neighbours == 1:
        return distances.min(axis=-1)
    return xp.sort(distances, axis=-1)[:, :neighbours].mean(axis=-1)


def head_logits(
    features: Float[Any, "n d"],
    rows: Float[Any, "c d"],
    bias: Float[Any, " c"],
    energies: Float[Any, " n"] | None = None,
) -> Float[Any, "n c"]:
    """Returns h.w + b, with h over its length where its squared length is given."""
    xp = namespace(features, rows)
    logits = products(features, rows)
    if energies is not None:
        logits = logits / xp.maximum(xp.sqrt(energies), NORM_FLOOR)[:, None]
    return logits + bias


def largest_logits(
    features: Float[Any, "n d"],
    basis: Float[Any, "r d"],
    attenuation: Float[Any, ""],
    rows: Float[Any, "c d"],
    bias: Float[Any, " c"],
    *,
    normalised: bool,
) -> tuple[Float[Any, " n"], Float[Any, " n"]]:
    """Returns a head's largest logit without and with TSF at its input (line 10)."""
    raw, filtered = (
        head_logits(given, rows, bias, energy(given) if normalised else None).max(axis=-1)
        for given in (features, filter_features(features, basis, attenuation))
    )
    return raw, filtered


# The tasks' statistics side by side, and a batch measured against them all -----------------------


class ViewArrays(NamedTuple):
    """Statistics of all tasks in one view, padded to one rank and one class count."""

    mean: Float[Any, "tasks d"]
    basis: Float[Any, "tasks r d"]
    centre: Float[Any, "tasks d"]
    offsets: Float[Any, "tasks c d"]
    constants: Float[Any, "tasks c"]
    residual_mean: Float[Any, " tasks"]
    residual_std: Float[Any, " tasks"]
    distance_mean: Float[Any, " tasks"]
    distance_std: Float[Any, " tasks"]
    valid: Float[Any, " tasks"]


class HeadArrays(NamedTuple):
    """Heads of all tasks, plain and with TSF folded in; padded classes have bias -inf."""

    rows: Float[Any, "tasks c d"]
    folded: Float[Any, "tasks c d"]
    bias: Float[Any, "tasks c"]


def stack_view(tasks: Sequence[ViewStatistics], xp: Any = np) -> ViewArrays:
    """Returns the statistics of tasks in one view side by side."""
    frames = [prototype_frame(task.prototypes, task.class_counts > 0) for task in tasks]
    centres, offsets, constants = zip(*frames, strict=True)
    means, bases, _, _, *moments = zip(*tasks, strict=True)
    return ViewArrays(
        stack(means, xp=xp),
        stack(bases, 8, xp=xp),
        stack(centres, xp=xp),
        stack(offsets, 4, xp=xp),
        stack(constants, 4, np.inf, xp=xp),
        # Of a task that is not there, means are 0 and deviations 1.
        *(stack(each, fill=place % 2, xp=xp) for place, each in enumerate(moments)),
        valid=stack([1.0 for _ in tasks], xp=xp),
    )


def stack_heads(
    heads: Sequence[inputs.HeadRows],
    bases: Sequence[Float[np.ndarray, "r d"]],
    attenuation: float,
    xp: Any = np,
) -> HeadArrays:
    """Returns heads side by side, and with TSF folded into them (line 9)."""
    gamma, pairs = np.float32(attenuation), zip(heads, bases, strict=True)
    return HeadArrays(
        stack([head.rows for head in heads], 4, xp=xp),
        stack([filter_features(head.rows, basis, gamma) for head, basis in pairs], 4, xp=xp),
        stack([head.bias for head in heads], 4, -np.inf, xp=xp),
    )


def measure(
    view: ViewArrays,
    heads: HeadArrays | None,
    features: Float[Any, "n d"],
    attenuation: Float[Any, ""],
    *,
    normalised: bool,
    neighbours: int,
    all_rows: bool = False,
) -> tuple[Float[Any, "n tasks ..."], ...]:
    """Measures a batch against all tasks in one view; `neighbours` is K, `attenuation` gamma.

    Returns:
        Residual ratios and prototype distances; with built-in heads (which divide their input by
        its norm where `normalised`) also the largest raw logit with its row and the largest
        filtered logit with its row; last, with `all_rows`, the logits of all classes of both kinds.
    """
    units = unit(features)  # Once for all tasks.
    energies = energy(features) if normalised else None

    def one_task(mean, basis, centre, offsets, constants, *head):
        ratio, coordinates = residual_ratio(features, mean, basis)
        distances = prototype_distances(units, centre, offsets, constants)
        distance = nearest_distance(distances, neighbours)
        if not head:
            return ratio, distance
        rows, folded, bias = head
        filtered_energies = None
        if energies is not None:
            # |(1 - gamma) h + gamma (h U) U^T|^2 of the uncentred feature.
            inside = energy(coordinates + products(mean[None], basis))
            kept = (1.0 - attenuation) ** 2
            filtered_energies = kept * energies + (1.0 - kept) * inside
        raw = head_logits(features, rows, bias, energies)
        filtered = head_logits(features, folded, bias, filtered_energies)
        largest = (each for z in (raw, filtered) for each in (z.max(axis=-1), z.argmax(axis=-1)))
        return ratio, distance, *largest, *((raw, filtered) if all_rows else ())

    return over_tasks(one_task, *view[:5], *(heads or ()))


def residual_ratios(
    means: Float[Any, "tasks d"], bases: Float[Any, "tasks r d"], features: Float[Any, "n d"]
) -> Float[Any, "n tasks"]:
    """Returns the residual ratios of a batch against all tasks."""
    return over_tasks(lambda *task: residual_ratio(features, *task)[:1], means, bases)[0]


# Test-time calibration (lines 14 to 20) ----------------------------------------------------------


def rlc_argument(residual: Any, coefficients: Float[Any, " 3"]) -> Any:
    """Returns log(p_F(u) / p_O(u)) / tau of Eq. llr; its tanh is the RLC evidence."""
    return (coefficients[0] * residual + coefficients[1]) * residual + coefficients[2]


def evidence(
    ratio: Float[Any, "n tasks"],
    distance: Float[Any, "n tasks"],
    view: ViewArrays,
    coefficients: Float[Any, " 3"],
    nearest: bool,
) -> tuple[Float[Any, "n tasks"], Float[Any, "n tasks"]]:
    """Returns the RLC evidence of one view and q_t of Eq. par, whose tanh is the PAC evidence.

    With `nearest`, affinities are standardised over the candidate tasks of the input instead of
    over the task's training features.
    """
    xp = namespace(ratio)
    residual = (ratio - view.residual_mean) / view.residual_std
    mean, std = view.distance_mean, view.distance_std
    if nearest:
        weights = view.valid / view.valid.sum()
        mean = (distance * weights).sum(axis=1, keepdims=True)
        std = xp.sqrt(((distance - mean) ** 2 * weights).sum(axis=1, keepdims=True))
        std = xp.maximum(std, SCALE_FLOOR)
    return xp.tanh(rlc_argument(residual, coefficients)), (mean - distance) / std


LOGITS = ("raw_logit", "raw_row", "filtered_logit", "filtered_row", "raw_rows", "filtered_rows")


class Arrays(NamedTuple):
    """A calibrator as the scoring kernel takes it; heads are `None` where they are functions."""

    views: list[ViewArrays]
    heads: HeadArrays | None
    coefficients: Float[Any, "views 3"]
    attenuation: Float[Any, ""]


def score_batch(
    arrays: Arrays,
    adapted: Float[Any, "n d"],
    pretrained: Float[Any, "n e"] | None = None,
    *,
    normalised: bool,
    neighbours: int,
    nearest: bool,
    all_rows: bool = False,
) -> dict[str, Any]:
    """Returns everything that the scores of a batch are made of, [n, tasks] each, padded tasks too.

    By name: `adapted_rlc`, `adapted_affinity`, the same of `pretrained`; with built-in heads the
    first four of `LOGITS`, with `all_rows` all, the last two as [n, tasks, c]; and
    `adapted_energy` and `pretrained_energy` [n], not finite for features that are not.
    """
    found: dict[str, Any] = {}
    for index, features in enumerate((adapted, pretrained)):
        if features is None:
            continue
        name, view = inputs.VIEWS[index], arrays.views[index]
        ratio, distance, *logits = measure(
            view,
            arrays.heads if index == 0 else None,
            features,
            arrays.attenuation,
            normalised=normalised,
            neighbours=neighbours,
            all_rows=all_rows,
        )
        rlc, affinity = evidence(ratio, distance, view, arrays.coefficients[index], nearest)
        found |= {f"{name}_rlc": rlc, f"{name}_affinity": affinity}
        found[f"{name}_energy"] = energy(features)
        found |= dict(zip(LOGITS, logits, strict=False))
    return found


def fused_score(
    logit: Float[Any, "n tasks"],
    scale: Float[Any, " tasks"],
    views: Sequence[tuple[float, Float[Any, "n tasks"], Float[Any, "n tasks"]]],
    rlc_weight: float = 1.0,
    pac_weight: float = 1.0,
) -> Float[Any, "n tasks"]:
    """Returns the calibrated task scores S_t (Eq. score-fusion, Eq. dual-main).

    Of each view `views` has the weight w_v and the evidence, tanh(RLC argument) and tanh(q_t).
    """
    for weight, rlc, pac in views:
        logit = logit + weight * scale * (pac_weight * pac - rlc_weight * rlc)
    return logit


class TaskLogits(NamedTuple):
    """Largest logit of each head and the head row it came from."""

    logit: Float[np.ndarray, "n tasks"]
    row: Int[np.ndarray, "n tasks"]


class ViewEvidence(NamedTuple):
    """Corrections of one view: the RLC evidence, and q_t, whose tanh is that of PAC."""

    rlc: Float[np.ndarray, "n tasks"]
    affinity: Float[np.ndarray, "n tasks"]

    @property
    def pac(self) -> Float[np.ndarray, "n tasks"]:
        """The PAC evidence."""
        return np.tanh(self.affinity)


@dataclass(frozen=True)
class Terms:
    """Everything the score of a sample and task is made of, so that any combination costs no pass.

    `raw_logits` and `raw_scale` are without TSF, `filtered_logits` and `filtered_scale` with it;
    `pretrained` is None when that view is not in use. `raw_rows` and `filtered_rows` are the logits
    of every class of every head, minus infinity beyond; None unless measured.
    """

    raw_logits: TaskLogits
    filtered_logits: TaskLogits
    adapted: ViewEvidence
    pretrained: ViewEvidence | None
    raw_scale: Float[np.ndarray, " tasks"]
    filtered_scale: Float[np.ndarray, " tasks"]
    settings: Settings
    classes: Sequence[Int[np.ndarray, " c"]]
    raw_rows: Float[np.ndarray, "n tasks c"] | None
    filtered_rows: Float[np.ndarray, "n tasks c"] | None

    def fuse(
        self,
        tsf: bool = True,
        rlc: bool = True,
        pac: bool = True,
        adapted_view: bool = True,
        pretrained_view: bool = True,
    ) -> Scores:
        """Returns the paper's scores with the named components switched on.

        Without TSF both the logits and the score scales are the raw ones (paper, "Test-Time
        Calibration"); with everything switched off the scores are the raw logits themselves.
        """
        settings = self.settings
        logits = self.filtered_logits if tsf else self.raw_logits
        used = self.used_views(adapted_view, pretrained_view)
        scores = fused_score(
            logits.logit,
            self.filtered_scale if tsf else self.raw_scale,
            [(weight, evidence.rlc, evidence.pac) for _, weight, evidence in used],
            rlc * settings.rlc_weight,
            pac * settings.pac_weight,
        )
        return Scores(scores, logits.row, self.classes)

    def used_views(self, adapted: bool, pretrained: bool) -> list[tuple[int, float, ViewEvidence]]:
        """Returns number, weight and evidence of the views that are there and switched on."""
        views = (
            (adapted, self.settings.adapted_view_weight, self.adapted),
            (pretrained, self.settings.pretrained_view_weight, self.pretrained),
        )
        return [
            (number, weight, evidence)
            for number, (on, weight, evidence) in enumerate(views)
            if on and evidence is not None
        ]

    def raw(self) -> Scores:
        """Returns the largest raw logits as scores (Eq. raw)."""
        return self.fuse(False, False, False)

    def scores(self, **switches: bool) -> Scores:
        """Returns the scores that the calibrator is set to give; of the paper's FDC, `fuse`'s."""
        return self.fuse(**switches)

    def by_class(self) -> Float[np.ndarray, "n tasks c"]:
        """Returns the score of every class, the largest of which decides as `scores` does."""
        return self.of_classes(self.scores())

    def of_classes(self, scores: Scores) -> Float[np.ndarray, "n tasks c"]:
        """Returns the score of every class: its task's, less what its logit lacks of the largest.

        Minus infinity where there is no class.
        """
        assert self.filtered_rows is not None
        behind = self.filtered_rows - self.filtered_logits.logit[..., None]
        return scores.task_scores[..., None] + behind

    def beyond(self) -> dict[str, dict[str, Scores]]:
        """Returns what is given beyond the paper, by name and component (`full` for all of them).

        The paper's FDC gives nothing.
        """
        return {}


# The calibrator ----------------------------------------------------------------------------------


class FDC:
    """Calibrates the competition of task heads from feature statistics (Algorithm 1).

    Call `fit_task` after each task is learned, then `finalize`, then `score`; more tasks may follow
    with `fit_task` and `finalize` again. Nothing is refitted then but the foreign reference.

    The order of tasks matters: a task's foreign residuals are measured against earlier tasks only.
    Features are used as they are, never centred or scaled as a whole: TSF and PAC depend on where
    the origin is.

    What lies beyond the paper is a subclass with statistics of its own: it may look at every block
    of the two walks over a task (`_first_walk`, `_between_walks`, `_second_walk`), at what a batch
    of test inputs is measured by (`_measure_batch`) and at the scores (`_terms`).

    Settings are the fields of `Settings`; InputError when one is outside its range.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    # Whether `fit_task` takes features of the encoder before the task.
    follows_encoder: ClassVar[bool] = False
    needs_all_rows: bool = False  # Whether scores need the logits of all classes.

    def __init__(self, **settings: Any):
        self.settings = self.settings_type(**settings)
        self.tasks: list[Task] = []
        self.heads: list[Any] = []
        self.references: list[ForeignReference | None] = []
        # Per task, the standardised foreign residuals F^v of each view; None once released.
        self.foreign: list[list[Float[np.ndarray, "earlier n"]]] | None = []
        self._finalized = False
        self._xp: Any = jnp
        self._arrays: Arrays | None = None
        self.normalised = False  # Whether the heads divide their input by its norm.

    @property
    def num_tasks(self) -> int:
        """Returns the number of tasks fitted so far."""
        return len(self.tasks)

    @property
    def num_views(self) -> int:
        """Returns 2 when tasks were fitted with a pretrained view, else 1; 0 before any task."""
        return len(self.tasks[0].views) if self.tasks else 0

    @property
    def classes(self) -> list[Int[np.ndarray, " c"]]:
        """Returns the labels of each task's head rows, in row order."""
        return [task.classes for task in self.tasks]

    @property
    def widths(self) -> list[int]:
        """Returns the feature width of each view, once there is a task."""
        return [len(view.mean) for view in self.tasks[0].views] if self.tasks else []

    @off_tpus()
    def fit_task(
        self, adapted: Any, labels: Any, head: Any, pretrained: Any = None, classes: Any = None
    ) -> None:
        """Collects the statistics of the next task (lines 5 to 11).

        Two walks over its samples are needed, because a residual is measured against the finished
        subspace and an affinity against the finished prototypes.

        Args:
            adapted: features E_t(D_t), [n, d], as an array of NumPy, JAX or any library that offers
                `__array__` or `__dlpack__`; memory maps are read block by block. Or a source: a
                function without arguments that returns a fresh iterator over chunks (adapted,
                pretrained or None, labels), the same at both calls; the rest is None then.
            labels: integers [n].
            head: the task's head, of the same type for all tasks.
            pretrained: features E_0(D_t), [n, e]; given for all tasks or for none.
            classes: label of each head row. By default the distinct labels in ascending order. Only
                when named may a class have no sample; PAC then ignores it.

        Raises:
            InputError: input that is malformed or unlike earlier tasks; nothing has changed then.
        """
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        task, settings, xp = self.num_tasks, self.settings, self._xp
        inputs.common_kind([*self.heads, head])
        source = inputs.task_source(adapted, labels, pretrained, task)

        # Line 6, the first walk: mean, PCA basis, class prototypes.
        sums: list[Sums] = []
        seen: list[np.ndarray] = []
        for views, own_labels in inputs.blocks(source, task, self.widths):
            sums = sums or [Sums(features.shape[1]) for features in views]
            seen.append(own_labels)
            for view, features in enumerate(views):
                sums[view].add(features, own_labels)
                self._first_walk(view, features, own_labels)
        if not sums:
            raise InputError(f"task {task}: expected at least one sample, found none")
        rows, num_classes = self._read_head(head, task, sums[0].width)
        labels = np.concatenate(seen)
        classes, counts = inputs.task_classes(labels, task, num_classes, classes, self.classes)
        if (present := int((counts > 0).sum())) < settings.neighbours:
            raise InputError(
                f"task {task}: {settings.neighbours} neighbours need as many classes with samples, "
                f"found {present}"
            )
        drafts = [
            ViewStatistics(
                each.mean.astype(np.float32),
                each.basis(settings.retained_energy),
                each.prototypes(classes).astype(np.float32),
                counts,
            )
            for each in sums
        ]
        self._between_walks(sums, classes, counts)

        # Lines 6, 7 and 10, the second walk: the samples against their own task and earlier ones.
        own_task = [stack_view([draft], xp) for draft in drafts]
        earlier = [[each.views[view] for each in self.tasks] for view in range(len(drafts))]
        subspaces = [
            (stack([each.mean for each in of], xp=xp), stack([each.basis for each in of], 8, xp=xp))
            for of in earlier
            if of
        ]
        gamma = np.float32(settings.attenuation)
        measured: list[list[tuple[Any, ...]]] = [[] for _ in drafts]
        again = [labels[:0]]
        for views, own_labels in inputs.blocks(source, task, [each.width for each in sums]):
            again.append(own_labels)
            for view, features in enumerate(views):
                batch = place(xp, features, 128)
                kind = {"normalised": False, "neighbours": settings.neighbours}
                found = self.run(measure, own_task[view], None, batch, gamma, **kind)
                # Of earlier tasks the residual alone: a long stream's fit is little else.
                others = found[0][:, :0]
                if subspaces:
                    others = self.run(residual_ratios, *subspaces[view], batch)
                found = (others, *found)
                if view == 0:
                    # A user's function sees no padding.
                    own = batch[: len(own_labels)] if rows is None else batch
                    basis = own_task[0].basis[0]
                    found += self._largest_logits(head, rows, num_classes, own, basis)
                measured[view].append(found)
                self._second_walk(view, batch, len(own_labels))
        if not np.array_equal(np.sort(np.concatenate(again)), np.sort(labels)):
            raise InputError(
                f"source of task {task}: the second pass gave other samples than the first "
                f"({sum(map(len, again))} rows, {len(labels)} before); it must start again at "
                "every call"
            )
        statistics, foreign, scales = [], [], []
        for view, draft in enumerate(drafts):
            sizes = [len(each) for each in again[1:]]
            others, ratio, distance, *logits = fetch(measured[view], sizes)
            scales += [population_moments(each)[1] for each in logits]
            moments = *population_moments(ratio[:, 0]), *population_moments(distance[:, 0])
            statistics.append(ViewStatistics(*draft[:4], *moments))
            # u_j of every earlier task j, by j's own moments.
            means = np.array([each.residual_mean for each in earlier[view]])
            stds = np.array([each.residual_std for each in earlier[view]])
            standardised = (others[:, :task].astype(np.float64) - means) / stds
            foreign.append(np.ascontiguousarray(standardised.T, np.float32))
        self.tasks = [*self.tasks, Task(statistics, classes, len(labels), *scales)]
        self.heads = [*self.heads, head]
        self.foreign = [*self.foreign, foreign]
        self._finalized = False
        self._warn_of_constant_residuals(task)

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC (line 13). May be called again.

        Args:
            release: drop the foreign residual scalars, one float32 per sample, earlier task and
                view. No further task can be fitted then.
        """
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        if self.foreign is not None and not self._finalized:
            self.references = [
                fit_foreign_reference([task[view] for task in self.foreign])
                for view in range(self.num_views)
            ]
            self._arrays = None
        self._finalized = True
        if release:
            self.foreign = None

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (lines 14 to 20), all components on.

        Args:
            adapted: final features E_T(x), [n, d].
            pretrained: features E_0(x), [n, e]; needed when tasks were fitted with a pretrained
                view whose weight is not 0.

        Raises:
            InputError: not finalized, or features of another shape than at fit time.
        """
        return self.terms(adapted, pretrained).scores()

    def raw(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns the largest raw logit of each head as its score (Eq. raw)."""
        return self.terms(adapted, pretrained).raw()

    def terms(self, adapted: Any, pretrained: Any = None, all_rows: bool = False) -> Terms:
        """Returns what scores are made of, for all component combinations; see `score`.

        With `all_rows` they have the logits of every class.
        """
        self.require_finalized()
        needed = self.settings.pretrained_view_weight != 0.0
        views = inputs.score_views(adapted, pretrained, self.widths, needed)
        all_rows |= self.needs_all_rows
        # The last rows of many get the shape of those before, which is compiled.
        least = 8 if len(views[0]) <= MAX_ROWS else MAX_ROWS
        batches, sizes = [], []
        for start in range(0, max(len(views[0]), 1), MAX_ROWS):
            parts = [view[start : start + MAX_ROWS] for view in views]
            sizes.append(len(parts[0]))
            placed = [place(self._xp, part, least) for part in parts]
            batches.append(self._measure_batch(placed, all_rows))
        columns = fetch([tuple(batch.values()) for batch in batches], sizes)
        found = dict(zip(batches[0], columns, strict=True))
        for name in inputs.VIEWS[: len(views)]:
            inputs.check_rows(f"{name} features", found[f"{name}_energy"])
        if self.arrays.heads is None:
            logits = self._function_logits(self._xp.asarray(views[0], np.float32))
            found |= dict(list(logits.items())[: 6 if all_rows else 4])
        return self._terms(found)

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """Returns a score of every class, tasks one after the other; see `Terms.by_class`.

        Column i is of label `np.concatenate(classes)[i]`; arguments and errors as of `score`.
        """
        scores = self.terms(adapted, pretrained, all_rows=True).by_class()
        return np.concatenate(
            [scores[:, task, : len(rows)] for task, rows in enumerate(self.classes)], axis=1
        )

    def replace_heads(self, heads: Sequence[Any]) -> None:
        """Predicts with other heads from now on, for learners that rewrite old heads.

        Score scales and all other statistics stay those collected when each task was learned.
        """
        heads = list(heads)
        if len(heads) != self.num_tasks:
            raise InputError(f"heads: expected one per task, {self.num_tasks}, found {len(heads)}")
        inputs.common_kind(heads)
        for index, (head, task) in enumerate(zip(heads, self.tasks, strict=True)):
            found = self._read_head(head, index, self.widths[0])[1]
            if found != len(task.classes):
                raise InputError(
                    f"head of task {index}: expected {len(task.classes)} classes, found {found}"
                )
        self.heads = heads
        self._arrays = None

    @property
    def paper_storage_bytes(self) -> int:
        """Returns the bytes of the paper's statistics in use, by its accounting, in float32.

        PCA bases count as factors; classifier weights and foreign residuals do not count. A view of
        weight 0 counts no more than what TSF needs: the adapted bases.
        """
        settings, numbers = self.settings, 2 * self.num_tasks  # Score scales with and without TSF.
        weights = (settings.adapted_view_weight, settings.pretrained_view_weight)
        for index, weight in enumerate(weights[: self.num_views]):
            views = [task.views[index] for task in self.tasks]
            if weight or (index == 0 and settings.attenuation):
                numbers += sum(view.basis.size for view in views)
            if weight:
                present = sum(int((view.class_counts > 0).sum()) for view in views)
                numbers += (len(views) + present) * self.widths[index]
                # Four moments per task; mean, variance and scale of the foreign reference.
                numbers += 4 * len(views) + (3 if len(views) > 1 else 0)
        return 4 * numbers

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the statistics that `score` uses."""
        return self.beyond_storage_bytes.get(self.settings.entry, self.paper_storage_bytes)

    @property
    def beyond_storage_bytes(self) -> dict[str, int]:
        """Returns the bytes that each entry of `Terms.beyond` needs."""
        return {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the finalized calibrator to one `.npz` file, whole or not at all.

        The foreign residuals are part of it unless released, so that a loaded calibrator can take
        further tasks. Heads that are functions are left out; `calibration.load` then needs them.
        """
        from fdc_jax.calibration import storage

        write_npz(path, storage.to_arrays(self))

    def to_numpy(self) -> FDC:
        """Returns the same calibrator computing with NumPy alone, as where JAX is not installed."""
        plain = copy.copy(self)
        plain._xp, plain._arrays = np, None
        return plain

    @property
    def arrays(self) -> Arrays:
        """Returns the calibrator as `score_batch` takes it, placed once."""
        if self._arrays is None:
            xp, attenuation = self._xp, self.settings.attenuation
            views = [
                stack_view([task.views[view] for task in self.tasks], xp)
                for view in range(self.num_views)
            ]
            read = [
                self._read_head(head, task, self.widths[0])[0]
                for task, head in enumerate(self.heads)
            ]
            rows = [head for head in read if head is not None]
            self.normalised = bool(rows) and rows[0].normalised
            bases = [task.views[0].basis for task in self.tasks]
            self._arrays = Arrays(
                views,
                stack_heads(rows, bases, attenuation, xp) if rows else None,
                xp.asarray(np.stack([llr_coefficients(r) for r in self.references]), np.float32),
                xp.asarray(attenuation, np.float32),
            )
        return self._arrays

    def require_finalized(self) -> None:
        """Raises InputError unless everything fitted has been finalized."""
        if not self._finalized:
            raise InputError("call fit_task for every task, then finalize, first")

    def run(self, kernel: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        """Runs a kernel where the calibrator computes; see `batching.run`."""
        return run(self._xp, kernel, *arguments, **static)

    def _first_walk(
        self, view: int, features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]
    ) -> None:
        """Sees every block of the first walk over a task; for subclasses."""

    def _between_walks(
        self, sums: list[Sums], classes: Int[np.ndarray, " c"], counts: Int[np.ndarray, " c"]
    ) -> None:
        """Sees what the first walk found in each view; for subclasses."""

    def _second_walk(self, view: int, batch: Float[Any, "padded d"], rows: int) -> None:
        """Sees every block of the second walk, on the device; for subclasses."""

    def _measure_batch(
        self, views: Sequence[Float[Any, "n _"]], all_rows: bool
    ) -> dict[str, Float[Any, "n ..."]]:
        """Returns what a batch is measured by, without waiting for it."""
        return self.run(
            score_batch,
            self.arrays,
            *views,
            normalised=self.normalised,
            neighbours=self.settings.neighbours,
            nearest=self.settings.affinity_reference == "nearest",
            all_rows=all_rows,
        )

    def _terms(self, found: dict[str, np.ndarray]) -> Terms:
        """Returns the terms of everything that was measured; padded tasks are dropped."""
        kept = {
            name: column[:, : self.num_tasks] for name, column in found.items() if column.ndim > 1
        }
        views = [
            ViewEvidence(kept[f"{name}_rlc"], kept[f"{name}_affinity"])
            for name in inputs.VIEWS
            if f"{name}_rlc" in kept
        ]
        return Terms(
            raw_logits=TaskLogits(kept["raw_logit"], kept["raw_row"]),
            filtered_logits=TaskLogits(kept["filtered_logit"], kept["filtered_row"]),
            adapted=views[0],
            pretrained=views[1] if len(views) == 2 else None,
            raw_scale=np.array([task.raw_scale for task in self.tasks], np.float32),
            filtered_scale=np.array([task.filtered_scale for task in self.tasks], np.float32),
            settings=self.settings,
            classes=self.classes,
            raw_rows=kept.get("raw_rows"),
            filtered_rows=kept.get("filtered_rows"),
        )

    def _warn_of_constant_residuals(self, task: int) -> None:
        for name, view in zip(inputs.VIEWS, self.tasks[task].views, strict=False):
            # A subspace that is the whole space leaves no residual to anybody.
            if view.residual_std > SCALE_FLOOR or len(view.basis) == len(view.mean):
                continue
            _LOGGER.warning(
                f"task {task}: the residual ratios of its training samples "
                f"({self.tasks[task].samples}) do not vary in the {name} view; RLC's foreign "
                "reference, which all tasks share, will be dominated by this task"
            )

    def _read_head(self, head: Any, task: int, width: int) -> tuple[inputs.HeadRows | None, int]:
        return inputs.read_head(head, f"head of task {task}", self._xp.ones((1, width), np.float32))

    def _largest_logits(
        self,
        head: Any,
        rows: inputs.HeadRows | None,
        num_classes: int,
        features: Float[Any, "n d"],
        basis: Float[Any, "r d"],
    ) -> tuple[Float[Any, " n"], ...]:
        """Returns `largest_logits` of the head of the next task."""
        gamma = np.float32(self.settings.attenuation)
        if rows is not None:
            given = (features, basis, gamma, rows.rows, rows.bias)
            return self.run(largest_logits, *given, normalised=rows.normalised)
        name = f"head of task {self.num_tasks}"
        both = (features, self.run(filter_features, features, basis, gamma))
        return tuple(inputs.function_logits(head, h, num_classes, name).max(axis=1) for h in both)

    def _function_logits(self, features: Float[Any, "n d"]) -> dict[str, np.ndarray]:
        """Returns what `LOGITS` names of heads that are functions, one after the other."""
        kinds: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        gamma = np.float32(self.settings.attenuation)
        tasks = zip(self.heads, self.classes, self.arrays.views[0].basis, strict=False)
        for task, (head, own, basis) in enumerate(tasks):
            filtered = self.run(filter_features, features, basis, gamma)
            for kind, given in zip(kinds, (features, filtered), strict=True):
                name = f"head of task {task}"
                kind.append(inputs.function_logits(head, given, len(own), name))
        # Classes first, to be padded like statistics.
        raw, filtered = (
            stack([each.T for each in kind], 4, -np.inf).transpose(2, 0, 1) for kind in kinds
        )
        largest = (each for z in (raw, filtered) for each in (z.max(axis=2), z.argmax(axis=2)))
        return dict(zip(LOGITS, (*largest, raw, filtered), strict=True))
