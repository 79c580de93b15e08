"""What the tests of learners share."""

import pytest

from fdc_jax import learners
from tests.learners import toy

learners.names()  # gives every file the answers that it leaves to Cumulative-LoRA


@pytest.fixture(scope="module")
def backbone():
    """Pretrained parameters of the tiny encoder."""
    return toy.make_backbone()
