"""An axis that is missing is an error: arrays of the encoder meet with equal ranks."""

import jax
import pytest


@pytest.fixture(autouse=True)
def equal_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield
