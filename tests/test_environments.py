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


def run(workdir, name, fields, *arguments, variables, **options):
    flags = [f"--config.{field}" for field in fields]
    arguments = [f"--config={name}", f"--workdir={workdir}", *flags, *arguments]
    return python("-m", "fdc_jax", "run", *arguments, env=os.environ | variables, **options)


@pytest.mark.ci
def test_all_methods_fit_the_example_under_strict_rules():
    program = ("-m", "fdc_jax", "posthoc", "example", "--method=all", "--projections=100")
    printed = python(*program, env=os.environ | STRICT)
    assert len(printed.splitlines()) > 10


@pytest.mark.ci
def test_own_photographs_are_learned_under_strict_rules(tmp_path, cache):
    source, workdir = tmp_path / "trees", tmp_path / "run"
    add(source, *OLD[:2])
    run(workdir, "own", [*PHOTOGRAPHS, f"data.source={source}"], variables=STRICT)
    assert small_runs.results(workdir)["num_classes"] == 2


@pytest.mark.ci
def test_a_guard_of_transfers_is_one_line(tmp_path, cache):
    guard = {"JAX_TRANSFER_GUARD": "disallow"}
    (line,) = run(tmp_path, "digits", (), "--quiet", variables=guard, expected=2).splitlines()
    assert line.startswith("fdc_jax.run: JAX_TRANSFER_GUARD: ")
