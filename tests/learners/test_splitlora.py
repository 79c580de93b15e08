"""SplitLoRA: the split of directions, where A is drawn, and what training leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax import learners
from fdc_jax.errors import InputError
from fdc_jax.learners import splitlora
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import increments
from tests.learners import small_stream
from tests.learners.small_stream import RANK, TINY, float64, make_batch, make_setup

PARTS = ("key", "value")


@pytest.fixture(scope="module")
def update():
    return splitlora.update(make_setup())


def random_spectrum(seed, width=48):
    rng = np.random.default_rng(seed)
    decay = rng.uniform(0.6, 1.0)
    return np.sort(decay ** np.arange(width) * rng.uniform(0.1, 1.0, width))[::-1]


# The split ---------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 5, 10, 20]), st.sampled_from([1.0, 5.0, 20.0]))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_split_counts_shares_above_a_cut_off(seed, tasks_done, alpha):
    """The minimum in closed form: directions from the second on with more than alpha / (t d)."""
    values = random_spectrum(seed)
    shares = values / values.sum()
    objective = [
        tasks_done * (1 - shares[: i + 1].sum()) - alpha * (48 - i) / 48 for i in range(48)
    ]
    best = min(range(48), key=lambda i: objective[i])
    above = int(np.sum(shares[1:] > alpha / (tasks_done * 48)))
    found = splitlora.num_major(values, tasks_done, alpha)
    assert found == max(best, 1) + 1 == max(above, 1) + 1


def test_split_grows_with_tasks_and_shrinks_with_alpha():
    values = random_spectrum(3)
    over_tasks = [splitlora.num_major(values, done, 5.0) for done in range(1, 21)]
    over_alpha = [splitlora.num_major(values, 10, alpha) for alpha in range(1, 41)]
    assert over_tasks == sorted(over_tasks) and over_tasks[0] < over_tasks[-1]
    assert over_alpha == sorted(over_alpha, reverse=True) and over_alpha[0] > over_alpha[-1]
    assert splitlora.num_major(values, 1, 1e6) == 2


# The draw of A -----------------------------------------------------------------------------------


def state_with_directions(setup, seed=0, major=(2, 5, 21)):
    rng = np.random.default_rng(seed)
    shape = (TINY.depth, TINY.width, TINY.width)
    directions = np.linalg.qr(rng.normal(size=shape))[0]
    return splitlora.initial_state(setup)._replace(
        directions=jnp.asarray(directions, jnp.float32), major=jnp.asarray(major, jnp.int32)
    )


@pytest.mark.parametrize("task", [1, 2])
def test_A_lies_in_the_minor_subspace_and_shrinks_with_tasks(backbone, task):
    setup = make_setup()
    state = state_with_directions(setup)
    frozen, _ = splitlora.start(setup, backbone, state, task, jax.random.key(5))
    first, _ = splitlora.start(setup, backbone, state, 0, jax.random.key(5))
    for part in PARTS:
        A, reference = float64(frozen["A"][part]), float64(first["A"][part])
        for block, major in enumerate((2, 5, 21)):
            leading = float64(state.directions)[block, :, :major]
            norm = np.linalg.norm(A[block])
            assert np.linalg.norm(leading.T @ A[block]) <= 1e-5 * norm
            expected = np.linalg.norm(reference[block]) / (task + 1)
            np.testing.assert_allclose(norm, expected, rtol=1e-5)
            assert np.linalg.matrix_rank(A[block], tol=1e-4 * norm) == RANK
    # Key and value share the subspace but not the draw.
    assert np.abs(float64(frozen["A"]["key"]) - float64(frozen["A"]["value"])).max() > 1e-2


def test_first_A_is_uniform(backbone):
    setup = make_setup(train__rank=20)
    frozen, _ = splitlora.start(
        setup, backbone, splitlora.initial_state(setup), 0, jax.random.key(0)
    )
    bound = TINY.width**-0.5
    for part in PARTS:
        A = np.asarray(frozen["A"][part])
        assert np.abs(A).max() < bound and np.abs(A).max() > 0.99 * bound
        assert np.linalg.norm(A) ** 2 == pytest.approx(TINY.depth * 20 / 3, rel=0.1)


def test_draw_is_spread_over_the_whole_minor_subspace():
    state = state_with_directions(make_setup())
    reference = jnp.ones((TINY.depth, TINY.width, 4000))
    A = float64(splitlora.within_minor(jax.random.key(0), state, reference, 1))
    for block, major in enumerate((2, 5, 21)):
        coordinates = float64(state.directions)[block].T @ A[block]
        variances = np.mean(coordinates**2, axis=1)
        np.testing.assert_allclose(
            variances[major:], 0.25 * TINY.width / (TINY.width - major), rtol=0.15
        )


def test_A_follows_from_the_key(backbone):
    setup = make_setup()
    state = state_with_directions(setup)
    first, again, other = (
        splitlora.start(setup, backbone, state, 1, jax.random.key(seed))[0]["A"]["key"]
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def test_too_few_minor_directions(backbone):
    setup = make_setup()
    state = state_with_directions(setup, major=(2, 23, 5))
    assert splitlora.before_task(setup, backbone, state, 0, None) is state
    with pytest.raises(
        InputError,
        match=r"splitlora.alpha: expected at least 2 .*leaves 1 of 24 in block 1 after 3",
    ):
        splitlora.before_task(setup, backbone, state, 3, None)
    ample = state_with_directions(setup)
    assert splitlora.before_task(setup, backbone, ample, 3, None) is ample


# Three tasks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectory(backbone, update):
    """What a run over three tasks passes through."""
    setup = make_setup(learner__splitlora__alpha=0.05)
    state = splitlora.initial_state(setup)
    steps = []
    for task in range(3):
        before = state
        _, frozen, trained, images = small_stream.train(
            splitlora, setup, backbone, state, task, update, steps=task + 2, rate=40.0
        )
        state = splitlora.after_task(setup, backbone, state, task, frozen, trained, images)
        steps.append((before, frozen, trained, images, state))
    return setup, steps


def test_moments_stream_over_all_tasks(backbone, trajectory):
    """Every task's inputs count by its tokens, each seen by the encoder of that task's end."""
    setup, steps = trajectory
    total, tokens, seen = 0.0, 0, 0
    for task, (_, _, _, images, after) in enumerate(steps):
        kernels = splitlora.encoder(setup, backbone, after, task + 1)
        moments, count = attention_input_moments(setup.model, backbone, kernels, images.augmented())
        total, tokens = total + count * float64(moments), tokens + count
        seen += sum(len(batch.images) for batch in images.augmented())
        assert float(after.tokens) == tokens == 10 * seen
        np.testing.assert_allclose(after.moments, total / tokens, atol=1e-5)


def test_directions_split_the_moments(trajectory):
    _, steps = trajectory
    for task, (*_, after) in enumerate(steps):
        for block in range(TINY.depth):
            directions = float64(after.directions)[block]
            moment = float64(after.moments)[block]
            values = np.sort(np.linalg.eigvalsh(moment))[::-1]
            np.testing.assert_allclose(directions.T @ directions, np.eye(TINY.width), atol=1e-5)
            np.testing.assert_allclose(
                directions.T @ moment @ directions, np.diag(values), atol=1e-4
            )
            assert after.major[block] == splitlora.num_major(values, task + 1, 0.05)
    assert np.asarray(steps[-1][-1].major).max() > 3


def test_increments_stay_in_the_minor_subspace(trajectory):
    _, steps = trajectory
    for task, (before, _, _, _, after) in enumerate(steps[1:], start=1):
        change = increments.products(increments.select(after.increments, task))
        for part in PARTS:
            for block in range(TINY.depth):
                major = float64(before.directions)[block, :, : int(before.major[block])]
                matrix = float64(change[part][block])
                assert np.linalg.matrix_rank(matrix, tol=1e-5) <= RANK
                # Kernels act from the right: x W.
                assert np.abs(major.T @ matrix).max() < 1e-5 * np.abs(matrix).max() + 1e-8
                assert np.abs(matrix).max() > 1e-4


def test_training_leaves_A_and_earlier_tasks_alone(trajectory):
    _, steps = trajectory
    for task, (before, frozen, trained, _, after) in enumerate(steps):
        for part in PARTS:
            np.testing.assert_array_equal(after.increments[part]["A"][task], frozen["A"][part])
            np.testing.assert_array_equal(
                after.increments[part]["B"][task], trained["increment"][part]
            )
        for old, new in zip(
            jax.tree.leaves((before.increments, before.heads)),
            jax.tree.leaves((after.increments, after.heads)),
            strict=True,
        ):
            np.testing.assert_array_equal(old[:task], new[:task])
            np.testing.assert_array_equal(new[task + 1 :], 0)


def test_a_task_starts_where_the_last_one_ended(backbone, trajectory):
    setup, steps = trajectory
    images = make_batch(77).images
    for task, (before, *_) in enumerate(steps):
        frozen, fresh = splitlora.start(setup, backbone, before, task, jax.random.key(3))
        increment = {
            part: {"A": frozen["A"][part], "B": fresh["increment"][part]} for part in PARTS
        }
        begun = small_stream.encode(setup, backbone, images, frozen["kernels"], increment)
        ended = small_stream.encode(
            setup, backbone, images, splitlora.encoder(setup, backbone, before, task)
        )
        np.testing.assert_allclose(begun, ended, atol=1e-6)
        assert np.abs(fresh["head"].weight).max() <= TINY.width**-0.5


def test_one_compilation_and_one_size_for_all_tasks(trajectory, update):
    _, steps = trajectory
    assert update.step._cache_size() == 1
    shapes = [jax.tree.map(jnp.shape, step[:3]) for step in steps]
    assert shapes[0] == shapes[1] == shapes[2]


def test_what_is_trained(backbone):
    setup = make_setup((2, 3, 1))
    state = splitlora.initial_state(setup)
    _, trained = splitlora.start(setup, backbone, state, 1, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert count == 2 * TINY.depth * TINY.width * RANK + 3 * (TINY.width + 1)


# Loss and update ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 1.0),
        ({"learner__preset": "native"}, 30.0),
        ({"learner__splitlora__loss_temperature": 4.0}, 4.0),
        ({"learner__preset": "native", "learner__splitlora__loss_temperature": 4.0}, 4.0),
    ],
)
def test_loss_divides_logits_by_the_temperature(backbone, trajectory, fields, temperature):
    _, steps = trajectory
    setup = make_setup(**fields)
    _, frozen, trained, _, after = steps[1]
    batch = make_batch(5, size=6, classes=3, padding=2)
    kernels = float64(splitlora.encoder(setup, backbone, after, 2))
    features = small_stream.reference_features(backbone, batch.images, kernels)
    cooler = jax.tree.map(lambda leaf: leaf / temperature, trained["head"])
    expected = small_stream.reference_cross_entropy(features[:4], cooler, batch.labels[:4], 3)
    found = splitlora.loss(setup, backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, expected.mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("preset", "rates", "decay"),
    [("protocol", (5e-4, 5e-3), 0.0), ("native", (1e-3, 1e-2), 5e-5)],
)
def test_first_step(backbone, preset, rates, decay):
    """Adam moves each entry by its rate; AdamW takes rate * decay of the entry beside that."""
    setup = make_setup(learner__preset=preset)
    state = splitlora.initial_state(setup)
    frozen, trained = splitlora.start(setup, backbone, state, 0, jax.random.key(0))
    # Large entries make decay visible; these rows belong to no class and have no gradient.
    head = trained["head"]
    trained["head"] = head._replace(weight=head.weight.at[2].set(1e4))
    before = small_stream.copy(trained)
    update = splitlora.update(setup)
    after, _, _ = update.step(
        backbone, frozen, trained, update.initialise(trained), make_batch(), 1.0
    )
    moved = np.abs(np.asarray(after["increment"]["value"] - before["increment"]["value"]))
    assert np.median(moved[moved > 0]) == pytest.approx(rates[0], rel=0.02)
    moved = float64(before["head"].weight - after["head"].weight)
    np.testing.assert_allclose(np.abs(moved[:2]), rates[1], rtol=0.02)
    np.testing.assert_allclose(moved[2], rates[1] * decay * 1e4, rtol=0.15)
    assert (update.schedule is splitlora.milestones) == (preset == "native")


def test_native_schedule_over_ten_epochs():
    found = [splitlora.milestones(epoch, 10) for epoch in range(10)]
    np.testing.assert_allclose(found, [1] * 4 + [0.1] * 3 + [0.01] * 3)
    assert [splitlora.milestones(epoch, 1) for epoch in range(1)] == [1]


def test_heads_are_without_padding(trajectory):
    setup, steps = trajectory
    found = splitlora.heads(setup, steps[-1][-1], 2)
    assert [head.weight.shape for head in found] == [(2, TINY.width), (3, TINY.width)]
    np.testing.assert_array_equal(found[1].bias, steps[1][2]["head"].bias)


def test_splitlora_is_found_by_name():
    assert learners.find("splitlora") is splitlora
