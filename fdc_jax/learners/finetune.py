"""Finetuning: one increment that all tasks train, a lower bound.

W_t = W_0 + B_t A_t, in which the factors of task t start from those of task t - 1. Nothing protects
earlier tasks. Every task has its own linear head, trained on the task's own classes.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner, State
from fdc_jax.learners.training import TaskImages
from fdc_jax.model import increments, vit


@dataclasses.dataclass(frozen=True)
class Finetune(Learner):
    """Finetuning, as described above; a state keeps the newest increment alone."""

    title = "Finetuning"
    paper_row = 102
    mean_over_images = True

    def initial_state(self) -> State:
        """Returns a zero increment, and empty slots of the heads of all tasks."""
        setup = self.setup
        state = super().initial_state()
        return state._replace(increments=increments.empty_stack(setup.variant, setup.rank, 1))

    def start_task(
        self, backbone: Any, state: State, task: int, key: Array, A: Any = None
    ) -> tuple[Any, Any]:
        """Returns the pretrained kernels, and the increment so far with a fresh head to train."""
        frozen, trained = super().start_task(backbone, state, task, key)
        if task > 0:
            trained["increment"] = increments.select(state.increments, 0)
        return frozen | {"kernels": vit.pretrained_kernels(backbone)}, trained

    def after_task(
        self, backbone: Any, state: State, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> State:
        """Returns the state with the task's head, and the increment in place of the one before."""
        heads = increments.store(state.heads, task, trained["head"])
        return State(jax.tree.map(lambda leaf: leaf[None], trained["increment"]), heads)

    def encoder(self, backbone: Any, state: State, num_tasks: int) -> vit.Replaced:
        """Returns the kernels of E_0 or of the newest encoder.

        Raises:
            InputError: the encoder is neither E_0 nor the newest.
        """
        pretrained = vit.pretrained_kernels(backbone)
        if num_tasks == 0:
            return pretrained
        training.require_newest(self.title, state.heads.weight, num_tasks)
        return increments.kernels_after(pretrained, state.increments, 1)
