"""Cumulative-LoRA, but its state grows with every task."""

import jax
import jax.numpy as jnp

from fdc_jax.learners import cumulative_lora

TITLE = "A learner of the tests"


def after_task(*arguments):
    """Adds a slot."""
    state = cumulative_lora.after_task(*arguments)
    return jax.tree.map(lambda slots: jnp.concatenate([slots, slots[:1]]), state)
