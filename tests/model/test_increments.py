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
    bound, draws = TINY.width**-0.5, set()
    for factors in map(float64, (*first.values(), *second.values())):
        a, b = factors["A"], factors["B"]
        assert a.shape == (TINY.depth, 24, 15) and b.shape == (TINY.depth, 15, 24)
        assert not b.any()
        # 720 draws: the extremes come near the bound, and a uniform has deviation bound / sqrt(3).
        assert 0.97 * bound < a.max() <= bound and -bound <= a.min() < -0.97 * bound
        assert abs(a.std() / (bound / 3**0.5) - 1) < 0.1
        draws |= {of_block.tobytes() for of_block in a}
    assert len(draws) == 4 * TINY.depth


def test_every_view_is_the_sum_of_products_from_one_compilation():
    """In float64, and equal to repeated merging bit for bit."""
    shapes = increments.initialise(jax.random.key(0), TINY, RANK)
    stack, already = increments.empty_stack(TINY, RANK, 3), increments.kernels_after._cache_size()
    for task in range(3):
        stack = increments.store(stack, task, random_like(shapes, task, 0.2))
    merged, sums = START, float64(START)
    for task in range(4):
        actual = increments.kernels_after(START, stack, task)
        jax.tree.map(assert_array_equal, actual, merged)
        jax.tree.map(partial(assert_allclose, atol=2e-6), actual, sums)
        increment = random_like(shapes, task, 0.2)
        merged = increments.merge(merged, increment)
        sums = jax.tree.map(np.add, sums, products(increment))
    assert increments.kernels_after._cache_size() - already <= 1


product = partial(operations.product_with_updates, precision=jax.lax.Precision.HIGHEST)


@pytest.fixture(scope="module")
def operands():
    rng, shapes = np.random.default_rng(0), ((3, 5, 8), (8, 6), (8, 2), (2, 6))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def test_updates_add_up_and_scales_have_gradients(operands):
    """Two updates, one of them with a number for each column, against the sum of kernels."""
    x, kernel, a, b = operands
    second = {"A": 2 * a, "B": b[::-1], "scale": np.float32([0.5, -2.0])}
    updates = ({"A": a, "B": b}, second)

    def product_with_sum(x, kernel, updates):
        for update in updates:
            scale = update.get("scale", np.ones(2, np.float32))
            kernel = kernel + (update["A"] * scale[None]) @ update["B"]
        return x @ kernel

    weight = np.random.default_rng(2).normal(size=(3, 5, 6)).astype(np.float32)

    @jax.jit
    def with_gradients(function):
        value, pull = jax.vjp(function, x, kernel, updates)
        return value, pull(weight)

    results = map(with_gradients, map(jax.tree_util.Partial, (product, product_with_sum)))
    jax.tree.map(partial(assert_allclose, atol=5e-5), *results)


def test_small_updates_reach_the_product_in_low_precision(operands):
    """Kernel and update are added before they are rounded."""
    x, kernel, a, b = operands
    short, updates = jnp.asarray(x, jnp.bfloat16), ({"A": a, "B": b},)
    actual, pull = jax.vjp(product, short, kernel, updates)
    merged = jnp.asarray(kernel + a @ b, jnp.bfloat16)
    assert_array_equal(actual, jnp.matmul(short, merged, precision="highest"))
    gradients = jax.tree.leaves(pull(actual))
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, *3 * [jnp.float32]]
