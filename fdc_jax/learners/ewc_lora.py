"""EWC-LoRA: increments with an elastic penalty on directions that earlier tasks are sensitive to.

Y. Zheng et al., "Revisiting Weight Regularization for Low-Rank Continual Learning", ICLR 2026.
Each task trains as in Cumulative-LoRA, but from the second task on the loss contains

    strength / 2 * sum over kernels and entries of Omega * (A B)^2,

where Omega is the sum of squared gradients of earlier tasks with respect to the whole kernels. The
anchor is the kernel at the start of the task, so that Omega is all that is remembered.

FDC paper: per-sample Fisher information, strength 1e7, accumulation factor one. Authors' code: the
factor one half, no division by images or tasks in the penalty, a sum of squared gradients divided
by the images of the task, labels from the data (their paper, by a summary, draws them from the
model), newly drawn augmented images (here those of the first epoch), only the task's own head and
classes. That code squares the mean gradient of a batch (`fisher=batch_mean`), which is smaller than
the mean of squares (`per_sample`) by up to the batch size, and sums factors after a task; here
products are summed. Their file for ImageNet-A has 10 epochs, their log 20. Unknown: the schedule of
the FDC paper's runs, and its "head-input transform".

E_t, the head's input and FDC's score scales are as in Cumulative-LoRA.
"""

import dataclasses
import math
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from msgspec import Meta

from fdc_jax.data.batches import Batch
from fdc_jax.heads import LinearHead
from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner, TaskImages
from fdc_jax.model import increments, vit

# Number of images whose gradients are in memory at a time.
IMAGES_AT_ONCE = 8
# The authors' values on ImageNet-R; other benchmarks have the protocol's rate and no decay.
NATIVE_HEAD_RATE, NATIVE_WEIGHT_DECAY = {"imagenet_r": 5e-4}, {"imagenet_r": 5e-3}


class State(NamedTuple):
    """Every task's increment and head on a leading task axis, and Omega."""

    increments: vit.Increment
    heads: LinearHead
    importance: vit.KeyValueKernels


@dataclasses.dataclass(frozen=True)
class EWCLoRA(Learner):
    """EWC-LoRA, as described above."""

    title = "EWC-LoRA"
    extra_passes = 1.0  # squared gradients
    paper_row = 1
    mean_over_images = True

    strength: Annotated[float, Meta(ge=0, description="lambda, of the penalty")] = 1e7
    fisher: Annotated[
        Literal["per_sample", "batch_mean"],
        Meta(description="squared gradients of images, or of batches"),
    ] = "per_sample"

    def initial_state(self) -> State:
        """Returns empty slots for all tasks, and an Omega of zero."""
        variant = self.setup.variant
        shape = (variant.depth, variant.width, variant.width)
        zero = vit.KeyValueKernels(key=jnp.zeros(shape), value=jnp.zeros(shape))
        return State(*super().initial_state(), importance=zero)

    def start_task(self, backbone: Any, state: State, task: int, key: Array) -> tuple[Any, Any]:
        """Returns the frozen kernels of E_{t-1} and Omega, and a fresh increment and head."""
        frozen, trained = super().start_task(backbone, state, task, key)
        return frozen | {"importance": state.importance}, trained

    def loss(self, backbone: Any, frozen: Any, trained: Any, batch: Batch) -> Float[Array, ""]:
        """Returns the cross-entropy over the task's own classes plus the penalty."""
        classification = super().loss(backbone, frozen, trained, batch)
        return classification + self.strength * penalty(frozen["importance"], trained["increment"])

    def update(self) -> training.Update:
        """Returns Adam, in the native preset along half a cosine wave."""
        if not self.setup.native:
            return super().update()
        benchmark, rates = self.setup.benchmark, training.paper_rates(self.setup)
        rates["head"] = NATIVE_HEAD_RATE.get(benchmark, rates["head"])
        decay = NATIVE_WEIGHT_DECAY.get(benchmark, 0.0)
        adam = optax.chain(optax.add_decayed_weights(decay), optax.scale_by_adam())
        return self.gradient_update(rates, adam, training.cosine)

    def after_task(
        self, backbone: Any, state: State, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> State:
        """Returns the state with increment and head stored and Fisher information added."""
        state = super().after_task(backbone, state, task, frozen, trained, images)
        kernels = self.encoder(backbone, state, task + 1)
        squares, count = jax.tree.map(jnp.zeros_like, state.importance), jnp.zeros(())
        model = vit.in_float32(self.setup.model)
        fixed = (backbone, kernels, trained["head"], frozen["class_mask"])
        for batch in images.augmented():
            squares = add_squared_gradients(model, self.fisher, *fixed, batch, squares)
            count += batch.weights.sum()
        mean = jax.tree.map(lambda sums: sums / count, squares)
        return state._replace(importance=jax.tree.map(jnp.add, state.importance, mean))


def penalty(importance: vit.KeyValueKernels, increment: vit.Increment) -> Float[Array, ""]:
    """Returns half the sum of Omega * (A B)^2 over all entries."""
    changes: Any = increments.kernel_updates(increment)
    key, value = (jnp.sum(importance[name] * changes[name] ** 2) for name in ("key", "value"))
    return 0.5 * (key + value)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=7)
def add_squared_gradients(model, fisher, backbone, kernels, head, class_mask, batch, total):
    """Returns `total` plus a batch's squared gradients with respect to key and value kernels.

    The gradient with respect to A B is that with respect to the kernel.
    """
    power = 2 if fisher == "per_sample" else 1

    def loss(kernels, image, label):
        batch = Batch(image[None], label[None], np.ones(1, np.float32))
        features = model.apply({"params": backbone}, batch.images, kernels)
        return training.cross_entropy(head.logits(features), batch, class_mask)

    def add_images(sums, part):
        of_images = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))
        gradients = of_images(kernels, part.images, part.labels)
        summed = partial(jnp.einsum, "n,nlde->lde", part.weights, precision="highest")
        return jax.tree.map(lambda s, g: s + summed(g**power), sums, gradients), None

    size = math.gcd(IMAGES_AT_ONCE, len(batch.labels))
    # Every part has images from the whole batch, and so from every device.
    parts = jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]).swapaxes(0, 1), batch)
    sums, _ = jax.lax.scan(add_images, jax.tree.map(jnp.zeros_like, total), parts)
    if fisher == "batch_mean":
        sums = jax.tree.map(lambda gradient: gradient**2 / batch.weights.sum(), sums)
    return jax.tree.map(jnp.add, total, sums)
