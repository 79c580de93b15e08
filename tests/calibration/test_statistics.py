"""Means, subspaces, prototypes and the foreign reference, against independent implementations."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.decomposition import PCA

from fdc_jax import calibration, heads
from fdc_jax.calibration import foreign, inputs, moments, scoring, stacking, statistics


def first_pass(features, rows, share=0.75, pretrained=None):
    source = inputs.task_source(features, rows, pretrained, 0)
    blocks = inputs.blocks(source, 0)
    return statistics.first_pass(blocks, 0, share, int(rows.max()) + 1, None, [])


def random_features(seed, samples, width, offset=0.0):
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(width, width)) * np.linspace(1, 0.1, width)
    return (rng.normal(size=(samples, width)) @ mix.T + offset).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("samples", [40, inputs.BLOCK_ROWS, 2 * inputs.BLOCK_ROWS + 77])
def test_mean_and_subspace_match_scikit_learn(offset, samples):
    features = random_features(0, samples, 24, offset)
    found = first_pass(features, np.zeros(samples, int)).shapes[0]
    pca = PCA(0.75, svd_solver="full").fit(features.astype(np.float64))
    assert len(found.basis) == pca.n_components_
    np.testing.assert_allclose(found.mean, pca.mean_, rtol=1e-6, atol=1e-6)
    # Bases agree up to signs: compare projectors.
    expected = pca.components_.T @ pca.components_
    np.testing.assert_allclose(found.basis.T @ found.basis, expected, atol=2e-5)


def test_fewer_samples_than_dimensions():
    features = random_features(1, 9, 40)
    for share, pca in ((0.75, PCA(0.75)), (1.0, PCA(8))):
        found = first_pass(features, np.zeros(9, int), share).shapes[0]
        expected = pca.fit(features.astype(np.float64)).components_
        assert len(found.basis) == len(expected)
        np.testing.assert_allclose(found.basis.T @ found.basis, expected.T @ expected, atol=2e-5)


@pytest.mark.parametrize("scale", [1.0, 0.037, 1234.5])
def test_an_energy_reached_exactly_is_reached(scale):
    # Four equal variances, rotated so that rounding strikes: three of them are exactly 0.75.
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    corners = np.concatenate([np.eye(4), -np.eye(4)])
    features = (scale * corners @ rotation + 2.0 * scale).astype(np.float32)
    found = first_pass(features, np.zeros(8, int), 0.75).shapes[0]
    assert len(found.basis) == 3
    assert moments.retained_rank(np.ones(4), 0.75, 8) == 3


@pytest.mark.parametrize(
    ("values", "share", "rank"),
    [([4, 3, 2, 1], 0.4, 1), ([4, 3, 2, 1], 0.41, 2), ([4, 3, 2, 1], 1.0, 4), ([1, 0, 0], 1.0, 1)],
)
def test_rank_is_the_fewest_components(values, share, rank):
    assert moments.retained_rank(np.array(values, float), share, 100) == rank


def test_rank_never_exceeds_what_the_samples_span():
    assert moments.retained_rank(np.ones(4), 1.0, 3) == 2
    assert moments.retained_rank(np.ones(4), 1.0, 5) == 4


def test_negative_rounding_noise_counts_as_zero():
    assert moments.retained_rank(np.array([1.0, -0.5, -0.5]), 0.9, 100) == 1


@pytest.mark.parametrize("samples", [1, 2, 700])
def test_equal_features_have_no_subspace(samples):
    features = np.tile(np.float32([0.1, 1e4, -3.3, 7.7]), (samples, 1))
    found = first_pass(features, np.zeros(samples, int)).shapes[0]
    assert found.basis.shape == (0, 4)
    np.testing.assert_array_equal(found.mean, features[0])


def test_prototypes_are_renormalised_means_of_unit_features():
    features = random_features(2, 600, 10) + np.float32(0.7)
    rows = np.random.default_rng(0).integers(0, 3, 600)
    found = first_pass(features, rows).shapes[0].prototypes
    unit = features.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    for row in range(3):
        mean = unit[rows == row].mean(axis=0)
        np.testing.assert_allclose(found[row], mean / np.linalg.norm(mean), atol=1e-6)
    # Not the same as the direction of the mean feature.
    raw = features[rows == 0].mean(axis=0)
    assert np.abs(found[0] - raw / np.linalg.norm(raw)).max() > 1e-3


def test_labels_get_rows_in_ascending_order():
    features = random_features(3, 30, 6)
    labels = np.repeat([7, -2, 5], 10)
    source = inputs.task_source(features, labels, None, 0)
    found = statistics.first_pass(inputs.blocks(source, 0), 0, 0.75, 3, None, [])
    assert found.classes.tolist() == [-2, 5, 7]
    assert found.class_counts.tolist() == [10, 10, 10]
    named = statistics.first_pass(inputs.blocks(source, 0), 0, 0.75, 4, np.array([5, 9, 7, -2]), [])
    assert named.class_counts.tolist() == [10, 0, 10, 10]
    np.testing.assert_array_equal(named.shapes[0].prototypes[[3, 0, 2]], found.shapes[0].prototypes)
    assert not named.shapes[0].prototypes[1].any()


def test_views_of_one_width_are_decomposed_like_views_alone():
    first, second = random_features(4, 80, 12), random_features(5, 80, 12)
    rows = np.zeros(80, int)
    both = first_pass(first, rows, pretrained=second).shapes
    for together, alone in zip(
        both, (first_pass(first, rows).shapes[0], first_pass(second, rows).shapes[0]), strict=True
    ):
        np.testing.assert_allclose(together.mean, alone.mean, atol=1e-6)
        np.testing.assert_allclose(
            together.basis.T @ together.basis, alone.basis.T @ alone.basis, atol=1e-5
        )


def test_one_compilation_serves_tasks_of_every_size():
    moments.add_moments.clear_cache()
    for samples in (513, 700, 1500):
        first_pass(random_features(6, samples, 7), np.arange(samples) % 2)
    assert moments.add_moments._cache_size() == 1


def test_population_moments_and_their_floor():
    values = np.float32([1, 2, 4])
    assert statistics.population_moments(values) == (
        pytest.approx(7 / 3),
        pytest.approx(np.sqrt(14) / 3),
    )
    assert statistics.population_moments(np.float32([3, 3])) == (3.0, 1e-6)


def test_foreign_reference_weights_pairs_equally_but_the_median_pools_samples():
    rng = np.random.default_rng(0)
    sizes = (50, 20, 900)
    tasks = [
        rng.normal(3 + t, 1 + t, size=(t, size)).astype(np.float32) for t, size in enumerate(sizes)
    ]
    found = foreign.fit_foreign_reference(tasks)
    pairs = [tasks[1][0], tasks[2][0], tasks[2][1]]
    pairs = [pair.astype(np.float64) for pair in pairs]
    mean = sum(pair.mean() for pair in pairs) / 3
    variance = sum((pair**2).mean() for pair in pairs) / 3 - mean**2
    pooled = np.concatenate(pairs)
    ratio = norm.logpdf(pooled, mean, np.sqrt(variance)) - norm.logpdf(pooled)
    assert found is not None
    np.testing.assert_allclose(found, (mean, variance, np.median(np.abs(ratio))), rtol=1e-9)
    assert abs(mean - pooled.mean()) > 0.05


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    digits=st.sampled_from([0, 1, 8]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_the_scale_is_the_same_from_few_samples_at_a_time(seed, sizes, digits, spread):
    rng = np.random.default_rng(seed)
    # Rounding makes samples repeat, also around the median.
    tasks = [
        np.round(rng.normal(1, spread, size=(t, size)), digits).astype(np.float32)
        for t, size in enumerate(sizes)
    ]
    expected = foreign.fit_foreign_reference(tasks)
    with mock.patch.object(foreign, "GATHERED", 0):
        assert foreign.fit_foreign_reference(tasks) == expected
    pooled = np.concatenate([task.ravel() for task in tasks])
    ratios = foreign.log_likelihood_ratio(pooled, expected.mean, expected.variance)
    assert expected.scale == max(np.median(np.abs(ratios)), 1e-6)


def test_no_foreign_reference_without_a_second_task():
    assert foreign.fit_foreign_reference([np.zeros((0, 30), np.float32)]) is None
    np.testing.assert_array_equal(foreign.foreign_coefficients(None), np.zeros(3))


def test_foreign_floors():
    found = foreign.fit_foreign_reference([np.zeros((0, 3)), np.full((1, 4), 2.0)])
    assert found is not None and found.variance == 1e-6
    # p_F equal to p_O: every ratio is zero, and the scale keeps its floor.
    samples = np.array([[-1.0, 1.0]])
    found = foreign.fit_foreign_reference([np.zeros((0, 3)), samples])
    assert found == (0.0, 1.0, 1e-6)


def test_log_likelihood_ratio_matches_scipy():
    residuals = np.linspace(-5, 40, 91)
    for reference in (
        foreign.ForeignReference(3.0, 4.0, 2.5),
        foreign.ForeignReference(-1.0, 0.3, 0.1),
    ):
        expected = norm.logpdf(residuals, reference.mean, np.sqrt(reference.variance))
        expected -= norm.logpdf(residuals)
        found = foreign.log_likelihood_ratio(residuals, reference.mean, reference.variance)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
        a, b, c = foreign.foreign_coefficients(reference).astype(np.float64)
        np.testing.assert_allclose(
            (a * residuals + b) * residuals + c, expected / reference.scale, rtol=1e-5, atol=1e-5
        )


def test_padded_sizes_are_few_and_tight():
    sizes = np.array([stacking.padded_size(size) for size in range(1, 1001)])
    assert (sizes >= np.arange(1, 1001)).all()
    assert (sizes <= 1.25 * np.arange(1, 1001)).all()
    assert len(set(sizes)) <= 4 * 10
    assert stacking.padded_size(3, 8) == 8 and stacking.padded_size(83, 8) == 96


def test_tasks_in_groups_score_like_tasks_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    calibrator = calibration.FDC()
    for task in range(5):
        features = rng.normal(size=(30, 8)) + rng.normal(size=8)
        head = heads.LinearHead(rng.normal(size=(2, 8)), np.zeros(2))
        calibrator.fit_task(features, np.arange(30) % 2 + 2 * task, head)
    calibrator.finalize()
    features = rng.normal(size=(20, 8))
    expected = calibrator.score(features).task_scores
    monkeypatch.setattr(scoring, "TASK_GROUP", 2)
    scoring.score_terms.clear_cache()
    np.testing.assert_allclose(calibrator.score(features).task_scores, expected, atol=1e-5)
    scoring.score_terms.clear_cache()
