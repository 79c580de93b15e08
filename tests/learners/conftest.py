"""What the tests of learners share."""

import jax
import pytest

from fdc_jax.learners import gaussian_alignment
from tests.learners import toy


@pytest.fixture(scope="module")
def backbone():
    """Pretrained parameters of the tiny encoder."""
    return toy.make_backbone()


@pytest.fixture
def one_batch(monkeypatch):
    """Heads are trained on a few drawn features of a class, all in one batch."""
    monkeypatch.setattr(gaussian_alignment, "SAMPLES", 4)
    monkeypatch.setattr(gaussian_alignment, "BATCH_SIZE", 20)


@pytest.fixture(autouse=True, scope="module")
def strict():
    """A missing axis, mixed number types and NaN are errors."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        with jax.debug_nans(True):
            yield
