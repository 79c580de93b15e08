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
TINY = {
    "data.train_per_class": 6,
    "data.test_per_class": 4,
    "train.epochs": 1,
    "train.batch_size": 15,
    "num_tasks": 2,
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of 24 images of two classes."""
    folder = tmp_path_factory.mktemp("photographs")
    images, labels = load_digits(return_X_y=True)
    for label in (0, 1):
        (folder / f"class_{label}").mkdir()
        rows = np.flatnonzero(labels == label)[:12]
        for row in rows:
            pixels = images[row].reshape(8, 8) * 15
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"class_{label}" / f"{row}.png")
    return folder


def fdc(*arguments, env):
    return python("-m", "fdc_jax", *arguments, env=os.environ | env)


@pytest.mark.ci
@pytest.mark.parametrize("kind", VARIABLES)
def test_digits_are_learned(kind, tmp_path, cache):
    workdir, fields = tmp_path / "run", small_runs.FIELDS | TINY
    fields = [f"--config.{name}={value}" for name, value in fields.items()]
    fdc("run", "--config=digits", f"--workdir={workdir}", *fields, env=VARIABLES[kind])
    results = small_runs.results(workdir)
    assert results["num_tasks"] == 2 and results["accuracy"]["fdc"] > 20


@pytest.mark.ci
@pytest.mark.parametrize("kind", VARIABLES)
def test_all_methods_fit_the_example(kind, tmp_path):
    command = ("posthoc", "example", "--method=all", f"--output={tmp_path / 'scores.npz'}")
    printed = fdc(*command, env=VARIABLES[kind])
    plain = fdc(*command, env={})
    accuracies = [line.split()[:2] for line in printed.splitlines()[:-1]]
    assert accuracies == [line.split()[:2] for line in plain.splitlines()[:-1]]


@pytest.mark.ci
@pytest.mark.parametrize("kind", VARIABLES)
def test_own_photographs_are_learned(kind, tmp_path, cache, photographs):
    encoder = {"variant": "digits", "weights": "digits", "image_size": 32}
    fields = {f"encoder.{name}": value for name, value in encoder.items()}
    fields |= {"data.source": photographs, "train.epochs": 1, "train.batch_size": 6}
    fields |= {"classes_per_task": 1}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    workdir = tmp_path / "run"
    fdc("run", "--config=own", f"--workdir={workdir}", *arguments, env=VARIABLES[kind])
    assert small_runs.results(workdir)["num_classes"] == 2
    assert (workdir / "report" / "report.html").exists()


@pytest.mark.ci
def test_a_guard_of_transfers_is_one_line(tmp_path, cache):
    env = {"JAX_TRANSFER_GUARD": "disallow"}
    fields = [f"--config.{name}={value}" for name, value in (small_runs.FIELDS | TINY).items()]
    arguments = ["--config=digits", f"--workdir={tmp_path / 'run'}", "--quiet", *fields]
    (line,) = python(
        "-m", "fdc_jax", "run", *arguments, expected=2, env=os.environ | env
    ).splitlines()
    assert line.startswith("fdc_jax.run: JAX_TRANSFER_GUARD: ")
