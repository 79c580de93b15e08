"""The two ways to a task's principal subspace: from its covariance and from its samples."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax.calibration import inputs, moments, statistics


def first_pass(features, rows, share=0.75, pretrained=None):
    blocks = inputs.blocks(inputs.task_source(features, rows, pretrained, 0), 0)
    return statistics.first_pass(blocks, 0, share, int(rows.max()) + 1, None, [])


def through_the_covariance(*arguments, **options):
    with mock.patch.object(moments, "sample_rows", lambda count, width: None):
        return first_pass(*arguments, **options)


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
@pytest.mark.parametrize("share", [0.5, 0.75, 0.99])
@pytest.mark.parametrize(("samples", "width"), [(7, 130), (100, 160), (129, 300), (500, 640)])
def test_components_of_few_samples_match_float64(samples, width, share, offset):
    assert moments.sample_rows(samples, width) is not None
    rank = min(samples - 1, 60)
    features = features_of_spectrum(0, samples, width, rank, 0.93, offset)
    found = first_pass(features, np.zeros(samples, int), share).shapes[0]
    mean, basis = float64_components(features, share)
    np.testing.assert_allclose(found.mean, mean, atol=1e-5)
    assert found.basis.shape == basis.shape
    np.testing.assert_allclose(found.basis @ found.basis.T, np.eye(len(basis)), atol=1e-6)
    # Bases agree up to signs, hence their projectors.
    np.testing.assert_allclose(found.basis.T @ found.basis, basis.T @ basis, atol=3e-5)
    probes = features + np.random.default_rng(1).normal(size=features.shape).astype(np.float32)
    for inputs_ in (features, probes):
        np.testing.assert_allclose(
            residual_ratios(inputs_, found.mean, found.basis),
            residual_ratios(inputs_, mean, basis),
            atol=1e-4,
        )


def test_a_distant_mean_costs_no_digits():
    # The mean of the block rounds to a multiple of about 1e-3 here.
    features = features_of_spectrum(0, 9, 160, 8, 0.9, offset=1e5)
    found = first_pass(features, np.zeros(9, int), 0.99).shapes[0]
    mean, basis = float64_components(features, 0.99)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-7)
    np.testing.assert_allclose(found.basis.T @ found.basis, basis.T @ basis, atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    samples=st.integers(2, 128),
    # Below the samples: of deficient rank, as with repeated images.
    rank=st.integers(1, 127),
    decay=st.floats(0.7, 0.97),
    share=st.sampled_from([0.3, 0.75, 0.95]),
    offset=st.sampled_from([0.0, 10.0]),
    second_width=st.sampled_from([None, 160, 200, 48]),
)
def test_both_ways_give_the_same_statistics(
    seed, samples, rank, decay, share, offset, second_width
):
    rank = min(rank, samples - 1)
    features = features_of_spectrum(seed, samples, 160, rank, decay, offset)
    pretrained = None
    if second_width is not None:
        other = min(rank, second_width - 1)
        pretrained = features_of_spectrum(seed + 1, samples, second_width, other, decay)
    rows = np.arange(samples) % 2
    found = first_pass(features, rows, share, pretrained)
    expected = through_the_covariance(features, rows, share, pretrained)
    views = (features, pretrained)
    for view, one, other in zip(views, found.shapes, expected.shapes, strict=False):
        np.testing.assert_allclose(one.mean, other.mean, atol=2e-6)
        np.testing.assert_allclose(one.prototypes, other.prototypes, atol=2e-6)
        assert one.basis.shape == other.basis.shape
        np.testing.assert_allclose(one.basis @ one.basis.T, np.eye(len(one.basis)), atol=1e-6)
        np.testing.assert_allclose(
            residual_ratios(view, one.mean, one.basis),
            residual_ratios(view, other.mean, other.basis),
            atol=1e-4,
        )
        np.testing.assert_allclose(one.basis.T @ one.basis, other.basis.T @ other.basis, atol=2e-4)


def test_all_components_of_few_samples_leave_no_residual():
    features = np.random.default_rng(0).normal(size=(20, 200)).astype(np.float32)
    found = first_pass(features, np.zeros(20, int), 1.0).shapes[0]
    assert found.basis.shape == (19, 200)
    np.testing.assert_allclose(residual_ratios(features, found.mean, found.basis), 0.0, atol=1e-6)


def test_repeated_samples_span_what_one_copy_spans():
    few = np.random.default_rng(0).normal(size=(5, 200)).astype(np.float32)
    found = first_pass(np.tile(few, (20, 1)), np.zeros(100, int), 1.0).shapes[0]
    assert found.basis.shape == (4, 200)
    np.testing.assert_allclose(residual_ratios(few, found.mean, found.basis), 0.0, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 60])
def test_equal_samples_have_no_subspace(samples):
    row = np.random.default_rng(0).normal(size=200).astype(np.float32) * 1e3
    found = first_pass(np.tile(row, (samples, 1)), np.zeros(samples, int)).shapes[0]
    assert found.basis.shape == (0, 200)
    np.testing.assert_array_equal(found.mean, row)


def test_small_tasks_share_compiled_programs():
    moments.sample_components.clear_cache()
    for samples in (2, 60, 128, 129, 200, 256):
        first_pass(features_of_spectrum(0, samples, 300, 1, 0.9), np.zeros(samples, int))
    assert moments.sample_components._cache_size() == 2


def test_only_tasks_of_one_block_are_decomposed_through_their_samples():
    assert moments.sample_rows(128, 129) == 128
    assert moments.sample_rows(129, 257) == 256
    assert moments.sample_rows(129, 256) is None
    samples = inputs.BLOCK_ROWS + 1
    features = features_of_spectrum(0, samples, 700, 3, 0.9)
    with mock.patch.object(moments, "sample_components", side_effect=AssertionError):
        found = first_pass(features, np.zeros(samples, int)).shapes[0]
    basis = float64_components(features, 0.75)[1]
    np.testing.assert_allclose(found.basis.T @ found.basis, basis.T @ basis, atol=1e-5)
