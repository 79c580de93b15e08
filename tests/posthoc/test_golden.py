"""The command on the feature file of `tests/golden`, of which other tests say more."""

from pathlib import Path

import numpy as np
import pytest

from fdc_jax.posthoc import __main__ as posthoc

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_the_command_gives_what_it_gave(method, tmp_path):
    output = tmp_path / "calibrated.npz"
    arguments = [str(GOLDEN / "features.npz"), f"--method={method}", f"--output={output}"]
    assert posthoc.main([*arguments, "--quiet"]) == 0
    with np.load(output) as found, np.load(GOLDEN / "scores.npz") as expected:
        np.testing.assert_array_equal(found["label"], expected[f"{method}: labels"])
        np.testing.assert_array_equal(found["raw_label"], expected["raw: labels"])
        scores = expected[f"{method}: scores"]
        np.testing.assert_allclose(found["scores"], scores, rtol=0, atol=1e-4 * scores.std())
