"""Cumulative-LoRA, but process 1 fails in the middle of the first task."""

import jax

from fdc_jax.errors import InputError
from fdc_jax.learners import Learner


class FailsOnSecond(Learner):
    def before_task(self, backbone, state, task, images):
        """Fails on process 1; process 0 goes on to train, and waits for it there."""
        if jax.process_index() == 1:
            raise InputError("an image that cannot be read")
        return state
