"""What the tests of learners share."""

import pytest

from tests.learners import trajectories
from tests.model.conftest import few_optimizations  # noqa: F401


@pytest.fixture(scope="module")
def backbone():
    """Pretrained parameters of the tiny encoder."""
    return trajectories.make_backbone()
