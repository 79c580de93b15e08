"""Cumulative-LoRA: the paper's reference, an increment and a linear head for each task.

A task trains a new increment of the key and value kernels and a new head with the cross-entropy
over its own classes (paper, Eq. intro-erm). Those of earlier tasks stay as they are; all increments
act together at inference. What another learner leaves out is answered here.

Stated in the paper: Adam, no weight decay, learning rates 5e-4 (increment) and 5e-3 (head), rank
10, 20 epochs, batch 64. Not stated, chosen here: a constant learning rate (`train.schedule`), A
uniform in +-1/sqrt(width) and B zero, and a head initialised uniformly in +-1/sqrt(width). Both
presets are the same.

E_0 is the pretrained encoder, E_t has the first t increments merged; the head input is the class
token after the final norm; score scales come from the head as it was trained, which never changes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fdc_jax import heads as head_types
from fdc_jax.data.batches import Batch
from fdc_jax.learners import training
from fdc_jax.model import increments, vit

TITLE = "Cumulative-LoRA"
PAPER_ROW = 0


class State(NamedTuple):
    """Every task's increment and head, stacked on a leading task axis."""

    increments: vit.Increment
    heads: head_types.LinearHead


# 1. What it keeps between tasks.
def initial_state(setup: training.Setup) -> State:
    """Returns empty slots for all tasks."""
    variant, tasks, rows = setup.variant, setup.num_tasks, setup.head_rows
    return State(
        increments=increments.empty_stack(variant, setup.config.train.rank, tasks),
        heads=head_types.LinearHead(
            weight=jnp.zeros((tasks, rows, variant.width)), bias=jnp.zeros((tasks, rows))
        ),
    )


# 2. What it computes before a task.
def before_task(setup, backbone, state, task: int, images):
    """Returns the state as it is: nothing is computed in closed form."""
    return state


# 3. What it trains, and how.
def start(setup: training.Setup, backbone, state, task: int, key: jax.Array):
    """Returns the frozen kernels of E_{t-1}, and a fresh increment and head to train."""
    key_of_increment, key_of_head = jax.random.split(key)
    variant = setup.variant
    frozen = {
        "kernels": encoder(setup, backbone, state, task),
        "class_mask": setup.class_mask(task),
    }
    trained = {
        "increment": increments.initialise(key_of_increment, variant, setup.config.train.rank),
        "head": training.new_linear_head(key_of_head, setup.head_rows, variant.width),
    }
    return frozen, trained


def start_with_directions(
    setup: training.Setup, backbone, state, task: int, A, key_of_head: jax.Array
):
    """Returns the frozen kernels of E_{t-1} and A, and a zero B and a fresh head to train.

    `A` has the directions of the key and of the value kernels, [blocks, width, rank] each.
    """
    frozen = {
        "kernels": encoder(setup, backbone, state, task),
        "A": A,
        "class_mask": setup.class_mask(task),
    }
    trained = {
        "increment": {name: jnp.zeros_like(each.swapaxes(1, 2)) for name, each in A.items()},
        "head": training.new_linear_head(key_of_head, setup.head_rows, setup.variant.width),
    }
    return frozen, trained


def increment_in_training(frozen, trained) -> vit.Increment:
    """Returns the task's increment; where A is frozen, B alone is trained."""
    if "A" not in frozen:
        return trained["increment"]

    def factors(name):
        return vit.Factors(A=frozen["A"][name], B=trained["increment"][name])

    return vit.Increment(key=factors("key"), value=factors("value"))


def loss(setup: training.Setup, backbone, frozen, trained, batch: Batch, temperature: float = 1.0):
    """Returns the cross-entropy over the task's own classes, of logits over a temperature."""
    features = setup.model.apply(
        {"params": backbone},
        batch.images,
        frozen["kernels"],
        increment_in_training(frozen, trained),
    )
    logits = trained["head"].logits(features) / temperature
    return training.cross_entropy(logits, batch.labels, frozen["class_mask"], batch.weights)


def update(setup: training.Setup) -> training.Update:
    """Returns Adam with the paper's two learning rates."""
    return training.gradient_update(setup, loss, mean_over_images=True)


# 4. What it does when a task ends.
def after_task(setup, backbone, state, task: int, frozen, trained, images):
    """Returns the state with the trained increment and head in the task's slot."""
    state = state._replace(heads=increments.store(state.heads, task, trained["head"]))
    if "increment" not in trained:
        return state
    increment = increment_in_training(frozen, trained)
    return state._replace(increments=increments.store(state.increments, task, increment))


# 5. What it offers for inference.
def encoder(setup, backbone, state, num_tasks: int) -> vit.KeyValueKernels:
    """Returns the kernels of E_t after `num_tasks` tasks; those of E_0 for 0."""
    return increments.kernels_after(vit.pretrained_kernels(backbone), state.increments, num_tasks)


def heads(setup: training.Setup, state, num_tasks: int) -> list[head_types.LinearHead]:
    """Returns the heads of the first `num_tasks` tasks, without padding."""
    return training.unpadded(setup, state.heads, num_tasks)
