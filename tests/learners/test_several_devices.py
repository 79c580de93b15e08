"""Learners on four devices: what they leave behind is what one device gives."""

import numpy as np
import pytest

from fdc_jax import learners
from tests import small_runs
from tests.learners import several_devices

OTHERS = sorted({*learners.names(trained=True)} - {"rsiat"})


# RSIAT's loss pairs images, which lie on different devices.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("rsiat", marks=pytest.mark.ci),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_state_on_four_devices_equals_that_on_one(name, tmp_path, cache):
    """Up to rounding, which a few steps make larger."""
    command = ("-m", "tests.learners.several_devices", name, tmp_path / "left.npz")
    small_runs.python(*command, env=small_runs.with_devices(4))
    with np.load(tmp_path / "left.npz") as file:
        for actual, expected in zip(file.values(), several_devices.left_behind(name), strict=True):
            np.testing.assert_allclose(actual, expected, atol=5e-3 * np.abs(expected).max())
