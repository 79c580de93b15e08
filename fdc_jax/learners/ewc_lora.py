"""EWC-LoRA: increments that an elastic penalty holds where earlier tasks were sensitive.

Y. Zheng et al., "Revisiting Weight Regularization for Low-Rank Continual Learning", ICLR 2026.
Each task trains as in Cumulative-LoRA, but from the second task on the loss contains

    strength / 2 * sum over kernels and entries of Omega * (A B)^2,

where Omega adds up the squared gradients of earlier tasks with respect to the whole kernels. The
anchor is the kernel at the start of the task, so that nothing but Omega has to be remembered.

FDC paper: per-sample Fisher information, strength 1e7, accumulation factor one. Authors' code: the
factor one half, no division by images or tasks in the penalty, a sum of squared gradients divided
by the images of the task, labels from the data (their paper, by a summary, draws them from the
model), augmented images drawn anew (those of the first epoch here), only the task's own head and
classes. That code squares the mean gradient of a batch (`fisher=batch_mean`), which is smaller than
the mean of squares (`per_sample`) by up to the batch size, and so makes the same strength up to
that much weaker. It also adds up factors instead of products after a task (`folding=factors`),
which brings in cross terms that were never trained; their paper adds products. `accumulation`
multiplies Omega before a task's Fisher information is added.

Preset `native` is Adam along half a cosine wave, and on ImageNet-R alone with another head rate
(5e-4) and coupled weight decay (5e-3). Their file for ImageNet-A says 10 epochs, their log 20.
Unknown: the schedule of the FDC paper's runs, and what it means by EWC-LoRA's "head-input
transform". In the authors' code the class token enters a linear head as it is, so the transform is
the identity (`head_input=class_token`); with `l2` the head is linear on the token divided by its
norm, and TSF acts before that division.

E_t has the first t increments folded in; head input and score scales are otherwise
Cumulative-LoRA's. Two float32 matrices a block are kept for Omega (57 MB for ViT-B/16). The Fisher
pass, in float32 in every mode, holds `images_at_once` gradients of that size at a time.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fdc_jax.data.batches import Batch
from fdc_jax.heads import Head, LinearHead, NormalisedLinearHead
from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner, Replaced, option
from fdc_jax.model import increments, vit

# Elsewhere they are those of the protocol.
NATIVE_HEAD_RATE, NATIVE_WEIGHT_DECAY = {"imagenet_r": 5e-4}, {"imagenet_r": 5e-3}


class State(NamedTuple):
    """Every task's increment and head on a leading task axis, and what the past deems important."""

    increments: vit.Increment
    heads: LinearHead
    importance: vit.KeyValueKernels


@dataclasses.dataclass(frozen=True)
class EWCLoRA(Learner):
    """EWC-LoRA, as described above."""

    title = "EWC-LoRA"
    paper_row = 1
    mean_over_images = True

    strength: float = option(1e7, "[0, inf)", "lambda, of the penalty")
    accumulation: float = option(1.0, "[0, inf)", "gamma, on the importance of earlier tasks")
    fisher: str = option(
        "per_sample", ("per_sample", "batch_mean"), "squared gradients of images, or of batches"
    )
    head_input: str = option(
        "class_token", ("class_token", "l2"), "the token as it is, or divided by its norm"
    )
    folding: str = option("products", ("products", "factors"), "what adds up over tasks")
    images_at_once: int = option(8, "[1, inf)", "gradients held; 57 MB each for ViT-B/16")

    # 1. What it keeps between tasks.
    def initial_state(self) -> State:
        """Returns empty slots for all tasks, and no importance."""
        variant = self.setup.variant
        shape = (variant.depth, variant.width, variant.width)
        return State(
            *super().initial_state(),
            importance=vit.KeyValueKernels(key=jnp.zeros(shape), value=jnp.zeros(shape)),
        )

    # 3. What it trains, and how.
    def start_task(self, backbone, state: State, task, key):
        """Returns the kernels so far with their importance, and a fresh increment and head."""
        frozen, trained = super().start_task(backbone, state, task, key)
        kernels = self._folded(backbone, state, task)
        return frozen | {"kernels": kernels, "importance": state.importance}, trained

    def loss(self, backbone, frozen, trained, batch):
        """Returns the cross-entropy over the task's own classes plus the penalty."""
        headed = trained | {"head": self._head(*trained["head"])}
        classification = super().loss(backbone, frozen, headed, batch)
        return classification + self.strength * penalty(frozen["importance"], trained["increment"])

    def update(self) -> training.Update:
        """Returns Adam, in the native preset along half a cosine wave."""
        if not self.native:
            return self.gradient_update()
        benchmark, rates = self.setup.config.benchmark, training.paper_rates(self.setup)
        rates["head"] = NATIVE_HEAD_RATE.get(benchmark, rates["head"])
        decay = NATIVE_WEIGHT_DECAY.get(benchmark, 0.0)
        adam = optax.chain(optax.add_decayed_weights(decay), optax.scale_by_adam())
        schedule = partial(training.learning_rate_factor, "cosine")
        return self.gradient_update(rates, adam, schedule)

    # 4. What it does when a task ends.
    def after_task(self, backbone, state: State, task, frozen, trained, images) -> State:
        """Returns the state with increment and head in their slot, Fisher information added."""
        state = super().after_task(backbone, state, task, frozen, trained, images)
        kernels, head = self.encoder(backbone, state, task + 1), self._head(*trained["head"])
        squares, count = jax.tree.map(jnp.zeros_like, state.importance), jnp.zeros(())
        model = vit.in_float32(self.setup.model)
        add = partial(_add_squared_gradients, model, self.fisher, self.images_at_once)
        for batch in images.augmented():
            squares = add(backbone, kernels, head, frozen["class_mask"], batch, squares)
            count += batch.weights.sum()
        importance = jax.tree.map(
            lambda omega, sums: self.accumulation * omega + sums / count, state.importance, squares
        )
        return state._replace(importance=importance)

    # 5. What it offers for inference.
    def encoder(self, backbone, state: State, num_tasks) -> Replaced:
        """Returns the kernels of E_t after `num_tasks` tasks; those of E_0 for 0."""
        if num_tasks == 0:
            return vit.pretrained_kernels(backbone)
        last = increments.select(state.increments, num_tasks - 1)
        return increments.merge(self._folded(backbone, state, num_tasks - 1), last)

    def heads(self, state: State, num_tasks) -> list[Head]:
        """Returns the heads of the first `num_tasks` tasks, without padding."""
        return [self._head(*rows) for rows in training.unpadded(self.setup, state.heads, num_tasks)]

    def _head(self, weight, bias) -> Head:
        """Returns the head that `head_input` asks for."""
        if self.head_input == "l2":
            return NormalisedLinearHead(weight, bias)
        return LinearHead(weight, bias)

    def _folded(self, backbone, state: State, num_tasks: int) -> Replaced:
        """Returns the kernels that the task after the first `num_tasks` starts from."""
        if self.folding == "products":
            return super().encoder(backbone, state, num_tasks)
        earlier = jnp.arange(self.setup.num_tasks) < num_tasks
        summed: Any = jax.tree.map(
            lambda slots: jnp.sum(jnp.where(earlier[:, None, None, None], slots, 0.0), axis=0),
            state.increments,
        )
        return increments.merge(vit.pretrained_kernels(backbone), summed)


def penalty(importance: vit.KeyValueKernels, increment: vit.Increment):
    """Returns half the sum of squares of the products A B, weighted by importance."""
    weighted = jax.tree.map(
        lambda omega, change: jnp.sum(omega * change**2), importance, increments.products(increment)
    )
    return 0.5 * (weighted["key"] + weighted["value"])


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=8)
def _add_squared_gradients(
    model, fisher, images_at_once, backbone, kernels, head, class_mask, batch, total
):
    """Adds a batch's squared gradients with respect to the key and value kernels to `total`.

    An increment is added to its kernel, so the gradient with respect to either is the same.
    """

    def mean_loss(kernels, part):
        features = model.apply({"params": backbone}, part.images, kernels)
        return training.cross_entropy(head.logits(features), part, class_mask)

    def image_loss(kernels, image, label):
        return mean_loss(kernels, Batch(image[None], label[None], np.ones(1, np.float32)))

    def add_images(total, part):
        gradients = jax.vmap(jax.grad(image_loss), in_axes=(None, 0, 0))(
            kernels, part.images, part.labels
        )
        summed = partial(
            jnp.einsum, "n,nlde->lde", part.weights, precision=jax.lax.Precision.HIGHEST
        )
        return jax.tree.map(lambda sums, each: sums + summed(each**2), total, gradients), None

    if fisher == "batch_mean":
        gradient = jax.grad(mean_loss)(kernels, batch)
        return jax.tree.map(
            lambda sums, mean: sums + batch.weights.sum() * mean**2, total, gradient
        )
    size = math.gcd(images_at_once, len(batch.labels))
    # Every part takes images from all over the batch, and so from every device.
    parts = jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]).swapaxes(0, 1), batch)
    return jax.lax.scan(add_images, total, parts)[0]
