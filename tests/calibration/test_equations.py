"""Means, subspaces and prototypes, against independent implementations."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.decomposition import PCA

from fdc_jax.calibration import compiled, inputs
from fdc_jax.calibration import equations as eq
from fdc_jax.errors import InputError


def mean_and_basis(features, share):
    """Returns m_t and U_t as a task is fitted."""
    mean, _ = eq.means(features, np.zeros(len(features), int), 1)
    return mean, eq.pca(features, mean, share)


def random_features(seed, samples, width, offset=0.0):
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(width, width)) * np.linspace(1, 0.1, width)
    return (rng.normal(size=(samples, width)) @ mix.T + offset).astype(np.float32)


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


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("samples", [20, inputs.BLOCK_ROWS, 2 * inputs.BLOCK_ROWS + 77])
def test_mean_and_subspace_match_scikit_learn(offset, samples):
    features = random_features(0, samples, 24, offset)
    pca = PCA(0.75, svd_solver="full").fit(features.astype(np.float64))
    mean, basis = mean_and_basis(features, 0.75)
    assert len(basis) == pca.n_components_
    np.testing.assert_allclose(mean, pca.mean_, rtol=1e-6, atol=1e-6)
    # Bases agree up to signs: compare projectors.
    np.testing.assert_allclose(basis.T @ basis, pca.components_.T @ pca.components_, atol=2e-5)


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
    near = probes - found_mean
    ratio = eq.residual_ratio(near, eq.energy(near), np.zeros(width, np.float32), found)[0]
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


def test_samples_that_repeat_span_what_one_copy_spans_and_leave_no_residual():
    few = np.random.default_rng(0).normal(size=(20, 200)).astype(np.float32)
    for features in (few, np.tile(few, (8, 1)), np.tile(few, (11, 1))):
        mean, basis = mean_and_basis(features, 1.0)
        assert basis.shape == (19, 200)
        np.testing.assert_allclose(residual_ratios(few, mean, basis), 0.0, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 60, 700])
@pytest.mark.parametrize("width", [4, 200])
def test_equal_samples_have_no_subspace(samples, width):
    row = np.random.default_rng(0).normal(size=width).astype(np.float32) * 1e3
    mean, basis = mean_and_basis(np.tile(row, (samples, 1)), 0.75)
    assert basis.shape == (0, width)
    np.testing.assert_array_equal(mean, row)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 0.037, 1e18])
def test_an_energy_reached_exactly_is_reached(scale):
    # Four equal variances, rotated so that rounding strikes: three of them are exactly 0.75.
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    corners = np.concatenate([np.eye(4), -np.eye(4)])
    features = (scale * corners @ rotation + 2.0 * scale).astype(np.float32)
    assert len(mean_and_basis(features, 0.75)[1]) == 3
    assert eq.retained_rank(np.ones(4), 0.75, 8) == 3


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
    assert eq.retained_rank(np.array(values, float), share, count) == rank


def test_prototypes_are_renormalised_means_of_unit_features():
    features = random_features(2, 600, 10) + np.float32(0.7)
    labels = np.random.default_rng(0).choice([7, -2, 5], 600)
    rows = np.array([{5: 0, 7: 2, -2: 3}[label] for label in labels.tolist()])
    found = eq.means(features, rows, 4)[1]
    unit = features.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    for label, prototype in zip([5, 7, -2], found[[0, 2, 3]], strict=True):
        mean = unit[labels == label].mean(axis=0)
        np.testing.assert_allclose(prototype, mean / np.linalg.norm(mean), atol=1e-6)
    assert not found[1].any()
    # Not the same as the direction of the mean feature.
    raw = features[labels == 5].mean(axis=0)
    assert np.abs(found[0] - raw / np.linalg.norm(raw)).max() > 1e-3


def test_population_moments_and_their_floor():
    expected = pytest.approx(7 / 3), pytest.approx(np.sqrt(14) / 3)
    assert eq.moments(np.float32([1, 2, 4])) == expected
    assert eq.moments(np.float32([3, 3])) == (3.0, 1e-6)


# The log ratio ---------------------------------------------------------------------------------


def test_the_log_ratio_is_zero_with_one_task():
    assert eq.log_ratio(np.float32([-7.0, 0.5]), 0.0, 1.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("mean", "variance"), [(3.0, 4.0), (-1.0, 0.3), (1e-3, 1.0)])
def test_the_log_ratio_matches_scipy(mean, variance):
    residuals = np.linspace(-5, 40, 91)
    expected = norm.logpdf(residuals, mean, np.sqrt(variance)) - norm.logpdf(residuals)
    found = eq.log_ratio(residuals, mean, variance)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    found = eq.log_ratio(residuals.astype(np.float32), mean, variance)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_affinity_averages_the_largest_cosines_of_classes_with_images():
    rng = np.random.default_rng(0)
    units, prototypes = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True)
        for rows in (rng.normal(size=(7, 5)), rng.normal(size=(4, 5)))
    )
    absent, centre = np.array([0.0, np.inf, 0.0, 0.0]), 0.2
    near = units - centre
    cosines = np.sort((units @ prototypes.T)[:, [0, 2, 3]], axis=1)
    for k in (1, 2, 3):
        found = eq.cosine_distance(near, eq.energy(near), prototypes - centre, absent, k)
        np.testing.assert_allclose(1.0 - found, cosines[:, -k:].mean(axis=1), rtol=1e-12)


def test_the_first_row_that_is_not_finite_is_named():
    features = random_features(0, inputs.BLOCK_ROWS + 9, 3)
    features[inputs.BLOCK_ROWS + 2, 1] = np.nan
    with pytest.raises(InputError, match=f"^given: row {inputs.BLOCK_ROWS + 2} is not finite"):
        inputs.feature_array(features, "given")


def test_padded_sizes_are_few_and_tight():
    sizes = np.array([compiled.padded_size(size) for size in range(1, 1001)])
    assert (sizes >= np.arange(1, 1001)).all()
    assert (sizes <= 1.25 * np.arange(1, 1001)).all()
    assert len(set(sizes)) <= 4 * 10
    assert compiled.padded_size(3, 8) == 8 and compiled.padded_size(83, 8) == 96
