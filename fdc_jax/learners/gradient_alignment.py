"""Gradient alignment: one half of a batch's classes trains where the other half would lead.

The distinct classes of a batch are split at random into two groups, the first with half of them
rounded down. A half-step looks ahead from one group and descends on the other: every tensor of the
increment is moved against its gradient on the first group, the gradient on the second group is
taken there, and the optimiser applies it to the tensor where it was. Two half-steps, one each way,
share the optimiser's state and one random length of look-ahead. The head is never moved ahead. A
batch of one class makes one plain step.

Second derivatives do not occur. A batch costs four passes forward and backward where a plain step
costs one: groups are weights on the whole batch, so that shapes are the same for every split and
the work stays divided between devices. It makes two steps of the optimiser.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.learners import training

# Added to the norm of a gradient before dividing by it.
NORM_FLOOR = 1e-12


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
        def slopes(leaves, weights):
            value, gradients = jax.value_and_grad(
                lambda leaves: loss(
                    setup, backbone, frozen, leaves, batch._replace(weights=weights)
                )
            )(leaves)
            return value, jax.tree.map(jnp.multiply, frozen["trains"], gradients)

        def descend(trained, optimizer, ahead, weights):
            value, gradients = slopes(ahead, weights)
            directions: Any
            directions, optimizer = transformation.update(gradients, optimizer, ahead)
            trained = {
                part: jax.tree.map(
                    lambda leaf, direction, trains, r=rates[part]: (
                        leaf - rate * r * trains * direction
                    ),
                    trained[part],
                    directions[part],
                    frozen["trains"][part],
                )
                for part in trained
            }
            return trained, optimizer, value

        def plain(trained, optimizer):
            return descend(trained, optimizer, trained, batch.weights)

        def aligned(trained, optimizer):
            def half_step(carried, groups):
                trained, optimizer = carried
                source, target = groups
                _, gradients = slopes(trained, source)
                ahead = trained | {
                    "increment": jax.tree.map(
                        lambda leaf, gradient: leaf + against(gradient, length),
                        trained["increment"],
                        gradients["increment"],
                    )
                }
                trained, optimizer, value = descend(trained, optimizer, ahead, target)
                return (trained, optimizer), value * target.sum()

            (trained, optimizer), totals = jax.lax.scan(
                half_step, (trained, optimizer), (groups, groups[::-1])
            )
            return trained, optimizer, totals.sum() / batch.weights.sum()

        if look_ahead is None:
            trained, optimizer, value = plain(trained, progress.optimizer)
        else:
            key = jax.random.wrap_key_data(frozen["alignment"])
            key_of_length, key_of_groups = jax.random.split(
                jax.random.fold_in(key, progress.batches)
            )
            length = look_ahead * jax.random.uniform(key_of_length)
            present = present_classes(batch.labels, batch.weights, len(frozen["class_mask"]))
            in_first = first_group(key_of_groups, present)[batch.labels]
            groups = batch.weights * jnp.stack([in_first, ~in_first])
            trained, optimizer, value = jax.lax.cond(
                present.sum() > 1, aligned, plain, trained, progress.optimizer
            )
        return trained, Progress(progress.batches + 1, optimizer), value

    return training.Update(initialise, jax.jit(step, donate_argnums=(2, 3)), schedule)


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
