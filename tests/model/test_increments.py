"""Low-rank increments: products are summed, merging changes nothing, one compilation for all."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fdc_jax.model import increments, operations, vit
from tests.model.reference import TINY, float64, products, random_like, random_params

RANK = 2
START = vit.pretrained_kernels(random_params(0))


def test_a_starts_uniform_within_the_bound_and_b_at_zero():
    first, second = (increments.initialise(jax.random.key(k), TINY, 15) for k in (3, 4))
    bound, draws = TINY.width**-0.5, []
    for factors in (*first.values(), *second.values()):
        a, b = factors["A"], factors["B"]
        assert a.shape == (TINY.depth, 24, 15) and b.shape == (TINY.depth, 15, 24)
        assert a.dtype == b.dtype == np.float32 and not b.any()
        # 720 draws: the extremes come near the bound, and a uniform has deviation bound / sqrt(3).
        assert 0.97 * bound < a.max() <= bound and -bound <= a.min() < -0.97 * bound
        assert abs(a.std() / (bound / 3**0.5) - 1) < 0.1
        draws += [np.asarray(of_block).tobytes() for of_block in a]
    assert len({*draws}) == 4 * TINY.depth


def test_every_view_is_the_sum_of_products_from_one_compilation():
    """In float64, and equal to repeated merging bit for bit."""
    shapes = increments.initialise(jax.random.key(0), TINY, RANK)
    stack, already = increments.empty_stack(TINY, RANK, 4), increments.kernels_after._cache_size()
    tasks = [random_like(shapes, seed, 0.2) for seed in range(4)]
    for task, increment in enumerate(tasks):
        stack = increments.store(stack, task, increment)
    merged, sums = START, float64(START)
    for num_tasks in range(5):
        if num_tasks:
            merged = increments.merge(merged, tasks[num_tasks - 1])
            sums = jax.tree.map(np.add, sums, products(tasks[num_tasks - 1]))
        actual = increments.kernels_after(START, stack, num_tasks)
        jax.tree.map(assert_array_equal, actual, merged)
        jax.tree.map(partial(assert_allclose, atol=2e-6), actual, sums)
    assert increments.kernels_after._cache_size() - already <= 1


HIGHEST = jax.lax.Precision.HIGHEST


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 5, 8), "kernel": (8, 6), "a": (8, 2), "b": (2, 6)}
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes.values()]


def test_updates_add_up_and_scales_have_gradients(operands):
    """Two updates, one of them with a number for each column, against the sum of kernels."""
    x, kernel, a, b = operands
    second = {"A": 2 * a, "B": b[::-1], "scale": np.float32([0.5, -2.0])}
    updates = ({"A": a, "B": b}, second)

    def product(*inputs):
        return operations.product_with_updates(*inputs, HIGHEST)

    def product_with_sum(x, kernel, updates):
        for update in updates:
            scale = update.get("scale", np.ones(2, np.float32))
            kernel = kernel + (update["A"] * scale[None]) @ update["B"]
        return x @ kernel

    actual, pull = jax.vjp(product, x, kernel, updates)
    expected, pull_expected = jax.vjp(product_with_sum, x, kernel, updates)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5, 6)), jnp.float32)
    close = partial(assert_allclose, atol=5e-5)
    close(actual, expected)
    jax.tree.map(close, pull(weight), pull_expected(weight))


def test_small_updates_reach_the_product_in_low_precision(operands):
    """Kernel and update are added before they are rounded."""
    x, kernel, a, b = operands

    def product(x, kernel, update):
        return operations.product_with_updates(x, kernel, (update,), HIGHEST)

    short = jnp.asarray(x, jnp.bfloat16)
    actual, pull = jax.vjp(product, short, kernel, {"A": a, "B": b})
    merged = jnp.asarray(kernel + a @ b, jnp.bfloat16)
    assert actual.dtype == jnp.bfloat16
    assert_array_equal(actual, jnp.matmul(short, merged, precision=HIGHEST))
    gradients = jax.tree.leaves(pull(actual))
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, *3 * [jnp.float32]]
