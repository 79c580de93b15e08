"""Learners on four devices: what they leave behind is what one device gives."""

import pytest

from fdc_jax import learners
from tests import small_runs

# RSIAT's loss pairs images, which lie on different devices.
FAST = ("rsiat",)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, marks=pytest.mark.ci),
        pytest.param(sorted({*learners.names(trained=True)} - {*FAST}), marks=pytest.mark.slow),
    ],
    ids=["rsiat", "others"],
)
def test_four_devices_leave_what_one_leaves(names, cache):
    command = ("-m", "tests.learners.several_devices", *names)
    output = small_runs.python(*command, env=small_runs.with_devices(4))
    assert output == "four devices agree with one\n"
