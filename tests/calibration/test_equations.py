"""Principal subspaces against decompositions in float64; test_fdc.py has the other equations."""

import numpy as np
import pytest

from fdc_jax.calibration import compiled, fdc, inputs, shapes


def mean_and_basis(features, share):
    """Returns m_t and U_t as a task is fitted."""
    labels = np.zeros(len(features), int)
    given = inputs.TaskInput(0, [features], labels, np.zeros(1, int), np.array([len(features)]))
    ((view,),) = fdc.subspaces(compiled.blocks_of([features]), given, [share], [])
    return view.mean, view.basis


def features_of_spectrum(seed, samples, width, rank, decay, offset=0.0):
    """Returns float32 samples whose centred singular values are `decay ** i`, `rank` of them."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(samples, rank))
    left = np.linalg.qr(left - left.mean(axis=0))[0]
    right = np.linalg.qr(rng.normal(size=(width, rank)))[0]
    centred = left * decay ** np.arange(rank) @ right.T
    shift = offset * rng.normal(size=width) / np.sqrt(width)
    return (np.sqrt(samples) * centred + shift).astype(np.float32)


def float64_components(features, share):
    wide = features.astype(np.float64)
    mean = wide.mean(axis=0)
    _, singular, directions = np.linalg.svd(wide - mean, full_matrices=False)
    energies = np.cumsum(singular**2) / np.sum(singular**2)
    return mean, directions[: int(np.sum(energies < share - 1e-6)) + 1]


def residual_ratios(features, mean, basis):
    centred = features.astype(np.float64) - mean
    total = np.sum(centred**2, axis=1)
    return (total - np.sum((centred @ basis.T) ** 2, axis=1)) / total


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("share", [0.75, 0.99])
@pytest.mark.parametrize(("samples", "width"), [(7, 130), (129, 300), (530, 700)])
def test_components_of_fewer_samples_than_dimensions(samples, width, share, offset):
    features = features_of_spectrum(0, samples, width, min(samples - 1, 60), 0.93, offset)
    found_mean, found = mean_and_basis(features, share)
    mean, basis = float64_components(features, share)
    assert found.shape == basis.shape
    np.testing.assert_allclose(found @ found.T, np.eye(len(basis)), atol=1e-6)
    np.testing.assert_allclose(found.T @ found, basis.T @ basis, atol=3e-5)
    probes = features + np.random.default_rng(1).normal(size=features.shape).astype(np.float32)
    centred = probes - found_mean
    ratio = fdc.residual_ratio(centred, centred @ found.T)
    np.testing.assert_allclose(ratio, residual_ratios(probes, mean, basis), atol=1e-4)


@pytest.mark.parametrize("samples", [9, 400])
def test_a_distant_mean_costs_no_digits(samples):
    features = features_of_spectrum(0, samples, 160, 8, 0.9, offset=1e5)
    (mean, found), (wide, basis) = (
        mean_and_basis(features, 0.99),
        float64_components(features, 0.99),
    )
    np.testing.assert_allclose(mean, wide, rtol=1e-6)
    np.testing.assert_allclose(found.T @ found, basis.T @ basis, atol=1e-5)


@pytest.mark.parametrize("tile", [7, 30, 32])
def test_directions_of_a_scatter_by_tiles_equal_float64(tile, monkeypatch):
    monkeypatch.setattr(compiled, "TILE", tile)
    features = features_of_spectrum(1, 600, 60, 8, 0.9, offset=3.0)
    _, actual = mean_and_basis(features, 0.95)
    _, expected = float64_components(features, 0.95)
    np.testing.assert_allclose(actual.T @ actual, expected.T @ expected, atol=1e-5)


def test_samples_that_repeat_span_what_one_copy_spans_and_leave_no_residual():
    few = np.random.default_rng(0).normal(size=(20, 200)).astype(np.float32)
    for features in (few, np.tile(few, (8, 1)), np.tile(few, (11, 1))):
        mean, basis = mean_and_basis(features, 1.0)
        assert basis.shape == (19, 200)
        np.testing.assert_allclose(residual_ratios(few, mean, basis), 0.0, atol=5e-6)


@pytest.mark.parametrize("samples", [1, 2, 60, 700])
@pytest.mark.parametrize("width", [4, 200])
def test_equal_samples_have_no_subspace(samples, width):
    row = np.random.default_rng(0).normal(size=width).astype(np.float32) * 1e3
    mean, basis = mean_and_basis(np.tile(row, (samples, 1)), 0.75)
    assert basis.shape == (0, width)
    np.testing.assert_array_equal(mean, row)


@pytest.mark.parametrize(
    ("values", "share", "count", "rank"),
    [
        ([4, 3, 2, 1], 0.4, 100, 1),
        ([4, 3, 2, 1], 0.41, 100, 2),
        ([4, 3, 2, 1], 1.0, 100, 4),
        ([1, 0, 0], 1.0, 100, 1),
        # No more than the samples span; rounding below zero counts as zero.
        ([1, 1, 1, 1], 1.0, 3, 2),
        ([1, 1, 1, 1], 1.0, 5, 4),
        ([1, -0.5, -0.5], 0.9, 100, 1),
        ([1], 0.9, 1, 0),
        ([0, 0], 0.9, 9, 0),
    ],
)
def test_rank_is_the_fewest_components(values, share, count, rank):
    variances = np.array(values, float)
    total = np.clip(variances, 0.0, None).sum()
    ranks = compiled.retained_ranks(variances[::-1], total, 1e-6, [share, 0.1], count)
    assert ranks[0] == rank


def test_padded_sizes_are_few_and_tight():
    sizes = np.array([shapes.padded_size(size) for size in range(1, 1001)])
    assert (sizes >= np.arange(1, 1001)).all()
    assert (sizes <= 1.25 * np.arange(1, 1001)).all()
    assert (sizes <= 1.125 * np.arange(1, 1001))[63:].all()
    assert len(set(sizes)) <= 4 * 6 + 8 * 4
    assert shapes.padded_size(3, 8) == 8 and shapes.padded_size(83, 8) == 88
