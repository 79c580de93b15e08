"""Commands under variables of JAX with which users look for mistakes in their learners."""

import os

import pytest

from tests import small_runs
from tests.run.test_own_data import OLD, add
from tests.small_runs import python

STRICT = {
    "JAX_DEBUG_NANS": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}
PHOTOGRAPHS = """
encoder.variant=digits encoder.weights=digits encoder.image_size=32 train.epochs=1
train.batch_size=6 classes_per_task=1 report=False
""".split()


@pytest.mark.ci
def test_all_methods_fit_the_example_under_strict_rules():
    program = ("-m", "fdc_jax", "posthoc", "example", "--method=all", "--projections=100")
    printed = python(*program, env=os.environ | STRICT)
    assert len(printed.splitlines()) > 10


@pytest.mark.ci
def test_own_photographs_are_learned_under_strict_rules(tmp_path, cache):
    source, workdir = tmp_path / "trees", tmp_path / "run"
    add(source, *OLD[:2])
    flags = [f"--config.{field}" for field in (*PHOTOGRAPHS, f"data.source={source}")]
    program = ("-m", "fdc_jax", "run", "--config=own", f"--workdir={workdir}")
    python(*program, *flags, env=os.environ | STRICT)
    assert small_runs.results(workdir)["num_classes"] == 2
