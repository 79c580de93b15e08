"""InfLoRA: where A points, how the memory grows, and what training leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax import learners
from fdc_jax.learners import inflora, training
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import increments, vit
from tests.learners import small_stream
from tests.learners.small_stream import RANK, TINY, float64, make_batch, make_setup

PARTS = ("key", "value")


@pytest.fixture(scope="module")
def update():
    return inflora.update(make_setup())


def random_moment(seed, width=16, decay=0.7, rank=None):
    """A second moment with a falling spectrum in a random basis."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0]
    values = decay ** np.arange(width) * rng.uniform(0.5, 1.5, width)
    values[width if rank is None else rank :] = 0.0
    return basis * values @ basis.T


def projector(basis):
    return basis @ basis.T


# The design of A ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 9])
def test_design_takes_the_leading_directions_outside_the_memory(size):
    moment = random_moment(0)
    memory = np.linalg.qr(np.random.default_rng(1).normal(size=(16, size)))[0]
    A = inflora.design(moment, memory, 4)
    np.testing.assert_allclose(A.T @ A, np.eye(4) / 3, atol=1e-12)
    np.testing.assert_allclose(memory.T @ A, 0, atol=1e-12)
    # Left singular vectors of (I - P) R are eigenvectors of (I - P) R R (I - P).
    outside = (np.eye(16) - projector(memory)) @ moment
    vectors = np.linalg.eigh(outside @ outside.T)[1][:, ::-1][:, :4]
    np.testing.assert_allclose(3 * projector(A), projector(vectors), atol=1e-8)


def test_design_never_points_into_the_memory():
    """Inputs of rank 3, two of whose directions are in the memory, have one direction to give."""
    moment = random_moment(2, rank=3)
    memory = np.linalg.svd(moment)[0][:, :2]
    A = inflora.design(moment, memory, 4)
    np.testing.assert_allclose(memory.T @ A, 0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(A[:, 0]), 3**-0.5, atol=1e-12)


# The memory --------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.floats(0.4, 0.99))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_first_memory_stays_below_the_threshold(seed, wanted, decay):
    moment = random_moment(seed, decay=decay)
    memory = inflora.first_memory(moment, wanted)
    values = np.sort(np.linalg.eigvalsh(moment))[::-1]
    size, reached = 0, 0.0
    for value in values:
        reached += value**2 / np.sum(values**2)
        if reached >= wanted:
            break
        size += 1
    if abs(reached - wanted) > 1e-9:
        assert memory.shape == (16, max(size, 1))
    np.testing.assert_allclose(memory.T @ memory, np.eye(memory.shape[1]), atol=1e-12)
    share = np.sum((memory.T @ moment) ** 2) / np.sum(moment**2)
    assert share < wanted + 1e-9 or memory.shape[1] == 1


@given(st.integers(0, 10**6), st.floats(0.3, 0.9999), st.floats(0.4, 0.99))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_grown_memory_reaches_the_threshold_and_no_further(seed, wanted, decay):
    old = inflora.first_memory(random_moment(seed, decay=decay), wanted)
    moment = random_moment(seed + 1, decay=decay)
    new = inflora.grown_memory(moment, old, wanted)

    def share(basis):
        return np.sum((projector(basis) @ moment) ** 2) / np.sum(moment**2)

    np.testing.assert_array_equal(new[:, : old.shape[1]], old)
    np.testing.assert_allclose(new.T @ new, np.eye(new.shape[1]), atol=1e-7)
    assert share(new) >= wanted - 1e-12
    if new.shape[1] > old.shape[1]:
        assert share(new[:, :-1]) < wanted
    again = inflora.grown_memory(moment, new, min(wanted, share(new)) - 1e-9)
    assert again is new


def test_memory_never_exceeds_the_width():
    memory = np.eye(6)[:, :4]
    moment = random_moment(3, width=6, decay=0.9)
    grown = inflora.grown_memory(moment, memory, 1.0)
    assert grown.shape == (6, 6)
    np.testing.assert_allclose(projector(grown), np.eye(6), atol=1e-9)


def dual_gpm(moments, thresholds):
    """The published rule: the complement is kept once it is the smaller of the two."""
    basis, occupied, width = None, True, len(moments[0])
    for moment, wanted in zip(moments, thresholds, strict=True):
        total = np.sum(moment**2)
        if basis is None:
            left, values, _ = np.linalg.svd(moment)
            size = max(int(np.sum(np.cumsum(values**2) / total < wanted)), 1)
            assert size < width / 2
            basis = left[:, :size]
        elif occupied:
            left, values, _ = np.linalg.svd(moment - projector(basis) @ moment)
            held, extra = 1 - np.sum(values**2) / total, 0
            while held < wanted:
                held += values[extra] ** 2 / total
                extra += 1
            basis = np.concatenate([basis, left[:, :extra]], axis=1)
        else:
            left, values, _ = np.linalg.svd(projector(basis) @ moment)
            free, taken = np.sum(values**2) / total, 0
            while free >= 1 - wanted:
                free -= values[taken] ** 2 / total
                taken += 1
            if taken:
                rest = basis - projector(left[:, :taken]) @ basis
                basis = np.linalg.svd(rest)[0][:, : basis.shape[1] - taken]
        if occupied and basis.shape[1] > width / 2:
            basis = np.linalg.svd(basis)[0][:, basis.shape[1] :]
            occupied = False
    return projector(basis) if occupied else np.eye(width) - projector(basis), occupied


@pytest.mark.parametrize("seed", range(3))
def test_growing_alone_equals_the_rule_that_swaps_to_the_complement(seed):
    moments = [random_moment(10 * seed + task, width=24, decay=0.75) for task in range(8)]
    thresholds = np.linspace(0.7, 0.97, 8)
    memory = inflora.first_memory(moments[0], thresholds[0])
    for task in range(1, 8):
        memory = inflora.grown_memory(moments[task], memory, thresholds[task])
    expected, occupied = dual_gpm(moments, thresholds)
    assert not occupied and 12 < memory.shape[1] < 24
    np.testing.assert_allclose(projector(memory), expected, atol=1e-8)


def test_threshold_rises_towards_lame_without_reaching_it():
    fields = dict(learner__inflora__lamb=0.95, learner__inflora__lame=1.0)
    chosen = make_setup(**fields).config.learner.inflora
    found = [inflora.threshold(chosen, task, 20) for task in range(20)]
    np.testing.assert_allclose(found, 0.95 + 0.0025 * np.arange(20))
    default = make_setup().config.learner.inflora
    assert inflora.threshold(default, 9, 10) == pytest.approx(0.998)


# Schedule and rates ------------------------------------------------------------------------------


def test_schedule_is_a_quarter_wave():
    """Against the factors that the authors' scheduler gave when it was run."""
    found = [training.quarter_cosine(epoch, 20) for epoch in (0, 1, 2, 18, 19)]
    np.testing.assert_allclose(found, [1, 1, 0.997, 0.178, 0.097], atol=6e-4)
    of_five = [training.quarter_cosine(epoch, 5) for epoch in range(5)]
    np.testing.assert_allclose(of_five, [1, 1, 0.925, 0.713, 0.394], atol=6e-4)
    assert sum(training.quarter_cosine(epoch, 20) for epoch in range(20)) == pytest.approx(
        13.70, abs=5e-3
    )
    assert training.quarter_cosine(0, 1) == 1.0
    assert inflora.update(make_setup()).schedule is training.quarter_cosine
    # Any learner that follows `train` can have it.
    again = [training.learning_rate_factor("quarter_cosine", epoch, 20) for epoch in (0, 2, 19)]
    assert again == [found[0], found[2], found[4]]


@pytest.mark.parametrize(
    ("preset", "rates"), [("protocol", (5e-4, 5e-3)), ("native", (5e-4, 5e-4))]
)
def test_first_step_of_adam_is_the_learning_rate(backbone, preset, rates):
    setup = make_setup(learner__preset=preset)
    state = inflora.initial_state(setup)
    frozen, trained = inflora.start(setup, backbone, state, 0, jax.random.key(0))
    frozen["A"] = small_stream.random_like(frozen["A"], 1)
    before = small_stream.copy(trained)
    update = inflora.update(setup)
    after, _, _ = update.step(
        backbone, frozen, trained, update.initialise(trained), make_batch(), 1.0
    )
    for part, rate in zip(("increment", "head"), rates, strict=True):
        moved = jax.tree.map(lambda a, b: np.abs(a - b), after[part], before[part])
        moved = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(moved)])
        assert np.median(moved[moved > 0]) == pytest.approx(rate, rel=0.02)


# Three tasks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectory(backbone, update):
    """What a run over three tasks passes through."""
    setup = make_setup(learner__inflora__lamb=0.9998, learner__inflora__lame=1.0)
    state = inflora.initial_state(setup)
    steps = []
    for task in range(3):
        before = state
        state, frozen, trained, images = small_stream.train(
            inflora, setup, backbone, state, task, update, steps=3, rate=40.0
        )
        designed = state
        state = inflora.after_task(setup, backbone, state, task, frozen, trained, images)
        steps.append((before, designed, frozen, trained, images, state))
    return setup, steps


def bases(state):
    memory, sizes = float64(state.memory), np.asarray(state.memory_size)
    return [columns[:, :size] for columns, size in zip(memory, sizes, strict=True)]


def test_A_avoids_the_memory_and_is_shared_by_key_and_value(trajectory):
    _, steps = trajectory
    for task, (before, designed, *_) in enumerate(steps):
        A = float64(designed.increments["key"]["A"])[task]
        np.testing.assert_array_equal(designed.increments["value"]["A"][task], A)
        for block, memory in enumerate(bases(before)):
            assert (memory.shape[1] > 0) == (task > 0)
            np.testing.assert_allclose(A[block].T @ A[block], np.eye(RANK) / 3, atol=1e-5)
            np.testing.assert_allclose(memory.T @ A[block], 0, atol=1e-5)


def test_A_comes_from_the_tasks_inputs_before_training(backbone, trajectory):
    setup, steps = trajectory
    for task, (before, designed, _, _, images, _) in enumerate(steps):
        moments, _ = attention_input_moments(
            setup.model,
            backbone,
            inflora.encoder(setup, backbone, before, task),
            images.augmented(),
        )
        for block, memory in enumerate(bases(before)):
            outside = (np.eye(TINY.width) - projector(memory)) @ float64(moments[block])
            vectors = np.linalg.svd(outside)[0][:, :RANK]
            A = float64(designed.increments["key"]["A"])[task, block]
            np.testing.assert_allclose(3 * projector(A), projector(vectors), atol=1e-4)


def test_training_leaves_A_and_earlier_tasks_alone(trajectory):
    _, steps = trajectory
    for task, (before, designed, frozen, trained, _, after) in enumerate(steps):
        for part in PARTS:
            np.testing.assert_array_equal(
                after.increments[part]["A"][task], designed.increments[part]["A"][task]
            )
            np.testing.assert_array_equal(
                after.increments[part]["B"][task], trained["increment"][part]
            )
            assert np.abs(after.increments[part]["B"][task]).max() > 1e-3
        np.testing.assert_array_equal(frozen["A"], designed.increments["key"]["A"][task])
        for old, new in zip(
            jax.tree.leaves((before.increments, before.heads)),
            jax.tree.leaves((after.increments, after.heads)),
            strict=True,
        ):
            np.testing.assert_array_equal(old[:task], new[:task])
            np.testing.assert_array_equal(new[task + 1 :], 0)


def test_increments_do_nothing_to_stored_inputs(trajectory):
    _, steps = trajectory
    for task, (before, *_, after) in enumerate(steps[1:], start=1):
        change = increments.products(increments.select(after.increments, task))
        for part in PARTS:
            for block, memory in enumerate(bases(before)):
                # Kernels act from the right: x W.
                assert np.abs(memory.T @ float64(change[part][block])).max() < 1e-5
                assert np.abs(change[part][block]).max() > 1e-3


def test_memory_holds_the_inputs_after_training(backbone, trajectory):
    setup, steps = trajectory
    for task, (before, designed, _, _, images, after) in enumerate(steps):
        moments, _ = attention_input_moments(
            setup.model,
            backbone,
            inflora.encoder(setup, backbone, after, task + 1),
            images.augmented(),
        )
        untrained, _ = attention_input_moments(
            setup.model,
            backbone,
            inflora.encoder(setup, backbone, designed, task + 1),
            images.augmented(),
        )
        assert np.abs(moments[1:] - untrained[1:]).max() > 1e-4
        wanted = 0.9998 + 0.0002 * task / 3
        for block, (old, new) in enumerate(zip(bases(before), bases(after), strict=True)):
            moment = float64(moments[block])
            np.testing.assert_allclose(new.T @ new, np.eye(new.shape[1]), atol=1e-5)
            np.testing.assert_array_equal(after.memory[block, :, new.shape[1] :], 0)
            np.testing.assert_array_equal(new[:, : old.shape[1]], old)
            share = np.sum((projector(new) @ moment) ** 2) / np.sum(moment**2)
            if task:
                assert share >= wanted - 1e-6
            else:
                assert share < wanted or new.shape[1] == 1
            expected = (
                inflora.grown_memory(moment, old, wanted)
                if task
                else inflora.first_memory(moment, wanted)
            )
            np.testing.assert_allclose(projector(new), projector(expected), atol=1e-4)
    assert np.all(np.asarray(steps[2][-1].memory_size) > np.asarray(steps[0][-1].memory_size))


def test_features_are_continuous_over_the_ends_of_tasks(backbone, trajectory):
    setup, steps = trajectory
    images = make_batch(77).images
    for task, (before, designed, frozen, trained, _, after) in enumerate(steps):
        ended = small_stream.encode(
            setup, backbone, images, inflora.encoder(setup, backbone, before, task)
        )
        redesigned = small_stream.encode(
            setup, backbone, images, inflora.encoder(setup, backbone, designed, task + 1)
        )
        np.testing.assert_array_equal(ended, redesigned)
        increment = vit.Increment(
            key=vit.Factors(A=frozen["A"], B=trained["increment"]["key"]),
            value=vit.Factors(A=frozen["A"], B=trained["increment"]["value"]),
        )
        factored = small_stream.encode(setup, backbone, images, frozen["kernels"], increment)
        merged = small_stream.encode(
            setup, backbone, images, inflora.encoder(setup, backbone, after, task + 1)
        )
        np.testing.assert_allclose(factored, merged, atol=1e-4)
        assert np.abs(merged - ended).max() > 1e-3


def test_loss_is_over_the_tasks_own_classes(backbone, trajectory):
    setup, steps = trajectory
    _, _, frozen, trained, _, after = steps[1]
    batch = make_batch(5, size=6, classes=3, padding=2)
    kernels = float64(inflora.encoder(setup, backbone, after, 2))
    features = small_stream.reference_features(backbone, batch.images, kernels)
    expected = small_stream.reference_cross_entropy(
        features[:4], trained["head"], batch.labels[:4], 3
    )
    found = inflora.loss(setup, backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, expected.mean(), rtol=1e-4)


def test_what_is_trained(backbone):
    setup = make_setup((2, 3, 1))
    _, trained = inflora.start(setup, backbone, inflora.initial_state(setup), 1, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    # 184,320 + 769 c for ViT-B/16 at rank 10.
    assert count == 2 * TINY.depth * TINY.width * RANK + 3 * (TINY.width + 1)
    for leaf in jax.tree.leaves(trained["increment"]):
        np.testing.assert_array_equal(leaf, 0)


def test_one_compilation_and_one_size_for_all_tasks(backbone, trajectory, update):
    _, steps = trajectory
    assert update.step._cache_size() == 1
    shapes = [jax.tree.map(jnp.shape, (step[0], step[2], step[3])) for step in steps]
    assert shapes[0] == shapes[1] == shapes[2]


def test_heads_are_without_padding(trajectory):
    setup, steps = trajectory
    found = inflora.heads(setup, steps[-1][-1], 2)
    assert [head.weight.shape for head in found] == [(2, TINY.width), (3, TINY.width)]
    np.testing.assert_array_equal(found[1].bias, steps[1][3]["head"].bias)


def test_inflora_is_found_by_name():
    assert learners.find("inflora") is inflora
    assert isinstance(inflora.update(make_setup()), training.Update)
