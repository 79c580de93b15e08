"""Adapters are no part of the package: they are found in their folder, as users find them."""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
sys.path.append(str(Path(__file__).parents[2] / "integrations"))


@pytest.fixture(scope="session")
def digits():
    """Scanned digits: training images [n, 64], from 0 to 1, test images, and labels of both."""
    found = load_digits()
    split = train_test_split(found.data, found.target, test_size=0.4, random_state=0)
    train, test, train_labels, test_labels = split
    return *((each / 16).astype(np.float32) for each in (train, test)), train_labels, test_labels


def run_program(heading, given=(), **words):
    """Runs the page's program under a heading with other words; returns what it defines."""
    program = PAGE.read_text().split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    for word, other in words.items():
        program = program.replace(word, other)
    found = {"__name__": heading, **dict(given)}
    exec(compile(program, str(PAGE), "exec"), found)
    return found


@pytest.fixture
def program():
    """Runs the page's program under a heading."""
    return run_program


@pytest.fixture
def checkout(monkeypatch):
    """Enters a toolbox that is only a repository, named by a variable of the environment.

    Returns what the page's program under a heading defines there.
    """
    known, entered = set(sys.modules), []

    def enter(variable, heading):
        if not os.environ.get(variable):
            pytest.skip(f"needs {variable}, the folder of its repository")
        entered.append(os.environ[variable])
        monkeypatch.syspath_prepend(entered[0])
        monkeypatch.chdir(entered[0])
        monkeypatch.delitem(sys.modules, "main", raising=False)
        return run_program(heading)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of its own code.
        yield enter
    gone = []
    for name in set(sys.modules) - known:
        module = sys.modules[name]
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])]
        if any(place.startswith(folder) for place in places for folder in entered):
            gone.append(name)
    for name in gone:  # All at once, since a path of a package is asked of its parent.
        del sys.modules[name]
