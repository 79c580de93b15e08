"""Gradient alignment against its rules in float64, on a loss with known slopes."""

import collections
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdc_jax.data.batches import Batch
from fdc_jax.learners import loda, training
from tests.learners import toy

SHAPE = (2, 3, 2)  # of a leaf: blocks of a matrix each
LENGTH = 0.8


class Squares(loda.LoDA):
    def loss(self, backbone, frozen, trained, batch):
        """The mean squared product of all leaves with an image, which has an array for each."""
        leaves = enumerate(jax.tree.leaves(trained))
        products = sum(jnp.tensordot(batch.images[:, k], leaf, 3) for k, leaf in leaves)
        return jnp.sum(batch.weights * products**2) / jnp.sum(batch.weights)


def value_and_slopes(trained, batch, weights):
    """The same in NumPy, with the gradient."""
    leaves, structure = jax.tree.flatten(trained)
    images = batch.images.astype(np.float64).swapaxes(0, 1)
    pairs = zip(images, leaves, strict=True)
    products = sum(np.tensordot(of_leaf, leaf, 3) for of_leaf, leaf in pairs)
    shares = weights / weights.sum()
    slopes = [2 * np.tensordot(shares * products, of_leaf, 1) for of_leaf in images]
    return shares @ products**2, jax.tree.unflatten(structure, slopes)


def reference_batch(trained, batch, groups, length, rates, optimizers):
    """Both half-steps of one batch; `groups` holds weights, a rate is 0 for leaves that stay."""

    def looked(leaf, slope, rate):
        norms = np.sqrt((slope**2).sum((-2, -1), keepdims=True))
        return leaf - (rate > 0) * length * slope / norms

    def stepped(leaf, slope, ahead, rate, optimizer):
        return leaf - rate * optimizer(slope, ahead)

    total = 0.0
    for source, target in (groups, groups[::-1]):
        _, slopes = value_and_slopes(trained, batch, source)
        increments = (tree["increment"] for tree in (trained, slopes, rates))
        ahead = trained | {"increment": jax.tree.map(looked, *increments)}
        value, slopes = value_and_slopes(ahead, batch, target)
        trained = jax.tree.map(stepped, trained, slopes, ahead, rates, optimizers)
        total += target.sum() * value
    return trained, total / batch.weights.sum()


def random_numbers(frozen, batches_done, batch):
    """The length of the look-ahead and the groups that follow from key and count."""
    key = jax.random.fold_in(jax.random.wrap_key_data(frozen["alignment"]), batches_done)
    key_of_length, key_of_groups = jax.random.split(key)
    present = np.isin(np.arange(6), batch.labels[batch.weights > 0])
    first = np.asarray(loda.first_group(key_of_groups, jnp.asarray(present)))[batch.labels]
    length = LENGTH * float(jax.random.uniform(key_of_length))
    return length, (batch.weights * first, batch.weights * ~first)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(10, 3, *SHAPE)).astype(np.float32)
    weights = (np.arange(10) < 10 - seed).astype(np.float32)
    return Batch(images, rng.integers(0, 6, 10, np.int32), weights)


def make_task():
    """Returns frozen and trained leaves; A stays."""
    leaves = {"increment": {"A": jnp.ones(SHAPE), "B": jnp.ones(SHAPE)}, "head": jnp.ones(SHAPE)}
    trains = jax.tree.map(lambda leaf: jnp.ones(()), leaves)
    trains["increment"]["A"] = jnp.zeros(())
    key = jax.random.key_data(jax.random.key(0))
    frozen = {"class_mask": jnp.ones(6, bool), "alignment": key, "trains": trains}
    return frozen, toy.random_like(leaves, 0)


LEARNER = Squares(toy.make_learner("loda").setup, look_ahead=LENGTH)


@pytest.mark.parametrize(("kind", "decay"), [("adam", 0.0), ("sgd", 0.3)])
def test_half_steps_of_three_batches_in_float64(kind, decay):
    """Also that decay sees the weights ahead, and that leaves which stay are not moved by it."""
    transformation = optax.scale_by_adam() if kind == "adam" else training.sgd(decay)
    update = LEARNER.half_steps({"increment": 0.02, "head": 0.1}, transformation)
    rates = {"increment": {"A": 0.0, "B": 0.01}, "head": 0.05}
    frozen, trained = make_task()
    expected = toy.float64(trained)
    optimizers = jax.tree.map(lambda leaf: toy.Optimizer(kind, decay), expected)
    progress = update.initialise(trained)
    for done in range(3):
        batch = make_batch(done)
        length, groups = random_numbers(frozen, done, batch)
        assert min(groups[0].sum(), groups[1].sum()) > 0
        expected, value = reference_batch(expected, batch, groups, length, rates, optimizers)
        trained, progress, actual = update.step(None, frozen, trained, progress, batch, 0.5)
        np.testing.assert_allclose(actual, value, rtol=1e-4)
        jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), trained, expected)


def test_first_group_is_a_random_half():
    """Of an odd number of classes, the smaller half."""
    keys, present = jax.random.split(jax.random.key(0), 600), (0, 1, 2, 4, 5)
    draws = jax.vmap(loda.first_group, (0, None))(keys, np.isin(np.arange(6), present))
    groups = [tuple(np.flatnonzero(draw)) for draw in np.asarray(draws)]
    shares = collections.Counter(groups)
    assert shares.keys() == {*itertools.combinations(present, 2)}
    assert max(shares.values()) < 100 and min(shares.values()) > 30
