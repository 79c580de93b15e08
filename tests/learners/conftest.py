"""What the tests of learners share."""

import pytest

from tests.learners import toy


@pytest.fixture(scope="module")
def backbone():
    """Pretrained parameters of the tiny encoder."""
    return toy.make_backbone()
