"""Functions shared by learners: set-up, new heads, losses, learning rates and schedules."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float64, Int

from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead
from fdc_jax.machine import devices
from fdc_jax.machine.devices import Mesh
from fdc_jax.model import increments
from fdc_jax.model.vit import Increment, Replaced, Variant, VisionTransformer

# The momentum of SGD in all authors' presets with SGD.
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class LearnerSetup:
    """The encoder, the stream and the settings of a run that a learner reads."""

    model: VisionTransformer
    image_size: int  # pixels
    classes_per_task: tuple[int, ...]
    benchmark: str  # authors' settings depend on it
    native: bool  # True for the method's own settings, False for those of the paper's protocol
    rank: int  # of the increments
    epochs: int
    increment_learning_rate: float
    head_learning_rate: float
    schedule: str  # a key of `SCHEDULES`
    mesh: Mesh = dataclasses.field(default_factory=devices.data_mesh)  # splits every batch

    @property
    def variant(self) -> Variant:
        """Architecture of the encoder."""
        return self.model.variant

    @property
    def num_tasks(self) -> int:
        """Length of the stream."""
        return len(self.classes_per_task)

    @property
    def head_rows(self) -> int:
        """Rows of every stored head: the classes of the largest task."""
        return max(self.classes_per_task)

    def class_mask(self, task: int) -> Bool[Array, " c"]:
        """Returns True for the rows of the padded head that are classes of the task."""
        return jnp.arange(self.head_rows) < self.classes_per_task[task]

    def classes_of_first(self, num_tasks: int) -> Bool[np.ndarray, "t c"]:
        """Returns True for the slots that are classes of the first `num_tasks` tasks."""
        classes = np.asarray(self.classes_per_task)[:, None]
        tasks = np.arange(self.num_tasks)[:, None]
        return (np.arange(self.head_rows) < classes) & (tasks < num_tasks)


LabelledFeatures: TypeAlias = tuple[Float[np.ndarray, "n d"], Int[np.ndarray, " n"]]


class TaskImages(NamedTuple):
    """The training images of one task, for a learner's passes before and after its training."""

    augmented: Callable[[], Iterator[Batch]]  # the batches of the first epoch of training
    plain: Callable[[], Iterator[Batch]]  # evaluation preprocessing
    # Returns features of all plain images by an encoder, and their labels within the task.
    features: Callable[[Replaced], LabelledFeatures]
    pretrained: Callable[[], LabelledFeatures]  # the same by E_0, from the cache if they are there


class StepCounter(NamedTuple):
    """The state of an update whose random numbers follow from the number of steps in the task."""

    steps: Int[Array, ""]
    optimizer: Any


def with_step_counter(transformation: optax.GradientTransformation) -> Callable[[Any], StepCounter]:
    """Returns the function from trained leaves to the `Progress` before the first step."""
    return lambda trained: StepCounter(jnp.zeros((), jnp.int32), transformation.init(trained))


def transformed(
    transformation: optax.GradientTransformation, gradients: Any, state: Any, trained: Any
) -> tuple[Any, Any]:
    """Returns Optax's directions and its new state.

    Optax mixes number types and ranks, which `JAX_NUMPY_DTYPE_PROMOTION` and
    `JAX_NUMPY_RANK_PROMOTION` may forbid.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return transformation.update(gradients, state, trained)


class Update(NamedTuple):
    """A learner's update of its trained leaves.

    Attributes:
        initialise: `trained -> optimizer_state`.
        step: `(backbone, frozen, trained, optimizer_state, batch, rate) -> (trained,
            optimizer_state, loss)`, jitted; `rate` is a factor on the learning rates, or the value
            of the learner's own schedule.
        schedule: `(epoch, epochs) -> rate` of a learner with its own schedule, epochs counted from
            0; None follows `train.schedule`.
    """

    initialise: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any, Float[Array, ""]]]
    schedule: Callable[[int, int], Any] | None = None


def constant(epoch: int, epochs: int) -> float:
    """Returns 1, the factor on the learning rates in every epoch."""
    return 1.0


def cosine(epoch: int, epochs: int) -> float:
    """Returns half a wave from 1 in epoch 0 to 0 after the last epoch."""
    return 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))


def quarter_cosine(epoch: int, epochs: int) -> float:
    """Returns a quarter wave, one epoch late, as InfLoRA's authors have it.

    Their scheduler resets its counter after its construction: the first two epochs have the full
    rate, and the wave stops one epoch before cos(0.495 pi).
    """
    return math.cos(0.495 * math.pi * max(epoch - 1, 0) / max(epochs - 1, 1))


# Factors on the learning rates by epoch, under the names of `train.schedule`.
SCHEDULES = {"constant": constant, "cosine": cosine, "quarter_cosine": quarter_cosine}


def sgd(decay: float = 0.0) -> optax.GradientTransformation:
    """Returns PyTorch's SGD with momentum and decay, before any learning rate."""
    momentum = optax.trace(MOMENTUM)
    return optax.chain(optax.add_decayed_weights(decay), momentum) if decay else momentum


def new_linear_head(key: Array, classes: int, width: int) -> LinearHead:
    """Returns a head with weight and bias uniform in +-1/sqrt(width), PyTorch's default."""
    bound = width**-0.5
    key_of_weight, key_of_bias = jax.random.split(key)
    weight = jax.random.uniform(key_of_weight, (classes, width), minval=-bound, maxval=bound)
    bias = jax.random.uniform(key_of_bias, (classes,), minval=-bound, maxval=bound)
    return LinearHead(weight, bias)


def new_cosine_rows(key: Array, classes: int, width: int) -> Float[Array, "c d"]:
    """Returns rows of a cosine head, normal with standard deviation 0.02."""
    return 0.02 * jax.random.normal(key, (classes, width))


def unpadded(setup: LearnerSetup, stack: Any, num_tasks: int) -> list[Any]:
    """Returns the slots of the first `num_tasks` tasks, without rows that are no classes."""
    return [
        jax.tree.map(lambda leaf, t=task, c=classes: leaf[t, :c], stack)
        for task, classes in enumerate(setup.classes_per_task[:num_tasks])
    ]


def require_newest(title: str, weights: Float[Array, "t c d"], num_tasks: int) -> None:
    """Raises InputError if E_t, t = `num_tasks`, is not the newest encoder.

    `weights` are those of the heads, which are zero until their task is learned.
    """
    newest = int(np.any(weights, axis=(1, 2)).sum())
    if num_tasks != newest:
        raise InputError(
            f"{title} keeps no encoder but its newest: expected E_0 or E_{newest}, "
            f"found E_{num_tasks}"
        )


def grown_to(tree: Any, wanted: Any) -> Any:
    """Returns `wanted` with the arrays of `tree` in its leading slots, for a run that grows.

    Slots are the tasks, and the rows of padded heads.
    """

    def fill(old: Any, new: Any) -> Any:
        corner = tuple(map(slice, np.minimum(old.shape, new.shape)))
        if isinstance(new, jax.Array):
            return new.at[corner].set(old[corner])
        new = new.copy()
        new[corner] = old[corner]
        return new

    return jax.tree.map(fill, tree, wanted)


def with_directions(
    stack: Increment, task: int, directions: Float64[np.ndarray, "l d r"]
) -> Increment:
    """Returns the increments of all tasks with A of one task set, equally for key and value."""
    A, increment = jnp.asarray(directions, jnp.float32), increments.select(stack, task)
    increment["key"]["A"] = increment["value"]["A"] = A
    return increments.store(stack, task, increment)


def cross_entropy(
    logits: Float[Array, "n c"], batch: Batch, class_mask: Bool[Array, " c"]
) -> Float[Array, ""]:
    """Returns the mean cross-entropy over the images of a batch and the classes in the mask."""
    logits = jnp.where(class_mask[None], logits, -jnp.inf)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.sum(batch.weights * losses) / jnp.sum(batch.weights)


def cosface(
    cosines: Float[Array, "n c"],
    batch: Batch,
    class_mask: Bool[Array, " c"],
    scale: float,
    margin: float,
) -> Float[Array, ""]:
    """Returns the mean CosFace loss over the images of a batch (Wang et al., CVPR 2018, Eq. 4).

    The logits are scale * cosine, and scale * (cosine - margin) in the label's row.
    """
    one_hot = jax.nn.one_hot(batch.labels, cosines.shape[-1], dtype=cosines.dtype)
    return cross_entropy(scale * (cosines - margin * one_hot), batch, class_mask)


def paper_rates(setup: LearnerSetup) -> dict[str, float]:
    """Returns the learning rates of increments and heads in `config.train`."""
    return {"increment": setup.increment_learning_rate, "head": setup.head_learning_rate}


def descend(trained: Any, directions: Any, rates: dict[str, Any], rate: Any) -> Any:
    """Returns the trained leaves after a step of `rate` times the rate of each top-level part.

    Raises:
        InputError: a part of `trained` has no rate.
    """
    if unknown := trained.keys() - rates.keys():
        raise InputError(
            f"start_task: trained has the parts {', '.join(sorted(unknown))}; expected parts with "
            f"a learning rate in `update`: {', '.join(rates)}"
        )

    def moved(part):
        factor = rate * rates[part]
        return jax.tree.map(lambda leaf, d: leaf - factor * d, trained[part], directions[part])

    return {part: moved(part) for part in trained}


def mean_over_portions(function: Callable[[Batch], Any], batch: Batch, size: int) -> Any:
    """Returns the mean of a function's values over portions of `size` images of a batch.

    A portion counts by the sum of its weights, so that weighted means over images, and their
    gradients, equal those of the whole batch.
    """
    portions = jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, size, *leaf.shape[1:])), batch)
    total = jnp.sum(batch.weights)

    def add(sums, portion):
        weight = jnp.sum(portion.weights)
        # The mean over a portion of padding must be finite; its weight is 0.
        weights = jnp.where(weight > 0, portion.weights, 1.0)
        values = function(portion._replace(weights=weights))
        return jax.tree.map(lambda s, value: s + weight / total * value, sums, values), None

    first = jax.tree.map(lambda leaf: leaf[0], portions)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, first))
    return jax.lax.scan(add, zeros, portions)[0]
