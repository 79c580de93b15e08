"""Commands under variables of JAX with which users look for mistakes in their learners."""

import os

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests import small_runs
from tests.small_runs import python

STRICT = {
    "JAX_DEBUG_NANS": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}
UNCOMPILED = {"JAX_DISABLE_JIT": "1"}
TINY = """
data.train_per_class=3 data.test_per_class=4 train.epochs=1 train.batch_size=6 num_tasks=2
classes_per_task=2 evaluation.batch_size=64 report=False
""".split()
PHOTOGRAPHS = """
encoder.variant=digits encoder.weights=digits encoder.image_size=32 train.epochs=1
train.batch_size=6 classes_per_task=1
""".split()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of 24 images of two classes."""
    folder = tmp_path_factory.mktemp("photographs")
    images, labels = load_digits(return_X_y=True)
    for label in (0, 1):
        (folder / f"class_{label}").mkdir()
        for row in np.flatnonzero(labels == label)[:12]:
            pixels = images[row].reshape(8, 8) * 15
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"class_{label}" / f"{row}.png")
    return folder


def fdc(*arguments, variables, **options):
    return python("-m", "fdc_jax", *arguments, env=os.environ | variables, **options)


def run(workdir, name, fields, *arguments, **options):
    flags = [f"--config.{field}" for field in fields]
    return fdc("run", f"--config={name}", f"--workdir={workdir}", *flags, *arguments, **options)


@pytest.mark.ci
def test_digits_are_learned_without_compilation(tmp_path, cache):
    run(tmp_path, "digits", TINY, variables=UNCOMPILED)
    results = small_runs.results(tmp_path)
    assert results["num_tasks"] == 2 and results["accuracy"]["fdc"] > 20


@pytest.mark.ci
def test_all_methods_fit_the_example_under_strict_rules():
    printed = fdc("posthoc", "example", "--method=all", "--projections=100", variables=STRICT)
    assert len(printed.splitlines()) > 10


@pytest.mark.ci
def test_own_photographs_are_learned_under_strict_rules(tmp_path, cache, photographs):
    fields = [*PHOTOGRAPHS, f"data.source={photographs}", "report=False"]
    run(tmp_path, "own", fields, variables=STRICT)
    assert small_runs.results(tmp_path)["num_classes"] == 2


@pytest.mark.ci
def test_a_guard_of_transfers_is_one_line(tmp_path, cache):
    guard = {"JAX_TRANSFER_GUARD": "disallow"}
    (line,) = run(tmp_path, "digits", TINY, "--quiet", variables=guard, expected=2).splitlines()
    assert line.startswith("fdc_jax.run: JAX_TRANSFER_GUARD: ")
