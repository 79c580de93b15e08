"""Increments of kernels, most often of keys and values: W_t = W_0 + sum over k <= t of B_k A_k.

The products are summed, never the factors, so that merging an increment leaves the encoder's
output unchanged. While a task trains, earlier increments are merged into the kernels; a stack on a
leading task axis keeps all of them, from which every E_t follows.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdc_jax.model.vit import Factors, Increment, Variant


def draw_flat(draw: Callable, key: Array, shape: tuple[int, ...], **bounds: float) -> Array:
    """Returns an array of a shape, drawn as one axis by `draw`, a function of `jax.random`.

    XLA takes seconds to compile a draw of three axes for a CPU.
    """
    return draw(key, (math.prod(shape),), **bounds).reshape(shape)


def initialise(
    key: Array, variant: Variant, rank: int, outputs: Mapping[str, int] | None = None
) -> Any:
    """Returns a fresh increment: A uniform in +-1/sqrt(width), B zero (the LoRA convention).

    Args:
        key: for the draw of every A.
        variant: architecture of the encoder.
        rank: of all updates; 0: of each the number of its outputs.
        outputs: outputs of each kernel to update, by name; None: those of keys and values.
    """
    depth, width = variant.depth, variant.width
    outputs = outputs or {"key": width, "value": width}

    def factors(random_key, size):
        ranks = rank or size
        shape, bound = (depth, width, ranks), width**-0.5
        A = draw_flat(jax.random.uniform, random_key, shape, minval=-bound, maxval=bound)
        return Factors(A=A, B=jnp.zeros((depth, ranks, size)))

    random_keys = jax.random.split(key, len(outputs))
    return dict(zip(outputs, map(factors, random_keys, outputs.values()), strict=True))


def empty_stack(variant: Variant, rank: int, num_tasks: int) -> Increment:
    """Returns zero increments with a leading task axis of length `num_tasks`."""
    shapes = jax.eval_shape(lambda: initialise(jax.random.key(0), variant, rank))
    return jax.tree.map(lambda leaf: jnp.zeros((num_tasks, *leaf.shape)), shapes)


@jax.jit
def store(stack: Increment, task: int | Int[Array, ""], increment: Increment) -> Increment:
    """Returns the stack with slot `task` replaced."""
    return jax.tree.map(lambda all_tasks, leaf: all_tasks.at[task].set(leaf), stack, increment)


def select(stack: Increment, task: int | Int[Array, ""]) -> Increment:
    """Returns the increment of one task."""
    return jax.tree.map(lambda all_tasks: all_tasks[task], stack)


def kernel_updates(increment: Any) -> Any:
    """Returns the update of every kernel: A B, the transposed B_k A_k, in float32."""

    def product(factors: Factors) -> Float[Array, "l d e"]:
        scaled = "scale" in factors
        A = factors["A"] * factors["scale"][:, None] if scaled else factors["A"]
        return jnp.einsum("ldr,lre->lde", A, factors["B"], precision="highest")

    return {name: product(factors) for name, factors in increment.items()}


@jax.jit
def merge(kernels: Any, increment: Any) -> Any:
    """Returns the kernels plus the products of one increment's factors, in float32."""
    return jax.tree.map(jnp.add, kernels, kernel_updates(increment))


@jax.jit
def kernels_after(kernels: Any, stack: Increment, num_tasks: int | Int[Array, ""]) -> Any:
    """Returns the kernels of E_t, `t = num_tasks`: those of E_0 plus the first t increments.

    The additions run in task order, so the result equals repeated calls of `merge` bit for bit.
    `num_tasks` is traced: one compilation serves E_0 ... E_T.
    """
    return jax.lax.fori_loop(
        0, num_tasks, lambda task, merged: merge(merged, select(stack, task)), kernels
    )
