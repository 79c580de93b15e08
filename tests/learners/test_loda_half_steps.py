"""Gradient alignment against its rules written out in float64, on a model with known slopes."""

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdc_jax.data.batches import Batch
from fdc_jax.learners import loda, training
from tests.learners import toy

WIDTH, RANK, BLOCKS, CLASSES = 5, 2, 2, 6
RATES = {"increment": 0.02, "head": 0.1}
LENGTH = 0.8


class Linear(loda.LoDA):
    def loss(self, backbone, frozen, trained, batch):
        """Cross-entropy of a linear head on two linear blocks, each with a low-rank increment."""
        x = batch.images
        for block in range(BLOCKS):
            A, B = (trained["increment"][name][block] for name in ("A", "B"))
            x = x @ (backbone[block] + A @ B)
        logits = x @ trained["head"].T
        return training.cross_entropy(logits, batch, frozen["class_mask"])


def reference_loss(backbone, trained, batch, weights):
    """The same in NumPy."""
    x, increment = batch.images, trained["increment"]
    for block in range(BLOCKS):
        x = x @ backbone[block] + x @ increment["A"][block] @ increment["B"][block]
    logits = x @ trained["head"][:-1].T
    chosen = logits[np.arange(len(x)), batch.labels]
    return np.average(np.log(np.exp(logits).sum(axis=1)) - chosen, weights=weights)


def reference_slopes(backbone, trained, batch, weights):
    """Loss and gradient by central differences, entry by entry."""
    leaves, structure = jax.tree.flatten(trained)

    def loss(leaves):
        return reference_loss(backbone, jax.tree.unflatten(structure, leaves), batch, weights)

    return loss(leaves), jax.tree.unflatten(structure, toy.differences(loss, leaves))


def reference_batch(backbone, trained, batch, groups, length, rates, optimizers):
    """Both half-steps of one batch; `groups` holds weights, a rate is 0 for leaves that stay."""

    def looked(leaf, slope, rate):
        norms = np.sqrt((slope**2).sum((-2, -1), keepdims=True))
        return leaf - (rate > 0) * length * slope / (norms + 1e-12)

    def stepped(leaf, slope, ahead, rate, optimizer):
        return leaf - rate * optimizer(slope, ahead)

    total = 0.0
    for source, target in (groups, groups[::-1]):
        _, slopes = reference_slopes(backbone, trained, batch, source)
        increments = (tree["increment"] for tree in (trained, slopes, rates))
        ahead = trained | {"increment": jax.tree.map(looked, *increments)}
        value, slopes = reference_slopes(backbone, ahead, batch, target)
        trained = jax.tree.map(stepped, trained, slopes, ahead, rates, optimizers)
        total = total + target.sum() * value
    return trained, total / (groups[0].sum() + groups[1].sum())


def random_numbers(frozen, batches_done, batch, longest):
    """The length of the look-ahead and the groups that follow from key and count."""
    key = jax.random.fold_in(jax.random.wrap_key_data(frozen["alignment"]), batches_done)
    key_of_length, key_of_groups = jax.random.split(key)
    present = np.zeros(len(frozen["class_mask"]), bool)
    present[batch.labels[batch.weights > 0]] = True
    first = np.asarray(loda.first_group(key_of_groups, jnp.asarray(present)))
    in_first = first[batch.labels]
    length = longest * float(jax.random.uniform(key_of_length))
    return length, (batch.weights * in_first, batch.weights * ~in_first)


def make_batch(seed, labels, padding=0):
    rng = np.random.default_rng(seed)
    labels = np.asarray(labels, np.int32)
    weights = (np.arange(len(labels)) < len(labels) - padding).astype(np.float32)
    return Batch(rng.normal(size=(len(labels), WIDTH)).astype(np.float32), labels, weights)


def make_task(A_trains=1.0):
    """Returns backbone, frozen and trained leaves; the last row of the head is no class."""
    rng = np.random.default_rng(0)

    def noise(*shape):
        return jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    backbone = noise(BLOCKS, WIDTH, WIDTH)
    # Blocks whose slopes differ in length.
    A = noise(BLOCKS, WIDTH, RANK) * jnp.array([1.0, 3.0])[:, None, None]
    increment = {"A": A, "B": noise(BLOCKS, RANK, WIDTH)}
    trained = {"increment": increment, "head": noise(CLASSES + 1, WIDTH)}
    trains = {"A": jnp.asarray(A_trains), "B": jnp.ones(())}
    frozen = {
        "class_mask": jnp.arange(CLASSES + 1) < CLASSES,
        "alignment": jax.random.key_data(jax.random.key(0)),
        "trains": {"increment": trains, "head": jnp.ones(())},
    }
    return backbone, frozen, trained


LEARNER = Linear(toy.make_learner("loda").setup, look_ahead=LENGTH)


@pytest.fixture(scope="module")
def update():
    return LEARNER.half_steps(RATES, optax.scale_by_adam())


def assert_close(actual, expected, **tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), actual, expected)


BATCHES = (
    make_batch(1, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3], padding=1),
    make_batch(2, [5, 5, 3, 3, 1, 1, 1, 1, 1, 1]),
    make_batch(3, [0, 4, 4, 4, 4, 4, 4, 4, 1, 2], padding=2),
)


@pytest.mark.parametrize(("kind", "A_trains"), [("adam", 1.0), ("sgd", 0.0)])
def test_half_steps_of_three_batches_in_float64(update, kind, A_trains):
    """Also that decay sees the weights ahead, and that leaves which stay are not moved by it."""
    decay = 0.0
    if kind == "sgd":
        decay = 0.3
        update = LEARNER.half_steps(RATES, training.sgd(decay))
    backbone, frozen, trained = make_task(A_trains=A_trains)
    kernels, expected, trains = toy.float64((backbone, trained, frozen["trains"]))
    rates = {
        part: jax.tree.map(lambda train, r=rate: 0.5 * r * train, trains[part])
        for part, rate in RATES.items()
    }
    optimizers = jax.tree.map(lambda leaf: toy.Optimizer(kind, decay), expected)
    before, progress = expected["increment"]["A"], update.initialise(trained)
    for done, batch in enumerate(BATCHES):
        length, groups = random_numbers(frozen, done, batch, LENGTH)
        assert min(groups[0].sum(), groups[1].sum()) > 0
        expected, value = reference_batch(
            kernels, expected, batch, groups, length, rates, optimizers
        )
        trained, progress, actual = update.step(backbone, frozen, trained, progress, batch, 0.5)
        np.testing.assert_allclose(actual, value, rtol=1e-4)
        assert_close(trained, expected, atol=2e-5)
    assert progress.steps == 3
    moved = np.abs(trained["increment"]["A"] - before).max()
    assert (moved > 1e-2) if A_trains else (moved == 0)


def test_a_batch_of_one_class_makes_a_plain_step(update):
    backbone, frozen, trained = make_task()
    batch = make_batch(4, [2] * 9 + [5], padding=1)
    plain = LEARNER.gradient_update(RATES, optax.scale_by_adam())

    def step(update):
        leaves = toy.copy(trained)
        return update.step(backbone, frozen, leaves, update.initialise(leaves), batch, 1.0)

    expected, optimizer, expected_value = step(plain)
    actual, progress, value = step(update)
    assert_close((actual, progress.optimizer), (expected, optimizer), atol=1e-6)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert progress.steps == 1


@pytest.mark.parametrize("present", [(2,), (1, 2, 5), (0, 1, 2, 4)])
def test_first_group_is_a_random_half(present):
    marked = jnp.zeros(CLASSES, bool).at[jnp.asarray(present)].set(True)
    size = max(1, len(present) // 2)
    draws = jax.vmap(loda.first_group, (0, None))(jax.random.split(jax.random.key(0), 600), marked)
    groups = [tuple(np.flatnonzero(draw)) for draw in np.asarray(draws)]
    expected = list(combinations(present, size))
    assert set(groups) == set(expected)
    shares = np.array([groups.count(group) for group in expected]) / len(groups)
    np.testing.assert_allclose(shares, 1 / len(expected), atol=0.06)
