"""Where JAX is not installed all calibrators fit and score with NumPy, and give the same."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import compiled
from tests.calibration import streams

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean")
CASES = [("fdc", kind) for kind in KINDS] + [
    (name, "linear") for name in calibration.METHODS if name != "fdc"
]


def scores_of(method, kind):
    """Class scores of a calibrator fitted on a stream, where a row of the inputs is zero."""
    stream = streams.known(6, 5)
    known = calibration.METHODS[method].settings
    settings = {"rlc_weight": 0.6, "neighbours": 2, "projections": 30}
    found = calibration.make(method, **{key: settings[key] for key in known if key in settings})
    streams.fit(found, stream, kind, previous=streams.previous_of(stream))
    adapted, pretrained = streams.probe_inputs(stream, size=300)
    adapted[0] = pretrained[0] = 0.0
    return found.class_scores(adapted, pretrained), found.score(adapted, pretrained).label


ALONE = """
import sys
class Absent:
    def find_spec(name, *_):
        if name.partition(".")[0] in ("jax", "jaxlib", "jaxtyping", "flax"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent)
import numpy as np
from tests.calibration import test_numpy_alone as here
assert here.compiled.jax is None
found = {}
for case in here.CASES:
    scores, labels = here.scores_of(*case)
    found |= {f"{case} scores": scores, f"{case} labels": labels}
np.savez(sys.argv[1], **found)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "scores.npz"
    run = subprocess.run(
        [sys.executable, "-c", ALONE, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return dict(np.load(path))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_numpy_gives_what_jax_gives(alone, case):
    assert compiled.jax is not None
    scores, labels = scores_of(*case)
    # Distances by covariances of few samples lose digits in whatever adds them up.
    tolerance = 2e-5 if case[0] in ("fdc", "gaussians", "raw") else 1e-3
    assert streams.relative_error(alone[f"{case} scores"], scores) < tolerance
    np.testing.assert_array_equal(alone[f"{case} labels"], labels)
