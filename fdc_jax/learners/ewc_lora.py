"""EWC-LoRA: increments that an elastic penalty holds where earlier tasks were sensitive.

Y. Zheng et al., "Revisiting Weight Regularization for Low-Rank Continual Learning", ICLR 2026.
Each task trains a new rank-r increment of the key and value kernels, as Cumulative-LoRA does. From
the second task on the loss contains

    strength / 2 * sum over kernels and entries of Omega * (A B)^2,

where Omega adds up the squared gradients of earlier tasks with respect to the whole kernels. The
anchor is the kernel at the start of the task, so that nothing but Omega has to be remembered.

Stated in the FDC paper: per-sample Fisher information, strength 1e7, accumulation factor one. Known
from the authors' code: the factor one half, no division by images or tasks in the penalty, a sum of
squared gradients divided by the images of the task, labels from the data, augmented images, only
the task's own head and classes. The method's own paper, which was at hand in a summary only, takes
the expectation over labels drawn from the model instead; `fisher_labels=model` draws one for each
image from the softmax over the task's classes, at the cost of a forward pass more. The code differs
from the FDC paper in one point, which is a field here: it squares the mean gradient of a batch
(`fisher=batch_mean`), which is smaller than the mean of squares (`per_sample`) by up to the batch
size, and so makes the same strength up to that much weaker. It also adds up factors instead of
products after a task (`folding=factors`), which brings in cross terms that were never trained; by
that summary the method's own paper adds products. `accumulation` multiplies Omega before a task's
Fisher information is added.

Preset `protocol` is Adam as `train` says; `native` is Adam along half a cosine wave, and on
ImageNet-R alone with another head rate (5e-4) and coupled weight decay (5e-3). No preset touches
epochs and batch size. The authors' (CUB-200 and OmniBenchmark: none published; their file for
ImageNet-A says 10 epochs, their log 20):

    cifar100    --config.train.epochs=20 --config.train.batch_size=128
    imagenet_r  --config.train.epochs=50 --config.train.batch_size=128
    imagenet_a  --config.train.epochs=20 --config.train.batch_size=128

Nor does it touch estimator and folding; theirs, for all of these, without which the strength means
up to their batch size times more:

    --config.learner.ewc_lora.fisher=batch_mean --config.learner.ewc_lora.folding=factors

Unknown: the schedule of the FDC paper's runs, and what it means by EWC-LoRA's "head-input
transform". In the authors' code the class token enters a linear head as it is, so the transform is
the identity (`head_input=class_token`); with `l2` the head is linear on the token divided by its
norm, and TSF acts before that division.

E_0 is the pretrained encoder, E_t has the first t increments folded in; the head input is the class
token after the final norm; sigma_t comes from head t as it was trained, which never changes.

Between tasks it keeps two float32 matrices a block for Omega (57 MB for ViT-B/16) beside every
increment and head. The Fisher pass, in float32 in every mode, costs about one epoch of parity mode
and holds `images_at_once` gradients of that size at a time.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from fdc_jax import heads as head_types
from fdc_jax.data.batches import Batch
from fdc_jax.learners import Option, cumulative_lora, training
from fdc_jax.model import increments, vit

TITLE = "EWC-LoRA"
PAPER_ROW = 1
OPTIONS = {
    "strength": Option(1e7, "[0, inf)", "lambda, of the penalty"),
    "accumulation": Option(1.0, "[0, inf)", "gamma, on the importance of earlier tasks"),
    "fisher": Option(
        "per_sample", ("per_sample", "batch_mean"), "square gradients of images, or of batches"
    ),
    "fisher_labels": Option("data", ("data", "model"), "or drawn from the model's softmax"),
    "head_input": Option(
        "class_token", ("class_token", "l2"), "the token as it is, or divided by its norm"
    ),
    "folding": Option("products", ("products", "factors"), "what adds up over tasks"),
    "images_at_once": Option(8, "[1, inf)", "gradients held; 57 MB each for ViT-B/16"),
}
# Without estimator and folding, the strength would mean up to their batch size times more.
_AUTHORS = {"train.batch_size": 128, "fisher": "batch_mean", "folding": "factors"}
AUTHORS_RUNS = {
    "cifar100": {"train.epochs": 20} | _AUTHORS,
    "imagenet_r": {"train.epochs": 50} | _AUTHORS,
    "imagenet_a": {"train.epochs": 20} | _AUTHORS,
}

# The authors' settings on ImageNet-R; elsewhere they are those of the protocol.
NATIVE_HEAD_RATE = {"imagenet_r": 5e-4}
NATIVE_WEIGHT_DECAY = {"imagenet_r": 5e-3}


class State(NamedTuple):
    """Every task's increment and head on a leading task axis, and what the past deems important."""

    increments: vit.Increment
    heads: head_types.LinearHead
    importance: vit.KeyValueKernels


# 1. What it keeps between tasks.
def initial_state(setup: training.Setup) -> State:
    """Returns empty slots for all tasks, and no importance."""
    variant = setup.variant
    shape = (variant.depth, variant.width, variant.width)
    return State(
        *cumulative_lora.initial_state(setup),
        importance=vit.KeyValueKernels(key=jnp.zeros(shape), value=jnp.zeros(shape)),
    )


# 2. What it computes before a task.
def before_task(setup, backbone, state: State, task: int, images) -> State:
    """Returns the state as it is: nothing is computed in closed form."""
    return state


# 3. What it trains, and how.
def start(setup: training.Setup, backbone, state: State, task: int, key: jax.Array):
    """Returns the kernels so far with their importance, and a fresh increment and head."""
    key_of_increment, key_of_head = jax.random.split(key)
    frozen = {
        "kernels": _folded(setup, backbone, state, task),
        "importance": state.importance,
        "class_mask": setup.class_mask(task),
        # Keys 0 and 1 under this one are those that it was split into.
        "labels": jax.random.key_data(jax.random.fold_in(key, 2)),
    }
    trained = {
        "increment": increments.initialise(
            key_of_increment, setup.variant, setup.config.train.rank
        ),
        "head": training.new_linear_head(key_of_head, setup.head_rows, setup.variant.width),
    }
    return frozen, trained


def loss(setup: training.Setup, backbone, frozen, trained, batch: Batch):
    """Returns the cross-entropy over the task's own classes plus the penalty."""
    features: Any = setup.model.apply(
        {"params": backbone}, batch.images, frozen["kernels"], trained["increment"]
    )
    logits = _head(setup, *trained["head"]).logits(features)
    strength = setup.config.learner.ewc_lora.strength
    return training.cross_entropy(
        logits, batch.labels, frozen["class_mask"], batch.weights
    ) + strength * penalty(frozen["importance"], trained["increment"])


def penalty(importance: vit.KeyValueKernels, increment: vit.Increment):
    """Returns half the sum of squares of the products A B, weighted by importance."""
    weighted = jax.tree.map(
        lambda omega, change: jnp.sum(omega * change**2), importance, increments.products(increment)
    )
    return 0.5 * (weighted["key"] + weighted["value"])


def update(setup: training.Setup) -> training.Update:
    """Returns Adam, in the native preset along half a cosine wave."""
    config = setup.config
    rates = {
        "increment": config.train.increment_learning_rate,
        "head": config.train.head_learning_rate,
    }
    if config.learner.preset == "protocol":
        return training.adam_update(setup, loss, rates, mean_over_images=True)
    rates["head"] = NATIVE_HEAD_RATE.get(config.benchmark, rates["head"])
    decay = NATIVE_WEIGHT_DECAY.get(config.benchmark, 0.0)
    adam = optax.chain(optax.add_decayed_weights(decay), optax.scale_by_adam())
    schedule = partial(training.learning_rate_factor, "cosine")
    return training.gradient_update(setup, loss, rates, adam, schedule, mean_over_images=True)


# 4. What it does when a task ends.
def after_task(setup, backbone, state: State, task: int, frozen, trained, images) -> State:
    """Returns the state with the task's increment and head, and its Fisher information added."""
    ours = setup.config.learner.ewc_lora
    stored_heads = jax.tree.map(
        lambda slots, one: slots.at[task].set(one), state.heads, trained["head"]
    )
    state = State(
        increments.store(state.increments, task, trained["increment"]),
        stored_heads,
        state.importance,
    )
    kernels = encoder(setup, backbone, state, task + 1)
    head, class_mask = _head(setup, *trained["head"]), frozen["class_mask"]
    key = jax.random.wrap_key_data(frozen["labels"])
    squares, count = jax.tree.map(jnp.zeros_like, state.importance), jnp.zeros(())
    model = vit.in_float32(setup.model)
    for number, batch in enumerate(images.augmented()):
        if ours.fisher_labels == "model":
            key_of_batch = jax.random.fold_in(key, number)
            labels = labels_of_model(
                model, backbone, kernels, head, class_mask, batch.images, key_of_batch
            )
            batch = batch._replace(labels=labels)
        squares = _add_squared_gradients(
            model,
            ours.fisher,
            ours.images_at_once,
            backbone,
            kernels,
            head,
            class_mask,
            batch,
            squares,
        )
        count += batch.weights.sum()
    importance = jax.tree.map(
        lambda omega, total: ours.accumulation * omega + total / count, state.importance, squares
    )
    return state._replace(importance=importance)


@partial(jax.jit, static_argnums=0)
def labels_of_model(model, backbone, kernels, head, class_mask, images, key) -> Int[Array, " n"]:
    """Returns a label for each image, drawn from the model's softmax over the task's classes."""
    features = model.apply({"params": backbone}, images, kernels)
    logits = jnp.where(class_mask, head.logits(features), -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=8)
def _add_squared_gradients(
    model, fisher, images_at_once, backbone, kernels, head, class_mask, batch, total
):
    """Adds a batch's squared gradients with respect to the key and value kernels to `total`.

    An increment is added to its kernel, so the gradient with respect to either is the same.
    """

    def mean_loss(kernels, part):
        features = model.apply({"params": backbone}, part.images, kernels)
        return training.cross_entropy(head.logits(features), part.labels, class_mask, part.weights)

    def image_loss(kernels, image, label):
        return mean_loss(kernels, Batch(image[None], label[None], np.ones(1, np.float32)))

    def add_images(total, part):
        gradients = jax.vmap(jax.grad(image_loss), in_axes=(None, 0, 0))(
            kernels, part.images, part.labels
        )
        return jax.tree.map(partial(_add_weighted_squares, part.weights), total, gradients), None

    if fisher == "batch_mean":
        gradient = jax.grad(mean_loss)(kernels, batch)
        return jax.tree.map(
            lambda sums, mean: sums + batch.weights.sum() * mean**2, total, gradient
        )
    size = math.gcd(images_at_once, len(batch.labels))
    # Every part takes images from all over the batch, and so from every device.
    parts = jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]).swapaxes(0, 1), batch)
    return jax.lax.scan(add_images, total, parts)[0]


def _add_weighted_squares(weights, total, each):
    return total + jnp.einsum("n,nlde->lde", weights, each**2, precision=jax.lax.Precision.HIGHEST)


# 5. What it offers for inference.
def encoder(setup, backbone, state: State, num_tasks: int) -> vit.KeyValueKernels:
    """Returns the kernels of E_t after `num_tasks` tasks; those of E_0 for 0."""
    if num_tasks == 0:
        return vit.pretrained_kernels(backbone)
    last = increments.select(state.increments, num_tasks - 1)
    return increments.merge(_folded(setup, backbone, state, num_tasks - 1), last)


def heads(setup: training.Setup, state: State, num_tasks: int) -> list[head_types.Head]:
    """Returns the heads of the first `num_tasks` tasks, without padding."""
    return [_head(setup, *rows) for rows in training.unpadded(setup, state.heads, num_tasks)]


def _head(setup: training.Setup, weight, bias) -> head_types.Head:
    """Returns the head that `head_input` asks for."""
    if setup.config.learner.ewc_lora.head_input == "l2":
        return head_types.NormalisedLinearHead(weight, bias)
    return head_types.LinearHead(weight, bias)


def _folded(setup, backbone, state: State, num_tasks: int) -> vit.KeyValueKernels:
    """Returns the kernels that the task after the first `num_tasks` starts from."""
    pretrained = vit.pretrained_kernels(backbone)
    if setup.config.learner.ewc_lora.folding == "products":
        return increments.kernels_after(pretrained, state.increments, num_tasks)
    earlier = jnp.arange(setup.num_tasks) < num_tasks
    summed = jax.tree.map(
        lambda slots: jnp.sum(jnp.where(earlier[:, None, None, None], slots, 0.0), axis=0),
        state.increments,
    )
    return increments.merge(pretrained, summed)
