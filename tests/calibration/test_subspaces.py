"""Principal subspaces against decompositions in float64; test_fdc.py has the other equations."""

import jax
import numpy as np
import pytest

from fdc_jax.calibration import compiled, fdc, inputs


def subspaces(features, *shares):
    """Returns the view with m_t and U_t, as a task is fitted, for each share of the variance."""
    labels = np.zeros(len(features), int)
    task = inputs.TaskInput(0, [features], labels, np.zeros(1, int), np.array([len(features)]))
    return [view for (view,) in fdc.subspaces(compiled.blocks_of([features]), task, shares)]


def features_of_spectrum(seed, samples, width, rank, decay, offset=0.0):
    """Returns float32 samples whose centred singular values are `decay ** i`, `rank` of them."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(samples, rank))
    left = np.linalg.qr(left - left.mean(axis=0))[0]
    right = np.linalg.qr(rng.normal(size=(width, rank)))[0]
    centred = left * decay ** np.arange(rank) @ right.T
    shift = offset * rng.normal(size=width) / np.sqrt(width)
    return (np.sqrt(samples) * centred + shift).astype(np.float32)


def in_float64(features, share):
    wide = features.astype(np.float64)
    mean = wide.mean(axis=0)
    _, singular, directions = np.linalg.svd(wide - mean, full_matrices=False)
    energies = np.cumsum(singular**2) / np.sum(singular**2)
    return mean, directions[: int(np.sum(energies < share - 1e-6)) + 1]


@pytest.mark.parametrize(
    ("samples", "width", "rank", "offset", "tolerance"),
    [
        (7, 130, 6, 0.0, 3e-5),
        (130, 160, 60, 30.0, 3e-5),
        (700, 300, 60, 30.0, 3e-5),
        (9, 160, 8, 1e5, 1e-5),
        (400, 160, 8, 1e5, 1e-5),
    ],
)
def test_means_and_subspaces_equal_float64(samples, width, rank, offset, tolerance):
    features = features_of_spectrum(0, samples, width, rank, 0.93, offset)
    shares = 0.75, 0.99
    for share, view in zip(shares, subspaces(features, *shares), strict=True):
        actual = view.basis
        mean, basis = in_float64(features, share)
        assert actual.shape == basis.shape
        np.testing.assert_allclose(view.mean, mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(actual @ actual.T, np.eye(len(basis)), atol=1e-6)
        np.testing.assert_allclose(actual.T @ actual, basis.T @ basis, atol=tolerance)


def test_directions_of_a_scatter_by_tiles_equal_float64(monkeypatch):
    monkeypatch.setattr(compiled, "TILE", 25)
    features = features_of_spectrum(1, 600, 60, 8, 0.9, offset=3.0)
    (actual,) = (view.basis for view in subspaces(features, 0.95))
    _, expected = in_float64(features, 0.95)
    np.testing.assert_allclose(actual.T @ actual, expected.T @ expected, atol=1e-5)


def test_a_tpu_without_a_processor_decomposes_itself(monkeypatch):
    def local_devices(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "local_devices", local_devices)
    ((values, vectors),) = compiled.decomposed([np.diag([1.0, 3.0, 2.0])])
    np.testing.assert_array_equal(values, [3.0, 2.0, 1.0])
    np.testing.assert_array_equal(np.abs(vectors), np.eye(3)[[1, 2, 0]])


def test_no_more_directions_are_kept_than_samples_span():
    assert compiled.retained_ranks(np.ones(4), 1e-6, [1.0], 3) == [2]
