"""Cumulative-LoRA, but process 1 fails in the middle of the first task."""

import jax

from fdc_jax.errors import InputError
from fdc_jax.learners.cumulative_lora import (  # noqa: F401
    after_task,
    encoder,
    heads,
    initial_state,
    loss,
    start,
    update,
)


def before_task(setup, backbone, state, task, images):
    """Fails on process 1; process 0 goes on to train, and waits for it there."""
    if jax.process_index() == 1:
        raise InputError("an image that cannot be read")
    return state
