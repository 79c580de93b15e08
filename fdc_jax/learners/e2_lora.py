"""E2-LoRA: full-rank increments whose weak directions later tasks reuse.

E2-LoRA, ICML 2026, arXiv 2605.27482. The increment of every block's query, key and value kernels,
side by side, has as many ranks as outputs, and so has that of the first kernel of the MLP. The
first task trains both factors. When a task ends, an orthonormal basis of the output space replaces
the rows of its B: the principal directions of the drift x A B of one batch, centred, in the order
of their energies; A changes with them, so that A B stays. When task n begins, every direction of
an earlier task is released if it and the later ones of that task have less than a share of its
energy: 1e-5, or the smallest multiple of it that leaves the new task a share 1/n of all
directions. The products of released directions are dropped. The new task trains their A, which
starts at zero; their rows of B stay, so that its updates are orthogonal to all that is kept. Its
loss is the cross-entropy over its own classes plus a distillation: the logits of earlier classes
follow those of the encoder without its increment. All heads are then aligned on pseudo-features, as
in InfLoRA+CA.

Authors' code (b4fad49): everything that is not named below. Weight 0.25 and temperature 2 of the
distillation; SGD at 5e-4 (increments) and 1e-2 (head of normal weights with deviation 0.02, zero
bias); three epochs of alignment without a division of logits; inputs of all tokens of the first
augmented batch (here of the first epoch). Directions without energy, which that code leaves to
rounding, stay in the span of the task's rows of B here; its updates do not depend on a basis of the
span under SGD. Inferred: the protocol, as the FDC paper does not include this method: the authors'
optimiser and rates, no decay, and `train.schedule`. Left out: that code replaces the final norm of
its encoder by a new one.

E_0 is the pretrained encoder; E_t has the kernels after task t, and only the newest is kept.
sigma_t comes from head t after the alignment at the end of task t. Decompositions run in float64 on
the host.
"""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64
from msgspec import Meta

from fdc_jax.data.batches import Batch
from fdc_jax.heads import LinearHead
from fdc_jax.learners import gaussian_alignment, training
from fdc_jax.learners.gaussian_alignment import ClassGaussians
from fdc_jax.learners.learner import Learner, Replaced, TaskImages
from fdc_jax.model import increments, vit
from fdc_jax.model.operations import Factors

# Updated kernels, and the sown inputs of their layers.
INPUTS = {"qkv": "attention_inputs", "fc1": "mlp_inputs"}
# Unit of the share of energy below which directions are released.
ENERGY_STEP = 1e-5
DISTILLATION_TEMPERATURE = 2.0
DECAY = 5e-4
# Tenths of the epochs after which the native rates drop to a tenth; elsewhere they are constant.
MILESTONES = {"cifar100": 8, "imagenet_a": 4}
RIDGE = 2e-4  # on the diagonal of a class's covariance


class State(NamedTuple):
    """The sum of all increments, and heads and a Gaussian of each class after alignment."""

    increment: dict[str, Factors]  # rows of B are orthonormal directions after the first task
    # Share of its task's energy that a direction and the later ones have, [l, e] of each kernel.
    remaining: dict[str, Float[Array, "l e"]]
    heads: LinearHead
    gaussians: ClassGaussians


@dataclasses.dataclass(frozen=True)
class E2LoRA(Learner):
    """E2-LoRA, as described above."""

    title = "E2-LoRA"
    step_passes = 1.5  # and features of the encoder without the new increment
    extra_passes = 0.5  # class features

    encoder_rate: Annotated[
        float, Meta(gt=0, description="of the increments, in place of train's")
    ] = 5e-4
    head_rate: Annotated[float, Meta(gt=0, description="of heads, also when they are aligned")] = (
        1e-2
    )
    distillation_weight: Annotated[
        float, Meta(ge=0, description="of the logits of earlier classes")
    ] = 0.25
    alignment_epochs: Annotated[int, Meta(ge=0, description="of all heads; 0: no alignment")] = 3

    def initial_state(self) -> State:
        """Returns a zero increment without directions, and empty slots for all tasks."""
        increment = jax.tree.map(jnp.zeros_like, self._fresh(jax.random.key(0)))
        remaining = {name: jnp.zeros(f["B"].shape[:2]) for name, f in increment.items()}
        heads = super().initial_state().heads
        return State(increment, remaining, heads, gaussian_alignment.empty(*heads.weight.shape))

    def _fresh(self, key: Array) -> dict[str, Factors]:
        """Returns the increment that the first task trains."""
        model: Any = self.setup.model
        params = vit.parameter_shapes(model, self.setup.image_size)
        read = functools.partial(vit.pretrained_kernels, names=tuple(INPUTS))
        shapes = jax.eval_shape(read, params)
        outputs = {name: kernel.shape[-1] for name, kernel in shapes.items()}
        return increments.initialise(key, self.setup.variant, 0, outputs)

    def start_task(self, backbone: Any, state: State, task: int, key: Array) -> tuple[Any, Any]:
        """Returns what the task keeps of earlier ones, and its increment and head."""
        increment_key, head_key, alignment_key = jax.random.split(key, 3)
        rows, width = self.setup.head_rows, self.setup.variant.width
        free, basis, earlier = {}, {}, {}
        for name, factors in state.increment.items():
            free[name] = ~kept(state.remaining[name], task)
            basis[name] = factors["B"]
            earlier[name] = restricted(factors, ~free[name])
        pretrained = vit.pretrained_kernels(backbone, tuple(INPUTS))
        known = jnp.asarray(self.setup.classes_of_first(task))
        kernels = increments.merge(pretrained, earlier)
        frozen = {
            "kernels": kernels,
            "free": free,
            "basis": basis,
            "later": jnp.asarray(task > 0),
            "class_mask": self.setup.class_mask(task),
            "heads": state.heads,
            "known": known,
            "alignment": jax.random.key_data(alignment_key),
        }
        increment = self._fresh(increment_key)
        if task > 0:
            increment = jax.tree.map(jnp.zeros_like, increment)
        head = LinearHead(training.new_cosine_rows(head_key, rows, width), jnp.zeros(rows))
        return frozen, {"increment": increment, "head": head}

    def loss(self, backbone: Any, frozen: Any, trained: Any, batch: Batch) -> Float[Array, ""]:
        """Returns the cross-entropy over the task's own classes plus the distillation."""
        kernels = increments.merge(frozen["kernels"], current(frozen, trained))
        features = self.features(backbone, batch, vit.with_kernels(backbone, kernels))
        earlier = self.features(backbone, batch, vit.with_kernels(backbone, frozen["kernels"]))
        logits = trained["head"].logits(features)
        classification = training.cross_entropy(logits, batch, frozen["class_mask"])

        def answers(features):
            """Returns log-probabilities of all earlier classes, [n, tasks * c]."""
            heads = jax.vmap(lambda head: head.logits(features), out_axes=1)(frozen["heads"])
            softened = heads / DISTILLATION_TEMPERATURE
            masked = jnp.where(frozen["known"][None], softened, -1e9)
            return jax.nn.log_softmax(masked.reshape(len(features), -1))

        target = answers(earlier)
        divergences = jnp.sum(jnp.exp(target) * (target - answers(features)), axis=1)
        distillation = jnp.sum(batch.weights * divergences) / jnp.sum(batch.weights)
        weight = self.distillation_weight * DISTILLATION_TEMPERATURE**2
        return classification + weight * distillation

    def update(self) -> training.Update:
        """Returns SGD with momentum at the learner's own rates."""
        rates = {"increment": self.encoder_rate, "head": self.head_rate}
        if not self.setup.native:
            return self.gradient_update(rates, training.sgd())
        tenths = MILESTONES.get(self.setup.benchmark, 10)

        def schedule(epoch: int, epochs: int) -> float:
            return 0.1 if 10 * epoch >= tenths * epochs else 1.0

        return self.gradient_update(rates, training.sgd(DECAY), schedule)

    def after_task(
        self, backbone: Any, state: State, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> State:
        """Returns the state with the task's directions, new Gaussians and aligned heads."""
        setup, increment = self.setup, current(frozen, trained)
        kernels = increments.merge(frozen["kernels"], increment)
        encoder = vit.with_kernels(backbone, kernels)
        features, labels = images.features(encoder)
        gaussians = gaussian_alignment.fit_task(
            state.gaussians, task, features, labels, setup.classes_per_task[task], RIDGE
        )
        heads = increments.store(state.heads, task, trained["head"])
        if task > 0:
            key = jax.random.wrap_key_data(frozen["alignment"])
            heads = self._align(heads, gaussians, setup.classes_of_first(task + 1), key)
        first = next(iter(images.augmented()))
        scatters = input_scatters(setup.model, encoder["parameters"], first)
        factors, remaining = {}, {}
        for name in INPUTS:
            new = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), increment[name])
            scatter = np.asarray(scatters[name], np.float64)
            old = jax.tree.map(np.array, state.increment[name])
            shares = np.array(state.remaining[name])
            for block, free in enumerate(np.asarray(frozen["free"][name])):
                A, B = new["A"][block][:, free], new["B"][block][free]
                if task == 0:
                    A, B = A @ B, np.eye(len(B))
                A, B, shares[block][free] = principal_directions(scatter[block], A, B)
                old["A"][block][:, free] = A
                old["B"][block][free] = B
            factors[name] = jax.tree.map(jnp.asarray, old)
            remaining[name] = jnp.asarray(shares)
        return State(factors, remaining, heads, gaussians)

    @functools.cached_property
    def _align(self):
        """The training of heads on features drawn from Gaussians, compiled once for all tasks."""
        return gaussian_alignment.linear_retraining(
            training.sgd(DECAY), self.alignment_epochs, self.head_rate, temperature=0.0
        )

    def encoder(self, backbone: Any, state: State, num_tasks: int) -> Replaced:
        """Returns all parameters of the newest encoder; the pretrained kernels for E_0.

        Raises:
            InputError: the encoder is neither E_0 nor the newest.
        """
        if num_tasks == 0:
            return vit.pretrained_kernels(backbone)
        training.require_newest(self.title, state.heads.weight, num_tasks)
        kernels = vit.pretrained_kernels(backbone, tuple(INPUTS))
        return vit.with_kernels(backbone, increments.merge(kernels, state.increment))


def kept(remaining: Float[Array, "l e"], task: int) -> Bool[Array, "l e"]:
    """Returns True for the directions that stay as they are in a task, counted from 0.

    They are those with the smallest multiple of `ENERGY_STEP` at least for which at most
    task / (task + 1) of all directions stay.
    """
    limit = task * remaining.shape[1] // (task + 1)
    # The largest share that must go; the comparison with it holds if the quotient was rounded.
    most = jnp.sort(remaining, axis=1)[:, ::-1][:, limit : limit + 1]
    level = ENERGY_STEP * (jnp.floor(most / ENERGY_STEP) + 1.0)
    return (remaining >= level) & (remaining > most)


def restricted(factors: Any, columns: Bool[Array, "l r"]) -> Factors:
    """Returns factors without the ranks that are not among the columns."""
    return Factors(A=jnp.where(columns[:, None], factors["A"], 0.0), B=factors["B"])


def current(frozen: Any, trained: Any) -> dict[str, Factors]:
    """Returns the increment of the task in training; after the first task its B is frozen."""
    increment = {}
    for name, factors in trained["increment"].items():
        B = jnp.where(frozen["later"], frozen["basis"][name], factors["B"])
        increment[name] = restricted({"A": factors["A"], "B": B}, frozen["free"][name])
    return increment


@functools.partial(jax.jit, static_argnums=0)
def input_scatters(model: Any, parameters: Any, batch: Batch) -> dict[str, Float[Array, "l d d"]]:
    """Returns the scatter of the inputs of every updated kernel, over all tokens of a batch."""
    images = batch.images
    _, sown = vit.in_float32(model).apply({"params": parameters}, images, mutable=["intermediates"])
    scatters = {}
    for name, sown_name in INPUTS.items():
        inputs: Any = sown["intermediates"]["Transformer"][sown_name][0]
        weights = jnp.broadcast_to(batch.weights[None, :, None, None], (*inputs.shape[:3], 1))
        mean = jnp.sum(weights * inputs, axis=(1, 2), keepdims=True)
        centred = inputs - mean / jnp.sum(weights, axis=(1, 2), keepdims=True)
        product = functools.partial(jnp.einsum, "lntd,lnte->lde", precision="highest")
        scatters[name] = product(weights * centred, centred)
    return scatters


def principal_directions(
    scatter: Float64[np.ndarray, "d d"],
    A: Float64[np.ndarray, "d r"],
    B: Float64[np.ndarray, "r e"],
) -> tuple[Float64[np.ndarray, "d r"], Float64[np.ndarray, "r e"], Float64[np.ndarray, " r"]]:
    """Returns A, B and remaining shares of energy for the principal directions of x A B.

    Rows of B are orthonormal, and A B stays the same; `scatter` is that of x.
    """
    values, vectors = np.linalg.eigh(scatter)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    _, deviations, directions = np.linalg.svd(root.T @ A)
    energies = np.zeros(len(directions))
    energies[: len(deviations)] = deviations**2
    remaining = np.cumsum(energies[::-1])[::-1]
    remaining = remaining / max(remaining[0], np.finfo(np.float64).tiny)
    return A @ directions.T, directions @ B, remaining
