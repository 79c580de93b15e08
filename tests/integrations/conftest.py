"""Adapters are no part of the package: they are imported from their folder, as users do it."""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fdc_jax import calibration, heads

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
sys.path.append(str(Path(__file__).parents[2] / "integrations"))


@pytest.fixture(scope="session")
def digits():
    """Scanned digits: training images [n, 64], from 0 to 1, test images, and labels of both."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    return train_test_split(images, labels, test_size=0.4, random_state=0)


@pytest.fixture(scope="session")
def digit_images(digits):
    """The digits in uint8, [n, 8, 8]."""
    images = [(part * 255).astype(np.uint8).reshape(-1, 8, 8) for part in digits[:2]]
    return [*images, *digits[2:]]


@pytest.fixture
def real_images():
    """Training and test images of `real_images.py` in uint8, and labels of both; its encoder."""
    if not {"CIFAR100", "WEIGHTS"} <= os.environ.keys():
        pytest.skip("needs CIFAR100 and WEIGHTS, see real_images.py")
    import real_images as real

    pixels = (127.5 * (real.images + 1)).round().byte().permute(0, 2, 3, 1)
    arrays = [
        part[rows].numpy() for part in (pixels, real.labels) for rows in (~real.test, real.test)
    ]
    return arrays, real.vit


def run_program(heading, given=(), **replaced):
    """Runs the page's program under a heading with other words; returns what it defines."""
    program = PAGE.read_text().split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    for word, other in replaced.items():
        program = program.replace(word, other)
    defined = {"__name__": heading, **dict(given)}
    exec(compile(program, str(PAGE), "exec"), defined)
    return defined


def surpasses(better, worse):
    """Returns True if an array of truth values is above another by three standard errors."""
    better = np.asarray(better)
    worse = np.asarray(worse)
    return np.sum(better) - np.sum(worse) > 3 * np.sqrt(np.sum(better != worse))


class Refitted:
    """A calibrator that no part of an adapter fits.

    Networks are those at the start and after every task; `features` are functions of a network and
    images, `layer_of` those of a network and classes, which return the layer and its rows.
    """

    def __init__(self, name, networks, images, labels, tasks, features, layer_of):
        self.calibrator, self.features = calibration.make(name), features
        self.first = networks[0]
        self.last = networks[-1]
        for task, classes in enumerate(tasks):
            rows = np.isin(labels, classes)
            of_task = images[rows]
            adapted = features(networks[task + 1], of_task)
            layer, kept = layer_of(networks[task + 1], classes)
            parameters = (part.detach().numpy()[kept] for part in (layer.weight, layer.bias))
            self.calibrator.fit_task(
                adapted,
                labels[rows],
                heads.LinearHead(*parameters),
                features(self.first, of_task),
                np.array(classes),
                features(networks[task], of_task),
            )
        self.calibrator.finalize()

    def views(self, images):
        return self.features(self.last, images), self.features(self.first, images)

    def assert_scores(self, actual, images):
        """Compares scores of images; those of classes to come are infinite."""
        expected = self.calibrator.class_scores(*self.views(images))
        scale = abs(expected[np.isfinite(expected)]).max()
        assert_allclose(actual, expected, atol=1e-3 * scale)


@pytest.fixture
def checkout(monkeypatch):
    """Enters a toolbox that is only a repository, named by a variable of the environment.

    Returns what the page's program under a heading defines there.
    """
    known, folders = {*sys.modules}, []

    def enter(variable, heading):
        if not os.environ.get(variable):
            pytest.skip(f"needs {variable}, the folder of its repository")
        folders.append(os.environ[variable])
        monkeypatch.syspath_prepend(folders[0])
        monkeypatch.chdir(folders[0])
        monkeypatch.delitem(sys.modules, "main", raising=False)
        return run_program(heading)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of its own code.
        yield enter
    entered = []
    for name in {*sys.modules} - known:
        module = sys.modules[name]
        paths = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])]
        if folders and any(path.startswith(folders[0]) for path in paths):
            entered.append(name)
    for name in entered:  # All at once, since a path of a package is asked of its parent.
        del sys.modules[name]
