"""The product with a kernel that carries an update: values and gradients are those of the sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.model import vit

HIGHEST = jax.lax.Precision.HIGHEST


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 5, 8), "kernel": (8, 6), "a": (8, 2), "b": (2, 6)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def product(x, kernel, a, b):
    return vit.product_with_update(x, kernel, a, b, HIGHEST)


def test_values_and_gradients_are_those_of_the_sum(operands):
    weight = np.random.default_rng(1).normal(size=(3, 5, 6))
    value, pull = jax.vjp(product, *operands.values())
    x, kernel, a, b = (each.astype(np.float64) for each in operands.values())
    np.testing.assert_allclose(value, x @ (kernel + a @ b), atol=1e-5)
    of_sum = np.einsum("ntd,nte->de", x, weight)
    expected = (weight @ (kernel + a @ b).T, of_sum, of_sum @ b.T, a.T @ of_sum)
    for found, reference in zip(pull(jnp.asarray(weight, jnp.float32)), expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, reference, atol=2e-5)


def test_one_gradient_per_image(operands):
    x, *rest = operands.values()

    def factor_gradient(image):
        return jax.grad(lambda b: jnp.sum(product(image, rest[0], rest[1], b) ** 2))(rest[2])

    each = jax.vmap(factor_gradient)(x)
    np.testing.assert_allclose(each[1], factor_gradient(x[1]), rtol=1e-5, atol=1e-4)


def test_small_updates_reach_the_product_in_low_precision(operands):
    """Kernel and update are added before they are rounded."""
    x, kernel, a, b = operands.values()
    x = jnp.asarray(x, jnp.bfloat16)
    found, pull = jax.vjp(product, x, kernel, a, b)
    assert found.dtype == jnp.bfloat16
    merged = jnp.asarray(kernel + a @ b, jnp.bfloat16)
    np.testing.assert_array_equal(found, jnp.matmul(x, merged, precision=HIGHEST))
    assert [leaf.dtype for leaf in pull(found)] == [jnp.bfloat16, *3 * [jnp.float32]]
