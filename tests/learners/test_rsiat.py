"""RSIAT: its losses and their gradients, its steps, and what it makes of the end of a task."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.data.batches import Batch
from fdc_jax.learners import rsiat
from fdc_jax.model import operations
from tests.learners import rsiat_reference, toy

LEARNER = toy.make_learner("rsiat")


@pytest.fixture(scope="module")
def state():
    """A state of noise, for which nothing is trained."""
    state = toy.random_like(LEARNER.initial_state(), 5)
    factors = np.asarray(state.gaussians.factors)
    return state._replace(gaussians=state.gaussians._replace(factors=factors))


def started(backbone, state, task):
    """Returns frozen leaves, and noise in place of the trained ones."""
    frozen, trained = LEARNER.start_task(backbone, state, task, jax.random.key(task))
    return frozen, toy.random_like(trained, 7)


def reference_loss(state, trained, batch, task, warm_up):
    """The loss in float64; `trained` holds float64 leaves."""
    images, labels = toy.shown([batch])
    features = toy.reference_features(images, adapter=trained["adapter"])
    rows = trained["head"][: toy.CLASSES[task]]
    value = rsiat_reference.cosface(features, rows, labels, scale=4.0, margin=0.3)
    if task == 0:
        return value + 0.7 * warm_up * rsiat_reference.steering(features, labels, 1.5, 0.2)
    earlier = toy.reference_features(images, adapter=state.adapter)
    means = toy.float64(state.gaussians.means)[0, : toy.CLASSES[0]]
    projected, projected_means = (
        rsiat_reference.project(trained["projector"], rows) for rows in (earlier, means)
    )
    value += 0.9 * np.mean((features - projected) ** 2)
    cosine = rsiat_reference.cosine
    return value + 2.0 * np.mean([[cosine(m, f) for f in projected] for m in projected_means])


def test_loss_and_gradients_in_float64(backbone, state, monkeypatch, warm_up=0.4):
    """The encoder takes three of six images at a time."""
    calls = toy.encoder_calls(monkeypatch)
    monkeypatch.setitem(operations.PORTION_TOKENS, "cpu", 30)
    # Without a key for it, nothing is dropped.
    loss = jax.jit(jax.value_and_grad(LEARNER.loss, argnums=2))
    for task in (0, 1):
        frozen, trained = started(backbone, state, task)
        batch = toy.make_batch(3, size=6, classes=toy.CLASSES[task], padding=1)
        value, gradients = loss(backbone, frozen, trained, batch, warm_up)

        def expected(leaves, task=task, batch=batch):
            return reference_loss(state, leaves, batch, task, warm_up)

        np.testing.assert_allclose(value, expected(toy.float64(trained)), rtol=1e-5)
        slopes = toy.assert_slopes(expected, trained, toy.float64(gradients), rtol=1e-3)
        # Adapter, head and projector; the first task does not train the projector.
        assert (np.abs(slopes[5:]).max() > 1e-3) == (task > 0)
    assert {len(call[2]) for call in calls} == {3}


def test_adapter_and_projector_continue_between_tasks(backbone, state):
    """A new adapter adds nothing; it and the projector go on from task to task."""
    before = LEARNER.initial_state(), state, state
    starts = [
        LEARNER.start_task(backbone, given, task, jax.random.key(task))
        for task, given in enumerate(before)
    ]
    adapter, bound = starts[0][1]["adapter"], toy.TINY.width**-0.5
    assert 0.9 * bound < np.abs(adapter["down"]).max() <= bound and adapter["down"].min() < 0
    for leaf in ("down_bias", "up", "up_bias"):
        np.testing.assert_array_equal(adapter[leaf], 0)
    # The first task has no use for a projector, the second draws it.
    drawn = np.asarray(starts[1][1]["projector"][0].weight)
    assert np.abs(drawn - np.asarray(state.projector[0].weight)).max() > 0.1
    assert 0.9 * bound < drawn.max() <= bound and -bound <= drawn.min() < -0.9 * bound
    toy.assert_equal(starts[2][1]["projector"], state.projector)
    for frozen, trained in starts[1:]:
        for leaves in (trained, frozen["kernels"]):
            toy.assert_equal(leaves["adapter"], state.adapter)


def test_dropout_follows_from_key_and_step(backbone, state, monkeypatch):
    def draw(self, backbone, frozen, trained, batch, warm_up, key):
        return jax.random.uniform(key) + 0.0 * jnp.sum(trained["head"])

    monkeypatch.setattr(rsiat.RSIAT, "loss", draw)
    update, draws = LEARNER.update(), []
    frozen, trained = started(backbone, state, 1)
    for key, steps in ((0, 0), (0, 0), (0, 1), (1, 0)):
        frozen["dropout"] = jax.random.key_data(jax.random.key(key))
        progress = update.initialise(trained)._replace(steps=np.int32(steps))
        given = toy.placed((frozen, trained, progress))
        draws.append(float(update.step(backbone, *given, toy.make_batch(), (1.0, 1.0))[2]))
    assert draws[0] == draws[1] and len(set(draws)) == 3


def test_dropout_is_in_the_trained_encoder_alone(backbone, state, monkeypatch):
    """In the encoder that is trained, and not in the one before the task."""
    calls, key = toy.encoder_calls(monkeypatch), jax.random.key(0)
    frozen, trained = started(backbone, state, 1)
    loss = partial(LEARNER.loss, backbone, frozen)
    jax.eval_shape(lambda leaves: loss(leaves, toy.make_batch(3), 1.0, key), trained)
    assert [tuple(call[4:-1]) for call in calls] == [(None, key, 0.1), (None, None, 0.0)]


def test_warm_up_raises_the_steering_weight():
    factors = []
    for preset, epochs in (("protocol", 4), ("native", 0)):
        fields = {"learner__preset": preset, "learner__rsiat__warm_up_epochs": epochs}
        schedule = toy.make_learner("rsiat", **fields).update().schedule
        factors.append([schedule(epoch, 8)[1] for epoch in range(6)])
    assert factors == [[0.0, 0.25, 0.5, 0.75, 1.0, 1.0], [1.0] * 6]


def test_native_constants_follow_the_benchmark():
    """Of the authors' files; an option that was set stays, and the protocol has ImageNet-A's."""
    fields = {"learner__rsiat__scale": 30.0, "learner__rsiat__margin": 0.7}
    for preset, benchmark, scale in (
        ("native", "cifar100", 40.0),
        ("native", "imagenet_a", 30.0),
        ("protocol", "cifar100", 30.0),
    ):
        learner = toy.make_learner("rsiat", benchmark=benchmark, learner__preset=preset, **fields)
        assert (learner.scale, learner.margin) == (scale, 0.7)
    learner = toy.make_learner("rsiat", benchmark="cifar100")
    assert learner.native_rates() == (1.8461e-2, 1.714e-4, 2.934e-3)


@pytest.fixture(scope="module")
def third_task(backbone, state):
    """Frozen and trained leaves and images of a third task, and the state after it."""
    frozen, trained = started(backbone, state, 2)
    images = toy.images_of(2, toy.CLASSES[2])
    return frozen, trained, images, LEARNER.after_task(backbone, state, 2, frozen, trained, images)


def test_earlier_means_follow_the_drift(state, third_task):
    _, _, given, after = third_task
    images, _ = toy.shown(given.plain())
    new, old = (toy.reference_features(images, adapter=s.adapter) for s in (after, state))
    for past, classes in enumerate(toy.CLASSES[:2]):
        means = toy.float64(state.gaussians.means)[past, :classes]
        moved = rsiat_reference.moved_means(means, old, new, 4.0)
        assert np.abs(moved - means).max() > 1e-3
        np.testing.assert_allclose(after.gaussians.means[past, :classes], moved, atol=1e-5)


def test_a_distant_mean_moves_by_the_mean_drift():
    """Weights of 4e-5 and less are near their floor of 1e-5."""
    rng = np.random.default_rng(0)
    before = rng.normal(size=(6, 3))
    after, means = before + rng.normal(size=(6, 3)), np.array([[0.0, 0.0, 0.0], [18.0, 0.0, 0.0]])
    expected = rsiat_reference.moved_means(means, before, after, 4.0)
    np.testing.assert_allclose(rsiat.moved_means(means, before, after), expected, rtol=1e-10)


def test_all_heads_are_calibrated_on_moved_means(backbone, state, third_task, factor=0.5):
    """Native decay shrinks heads of earlier tasks, by a factor that trains along."""
    frozen, trained, images, after = third_task
    trained = trained | {"earlier_heads": jnp.asarray(factor)}
    actual = LEARNER.after_task(backbone, state, 2, frozen, trained, images)
    heads = (factor * state.heads).at[2].set(trained["head"])
    key = jax.random.wrap_key_data(frozen["calibration"])
    expected = LEARNER.calibrate(heads, after.gaussians, LEARNER.setup.classes_of_first(3), key)
    toy.assert_equal((actual.heads, actual.gaussians), (expected, after.gaussians))


def test_steering_without_pairs_of_a_kind_is_finite():
    weights = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
    features = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    loss = jax.jit(jax.value_and_grad(rsiat.steering_loss))
    for labels in (np.arange(8), np.zeros(8, int)):
        value, gradient = loss(features, Batch(None, labels, weights), 1.0, 0.1)
        expected = rsiat_reference.steering(toy.float64(features)[:6], labels[:6], 1.0, 0.1)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("preset", "decay"), [("protocol", 0.0), ("native", 0.3)])
def test_calibration_in_float64(one_batch, monkeypatch, preset, decay):
    """Classes without spread make every draw a mean; one batch an epoch has no order.

    With decay by the authors' rates for a data set, without it by the protocol's.
    """
    monkeypatch.setattr(rsiat, "CALIBRATION_RATE", 0.5)
    monkeypatch.setattr(rsiat, "CALIBRATION_EPOCHS", 2)
    monkeypatch.setitem(rsiat.NATIVE_RATES, "imagenet_a", (0.5, decay, 0.0))
    learner = toy.make_learner("rsiat", learner__preset=preset, learner__rsiat__scale=5.0)
    gaussians = toy.points(0)
    seen = learner.setup.classes_of_first(2)
    heads = np.where(seen[..., None], toy.random_like(gaussians.means, 1, 1.0), 0)
    actual = np.asarray(learner.calibrate(heads, gaussians, seen, jax.random.key(0)))
    rows, means = (toy.float64(array)[seen] for array in (heads, gaussians.means))

    def loss(heads):
        return rsiat_reference.cosface(means, heads, np.arange(len(heads)), 5.0, 0.0)

    expected = toy.descent(loss, rows, toy.Optimizer("sgd", decay), [0.5, 0.25])
    assert np.abs(expected - rows).max() > 0.1
    np.testing.assert_allclose(actual[seen], expected, atol=1e-5)
    np.testing.assert_array_equal(actual[~seen], 0)


def test_gradients_of_the_adapter_are_summed_in_float32():
    """In fast precision, too; rounded to bfloat16 they would be off by 0.2 %."""
    rng = np.random.default_rng(0)
    x, slopes = (jnp.asarray(rng.normal(size=(120, n)), jnp.bfloat16) for n in (24, 5))
    dense = partial(operations.dense, precision=jax.lax.Precision.DEFAULT)
    _, pull = jax.vjp(partial(dense, x), jnp.ones((24, 5)), jnp.ones(5))
    rows, gradients = toy.float64((x, slopes))
    weight, bias = pull(slopes)
    np.testing.assert_allclose(weight, rows.T @ gradients, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(bias, gradients.sum(axis=0), rtol=1e-4, atol=1e-4)
