"""LoDA: a general and an isolated increment, on directions chosen by the energy of the inputs.

L. He et al., "Task-Driven Subspace Decomposition for Knowledge Sharing and Isolation in LoRA-based
Continual Learning", ICML 2026. With A fixed, how far training B can change a projection is bounded
by the energy of its inputs along A. Before a task, per block, the general A takes the leading
eigenvectors of the second moment of old and new attention inputs together; the isolated A takes
the directions with the largest ratio of new to old energy (generalised eigenvectors, then
orthonormal). Both are divided by sqrt(3). Key and value share them, each with a B of its own, which
starts at zero. The first task has no isolated part and trains its general A too; later tasks train
B alone. The loss is CosFace over the task's own classes. When a task ends, row i of the general B
is shrunk by 1 - g_old / (g_old + gamma g_new), g being the energies of old and new inputs along
direction i; the isolated product is added in full. Then the task's moments join the old ones twice:
as seen before and after that shrinking.

Gradient alignment: the distinct classes of a batch are split at random into two groups, the first
with half of them rounded down. A half-step looks ahead from one group and descends on the other:
every tensor of the increment is moved against its gradient on the first group, the gradient on the
second group is taken there, and the optimiser applies it to the tensor where it was. Two
half-steps, one each way, share the optimiser's state and one random length of look-ahead. The head
is never moved ahead. A batch of one class makes one plain step, at the same cost.

Authors' code: all of the above; moments over all tokens of augmented images (drawn anew for each
pass; those of the first epoch here), not centred; scales 0.25 and 0.5 on the two products, gamma 3;
training of the first A (their paper is said to freeze it) and the double count of moments; the
ratio of energies in its Cholesky form, which maximises the trace of a ratio, where the paper speaks
of a ratio of traces; the shrunk rows, where the paper is said to recalibrate by a matrix; no
classifier alignment, as the FDC paper says; head rows drawn with standard deviation 0.02. Their key
and value form is known from a compiled file only; the code at hand adapts the fused query, key and
value. Inferred: `train.rank` is the rank of each branch; the scales, which that compiled file does
not halve (0.5 and 1). FDC paper: Adam without decay at 5e-4 and 5e-3. Unknown: its schedule
(`train.schedule`), margins and look-aheads. Preset `native` is SGD with momentum 0.9, weight decay
and one rate for all leaves (1e-2 where they have none) along half a cosine wave.

E_t has the shrunken increments of the first t tasks merged. Logits are the class token's cosines to
the rows of the head, without scale; sigma_t comes from head t as it was trained. One moment a block
is kept (28 MB for ViT-B/16), and every increment with the rank of both branches (59 MB for 20 tasks
of rank 10); nothing grows with tasks. A batch costs four passes forward and backward, two over each
group, without second derivatives: about 2.3 plain steps on one device, four on several. Beside the
training there are three passes over the images without gradients: one before, two after.
Decompositions run in float64 on the host; where a moment is not positive definite, multiples of the
identity from 1e-12 on are added.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jaxtyping import Array, Bool, Float, Float64, Int

from fdc_jax.data.batches import Batch
from fdc_jax.heads import CosineHead, Head
from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner, option
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import increments, vit

NATIVE_MOMENTUM = 0.9
NATIVE_RATE = 1e-2
NATIVE_RATE_OF = {"cifar100": 5e-3, "imagenet_a": 1e-2, "imagenet_r": 2e-2, "cub200": 5e-3}
NATIVE_WEIGHT_DECAY, NATIVE_WEIGHT_DECAY_OF = 5e-4, {"imagenet_r": 0.0}

# Of the general and of the isolated product, and of cosines in the loss; the authors'.
GENERAL_SCALE, ISOLATED_SCALE, COSINE_SCALE = 0.25, 0.5, 20.0
# Weight of the new task where products are shrunk, the authors'.
GAMMA = 3.0
FIRST_JITTER = 1e-12
ENERGY_FLOOR = 1e-12
# Added to the norm of a gradient before dividing by it.
NORM_FLOOR = 1e-12
# Sizes that a part of a batch can have, in eighths of the batch.
PART_SIZES = (4, 5, 6, 8)


class State(NamedTuple):
    """What outlasts a task."""

    # The first half of the rank is the general branch, the second the isolated one; scales and
    # shrinking are part of B. While a task trains, its slot holds its A, and B is zero.
    increments: vit.Increment
    heads: Float[Array, "tasks c d"]  # rows of the cosine heads
    moments: Float[Array, "l d d"]  # summed, of earlier tasks' attention inputs, two a task


class Progress(NamedTuple):
    """What the update carries from batch to batch; random numbers follow from the count."""

    batches: Int[Array, ""]
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class LoDA(Learner):
    """LoDA, as described above."""

    title = "LoDA"
    paper_row = 7
    selected = "pac+rlc_adapted_view"
    mean_over_images = True

    margin: float = option(  # The authors'; unpublished for OmniBenchmark, which has ImageNet-R's.
        0.0,
        "[0, inf)",
        "off the cosine of the own class",
        on={"imagenet_a": 0.15, "imagenet_r": 0.1, "cub200": 0.1, "omnibench": 0.1},
    )
    look_ahead: float = option(0.3, "[0, inf)", "rho, the longest", on={"imagenet_r": 0.7})

    # 1. What it keeps between tasks.
    def initial_state(self) -> State:
        """Returns empty slots for all tasks and no moments."""
        variant, tasks = self.setup.variant, self.setup.num_tasks
        return State(
            increments=increments.empty_stack(variant, 2 * self.setup.rank, tasks),
            heads=jnp.zeros((tasks, self.setup.head_rows, variant.width)),
            moments=jnp.zeros((variant.depth, variant.width, variant.width)),
        )

    # 2. What it computes before a task.
    def before_task(self, backbone, state: State, task, images) -> State:
        """Returns the state with the task's A of both branches, from its images seen by E_{t-1}."""
        kernels, augmented = self.encoder(backbone, state, task), images.augmented()
        moments, _ = attention_input_moments(self.setup.model, backbone, kernels, augmented)
        rank = self.setup.rank
        new, old = (_symmetric(np.asarray(each, np.float64)) for each in (moments, state.moments))
        designed = []
        for block in range(len(new)):
            general = general_directions(new[block] + old[block], rank)
            isolated = np.zeros_like(general)
            if task > 0:
                isolated = isolated_directions(new[block], old[block], rank)
            designed.append(np.concatenate([general, isolated], axis=1) / math.sqrt(3.0))
        stack = training.with_directions(state.increments, task, np.stack(designed))
        return state._replace(increments=stack)

    # 3. What it trains, and how.
    def start_task(self, backbone, state: State, task, key):
        """Returns the kernels of E_{t-1} and the isolated A, and what trains.

        Trained are the factors of the general branch, of which A stays from the second task on, B
        of the isolated branch, which has no gradient in the first task since A is zero there, and
        the rows of the head.
        """
        key_of_head, key_of_alignment = jax.random.split(key)
        setup, rank = self.setup, self.setup.rank
        slot = increments.select(state.increments, task)
        trained = {
            "increment": {
                "general": {
                    name: vit.Factors(A=slot[name]["A"][..., :rank], B=slot[name]["B"][:, :rank])
                    for name in ("key", "value")
                },
                "isolated": {name: slot[name]["B"][:, rank:] for name in ("key", "value")},
            },
            "head": training.new_cosine_rows(key_of_head, setup.head_rows, setup.variant.width),
        }
        trains = jax.tree.map(lambda leaf: jnp.ones(()), trained)
        for factors in trains["increment"]["general"].values():
            factors["A"] = jnp.asarray(task == 0, jnp.float32)
        frozen = {
            "kernels": self.encoder(backbone, state, task),
            "isolated": slot["key"]["A"][..., rank:],
            "class_mask": setup.class_mask(task),
            "trains": trains,
            "alignment": jax.random.key_data(key_of_alignment),
        }
        return frozen, trained

    def _increment(self, frozen, trained, shrinking=None) -> vit.Increment:
        """Returns both branches as one increment, scaled, and the general one shrunken if asked."""

        def factors(name):
            general = trained["increment"]["general"][name]
            B = GENERAL_SCALE * general["B"]
            if shrinking is not None:
                B = shrinking[name][:, :, None] * B
            isolated = ISOLATED_SCALE * trained["increment"]["isolated"][name]
            return vit.Factors(
                A=jnp.concatenate([general["A"], frozen["isolated"]], axis=2),
                B=jnp.concatenate([B, isolated], axis=1),
            )

        return vit.Increment(key=factors("key"), value=factors("value"))

    def loss(self, backbone, frozen, trained, batch):
        """Returns the cross-entropy of scaled cosines, the label's one less a margin (CosFace)."""
        increment = self._increment(frozen, trained)
        features = self.features(backbone, batch, frozen["kernels"], increment)
        cosines = CosineHead(trained["head"]).logits(features)
        return training.cosface(cosines, batch, frozen["class_mask"], COSINE_SCALE, self.margin)

    def update(self) -> training.Update:
        """Returns Adam with the paper's rates, or SGD with the authors'; in half-steps."""
        benchmark = self.setup.config.benchmark
        if not self.native:
            return self.half_steps(training.paper_rates(self.setup), optax.scale_by_adam())
        rate = NATIVE_RATE_OF.get(benchmark, NATIVE_RATE)
        decay = NATIVE_WEIGHT_DECAY_OF.get(benchmark, NATIVE_WEIGHT_DECAY)
        sgd = optax.chain(optax.add_decayed_weights(decay), optax.trace(NATIVE_MOMENTUM))
        schedule = partial(training.learning_rate_factor, "cosine")
        return self.half_steps({"increment": rate, "head": rate}, sgd, schedule)

    def half_steps(
        self,
        rates: dict[str, float],
        transformation: optax.GradientTransformation,
        schedule: Callable[[int, int], float] | None = None,
    ) -> training.Update:
        """Returns an update in half-steps; arguments as of `gradient_update`."""

        def initialise(trained) -> Progress:
            return Progress(jnp.zeros((), jnp.int32), transformation.init(trained))

        def step(backbone, frozen, trained, progress, batch, rate):
            def slopes(leaves, part):
                """Returns the loss on a part of the batch, and its gradient."""
                value, gradients = self.value_and_gradients(backbone, frozen, leaves, part)
                return value, jax.tree.map(jnp.multiply, frozen["trains"], gradients)

            def one_pass(carried, kind):
                trained, optimizer, ahead = carried
                weights, descends = kind
                part = batch._replace(weights=weights)
                value, gradients = of_group(slopes, ahead, part, alone=self.setup.mesh.size == 1)
                moved = jax.tree.map(
                    lambda leaf, gradient: leaf + against(gradient, length),
                    trained["increment"],
                    gradients["increment"],
                )
                looked = (trained, optimizer, trained | {"increment": moved})
                directions: Any
                directions, optimizer = transformation.update(gradients, optimizer, ahead)
                directions = jax.tree.map(jnp.multiply, frozen["trains"], directions)
                trained = training.descended(trained, directions, rates, rate)
                stepped = (trained, optimizer, trained)
                carried = jax.tree.map(partial(jnp.where, descends), stepped, looked)
                return carried, descends * value * weights.sum()

            key = jax.random.wrap_key_data(frozen["alignment"])
            key_of_length, key_of_groups = jax.random.split(
                jax.random.fold_in(key, progress.batches)
            )
            present = jnp.zeros(len(frozen["class_mask"])).at[batch.labels].max(batch.weights) > 0
            several = present.sum() > 1
            length = several * self.look_ahead * jax.random.uniform(key_of_length)
            first = first_group(key_of_groups, present)[batch.labels]
            # A single class is both groups, and only the first half-step counts.
            groups = [batch.weights * first, batch.weights * jnp.where(several, ~first, first)]
            # One after the other in a loop, so that the encoder is compiled once for all of them.
            (trained, optimizer, _), totals = jax.lax.scan(
                one_pass,
                (trained, progress.optimizer, trained),
                (jnp.stack([*groups, *groups[::-1]]), jnp.stack([False, True, False, several])),
            )
            value = totals.sum() / batch.weights.sum()
            return trained, Progress(progress.batches + 1, optimizer), value

        return training.Update(initialise, jax.jit(step, donate_argnums=(2, 3)), schedule)

    # 4. What it does when a task ends.
    def after_task(self, backbone, state: State, task, frozen, trained, images) -> State:
        """Returns the state with the increment shrunk and stored, the head, and new moments."""

        def moments_under(increment):
            kernels = increments.merge(frozen["kernels"], increment)
            augmented = images.augmented()
            return attention_input_moments(self.setup.model, backbone, kernels, augmented)[0]

        new = moments_under(self._increment(frozen, trained))
        shrinking = {
            name: shrinkage(factors["A"], state.moments, new, GAMMA)
            for name, factors in trained["increment"]["general"].items()
        }
        shrunken = self._increment(frozen, trained, shrinking)
        return State(
            increments=increments.store(state.increments, task, shrunken),
            heads=state.heads.at[task].set(trained["head"]),
            moments=state.moments + new + moments_under(shrunken),
        )

    # 5. What it offers for inference.
    def heads(self, state: State, num_tasks) -> list[Head]:
        """Returns the cosine heads of the first `num_tasks` tasks, unscaled and without padding."""
        return [CosineHead(rows) for rows in super().heads(state, num_tasks)]


def _symmetric(matrices):
    return (matrices + matrices.swapaxes(-2, -1)) / 2


def general_directions(moment: Float64[np.ndarray, "d d"], rank: int) -> Float64[np.ndarray, "d r"]:
    """Returns the leading eigenvectors, in descending order of energy."""
    return np.linalg.eigh(moment)[1][:, ::-1][:, :rank]


def isolated_directions(
    new: Float64[np.ndarray, "d d"], old: Float64[np.ndarray, "d d"], rank: int
) -> Float64[np.ndarray, "d r"]:
    """Returns an orthonormal basis of the directions with the most new energy to old."""
    root = cholesky(old)
    half = scipy.linalg.solve_triangular(root, new, lower=True)
    ratios = _symmetric(scipy.linalg.solve_triangular(root, half.T, lower=True))
    directions = scipy.linalg.solve_triangular(root.T, general_directions(ratios, rank))
    return np.linalg.qr(directions)[0]


def cholesky(matrix: Float64[np.ndarray, "d d"]) -> Float64[np.ndarray, "d d"]:
    """Returns the lower root of matrix + jitter I.

    The jitter is 0 if that is enough, or else 1e-12, then 1e-11 more, and so on until it is.
    """
    jitter, more = 0.0, FIRST_JITTER
    while True:
        try:
            return np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)))
        except np.linalg.LinAlgError:
            jitter, more = jitter + more, 10 * more


def of_group(function: Callable[..., Any], leaves, batch: Batch, alone: bool) -> Any:
    """Returns `function(leaves, part)`, the part being the rows of the batch with a weight.

    Shapes have to be known beforehand: the part has the smallest of a few sizes that holds the
    rows, others of weight 0 fill it up. Unless a device is `alone` it is the whole batch, which
    stays divided between the devices.
    """
    rows = len(batch.labels)
    if not alone:
        return function(leaves, batch)
    sizes = sorted({-(-rows * eighths // 8) for eighths in PART_SIZES})
    order = jnp.argsort(batch.weights == 0, stable=True)

    def of_size(size, leaves):
        return function(leaves, jax.tree.map(lambda leaf: leaf[order[:size]], batch))

    needed = jnp.searchsorted(jnp.asarray(sizes), (batch.weights != 0).sum())
    return jax.lax.switch(needed, [partial(of_size, size) for size in sizes], leaves)


def against(gradient: Float[Array, "*l a b"], length) -> Float[Array, "*l a b"]:
    """Returns a step of the given length against the gradient of every matrix."""
    norm = jnp.sqrt(jnp.sum(gradient**2, axis=(-2, -1), keepdims=True))
    return -length * gradient / (norm + NORM_FLOOR)


def first_group(key: Array, present: Bool[Array, " c"]) -> Bool[Array, " c"]:
    """Returns a random half of the classes present, rounded down but at least one."""
    lot = jnp.where(present, jax.random.uniform(key, present.shape), jnp.inf)
    place = jnp.argsort(jnp.argsort(lot))
    return present & (place < jnp.maximum(present.sum() // 2, 1))


@jax.jit
def shrinkage(
    A: Float[Array, "l d r"], old: Float[Array, "l d d"], new: Float[Array, "l d d"], gamma: float
) -> Float[Array, "l r"]:
    """Returns the factor s in [0, 1] on each direction that minimises old s^2 + gamma new (1-s)^2.

    Directions are columns of A, of which only energies under the two moments count.
    """

    def energy(moments):
        along = jnp.einsum("ldr,lde,ler->lr", A, moments, A, precision=jax.lax.Precision.HIGHEST)
        return jnp.maximum(along, 0.0)

    kept, gained = energy(old), gamma * energy(new)
    return 1.0 - kept / (kept + gained + ENERGY_FLOOR)
