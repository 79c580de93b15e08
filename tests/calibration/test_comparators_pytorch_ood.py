"""ViM and Mahalanobis against pytorch-ood, where PyTorch and that package are installed."""

import importlib.util
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest
from scipy import stats

from fdc_jax import heads
from fdc_jax.calibration import comparators

torch = pytest.importorskip("torch")


@pytest.fixture
def detectors(monkeypatch):
    """The package's detectors; its data sets ask for torchvision, the detectors do not need it."""
    if importlib.util.find_spec("torchvision") is None:
        stub = MagicMock(__path__=[])
        names = ("transforms", "transforms.functional", "datasets", "datasets.folder")
        names += ("datasets.utils", "datasets.vision", "datasets.mnist", "models", "models.resnet")
        for name in ("torchvision", *(f"torchvision.{name}" for name in names)):
            monkeypatch.setitem(sys.modules, name, stub)
    return pytest.importorskip("pytorch_ood.detector", exc_type=ImportError)


@pytest.fixture
def task():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 100)
    means = 2 * rng.normal(size=(4, 24))
    spread = np.linspace(2, 0.3, 24)
    features = (means[labels] + spread * rng.normal(size=(400, 24))).astype(np.float32)
    head = heads.LinearHead(
        rng.normal(size=(4, 24)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    )
    return features, labels, head, (2 * rng.normal(size=(50, 24))).astype(np.float32)


def test_vim(detectors, task):
    features, labels, head, test = task
    ours = comparators.VirtualLogitMatching(principal=10)
    ours.fit_task(features, labels, head)
    ours.finalize()
    weight, bias = (torch.from_numpy(part) for part in head)
    reference = detectors.ViM(None, d=10, w=weight, b=bias)
    reference.fit_features(torch.from_numpy(features), torch.from_numpy(labels))
    expected = -reference.predict_features(torch.from_numpy(test)).numpy()
    np.testing.assert_allclose(
        ours.score(test).task_scores[:, 0], expected, atol=1e-5 * np.abs(expected).max()
    )


def test_mahalanobis_ranks_alike(detectors, task):
    """The package scales distances and divides by n - 1, ours shrinks: near ties may swap."""
    features, labels, head, test = task
    ours = comparators.Mahalanobis()
    ours.fit_task(features, labels, head)
    ours.finalize()
    reference = detectors.Mahalanobis(None)
    reference.fit_features(torch.from_numpy(features), torch.from_numpy(labels))
    expected = -reference.predict_features(torch.from_numpy(test)).numpy()
    found = ours.score(test).task_scores[:, 0]
    assert stats.spearmanr(found, expected).statistic > 0.999
