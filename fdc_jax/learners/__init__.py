"""Class-incremental learners, one file each, all of one shape.

A learner is a module that answers five questions, in this order:

1. What does it keep between tasks?
   `initial_state(setup) -> state`
2. What does it compute before a task, in closed form?
   `before_task(setup, backbone, state, task, images) -> state`
3. What does it train, with what loss and what update?
   `start(setup, backbone, state, task, key) -> (frozen, trained)`,
   `loss(setup, backbone, frozen, trained, batch) -> scalar`, `update(setup) -> training.Update`
4. What does it do when the task ends?
   `after_task(setup, backbone, state, task, frozen, trained, images) -> state`
5. Which encoder and which heads does it offer for inference?
   `encoder(setup, backbone, state, num_tasks) -> kernels`,
   `heads(setup, state, num_tasks) -> list of heads`

`state`, `frozen` and `trained` are pytrees of arrays whose shapes never depend on the task, so
that one compilation serves all tasks. `state` is what a checkpoint holds; `frozen` must follow from
`state`, `task` and `key`, which itself follows from seed and task; `backbone` is the pretrained
parameter tree and never changes. A leaf of `state` that is a NumPy array stays on the host, where
large things belong that no training step reads; everything else is put on the devices. `images`
gives the task's training images again: `images.augmented()`, as the first epoch of the task has
them, and `images.plain()`, in evaluation preprocessing, iterate over batches, labels counted within
the task.
"""

import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp

from fdc_jax.errors import InputError

LEARNERS = {
    "cumulative_lora": "fdc_jax.learners.cumulative_lora",
    "inflora": "fdc_jax.learners.inflora",
    "inflora_ca": "fdc_jax.learners.inflora_ca",
    "splitlora": "fdc_jax.learners.splitlora",
    "ewc_lora": "fdc_jax.learners.ewc_lora",
    "sd_lora": "fdc_jax.learners.sd_lora",
    "lora_subtraction": "fdc_jax.learners.lora_subtraction",
    "rsiat": "fdc_jax.learners.rsiat",
    "loda": "fdc_jax.learners.loda",
}

_QUESTIONS = (
    "initial_state",
    "before_task",
    "start",
    "loss",
    "update",
    "after_task",
    "encoder",
    "heads",
)


def find(name: str) -> types.ModuleType:
    """Returns a learner by its name, or by the dotted name of a module outside the package.

    Raises:
        InputError: no such learner, or a module that leaves a question unanswered.
    """
    try:
        learner = importlib.import_module(LEARNERS.get(name, name))
    except (ImportError, ValueError) as error:
        raise InputError(
            f"learner.name: expected one of {', '.join(LEARNERS)} or an importable module, "
            f"found {name!r} ({error})"
        ) from error
    missing = [question for question in _QUESTIONS if not hasattr(learner, question)]
    if missing:
        raise InputError(f"learner.name: module {name!r} lacks {', '.join(missing)}")
    return learner


def check_state(name: str, question: str, before: Any, after: Any) -> None:
    """Checks that a learner's new state has the arrays of the old one, in shape and type.

    Args:
        name: of the learner.
        question: that it answered with the new state.
        before: the old state.
        after: the new one.

    Raises:
        InputError: names the first array that is another.
    """
    old, new = (
        {
            jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (before, after)
    )
    for place in [*old, *new]:
        if old.get(place) != new.get(place):
            raise InputError(
                f"learner.name: {name}: {question} must return a state like that of initial_state; "
                f"expected {old.get(place, 'nothing')} at {place or 'its place'}, found "
                f"{new.get(place, 'nothing')}"
            )
