"""Adapters are no part of the package: they are found in their folder, as users find them."""

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

sys.path.append(str(Path(__file__).parents[2] / "integrations"))


@pytest.fixture(scope="session")
def digits():
    """Scanned digits: training images [n, 64], from 0 to 1, test images, and labels of both."""
    found = load_digits()
    split = train_test_split(found.data, found.target, test_size=0.4, random_state=0)
    train, test, train_labels, test_labels = split
    return *((each / 16).astype(np.float32) for each in (train, test)), train_labels, test_labels
