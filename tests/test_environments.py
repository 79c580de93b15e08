"""Commands under variables of JAX with which users look for mistakes in their learners."""

import os

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests import small_runs
from tests.small_runs import python

VARIABLES = {
    "NaN as errors": {"JAX_DEBUG_NANS": "1"},
    "strict promotion": {
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    },
    "no compilation": {"JAX_DISABLE_JIT": "1"},
}
TINY = """
data.train_per_class=6 data.test_per_class=4 train.epochs=1 train.batch_size=15 num_tasks=2
classes_per_task=5 evaluation.batch_size=64 report=False
""".split()
# Without compilation, and of images by strict promotion: slow, beside the digits.
PHOTOGRAPHED = [
    "NaN as errors",
    pytest.param("strict promotion", marks=pytest.mark.slow),
    pytest.param("no compilation", marks=pytest.mark.slow),
]
METHODS = ["NaN as errors", "strict promotion", PHOTOGRAPHED[2]]
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
@pytest.mark.parametrize("kind", VARIABLES)
def test_digits_are_learned(kind, tmp_path, cache):
    run(tmp_path, "digits", TINY, variables=VARIABLES[kind])
    results = small_runs.results(tmp_path)
    assert results["num_tasks"] == 2 and results["accuracy"]["fdc"] > 20


@pytest.mark.ci
@pytest.mark.parametrize("kind", METHODS)
def test_all_methods_fit_the_example(kind, tmp_path):
    tables = []
    for variables in ({}, VARIABLES[kind]):
        output = f"--output={tmp_path / 'scores.npz'}"
        printed = fdc("posthoc", "example", "--method=all", output, variables=variables)
        tables.append([line.split()[:2] for line in printed.splitlines()[:-1]])
    assert tables[0] == tables[1]


@pytest.mark.ci
@pytest.mark.parametrize("kind", PHOTOGRAPHED)
def test_own_photographs_are_learned(kind, tmp_path, cache, photographs):
    fields = [*PHOTOGRAPHS, f"data.source={photographs}"]
    run(tmp_path, "own", fields, variables=VARIABLES[kind])
    assert small_runs.results(tmp_path)["num_classes"] == 2
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.ci
def test_a_guard_of_transfers_is_one_line(tmp_path, cache):
    guard = {"JAX_TRANSFER_GUARD": "disallow"}
    (line,) = run(tmp_path, "digits", TINY, "--quiet", variables=guard, expected=2).splitlines()
    assert line.startswith("fdc_jax.run: JAX_TRANSFER_GUARD: ")
