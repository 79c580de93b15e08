"""Frozen encoder: no training, heads of class means.

Every encoder is E_0, and the raw prediction is the nearest class mean: with the mean m of a class,
its logit for features g is g'm - |m|^2 / 2. Calibrators read the view of E_0 alone. A run passes
over the images once; it is the reference against which the gain by training is measured.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fdc_jax.heads import Head, LinearHead, products
from fdc_jax.learners import training
from fdc_jax.learners.learner import Learner
from fdc_jax.learners.training import TaskImages
from fdc_jax.model import increments, vit


@dataclasses.dataclass(frozen=True)
class Frozen(Learner):
    """Frozen encoder, as described above."""

    title = "Frozen encoder"
    paper_row = 101  # the last of the package
    trains = False

    def initial_state(self) -> Any:
        """Returns the heads of all tasks, empty."""
        return super().initial_state().heads

    def after_task(
        self, backbone: Any, state: Any, task: int, frozen: Any, trained: Any, images: TaskImages
    ) -> Any:
        """Returns the heads with the class means of the task."""
        features, labels = images.pretrained()
        members = jax.nn.one_hot(labels, self.setup.head_rows)
        sums = products(members.T, jnp.asarray(features).T)
        means = sums / jnp.maximum(members.sum(axis=0), 1.0)[:, None]
        head = LinearHead(weight=means, bias=-0.5 * jnp.sum(means**2, axis=1))
        return increments.store(state, task, head)

    def encoder(self, backbone: Any, state: Any, num_tasks: int) -> vit.Replaced:
        """Returns the parameters of E_0."""
        return vit.pretrained_kernels(backbone)

    def heads(self, state: Any, num_tasks: int) -> list[Head]:
        """Returns the heads of the first `num_tasks` tasks, without padding."""
        return training.unpadded(self.setup, state, num_tasks)
