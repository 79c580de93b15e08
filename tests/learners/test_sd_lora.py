"""SD-LoRA: old directions normalised and scaled by magnitudes that go on training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fdc_jax import configuration, learners
from fdc_jax.errors import InputError
from fdc_jax.learners import sd_lora
from fdc_jax.model import vit
from tests.learners import small_stream
from tests.learners.small_stream import RANK, TINY, float64, make_batch, make_setup

PARTS = ("key", "value")


@pytest.fixture(scope="module")
def update():
    return sd_lora.update(make_setup())


def random_state(setup, num_tasks, seed=0):
    """State after `num_tasks` tasks whose leaves are noise; later slots are empty."""
    state = small_stream.random_like(sd_lora.initial_state(setup), seed)

    def emptied(slots):
        return slots.at[num_tasks:].set(0.0)

    rows = jnp.tril(1.0 + jnp.abs(state.magnitudes))
    return jax.tree.map(emptied, state._replace(magnitudes=rows))


def norms(factors):
    return np.sqrt((factors**2).sum((-2, -1), keepdims=True))


def expected_kernels(backbone, stack, magnitudes, task, current):
    """W_0 + sum over earlier tasks of m A B / (|A| |B|), plus m A B of the current one."""
    kernels = float64(vit.pretrained_kernels(backbone))
    stack, magnitudes, current = float64(stack), float64(magnitudes), float64(current)
    for part in PARTS:
        for earlier in range(task):
            a, b = stack[part]["A"][earlier], stack[part]["B"][earlier]
            kernels[part] = kernels[part] + magnitudes[earlier] * (a @ b) / (norms(a) * norms(b))
        product = current[part]["A"] @ current[part]["B"]
        kernels[part] = kernels[part] + magnitudes[task] * product
    return kernels


def task_under_way(setup, backbone, task, seed=0):
    """Frozen and trained leaves in the middle of a task, and the state it began with."""
    state = random_state(setup, task, seed)
    frozen, trained = sd_lora.start(setup, backbone, state, task, jax.random.key(seed))
    trained = small_stream.random_like(trained, seed + 1)
    trained["magnitudes"] = jnp.abs(trained["magnitudes"]) + 0.5
    return state, frozen, trained


@pytest.fixture(scope="module")
def compiled_loss():
    return jax.jit(partial(sd_lora.loss, make_setup()))


@pytest.mark.parametrize("task", [0, 2])
def test_loss_in_float64(backbone, compiled_loss, task):
    setup = make_setup()
    state, frozen, trained = task_under_way(setup, backbone, task)
    batch = make_batch(padding=1)
    kernels = expected_kernels(
        backbone, state.increments, trained["magnitudes"], task, trained["increment"]
    )
    features = small_stream.reference_features(backbone, batch.images, kernels)
    losses = small_stream.reference_cross_entropy(features, trained["head"], batch.labels, 2)
    found = compiled_loss(backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, losses[:3].mean(), rtol=1e-4)


def test_history_has_no_scale_and_the_current_direction_has(backbone, compiled_loss):
    setup = make_setup()
    state, frozen, trained = task_under_way(setup, backbone, 2)
    batch = make_batch()
    value = compiled_loss(backbone, frozen, trained, batch)

    def scaled(increments, a, b):
        return {
            part: {"A": a * factors["A"], "B": b * factors["B"]}
            for part, factors in increments.items()
        }

    other = state._replace(increments=scaled(state.increments, 3.0, 0.2))
    frozen_again, _ = sd_lora.start(setup, backbone, other, 2, jax.random.key(0))
    again = compiled_loss(backbone, frozen_again, trained, batch)
    np.testing.assert_allclose(again, value, rtol=1e-4)
    larger = trained | {"increment": scaled(trained["increment"], 3.0, 0.2)}
    assert abs(float(compiled_loss(backbone, frozen, larger, batch) - value)) > 1e-3 * abs(value)


def test_normalised_directions(backbone):
    """Every factor has norm one, so that no product exceeds it; slots to come stay zero."""
    state = random_state(make_setup(), 3)
    found = sd_lora._normalised_directions(state.increments, 2)
    for part in PARTS:
        factors, original = float64(found[part]), float64(state.increments[part])
        for name in ("A", "B"):
            np.testing.assert_allclose(norms(factors[name])[:2], 1.0, rtol=1e-6)
            expected = original[name] / norms(original[name])
            np.testing.assert_allclose(factors[name][:2], expected[:2], atol=1e-6)
            np.testing.assert_array_equal(factors[name][2], 0)
        lengths = norms(factors["A"][:2] @ factors["B"][:2])
        assert np.all(lengths <= 1 + 1e-6)
        assert np.all(lengths > 1e-3)


def test_a_direction_of_zeros_is_no_quotient_of_zeros(backbone):
    state = random_state(make_setup(), 0)
    for leaf in jax.tree.leaves(sd_lora._normalised_directions(state.increments, 2)):
        np.testing.assert_array_equal(leaf, 0)


def test_first_step_of_a_task(backbone):
    """B is zero: the current term and the slopes of m_t and A vanish, others do not."""
    setup = make_setup()
    state = random_state(setup, 2)
    frozen, trained = sd_lora.start(setup, backbone, state, 2, jax.random.key(0))
    np.testing.assert_array_equal(trained["magnitudes"], np.float32(0.8))
    batch = make_batch()
    value, gradients = jax.jit(
        jax.value_and_grad(partial(sd_lora.loss, setup), argnums=(1, 2), allow_int=True)
    )(backbone, frozen, trained, batch)
    kernels = expected_kernels(backbone, state.increments, np.full(3, 0.8), 2, trained["increment"])
    features = small_stream.reference_features(backbone, batch.images, kernels)
    losses = small_stream.reference_cross_entropy(features, trained["head"], batch.labels, 2)
    np.testing.assert_allclose(value, losses.mean(), rtol=1e-4)
    _, of_trained = gradients
    for part in PARTS:
        np.testing.assert_array_equal(of_trained["increment"][part]["A"], 0)
        assert np.all(np.abs(of_trained["increment"][part]["B"]).max(axis=(1, 2)) > 0)
        assert np.all(np.asarray(trained["increment"][part]["B"]) == 0)
    slopes = np.asarray(of_trained["magnitudes"])
    assert slopes[2] == 0
    assert np.all(slopes[:2] != 0)


def test_slopes_of_magnitudes_by_finite_differences(backbone):
    setup = make_setup()
    state, frozen, trained = task_under_way(setup, backbone, 1)
    batch = make_batch(classes=3)
    slopes = jax.jit(jax.grad(partial(sd_lora.loss, setup), argnums=2))(
        backbone, frozen, trained, batch
    )["magnitudes"]
    magnitudes = np.asarray(trained["magnitudes"], np.float64)
    for index in range(2):
        losses = []
        for sign in (1, -1):
            moved = magnitudes.copy()
            moved[index] += sign * 1e-5
            kernels = expected_kernels(backbone, state.increments, moved, 1, trained["increment"])
            features = small_stream.reference_features(backbone, batch.images, kernels)
            losses.append(
                small_stream.reference_cross_entropy(
                    features, trained["head"], batch.labels, 3
                ).mean()
            )
        expected = (losses[0] - losses[1]) / 2e-5
        assert abs(expected) > 1e-5
        np.testing.assert_allclose(slopes[index], expected, rtol=2e-3)
    # A magnitude of a task to come has nothing to scale.
    assert slopes[2] == 0


def test_encoders_of_all_tasks_can_be_had_again(backbone):
    """E_t is the formula with the magnitudes at the end of task t, whatever came later."""
    setup = make_setup()
    state = random_state(setup, 3)
    for num_tasks in (1, 2, 3):
        last = num_tasks - 1
        current = jax.tree.map(lambda slots, t=last: slots[t], state.increments)
        expected = expected_kernels(
            backbone, state.increments, state.magnitudes[last], last, current
        )
        found = sd_lora.encoder(setup, backbone, state, num_tasks)
        for part in PARTS:
            np.testing.assert_allclose(found[part], expected[part], atol=1e-5)
    pretrained = sd_lora.encoder(setup, backbone, state, 0)
    jax.tree.map(np.testing.assert_array_equal, pretrained, vit.pretrained_kernels(backbone))


def test_merged_encoder_gives_the_features_of_training(backbone):
    setup = make_setup()
    state, frozen, trained = task_under_way(setup, backbone, 1)
    after = sd_lora.after_task(setup, backbone, state, 1, frozen, trained, None)
    images = make_batch(5).images
    merged = small_stream.encode(
        setup, backbone, images, sd_lora.encoder(setup, backbone, after, 2)
    )
    kernels = expected_kernels(
        backbone, state.increments, trained["magnitudes"], 1, trained["increment"]
    )
    expected = small_stream.reference_features(backbone, images, kernels)
    np.testing.assert_allclose(merged, expected, atol=1e-4)


def test_magnitudes_start_anew_or_are_carried_over(backbone):
    learned = np.array([[0.7, 0, 0], [0.6, 1.1, 0], [0, 0, 0]], np.float32)
    for reset, expected in ((True, [0.9, 0.9, 0.9]), (False, [0.6, 0.9, 1.1])):
        setup = make_setup(
            learner__sd_lora__magnitude=0.9, learner__sd_lora__reset_magnitudes=reset
        )
        state = random_state(setup, 2)._replace(magnitudes=jnp.asarray(learned))
        _, trained = sd_lora.start(setup, backbone, state, 2, jax.random.key(0))
        np.testing.assert_allclose(trained["magnitudes"], expected)
        # Of the second task the first direction is old for the first time.
        _, trained = sd_lora.start(setup, backbone, state, 1, jax.random.key(0))
        np.testing.assert_allclose(trained["magnitudes"][:2], [0.9, 0.9 if reset else 0.7])
        _, trained = sd_lora.start(setup, backbone, state, 0, jax.random.key(0))
        np.testing.assert_allclose(trained["magnitudes"], 0.9)


def test_earlier_tasks_and_the_backbone_stay(backbone, update):
    setup = make_setup()
    before = small_stream.copy(backbone)
    states = [sd_lora.initial_state(setup)]
    for task in range(2):
        states.append(small_stream.train_whole(sd_lora, setup, backbone, states[-1], task, update))
    jax.tree.map(np.testing.assert_array_equal, before, backbone)
    for old, new in zip(*map(jax.tree.leaves, states[1:]), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.any(np.asarray(old[1]) != np.asarray(new[1]))
        np.testing.assert_array_equal(new[2], 0)
    # Old magnitudes trained along, those of tasks to come are not recorded.
    row = np.asarray(states[2].magnitudes[1])
    assert row[0] not in (np.float32(0.8), states[1].magnitudes[0, 0])
    assert row[1] != 0.8 and row[2] == 0
    shapes = [head.weight.shape for head in sd_lora.heads(setup, states[2], 2)]
    assert shapes == [(2, TINY.width), (3, TINY.width)]
    np.testing.assert_array_equal(
        sd_lora.heads(setup, states[2], 2)[1].weight, states[2].heads.weight[1]
    )


def test_starts_of_the_head(backbone):
    starts = {}
    for kind in ("uniform", "zero_bias"):
        setup = make_setup((400,), learner__sd_lora__head_start=kind)
        state = sd_lora.initial_state(setup)
        starts[kind] = sd_lora.start(setup, backbone, state, 0, jax.random.key(0))[1]["head"]
    bound = TINY.width**-0.5
    for leaf in starts["uniform"]:
        assert 0.98 * bound < np.abs(leaf).max() <= bound
    weight = starts["zero_bias"].weight
    assert 0.98 * bound < np.abs(weight).max() / np.sqrt(3) <= bound * (1 + 1e-6)
    np.testing.assert_array_equal(starts["zero_bias"].bias, 0)


def test_number_of_trained_parameters(backbone):
    setup = make_setup()
    _, trained = sd_lora.start(setup, backbone, sd_lora.initial_state(setup), 0, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert count == 4 * TINY.depth * TINY.width * RANK + 3 * (TINY.width + 1) + setup.num_tasks


def test_one_compilation_and_one_size_for_all_tasks(backbone):
    setup = make_setup((3, 2) * 10)
    update = sd_lora.update(setup)
    functions = (update.step, sd_lora._add_directions, sd_lora._normalised_directions)
    alive, compiled = small_stream.cost_of_tasks(sd_lora, setup, backbone, update, functions)
    assert alive[1] == alive[17]
    assert compiled[1] == compiled[17]
    assert compiled[1][0] == 1


@pytest.mark.parametrize(("benchmark", "rate"), [("cifar100", 8e-3), ("imagenet_r", 1e-2)])
def test_native_update(backbone, benchmark, rate):
    """SGD with momentum 0.9 at one rate for all leaves: two steps in NumPy."""
    setup = make_setup(
        learner__preset="native",
        learner__sd_lora__magnitude_rate_factor=0.5,
        benchmark=benchmark,
    )
    update = sd_lora.update(setup)
    assert update.schedule is not None
    assert {update.schedule(epoch, 20) for epoch in range(20)} == {1.0}
    _, frozen, trained = task_under_way(setup, backbone, 1)
    optimizer = update.initialise(trained)
    gradient = jax.jit(jax.grad(partial(sd_lora.loss, setup), argnums=2))
    expected = float64(trained)
    momentum = jax.tree.map(np.zeros_like, expected)
    for step in range(2):
        batch = make_batch(step, classes=3)
        slopes = float64(gradient(backbone, frozen, trained, batch))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slopes)
        for part, factor in (("increment", 1.0), ("head", 1.0), ("magnitudes", 0.5)):
            expected[part] = jax.tree.map(
                lambda p, m, f=factor: p - rate * f * m, expected[part], momentum[part]
            )
        trained, optimizer, _ = update.step(backbone, frozen, trained, optimizer, batch, 1.0)
    for ours, reference in zip(*map(jax.tree.leaves, (trained, expected)), strict=True):
        np.testing.assert_allclose(ours, reference, atol=2e-6)


def test_protocol_is_adam_with_magnitudes_at_the_rate_of_increments(backbone):
    setup = make_setup(learner__sd_lora__magnitude_rate_factor=3.0)
    update = sd_lora.update(setup)
    assert update.schedule is None
    _, frozen, trained = task_under_way(setup, backbone, 1)
    before = float64(trained)
    stepped, _, _ = update.step(
        backbone, frozen, trained, update.initialise(trained), make_batch(classes=3), 1.0
    )
    moved = jax.tree.map(lambda new, old: np.abs(np.asarray(new) - old), stepped, before)
    # Adam's first step has the length of the rate.
    np.testing.assert_allclose(moved["magnitudes"][:2], 1.5e-3, rtol=1e-2)
    assert moved["magnitudes"][2] == 0
    np.testing.assert_allclose(np.median(moved["increment"]["value"]["B"]), 5e-4, rtol=1e-2)
    np.testing.assert_allclose(np.median(moved["head"].weight), 5e-3, rtol=1e-2)


@pytest.mark.parametrize("field", ["magnitude", "magnitude_rate_factor"])
def test_impossible_settings_are_named(field):
    config = base.get_config()
    config.learner.sd_lora[field] = -1.0
    with pytest.raises(InputError, match=rf"^config\.learner\.sd_lora\.{field}: expected "):
        configuration.validate(config)


def test_it_is_found_by_its_name():
    assert learners.find("sd_lora") is sd_lora
