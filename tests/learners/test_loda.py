"""LoDA: its directions, its shrinking, its loss, and what a task changes."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from configs import base
from fdc_jax import configuration, heads, learners
from fdc_jax.errors import InputError
from fdc_jax.learners import loda
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import vit
from tests.learners import small_stream
from tests.learners.small_stream import RANK, TINY, float64, make_batch, make_setup
from tests.learners.test_gradient_alignment import Adam, Momentum, random_numbers, reference_batch

PARTS = ("key", "value")


@pytest.fixture(scope="module")
def update():
    return loda.update(make_setup())


def random_moment(seed, width=12, spread=3.0):
    """A second moment with energies over `spread` orders of magnitude."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(width, width)))[0]
    rows = rng.normal(size=(10 * width, width)) * np.logspace(0, -spread / 2, width) @ axes
    return rows.T @ rows / len(rows)


# Directions --------------------------------------------------------------------------------------


def trace_of_ratio(basis, new, old):
    """J(Q) = tr((Q' old Q)^-1 Q' new Q), which does not depend on the basis of a space."""
    return np.trace(np.linalg.solve(basis.T @ old @ basis, basis.T @ new @ basis))


@pytest.mark.parametrize("seed", range(5))
def test_isolated_directions_maximise_the_trace_of_the_ratio(seed):
    new, old = random_moment(seed), random_moment(seed + 50)
    values, vectors = scipy.linalg.eigh(new, old)
    found, jitter = loda.isolated_directions(new, old, 4)
    assert jitter == 0
    np.testing.assert_allclose(found.T @ found, np.eye(4), atol=1e-12)
    best = trace_of_ratio(found, new, old)
    np.testing.assert_allclose(best, values[-4:].sum(), rtol=1e-9)
    angles = scipy.linalg.subspace_angles(found, vectors[:, -4:])
    assert angles.max() < 1e-6
    rng = np.random.default_rng(seed)
    others = [np.linalg.qr(rng.normal(size=(12, 4)))[0] for _ in range(200)]
    others += [np.linalg.qr(found + 0.1 * rng.normal(size=(12, 4)))[0] for _ in range(200)]
    others += [np.linalg.eigh(old)[1][:, :4], np.linalg.eigh(new)[1][:, -4:]]
    assert max(trace_of_ratio(other, new, old) for other in others) < best


def test_general_directions_hold_the_most_energy():
    moment = random_moment(3)
    found = loda.general_directions(moment, 4)
    np.testing.assert_allclose(found.T @ found, np.eye(4), atol=1e-12)
    values = scipy.linalg.eigvalsh(moment)[::-1]
    np.testing.assert_allclose(found.T @ moment @ found, np.diag(values[:4]), atol=1e-12)


@pytest.mark.parametrize(
    ("least", "jitter"),
    [(1e-3, 0.0), (-1e-13, 1e-12), (-3e-11, 1.11e-10), (-2e-5, 1.1111111e-4)],
)
def test_cholesky_adds_growing_multiples_of_the_identity(least, jitter):
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    # With signed axes alone no rounding could decide.
    axes = np.eye(6) if abs(least) < 1e-9 else axes
    matrix = axes @ np.diag([1.0, 0.5, 0.1, 0.1, 0.1, least]) @ axes.T
    root, found = loda.cholesky(matrix)
    assert found == pytest.approx(jitter, rel=1e-6)
    np.testing.assert_allclose(root @ root.T, matrix + jitter * np.eye(6), atol=1e-12)
    np.testing.assert_array_equal(np.triu(root, 1), 0)


def seen_moments(setup, backbone, state, task, images):
    """Second moments of the task's inputs under E_{t-1}, in float64."""
    kernels = loda.encoder(setup, backbone, state, task)
    moments, _ = attention_input_moments(setup.model, backbone, kernels, images.augmented())
    return float64(moments)


@pytest.mark.parametrize("task", [0, 1])
def test_designed_directions(backbone, task):
    setup = make_setup()
    state = loda.initial_state(setup)
    images = small_stream.task_images(make_batch(1), make_batch(2, padding=1))
    # Beyond its first task a stream has moments; here of other noise.
    old = np.zeros((TINY.depth, TINY.width, TINY.width))
    if task > 0:
        old = np.stack([random_moment(block, TINY.width) for block in range(TINY.depth)])
        state = state._replace(
            increments=small_stream.random_like(state.increments, 1),
            moments=jnp.asarray(old, jnp.float32),
        )
        of_pretrained = seen_moments(setup, backbone, state, 0, images)
    old = float64(state.moments)
    new = seen_moments(setup, backbone, state, task, images)
    if task > 0:
        assert np.abs(new - of_pretrained)[1:].max() > 0.1 * np.abs(new).max()
    designed = loda.before_task(setup, backbone, state, task, images)
    np.testing.assert_array_equal(designed.moments, state.moments)
    frozen, trained = loda.start(setup, backbone, designed, task, jax.random.key(0))
    A = {part: float64(trained["increment"]["general"][part]["A"]) for part in PARTS}
    np.testing.assert_array_equal(A["key"], A["value"])
    isolated = float64(frozen["isolated"])
    if task == 0:
        np.testing.assert_array_equal(isolated, 0)
    for block in range(TINY.depth):
        general = A["key"][block]
        np.testing.assert_allclose(general.T @ general, np.eye(RANK) / 3, atol=1e-5)
        both = new[block] + old[block]
        energies = np.linalg.eigvalsh(both)[::-1][:RANK] / 3
        found = general.T @ both @ general
        np.testing.assert_allclose(found, np.diag(energies), atol=1e-5 * energies[0])
        if task > 0:
            one = isolated[block]
            np.testing.assert_allclose(one.T @ one, np.eye(RANK) / 3, atol=1e-5)
            values = scipy.linalg.eigh(new[block], old[block], eigvals_only=True)
            ratio = trace_of_ratio(one, new[block], old[block])
            np.testing.assert_allclose(ratio, values[-RANK:].sum(), rtol=1e-3)


def test_added_jitter_is_logged(backbone, caplog):
    setup = make_setup()
    old = np.tile(np.eye(TINY.width), (TINY.depth, 1, 1))
    old[1, 4, 4] = -1e-6
    state = loda.initial_state(setup)._replace(moments=jnp.asarray(old, jnp.float32))
    with caplog.at_level(logging.WARNING):
        designed = loda.before_task(
            setup, backbone, state, 1, small_stream.task_images(make_batch())
        )
    assert [record.getMessage() for record in caplog.records] == [
        "task 2, block 1: 1.11e-06 was added to the diagonal of the old moment, which is not "
        "positive definite"
    ]
    # The emptiest direction of the past is the most isolated one.
    A = float64(designed.increments["value"]["A"])[1, 1, :, RANK:]
    np.testing.assert_allclose(np.linalg.norm(A[4]), 3**-0.5, rtol=1e-2)


# Shrinking ---------------------------------------------------------------------------------------


def test_shrinkage_minimises_its_objective():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(2, 12, 3))
    old = np.stack([random_moment(0), random_moment(1)])
    new = np.stack([random_moment(2), random_moment(3)])
    found = float64(
        loda.shrinkage(*(jnp.asarray(each, jnp.float32) for each in (A, old, new)), 2.5)
    )
    grid = np.linspace(0, 1, 10001)
    for block in range(2):
        for column in range(3):
            a = A[block, :, column]
            kept, gained = a @ old[block] @ a, a @ new[block] @ a
            objective = kept * grid**2 + 2.5 * gained * (1 - grid) ** 2
            np.testing.assert_allclose(
                found[block, column], grid[np.argmin(objective)], atol=1.01e-4
            )
    assert found.min() > 0 and found.max() < 1 and np.ptp(found) > 0.1


def test_shrinkage_at_its_ends():
    A = jnp.ones((1, 4, 2))
    moment = jnp.eye(4)[None]
    for old, new, expected in [
        (0.0, 1.0, 1.0),
        (0.0, 0.0, 1.0),
        (1.0, 0.0, 0.0),
        (1.0, 1.0, 0.75),
        # A task later than t others of the same energy, each of which counts twice.
        (8.0, 1.0, 3 / (3 + 2 * 4)),
        # Rounding may leave an energy below zero.
        (-1e-6, 1.0, 1.0),
        (1.0, -1e-6, 0.0),
    ]:
        found = loda.shrinkage(A, old * moment, new * moment, 3.0)
        np.testing.assert_allclose(found, np.full((1, 2), expected), atol=1e-6)


# Three tasks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectory(backbone, update):
    """What a run over three tasks passes through."""
    setup = make_setup()
    state = loda.initial_state(setup)
    steps = []
    for task in range(3):
        before = state
        designed, frozen, trained, images = small_stream.train(
            loda, setup, backbone, state, task, update, steps=task + 2, rate=40.0
        )
        state = loda.after_task(setup, backbone, designed, task, frozen, trained, images)
        steps.append((before, designed, frozen, trained, images, state))
    return setup, steps


def expected_kernels(before_kernels, frozen, trained, shrinking, general=0.25, isolated=0.5):
    """W + general scale * sum s_i a_i b_i + isolated scale * A B, written for x W."""
    kernels = {}
    leaves, fixed = float64(trained["increment"]), float64(frozen["isolated"])
    for part in PARTS:
        kernels[part] = np.array(before_kernels[part], np.float64)
        A, B = (leaves["general"][part][name] for name in ("A", "B"))
        for block in range(TINY.depth):
            for i in range(RANK):
                kernels[part][block] += (
                    general * shrinking[part][block, i] * np.outer(A[block, :, i], B[block, i])
                )
            kernels[part][block] += isolated * fixed[block] @ leaves["isolated"][part][block]
    return kernels


def no_shrinking():
    return {part: np.ones((TINY.depth, RANK)) for part in PARTS}


def test_merged_kernels_and_moments(backbone, trajectory):
    """In float64: energies under the unmerged encoder, and both passes added to the old sum."""
    setup, steps = trajectory
    for task, (before, designed, frozen, trained, images, after) in enumerate(steps):
        old = float64(before.moments)
        start = loda.encoder(setup, backbone, before, task)

        def moments_of(kernels, images=images):
            single = {part: jnp.asarray(kernels[part], jnp.float32) for part in PARTS}
            found, _ = attention_input_moments(setup.model, backbone, single, images.augmented())
            return float64(found)

        unmerged = moments_of(expected_kernels(start, frozen, trained, no_shrinking()))
        shrinking = {}
        for part in PARTS:
            A = float64(trained["increment"]["general"][part]["A"])
            kept = np.einsum("ldr,lde,ler->lr", A, old, A)
            gained = np.einsum("ldr,lde,ler->lr", A, unmerged, A)
            shrinking[part] = 3 * gained / (kept + 3 * gained)
        expected = expected_kernels(start, frozen, trained, shrinking)
        found = loda.encoder(setup, backbone, after, task + 1)
        for part in PARTS:
            np.testing.assert_allclose(found[part], expected[part], atol=2e-6)
            if task > 0:
                # Every piece matters.
                for other in (
                    expected_kernels(start, frozen, trained, no_shrinking()),
                    expected_kernels(start, frozen, trained, shrinking, isolated=0.0),
                    expected_kernels(start, frozen, trained, shrinking, general=0.0),
                ):
                    assert np.abs(other[part] - expected[part]).max() > 1e-4
        merged = moments_of(expected)
        np.testing.assert_allclose(after.moments, old + unmerged + merged, rtol=1e-4, atol=1e-4)
        if task > 0:
            assert np.abs(merged - unmerged).max() > 3e-3
            assert max(s.max() for s in shrinking.values()) < 0.9
        np.testing.assert_array_equal(designed.moments, before.moments)


@pytest.mark.parametrize("task", [0, 2])
def test_merging_without_shrinking_leaves_features_as_they_are(backbone, trajectory, task):
    """The first task always, later ones if there was no input before."""
    setup, steps = trajectory
    _, designed, frozen, trained, images, _ = steps[task]
    if task > 0:
        designed = designed._replace(moments=jnp.zeros_like(designed.moments))
    after = loda.after_task(setup, backbone, designed, task, frozen, trained, images)
    probe = make_batch(77).images
    increment = loda._increment(setup, frozen, trained)
    unmerged = small_stream.encode(setup, backbone, probe, frozen["kernels"], increment)
    merged = small_stream.encode(
        setup, backbone, probe, loda.encoder(setup, backbone, after, task + 1)
    )
    np.testing.assert_allclose(merged, unmerged, atol=1e-5)
    logits = [heads.CosineHead(trained["head"]).logits(each) for each in (merged, unmerged)]
    np.testing.assert_allclose(*logits, atol=1e-5)
    begun = small_stream.encode(setup, backbone, probe, frozen["kernels"])
    assert np.abs(unmerged - begun).max() > 1e-2


def test_a_task_starts_where_the_last_one_ended(backbone, trajectory):
    setup, steps = trajectory
    probe = make_batch(77).images
    for task, (before, designed, *_) in enumerate(steps):
        frozen, fresh = loda.start(setup, backbone, designed, task, jax.random.key(3))
        increment = loda._increment(setup, frozen, fresh)
        begun = small_stream.encode(setup, backbone, probe, frozen["kernels"], increment)
        ended = small_stream.encode(
            setup, backbone, probe, loda.encoder(setup, backbone, before, task)
        )
        np.testing.assert_allclose(begun, ended, atol=1e-6)


def test_what_training_moves(backbone, trajectory):
    """A of the general branch in the first task alone, B of the isolated one after it."""
    setup, steps = trajectory
    for task, (_, designed, _, trained, *_) in enumerate(steps):
        frozen, fresh = loda.start(setup, backbone, designed, task, jax.random.key(task))
        for part in PARTS:
            old, new = (each["increment"]["general"][part] for each in (fresh, trained))
            moved = np.abs(np.asarray(new["A"] - old["A"])).max(axis=(1, 2))
            assert np.all(moved > 1e-3) if task == 0 else np.all(moved == 0)
            np.testing.assert_array_equal(old["B"], 0)
            assert np.all(np.abs(new["B"]).max(axis=(1, 2)) > 1e-3)
            old, new = (each["increment"]["isolated"][part] for each in (fresh, trained))
            np.testing.assert_array_equal(old, 0)
            moved = np.abs(np.asarray(new)).max(axis=(1, 2))
            assert np.all(moved == 0) if task == 0 else np.all(moved > 1e-3)
        rows = setup.classes_per_task[task]
        moved = np.abs(np.asarray(trained["head"] - fresh["head"])).max(axis=1)
        assert np.all(moved[:rows] > 1e-3) and np.all(moved[rows:] == 0)
        # The tree names what trains.
        flags = frozen["trains"]["increment"]["general"]
        assert [float(flags[part]["A"]) for part in PARTS] == [float(task == 0)] * 2


def test_earlier_tasks_and_the_backbone_stay(backbone, trajectory):
    _, steps = trajectory
    jax.tree.map(np.testing.assert_array_equal, backbone, small_stream.make_backbone())
    for task, (before, _, _, trained, _, after) in enumerate(steps):
        for old, new in zip(
            jax.tree.leaves((before.increments, before.heads)),
            jax.tree.leaves((after.increments, after.heads)),
            strict=True,
        ):
            np.testing.assert_array_equal(old[:task], new[:task])
            np.testing.assert_array_equal(new[task + 1 :], 0)
        np.testing.assert_array_equal(after.heads[task], trained["head"])


def test_every_encoder_can_be_had_again(backbone, trajectory):
    setup, steps = trajectory
    last = steps[-1][-1]
    for task, (*_, after) in enumerate(steps):
        jax.tree.map(
            np.testing.assert_array_equal,
            loda.encoder(setup, backbone, last, task + 1),
            loda.encoder(setup, backbone, after, task + 1),
        )
    jax.tree.map(
        np.testing.assert_array_equal,
        loda.encoder(setup, backbone, last, 0),
        vit.pretrained_kernels(backbone),
    )


def test_one_compilation_and_one_size_for_all_tasks(trajectory, update):
    _, steps = trajectory
    assert update.step._cache_size() == 1
    shapes = [jax.tree.map(jnp.shape, step[:4]) for step in steps]
    assert shapes[0] == shapes[1] == shapes[2]


def test_what_is_trained(backbone):
    setup = make_setup((2, 3, 1))
    state = loda.initial_state(setup)
    _, trained = loda.start(setup, backbone, state, 1, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    # Two A and four B; the two A stay from the second task on.
    assert count == 6 * TINY.depth * TINY.width * RANK + 3 * TINY.width


def test_start_follows_from_state_task_and_key(backbone, trajectory):
    setup, steps = trajectory
    one, again, other = (
        loda.start(setup, backbone, steps[1][1], 1, jax.random.key(seed)) for seed in (1, 1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert np.any(one[0]["alignment"] != other[0]["alignment"])
    assert np.abs(one[1]["head"] - other[1]["head"]).max() > 1e-3


# Loss, heads and update --------------------------------------------------------------------------


def test_head_starts_small_and_normal(backbone):
    setup = make_setup((40,))
    state = loda.initial_state(setup)
    _, trained = loda.start(setup, backbone, state, 0, jax.random.key(0))
    assert np.std(trained["head"]) == pytest.approx(0.02, rel=0.1)
    assert np.abs(np.mean(trained["head"])) < 0.003


@pytest.mark.parametrize(("scale", "margin"), [(20.0, 0.0), (7.0, 0.15)])
def test_loss_is_cosface_over_the_tasks_own_classes(backbone, trajectory, scale, margin):
    _, steps = trajectory
    setup = make_setup(learner__loda__scale=scale, learner__loda__margin=margin)
    before, _, frozen, trained, *_ = steps[2]
    batch = make_batch(5, size=6, padding=2)
    kernels = expected_kernels(
        loda.encoder(setup, backbone, before, 2), frozen, trained, no_shrinking()
    )
    features = small_stream.reference_features(backbone, batch.images, kernels)
    losses = []
    for feature, label in zip(features[:4], batch.labels[:4], strict=True):
        rows = float64(trained["head"])[:2]
        cosines = rows @ feature / np.linalg.norm(rows, axis=1) / np.linalg.norm(feature)
        own = np.exp(scale * (cosines[label] - margin))
        losses.append(-np.log(own / (own + np.exp(scale * cosines[1 - label]))))
    found = loda.loss(setup, backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, np.mean(losses), rtol=2e-4)


def test_heads_are_unscaled_cosines_without_padding(trajectory):
    setup, steps = trajectory
    final = steps[-1][-1]
    found = loda.heads(setup, final, 3)
    assert [len(head.weight) for head in found] == [2, 3, 2]
    features = np.random.default_rng(0).normal(size=(9, TINY.width)).astype(np.float32)
    for task, head in enumerate(found):
        assert isinstance(head, heads.CosineHead)
        logits = np.asarray(head.logits(features))
        rows = float64(steps[task][3]["head"])[: len(head.weight)]
        expected = features @ rows.T
        expected /= np.linalg.norm(features, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
        np.testing.assert_allclose(logits, expected, atol=1e-6)
        assert np.abs(logits).max() <= 1 + 1e-6
        # A row is its own best match.
        np.testing.assert_allclose(np.diag(head.logits(head.weight)), 1.0, atol=1e-6)
        rescaled = heads.CosineHead(5.0 * head.weight).logits(0.1 * features)
        np.testing.assert_allclose(rescaled, logits, atol=1e-6)


@pytest.mark.parametrize("task", [0, 1])
def test_batches_in_half_steps(backbone, trajectory, update, task):
    """Two batches against the rules in float64, on gradients of the loss."""
    setup, steps = trajectory
    _, _, frozen, trained, *_ = steps[task]
    classes = setup.classes_per_task[task]
    gradient = jax.jit(jax.value_and_grad(partial(loda.loss, setup), argnums=2))
    rates = {"increment": 2 * 5e-4, "head": 2 * 5e-3}
    expected, adam, trains = float64(trained), Adam(), float64(frozen["trains"])
    found = small_stream.copy(trained)
    progress = update.initialise(found)
    for done in range(2):
        batch = make_batch(40 + done, size=4, classes=classes, padding=1)
        length, groups = random_numbers(frozen, done, batch, 0.3)

        def slopes(leaves, weights, batch=batch):
            single = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), leaves)
            value, slope = gradient(backbone, frozen, single, batch._replace(weights=weights))
            return float(value), float64(slope)

        expected, value = reference_batch(slopes, adam, expected, groups, length, rates, trains)
        found, progress, found_value = update.step(backbone, frozen, found, progress, batch, 2.0)
        np.testing.assert_allclose(found_value, value, rtol=1e-3)
    # Adam divides by the size of a gradient; where that is rounding, so is the step.
    for ours, theirs, start in zip(
        *map(jax.tree.leaves, (found, expected, float64(trained))), strict=True
    ):
        difference = np.abs(np.asarray(ours, np.float64) - theirs)
        length = np.abs(theirs - start).max()
        assert np.quantile(difference, 0.99) <= 0.02 * length
        assert np.median(difference) <= 1e-3 * length


def captured(monkeypatch, **fields):
    """Returns what the update of a configuration asks alignment for."""
    arguments = {}

    def aligned_update(setup, loss, rates, transformation, look_ahead, schedule=None):
        arguments.update(locals())

    monkeypatch.setattr(loda, "aligned_update", aligned_update)
    loda.update(make_setup(**fields))
    return arguments


def follow(transformation, theirs, steps=3):
    """Checks a transformation against a reference on random gradients."""
    rng = np.random.default_rng(0)
    parameters = {"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)}
    single = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parameters)
    state = transformation.init(single)
    for _ in range(steps):
        gradients = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), parameters)
        directions, state = transformation.update(
            jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradients), state, single
        )
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-4),
            directions,
            theirs(gradients, parameters),
        )


def test_protocol(monkeypatch):
    found = captured(monkeypatch)
    assert found["rates"] == {"increment": 5e-4, "head": 5e-3}
    assert found["look_ahead"] == 0.3 and found["schedule"] is None
    assert found["loss"] is loda.loss
    follow(found["transformation"], Adam())
    assert captured(monkeypatch, learner__loda__look_ahead=0.0)["look_ahead"] == 0.0
    assert captured(monkeypatch, learner__loda__alignment=False)["look_ahead"] is None


@pytest.mark.parametrize(
    ("benchmark", "rate", "decay"),
    [
        ("cifar100", 5e-3, 5e-4),
        ("imagenet_a", 1e-2, 5e-4),
        ("imagenet_r", 2e-2, 0.0),
        ("cub200", 5e-3, 5e-4),
        ("omnibench", 1e-2, 5e-4),
    ],
)
def test_native(monkeypatch, benchmark, rate, decay):
    """SGD with momentum and decay, one rate for all, half a cosine wave."""
    native = partial(captured, monkeypatch, learner__preset="native", benchmark=benchmark)
    found = native()
    assert found["rates"] == {"increment": rate, "head": rate}
    assert found["look_ahead"] == 0.3
    schedule = [found["schedule"](epoch, 20) for epoch in range(20)]
    np.testing.assert_allclose(schedule, (1 + np.cos(np.pi * np.arange(20) / 20)) / 2)
    follow(found["transformation"], Momentum(decay))
    chosen = native(learner__loda__native_learning_rate=0.125)
    assert chosen["rates"] == {"increment": 0.125, "head": 0.125}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("general_scale", -1.0),
        ("isolated_scale", -1.0),
        ("merge_gamma", 0.0),
        ("scale", 0.0),
        ("margin", -0.1),
        ("look_ahead", -0.1),
        ("native_learning_rate", -1.0),
    ],
)
def test_impossible_settings_are_named(field, value):
    config = base.get_config()
    config.learner.loda[field] = value
    with pytest.raises(InputError, match=rf"^config\.learner\.loda\.{field}: expected "):
        configuration.validate(config)


def test_it_is_found_by_its_name():
    assert learners.find("loda") is loda
