"""RSIAT's projector: maps features of the encoder before a task to those of the one in training.

P(f) = f + decoder(encoder(f)), two small perceptrons. It serves training only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Between the features and the code, in either direction.
HIDDEN_UNITS = 64


class Dense(NamedTuple):
    """One layer x W + b."""

    weight: Float[Array, "i o"]
    bias: Float[Array, " o"]


class Projector(NamedTuple):
    """Two layers to the code and two layers back."""

    into: Dense
    to_code: Dense
    from_code: Dense
    out: Dense


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def initialise(key: Array, width: int, code: int, identity: bool = False) -> Projector:
    """Returns layers uniform in +-1/sqrt(inputs), as PyTorch initialises.

    Args:
        key: random key.
        width: of the features.
        code: of the code.
        identity: whether the last layer is zero, which makes `project` with `bounded=False` the
            identity.
    """
    sizes = (width, HIDDEN_UNITS, code, HIDDEN_UNITS, width)

    def layer(key, inputs, outputs):
        bound = inputs**-0.5
        key_of_weight, key_of_bias = jax.random.split(key)
        return Dense(
            jax.random.uniform(key_of_weight, (inputs, outputs), minval=-bound, maxval=bound),
            jax.random.uniform(key_of_bias, (outputs,), minval=-bound, maxval=bound),
        )

    layers = [
        layer(*arguments)
        for arguments in zip(jax.random.split(key, 4), sizes[:-1], sizes[1:], strict=True)
    ]
    if identity:
        layers[-1] = Dense(*(jnp.zeros_like(leaf) for leaf in layers[-1]))
    return Projector(*layers)


def project(
    projector: Projector, features: Float[Array, "n d"], bounded: bool = True
) -> Float[Array, "n d"]:
    """Returns the features plus what comes back from the code.

    Args:
        projector: the layers.
        features: of the earlier encoder.
        bounded: whether a sigmoid follows the last layer, so that coordinates only grow, by less
            than 1 each.
    """
    hidden = features
    for layer in projector[:-1]:
        hidden = jax.nn.gelu(_dense(layer, hidden), approximate=False)
    correction = _dense(projector.out, hidden)
    return features + (jax.nn.sigmoid(correction) if bounded else correction)


def _dense(layer: Dense, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
    return jnp.matmul(x, layer.weight, precision=jax.lax.Precision.HIGHEST) + layer.bias
