"""Low-rank increments: products are summed, merging changes nothing, one compilation for all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdc_jax.model import increments, vit

TINY = vit.Variant(width=24, depth=3, heads=3, patch=4)
SIDE, RANK, NUM_TASKS = 12, 2, 4


@pytest.fixture(scope="module")
def params():
    shapes = vit.parameter_shapes(vit.VisionTransformer(TINY), SIDE)
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(
        structure, [jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32) for leaf in leaves]
    )


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).integers(0, 256, (4, SIDE, SIDE, 3), np.uint8)


@pytest.fixture(scope="module")
def encode(params):
    model = vit.VisionTransformer(TINY)
    return jax.jit(
        lambda images, kernels, increment: model.apply(
            {"params": params}, images, kernels, increment
        )
    )


@pytest.fixture(scope="module")
def tasks():
    """One increment a task with both factors random."""
    rng = np.random.default_rng(2)
    shapes = increments.initialise(jax.random.key(0), TINY, RANK)
    return [
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), shapes)
        for _ in range(NUM_TASKS)
    ]


@pytest.fixture(scope="module")
def stack(tasks):
    filled = increments.empty_stack(TINY, RANK, NUM_TASKS)
    for task, increment in enumerate(tasks):
        filled = increments.store(filled, task, increment)
    return filled


def test_a_starts_uniform_within_the_bound_and_b_at_zero():
    fresh = increments.initialise(jax.random.key(3), TINY, 10)
    bound = TINY.width**-0.5
    for part in ("key", "value"):
        a, b = np.asarray(fresh[part]["A"]), np.asarray(fresh[part]["B"])
        assert a.shape == (3, 24, 10) and b.shape == (3, 10, 24)
        assert a.dtype == b.dtype == np.float32
        assert not b.any()
        assert np.abs(a).max() <= bound
        # 720 draws: the extremes come near the bound, and a uniform has deviation bound / sqrt(3).
        assert a.max() > 0.97 * bound and a.min() < -0.97 * bound
        assert abs(a.std() / (bound / 3**0.5) - 1) < 0.1
        assert abs(a.mean()) < 0.1 * bound
    assert not np.allclose(fresh["key"]["A"], fresh["value"]["A"])
    other = increments.initialise(jax.random.key(4), TINY, 10)
    assert not np.allclose(fresh["key"]["A"], other["key"]["A"])
    # Blocks differ too.
    assert not np.allclose(fresh["key"]["A"][0], fresh["key"]["A"][1])


def test_a_fresh_increment_leaves_the_features_as_they_are(params, images, encode):
    fresh = increments.initialise(jax.random.key(3), TINY, RANK)
    kernels = vit.pretrained_kernels(params)
    np.testing.assert_array_equal(encode(images, kernels, fresh), encode(images, kernels, None))


def test_merging_leaves_the_features_unchanged(params, images, encode, tasks):
    kernels = vit.pretrained_kernels(params)
    for increment in tasks:
        training = encode(images, kernels, increment)
        before = encode(images, kernels, None)
        kernels = increments.merge(kernels, increment)
        np.testing.assert_allclose(encode(images, kernels, None), training, atol=2e-5)
        assert np.abs(before - training).max() > 0.01


def test_kernels_are_the_sum_of_products_not_the_product_of_sums(params, tasks, stack):
    start = vit.pretrained_kernels(params)
    merged = increments.kernels_after(start, stack, NUM_TASKS)
    for part in ("key", "value"):
        a = [np.asarray(task[part]["A"], np.float64) for task in tasks]
        b = [np.asarray(task[part]["B"], np.float64) for task in tasks]
        delta = np.asarray(merged[part], np.float64) - np.asarray(start[part], np.float64)
        of_products = sum(one @ other for one, other in zip(a, b, strict=True))
        np.testing.assert_allclose(delta, of_products, atol=2e-6)
        assert np.abs(sum(a) @ sum(b) - of_products).max() > 0.1


def test_every_view_comes_from_one_compilation_bit_for_bit(params, tasks, stack):
    traces = []

    @jax.jit
    def counted(kernels, stack, num_tasks):
        traces.append(None)
        return increments.kernels_after(kernels, stack, num_tasks)

    start = vit.pretrained_kernels(params)
    already = increments.kernels_after._cache_size()
    expected = start
    for num_tasks in range(NUM_TASKS + 1):
        if num_tasks:
            expected = increments.merge(expected, tasks[num_tasks - 1])
        for found in (
            increments.kernels_after(start, stack, num_tasks),
            counted(start, stack, num_tasks),
        ):
            for part in ("key", "value"):
                np.testing.assert_array_equal(found[part], expected[part])
    assert len(traces) == 1
    # A Python integer and one counted on the device are the same compilation.
    increments.kernels_after(start, stack, jnp.int32(2))
    assert increments.kernels_after._cache_size() - already <= 2


def test_slots_beyond_the_task_are_not_looked_at(params, stack):
    start = vit.pretrained_kernels(params)
    broken = jax.tree.map(lambda leaf: leaf.at[2:].set(jnp.nan), stack)
    for part in ("key", "value"):
        np.testing.assert_array_equal(
            increments.kernels_after(start, broken, 2)[part],
            increments.kernels_after(start, stack, 2)[part],
        )


def test_select_returns_what_store_kept_and_other_slots_stay(tasks, stack):
    for task, increment in enumerate(tasks):
        jax.tree.map(np.testing.assert_array_equal, increments.select(stack, task), increment)
    changed = increments.store(stack, 1, tasks[3])
    jax.tree.map(np.testing.assert_array_equal, increments.select(changed, 1), tasks[3])
    for task in (0, 2, 3):
        jax.tree.map(np.testing.assert_array_equal, increments.select(changed, task), tasks[task])


def test_an_empty_stack_adds_nothing(params):
    start = vit.pretrained_kernels(params)
    empty = increments.empty_stack(TINY, RANK, NUM_TASKS)
    jax.tree.map(
        np.testing.assert_array_equal, increments.kernels_after(start, empty, NUM_TASKS), start
    )


def test_gradient_and_optimiser_state_exist_for_the_increment_alone(params, images, encode):
    kernels = vit.pretrained_kernels(params)
    fresh = increments.initialise(jax.random.key(3), TINY, RANK)
    direction = jax.random.normal(jax.random.key(5), (len(images), TINY.width))

    def loss(increment):
        return jnp.sum(encode(images, kernels, increment) * direction)

    gradient = jax.grad(loss)(fresh)
    assert jax.tree.structure(gradient) == jax.tree.structure(fresh)
    assert len(jax.tree.leaves(gradient)) == 4
    for part in ("key", "value"):
        # Where B is zero nothing flows to A yet, and every block's B moves.
        assert not np.asarray(gradient[part]["A"]).any()
        assert (np.abs(np.asarray(gradient[part]["B"])).max((1, 2)) > 1e-5).all()
    optimizer = optax.adam(1e-2)
    state = optimizer.init(fresh)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(moments) == 2 * 4
    updates, _ = optimizer.update(gradient, state)
    moved = jax.tree.map(jnp.add, fresh, updates)
    assert float(loss(moved)) < float(loss(fresh))
    after_one_step = jax.grad(loss)(moved)
    assert all((np.abs(after_one_step[part]["A"]).max() > 1e-5) for part in ("key", "value"))
