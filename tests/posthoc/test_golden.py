"""The command on the golden feature file gives what the library gives."""

import numpy as np
import pytest

from fdc_jax.posthoc import __main__ as posthoc
from tests.calibration.test_golden import EXPECTED, GOLDEN, assert_near


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_the_command_on_the_file_gives_the_same(method, tmp_path):
    output = tmp_path / "calibrated.npz"
    arguments = [str(GOLDEN / "features.npz"), f"--method={method}", f"--output={output}"]
    assert posthoc.main([*arguments, "--quiet"]) == 0
    with np.load(output) as found:
        np.testing.assert_array_equal(found["label"], EXPECTED[f"{method}: labels"])
        np.testing.assert_array_equal(found["raw_label"], EXPECTED["raw: labels"])
        assert_near(found["scores"], EXPECTED[f"{method}: scores"], method)
