"""RSIAT's losses on features, and where their gradients go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.learners import rsiat
from tests.learners import rsiat_reference
from tests.learners.small_stream import float64, random_like

LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 0])
# The last two rows are padding, labelled as padding is.
WEIGHTS = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
WIDTH = 12


def random_features(seed, count=8):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, WIDTH)), jnp.float32)


# Steering ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "threshold"), [(1.0, 1.5), (0.5, 0.3), (2.0, -0.2)])
def test_steering_against_its_formula(weight, threshold):
    features = random_features(0)
    expected = rsiat_reference.steering(float64(features)[:6], LABELS[:6], weight, threshold)
    found = rsiat.steering_loss(features, LABELS, WEIGHTS, weight, threshold)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_steering_ignores_what_padding_shows():
    features = random_features(0)
    other = features.at[6:].set(7.0 * features[0])

    def found(rows):
        return jax.value_and_grad(rsiat.steering_loss)(rows, LABELS, WEIGHTS, 1.0, -1.0)

    jax.tree.map(np.testing.assert_array_equal, found(features)[0], found(other)[0])
    np.testing.assert_array_equal(found(other)[1][6:], 0)
    assert np.abs(np.asarray(found(other)[1])[:6]).min() > 0


def test_steering_is_zero_for_compact_classes_below_the_threshold():
    """Classes along three axes, at any length: cosines of 1 within and of 0 between them."""
    features = jnp.eye(WIDTH)[LABELS] * (1.0 + jnp.arange(8.0))[:, None]
    assert float(rsiat.steering_loss(features, LABELS, WEIGHTS, 1.0, 0.0)) == 0.0
    above = rsiat.steering_loss(features, LABELS, WEIGHTS, 2.0, -0.25)
    np.testing.assert_allclose(above, 2.0 * 0.25, rtol=1e-5)
    # Two of the six ordered pairs of a class have the cosine -1 now.
    turned = features.at[0].multiply(-1.0)
    np.testing.assert_allclose(
        rsiat.steering_loss(turned, LABELS, WEIGHTS, 1.0, 0.5), 2 * 2.0 / 6, rtol=1e-5
    )


def test_steering_without_pairs_of_a_kind_is_finite():
    features = random_features(0)
    alone = np.arange(8)
    assert float(rsiat.steering_loss(features, alone, WEIGHTS, 1.0, 1.5)) == 0.0
    gradient = jax.grad(rsiat.steering_loss)(features, alone, WEIGHTS, 1.0, 1.5)
    np.testing.assert_array_equal(gradient, 0)
    one = rsiat.steering_loss(features, np.zeros(8, int), WEIGHTS, 1.0, -1.0)
    expected = rsiat_reference.steering(float64(features)[:6], np.zeros(6), 1.0, -1.0)
    np.testing.assert_allclose(one, expected, rtol=1e-5)


# Alignment and repulsion -------------------------------------------------------------------------

MEAN_MASK = np.array([True, True, True, False, False])


@pytest.fixture(scope="module")
def layers():
    shapes = jax.eval_shape(lambda: rsiat.new_projector(jax.random.key(0), WIDTH, 7))
    return random_like(shapes, 3)


def means():
    """Means of three classes, and slots of none, which are zero."""
    return random_features(5, 5) * MEAN_MASK[:, None]


def losses(layers, features, earlier, mean_rows, bounded=True):
    return rsiat.projection_losses(
        lambda rows: rsiat.project(layers, rows, bounded),
        features,
        earlier,
        WEIGHTS,
        mean_rows,
        MEAN_MASK,
    )


def test_alignment_and_repulsion_against_their_formulas(layers):
    features, earlier = random_features(1), random_features(2)
    alignment, repulsion = losses(layers, features, earlier, means())
    projected = rsiat_reference.project(float64(layers), float64(earlier)[:6])
    projected_means = rsiat_reference.project(float64(layers), float64(means())[:3])
    expected = rsiat_reference.alignment(float64(features)[:6], projected)
    np.testing.assert_allclose(alignment, expected, rtol=1e-5)
    expected = rsiat_reference.repulsion(projected_means, projected)
    np.testing.assert_allclose(repulsion, expected, rtol=1e-4)


def test_repulsion_keeps_its_sign(layers):
    """Means opposite to the features are what it asks for: a mean cosine near -1, not near 1."""
    earlier = jnp.tile(jnp.full(WIDTH, 40.0), (8, 1))
    opposite = jnp.full((5, WIDTH), -40.0)
    assert float(losses(layers, earlier, earlier, opposite)[1]) < -0.99
    assert float(losses(layers, earlier, earlier, -opposite)[1]) > 0.99


def test_where_the_gradients_go(layers):
    features, earlier = random_features(1), random_features(2)

    def gradients(which):
        return jax.grad(lambda p, f: losses(p, f, earlier, means())[which], argnums=(0, 1))(
            layers, features
        )

    of_projector, of_features = gradients(0)
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(of_projector)) > 0
    assert np.abs(np.asarray(of_features)[:6]).min() > 0
    np.testing.assert_array_equal(of_features[6:], 0)
    of_projector, of_features = gradients(1)
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(of_projector)) > 0
    np.testing.assert_array_equal(of_features, 0)


def test_slots_without_a_class_have_finite_gradients(layers):
    """The unbounded projector maps zero to zero, whose norm has no derivative."""
    nothing, earlier = jax.tree.map(jnp.zeros_like, layers), random_features(2)
    gradients = jax.grad(lambda p: losses(p, earlier, earlier, means(), False)[1])
    for leaf in jax.tree.leaves(gradients(nothing)):
        assert np.isfinite(leaf).all()


def test_padding_and_slots_count_for_nothing(layers):
    features, earlier = random_features(1), random_features(2)
    found = losses(layers, features, earlier, means())
    other = losses(
        layers, features.at[6:].set(9.0), earlier.at[6:].set(-9.0), means().at[3:].set(9.0)
    )
    np.testing.assert_array_equal(np.array(found), np.array(other))
