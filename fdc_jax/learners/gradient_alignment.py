"""Gradient alignment: one half of a batch's classes trains where the other half would lead.

The distinct classes of a batch are split at random into two groups, the first with half of them
rounded down. A half-step looks ahead from one group and descends on the other: every tensor of the
increment is moved against its gradient on the first group, the gradient on the second group is
taken there, and the optimiser applies it to the tensor where it was. Two half-steps, one each way,
share the optimiser's state and one random length of look-ahead. The head is never moved ahead. A
batch of one class makes one plain step, at the same cost.

Second derivatives do not occur. A batch costs four passes forward and backward, two over each
group, and makes two steps of the optimiser. On one device a pass runs over the rows of its group,
filled up to one of a few sizes, which makes about 2.3 times a plain step for groups of equal size;
on several devices it runs over the whole batch, four times a plain step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.data.batches import Batch
from fdc_jax.learners import training

# Added to the norm of a gradient before dividing by it.
NORM_FLOOR = 1e-12
# Sizes that a part of a batch can have, in eighths of the batch.
PART_SIZES = (4, 5, 6, 8)


class Progress(NamedTuple):
    """What the update carries from batch to batch.

    Attributes:
        batches: how many there were, from which the random numbers of the next one follow.
        optimizer: state of the optimiser, which has seen up to twice as many steps.
    """

    batches: Int[Array, ""]
    optimizer: Any


def aligned_update(
    setup: training.Setup,
    loss: Callable[..., Any],
    rates: dict[str, float],
    transformation: optax.GradientTransformation,
    look_ahead: float | None,
    schedule: Callable[[int, int], float] | None = None,
) -> training.Update:
    """Returns an update in half-steps.

    `frozen` must hold `trains`, a tree like `trained` with 1 for a leaf that trains and 0 for one
    that stays; `class_mask`, whose length is that of the padded head; and `alignment`, the data of
    a random key. `trained["increment"]` holds matrices on the last two axes.

    Args:
        setup: the run.
        loss: `loss(setup, backbone, frozen, trained, batch)`, a mean over the weights of the batch.
        rates: learning rate of each top-level part of `trained`.
        transformation: turns gradients into directions, before any learning rate.
        look_ahead: length of the longest look-ahead; None makes one plain step of each batch.
        schedule: of `training.Update`.
    """

    def initialise(trained) -> Progress:
        return Progress(jnp.zeros((), jnp.int32), transformation.init(trained))

    def step(backbone, frozen, trained, progress, batch, rate):
        def slopes(leaves, part):
            """Returns the loss on a part of the batch, and its gradient."""
            value, gradients = jax.value_and_grad(
                lambda leaves: loss(setup, backbone, frozen, leaves, part)
            )(leaves)
            return value, jax.tree.map(jnp.multiply, frozen["trains"], gradients)

        def descended(trained, optimizer, ahead, gradients):
            directions: Any
            directions, optimizer = transformation.update(gradients, optimizer, ahead)
            directions = jax.tree.map(jnp.multiply, frozen["trains"], directions)
            return training.descended(trained, directions, rates, rate), optimizer

        def one_pass(carried, kind):
            trained, optimizer, ahead = carried
            weights, descends = kind
            value, gradients = of_group(slopes, ahead, batch._replace(weights=weights))
            moved = jax.tree.map(
                lambda leaf, gradient: leaf + against(gradient, length),
                trained["increment"],
                gradients["increment"],
            )
            looked = (trained, optimizer, trained | {"increment": moved})
            stepped = descended(trained, optimizer, ahead, gradients)
            carried = jax.tree.map(partial(jnp.where, descends), (*stepped, stepped[0]), looked)
            return carried, descends * value * weights.sum()

        if look_ahead is None:
            value, gradients = slopes(trained, batch)
            trained, optimizer = descended(trained, progress.optimizer, trained, gradients)
            return trained, Progress(progress.batches + 1, optimizer), value
        key = jax.random.wrap_key_data(frozen["alignment"])
        key_of_length, key_of_groups = jax.random.split(jax.random.fold_in(key, progress.batches))
        present = present_classes(batch.labels, batch.weights, len(frozen["class_mask"]))
        several = present.sum() > 1
        length = several * look_ahead * jax.random.uniform(key_of_length)
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


def of_group(function: Callable[..., Any], leaves, batch: Batch) -> Any:
    """Returns `function(leaves, part)`, the part being the rows of the batch with a weight.

    Shapes have to be known beforehand: the part has the smallest of a few sizes that holds the
    rows, others of weight 0 fill it up. With several devices it is the whole batch, which stays
    divided between them.
    """
    rows = len(batch.labels)
    if jax.device_count() > 1:
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


def present_classes(
    labels: Int[Array, " n"], weights: Float[Array, " n"], classes: int
) -> Bool[Array, " c"]:
    """Marks the classes that a batch has an image of; rows of weight 0 do not count."""
    return jnp.zeros(classes).at[labels].max(weights) > 0


def first_group(key: Array, present: Bool[Array, " c"]) -> Bool[Array, " c"]:
    """Returns a random half of the classes present, rounded down but at least one."""
    lot = jnp.where(present, jax.random.uniform(key, present.shape), jnp.inf)
    place = jnp.argsort(jnp.argsort(lot))
    return present & (place < jnp.maximum(present.sum() // 2, 1))
