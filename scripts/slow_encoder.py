# ruff: noqa
"""A slow encoder in variants: which of its weights move, how fast, and under which head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fdc_jax.heads import LinearHead
from fdc_jax.learners import Learner, option, training
from fdc_jax.model import increments, vit


def path_of(keys) -> str:
    return "/".join(str(key.key) for key in keys)


def matrix(path: str, shape) -> tuple[int, int]:
    """Returns inputs and outputs of a kernel."""
    inputs = shape[0] * shape[1] if path.endswith("out/kernel") else shape[0]
    size = 1
    for side in shape:
        size *= side
    return inputs, size // inputs


@dataclasses.dataclass(frozen=True)
class Slow(Learner):
    """SLCA's first stage, without its alignment."""

    title = "Slow encoder"
    mean_over_images = True

    moves: str = option(
        "all", ("all", "keys_values", "last_six", "last_three", "norms_biases", "low_rank")
    )
    optimizer: str = option("sgd", ("sgd", "adam"))
    head: str = option("linear", ("linear", "cosine"))
    encoder_rate: float = option(1e-4, "(0, inf)")
    head_rate: float = option(1e-2, "(0, inf)")
    over_tasks: str = option("constant", ("constant", "root"), "rate of the encoder times t^-1/2")
    rank: int = option(10, "[1, inf)")

    def initial_state(self):
        setup, width = self.setup, self.setup.variant.width
        shapes = vit.parameter_shapes(setup.model, setup.config.encoder.image_size)
        encoder = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        heads = LinearHead(
            jnp.zeros((setup.num_tasks, setup.head_rows, width)),
            jnp.zeros((setup.num_tasks, setup.head_rows)),
        )
        return {"encoder": encoder, "heads": heads}

    def start_task(self, backbone, state, task, key):
        rows, width = self.setup.head_rows, self.setup.variant.width
        encoder = jax.tree.map(jnp.copy, state["encoder"] if task > 0 else backbone)
        of_head, of_encoder = jax.random.split(key)
        head = LinearHead(training.new_cosine_rows(of_head, rows, width), jnp.zeros(rows))
        factor = (task + 1) ** -0.5 if self.over_tasks == "root" else 1.0
        frozen = {"class_mask": self.setup.class_mask(task), "factor": jnp.float32(factor)}
        if self.moves != "low_rank":
            return frozen, {"encoder": encoder, "head": head}
        factors = {}
        for number, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(encoder)):
            path = path_of(keys)
            if not path.endswith("kernel") or "encoderblock" not in path:
                continue
            inputs, outputs = matrix(path, leaf.shape)
            draw = jax.random.fold_in(of_encoder, number)
            A = jax.random.uniform(draw, (inputs, self.rank), minval=-1, maxval=1) * inputs**-0.5
            factors[path] = {"A": A, "B": jnp.zeros((self.rank, outputs))}
        return frozen | {"encoder": encoder}, {"encoder": factors, "head": head}

    def _moves(self, path: str) -> bool:
        if self.moves == "keys_values":
            return "/key/kernel" in path or "/value/kernel" in path
        if self.moves == "norms_biases":
            return not path.endswith("kernel") and "Transformer/" in path and "pos" not in path
        if self.moves in ("last_six", "last_three"):
            last = range(6 if self.moves == "last_six" else 9, self.setup.variant.depth)
            return "encoder_norm" in path or any(f"encoderblock_{i}/" in path for i in last)
        return True

    def merged(self, frozen, trained):
        if self.moves == "low_rank":

            def added(keys, leaf):
                factors = trained["encoder"].get(path_of(keys))
                if factors is None:
                    return leaf
                return leaf + jnp.matmul(factors["A"], factors["B"], precision="highest").reshape(
                    leaf.shape
                )

            return jax.tree_util.tree_map_with_path(added, frozen["encoder"])
        factor = frozen["factor"]

        def slowed(keys, leaf):
            still = jax.lax.stop_gradient(leaf)
            return still + factor * (leaf - still) if self._moves(path_of(keys)) else still

        return jax.tree_util.tree_map_with_path(slowed, trained["encoder"])

    def loss(self, backbone, frozen, trained, batch):
        replaced = vit.AllParameters(parameters=self.merged(frozen, trained))
        features = self.features(backbone, batch, replaced)
        if self.head == "cosine":
            rows = trained["head"].weight
            unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            logits = 16.0 * jnp.matmul(unit(features), unit(rows).T, precision="highest")
        else:
            logits = trained["head"].logits(features)
        return training.cross_entropy(logits, batch, frozen["class_mask"])

    def update(self):
        rates = {"encoder": self.encoder_rate, "head": self.head_rate}
        how = optax.trace(0.9) if self.optimizer == "sgd" else optax.scale_by_adam()
        return self.gradient_update(rates, how)

    def after_task(self, backbone, state, task, frozen, trained, images):
        encoder = trained["encoder"] if self.moves != "low_rank" else self.merged(frozen, trained)
        return {
            "encoder": encoder,
            "heads": increments.store(state["heads"], task, trained["head"]),
        }

    def encoder(self, backbone, state, num_tasks):
        if num_tasks == 0:
            return vit.pretrained_kernels(backbone)
        return vit.AllParameters(parameters=state["encoder"])

    def heads(self, state, num_tasks):
        return training.unpadded(self.setup, state["heads"], num_tasks)
