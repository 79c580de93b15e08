"""The reference learner: what it trains, with which loss and update, and what stays as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from fdc_jax import learners
from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError
from fdc_jax.learners import cumulative_lora, training
from fdc_jax.model import vit


def make_setup(classes_per_task=(2, 2, 2)):
    config = digits.get_config()
    model = vit.build("digits", 32, config.data.input_range, config.precision)
    return training.Setup(model, tuple(classes_per_task), config)


@pytest.fixture(scope="module")
def backbone():
    return vit.initialise(vit.build("digits", 32), 32, jax.random.key(7))


@pytest.fixture(scope="module")
def update():
    return cumulative_lora.update(make_setup())


def make_batch(seed=0, size=8, classes=2):
    rng = np.random.default_rng(seed)
    return Batch(
        rng.integers(0, 256, (size, 32, 32, 3)).astype(np.uint8),
        rng.integers(0, classes, size).astype(np.int32),
        np.ones(size, np.float32),
    )


def start(setup, backbone, task=0, seed=0):
    state = cumulative_lora.initial_state(setup)
    return cumulative_lora.start(setup, backbone, state, task, jax.random.key(seed))


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def test_golden_step(backbone, update):
    """One step from a fixed start, to the digit.

    A change here means that the encoder, the initialisation, the loss or Adam changed: published
    runs can no longer be repeated. Change the numbers only when that is intended, and say so.
    """
    frozen, trained = start(make_setup(), backbone)
    trained, _, loss = update.step(
        backbone, frozen, trained, update.initialise(trained), make_batch(), 1.0
    )
    observed = {
        "loss": float(loss),
        "B": float(jnp.abs(trained["increment"]["key"]["B"]).sum()),
        "A": float(jnp.abs(trained["increment"]["value"]["A"]).sum()),
        "weight": float(trained["head"].weight.sum()),
        "bias": float(trained["head"].bias[0]),
    }
    assert observed == pytest.approx(
        {
            "loss": 0.783946,
            "B": 1.918556,
            "A": 195.969269,
            "weight": 0.563046,
            "bias": -0.0785203,
        },
        rel=2e-5,
    )


def test_adam_against_its_formula(backbone, update):
    """Two steps of Adam (Kingma and Ba, algorithm 1) in float64 from the gradients of the loss."""
    setup = make_setup()
    frozen, trained = start(setup, backbone)
    rates = {"increment": 5e-4, "head": 5e-3}
    expected = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), trained)
    first = second = jax.tree.map(np.zeros_like, expected)
    state, current = update.initialise(trained), copy(trained)
    gradient = jax.jit(
        jax.grad(lambda leaves, batch: cumulative_lora.loss(setup, backbone, frozen, leaves, batch))
    )
    for step, factor in enumerate((1.0, 0.25), start=1):
        batch = make_batch(step)
        gradients = gradient(current, batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * np.asarray(g), first, gradients)
        second = jax.tree.map(
            lambda v, g: 0.999 * v + 0.001 * np.asarray(g, np.float64) ** 2, second, gradients
        )
        for part, rate in rates.items():
            expected[part] = jax.tree.map(
                lambda p, m, v, lr=rate * factor, s=step: (
                    p - lr * (m / (1 - 0.9**s)) / (np.sqrt(v / (1 - 0.999**s)) + 1e-8)
                ),
                expected[part],
                first[part],
                second[part],
            )
        current, state, _ = update.step(backbone, frozen, current, state, batch, factor)
    for ours, reference in zip(jax.tree.leaves(current), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-5)


def test_only_one_increment_and_one_head_are_trained(backbone, update):
    setup = make_setup((2, 3, 1))
    _, trained = start(setup, backbone, task=1)
    variant, rank = setup.variant, setup.config.train.rank
    assert len(jax.tree.leaves(trained)) == 4 + 2
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert count == 4 * variant.depth * variant.width * rank + 3 * (variant.width + 1)
    # Adam keeps two moments of each leaf and one counter.
    assert len(jax.tree.leaves(update.initialise(trained))) == 2 * (4 + 2) + 1


def test_earlier_tasks_and_the_backbone_stay(backbone, update):
    setup = make_setup()
    state = cumulative_lora.initial_state(setup)
    before = copy(backbone)
    for task in range(2):
        frozen, trained = cumulative_lora.start(setup, backbone, state, task, jax.random.key(task))
        optimizer = update.initialise(trained)
        for step in range(2):
            trained, optimizer, _ = update.step(
                backbone, frozen, trained, optimizer, make_batch(step), 1.0
            )
        previous = state
        state = cumulative_lora.after_task(setup, backbone, state, task, frozen, trained, None)
    for old, new in zip(jax.tree.leaves(previous), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.any(np.asarray(old[1]) != np.asarray(new[1]))
        np.testing.assert_array_equal(new[2], 0)
    jax.tree.map(np.testing.assert_array_equal, before, backbone)


def test_the_end_of_a_task_leaves_features_unchanged(backbone, update):
    setup = make_setup()
    state = cumulative_lora.initial_state(setup)
    frozen, trained = cumulative_lora.start(setup, backbone, state, 0, jax.random.key(0))
    optimizer = update.initialise(trained)
    for step in range(3):
        trained, optimizer, _ = update.step(
            backbone, frozen, trained, optimizer, make_batch(step), 20.0
        )
    state = cumulative_lora.after_task(setup, backbone, state, 0, frozen, trained, None)
    images = make_batch(9).images
    in_training = setup.model.apply(
        {"params": backbone}, images, frozen["kernels"], trained["increment"]
    )
    merged = setup.model.apply(
        {"params": backbone}, images, cumulative_lora.encoder(setup, backbone, state, 1)
    )
    pretrained = setup.model.apply({"params": backbone}, images)
    np.testing.assert_allclose(merged, in_training, atol=2e-5)
    assert np.abs(np.asarray(merged - pretrained)).max() > 0.01
    # The next task starts where this one ended.
    next_frozen, next_trained = cumulative_lora.start(setup, backbone, state, 1, jax.random.key(1))
    np.testing.assert_array_equal(
        setup.model.apply(
            {"params": backbone}, images, next_frozen["kernels"], next_trained["increment"]
        ),
        merged,
    )


def test_padding_of_batches_and_heads_counts_for_nothing(backbone):
    setup = make_setup((2, 4))
    frozen, trained = start(setup, backbone, task=0)
    batch = make_batch(size=6)
    padded = Batch(
        np.concatenate([batch.images, np.zeros((2, 32, 32, 3), np.uint8)]),
        np.concatenate([batch.labels, np.zeros(2, np.int32)]),
        np.concatenate([batch.weights, np.zeros(2, np.float32)]),
    )

    @jax.jit
    def value_and_gradient(batch, leaves):
        return jax.value_and_grad(
            lambda leaves: cumulative_lora.loss(setup, backbone, frozen, leaves, batch)
        )(leaves)

    value, gradients = value_and_gradient(batch, trained)
    other_rows = trained["head"]._replace(
        weight=trained["head"].weight.at[2:].set(5.0), bias=trained["head"].bias.at[2:].set(9.0)
    )
    for again in (
        value_and_gradient(padded, trained),
        value_and_gradient(batch, trained | {"head": other_rows}),
    ):
        np.testing.assert_allclose(again[0], value, rtol=1e-5)
    np.testing.assert_array_equal(gradients["head"].weight[2:], 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    features = setup.model.apply({"params": backbone}, batch.images, frozen["kernels"])
    logits = np.asarray(trained["head"].logits(features), np.float64)[:, :2]
    log_sum = np.log(np.exp(logits).sum(1))
    expected = np.mean(log_sum - logits[np.arange(6), batch.labels])
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_a_batch_in_portions_makes_the_same_step(backbone, update, monkeypatch):
    """Two full portions, one partly of padding and one of nothing else."""
    batch = make_batch(size=16)
    batch = batch._replace(weights=(np.arange(16) < 10).astype(np.float32))
    found = {}
    for name, tokens in (("whole", 16 * 17), ("portions", 4 * 17)):
        monkeypatch.setattr(vit, "PORTION_TOKENS", tokens)
        setup = make_setup()
        sizes = []
        function = training.mean_over_portions
        monkeypatch.setattr(
            training,
            "mean_over_portions",
            lambda *arguments, sizes=sizes, function=function: (
                sizes.append(arguments[2]) or function(*arguments)
            ),
        )
        frozen, trained = start(setup, backbone)
        one = cumulative_lora.update(setup)
        found[name] = one.step(backbone, frozen, trained, one.initialise(trained), batch, 1.0)
        assert sizes == ([4] if name == "portions" else [])
    # Adam's first moments are the gradients; its first step would hide their size.
    for whole, cut in zip(*(jax.tree.leaves(found[name][1:]) for name in found), strict=True):
        np.testing.assert_allclose(cut, whole, rtol=1e-4, atol=1e-6)


def test_task_fifty_costs_what_task_two_costs(backbone):
    """One compilation serves all tasks, and no array is alive that was not at task 2."""
    setup = make_setup((1, 2) * 26)
    update = cumulative_lora.update(setup)
    state = cumulative_lora.initial_state(setup)
    live, kinds = {}, {}
    for task in (1, 49):
        frozen, trained = cumulative_lora.start(setup, backbone, state, task, jax.random.key(task))
        optimizer = update.initialise(trained)
        trained, optimizer, loss = update.step(
            backbone, frozen, trained, optimizer, make_batch(classes=2 - task % 2), 1.0
        )
        loss.block_until_ready()
        state = cumulative_lora.after_task(setup, backbone, state, task, frozen, trained, None)
        jax.block_until_ready(state)
        live[task] = sum(array.nbytes for array in jax.live_arrays())
        kinds[task] = update.step._cache_size()
    assert live[1] == live[49]
    assert kinds == {1: 1, 49: 1}


def test_cosine_schedule():
    factors = [training.learning_rate_factor("cosine", epoch, 4) for epoch in range(4)]
    np.testing.assert_allclose(factors, [1, 0.5 + np.sqrt(0.125), 0.5, 0.5 - np.sqrt(0.125)])
    assert training.learning_rate_factor("constant", 3, 4) == 1.0


def test_find_refuses_what_is_no_learner():
    assert learners.find("cumulative_lora") is cumulative_lora
    assert learners.find("fdc_jax.learners.cumulative_lora") is cumulative_lora
    with pytest.raises(InputError, match=r"learner.name: .*'no_such_learner'"):
        learners.find("no_such_learner")
    with pytest.raises(InputError, match="module 'json' lacks initial_state"):
        learners.find("json")
