"""Programs of these tests are tiny: compiling them well takes longer than running them does."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def few_optimizations():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
