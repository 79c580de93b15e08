"""What the tests of learners share."""

import pytest

from tests.learners import small_stream


@pytest.fixture(scope="module")
def backbone():
    """Pretrained parameters of the tiny encoder."""
    return small_stream.make_backbone()
