"""Heads that are a user's own function: scored one task after the other."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import inputs, measures
from fdc_jax.calibration.terms import TaskLogits
from fdc_jax.errors import InputError

_filter = jax.jit(measures.filter_features)


def function_logits(
    head: Any,
    features: Float[np.ndarray | Array, "n d"],
    basis: Float[Array, "r d"],
    attenuation: Float[Array, ""],
    num_classes: int,
    name: str,
) -> tuple[TaskLogits, TaskLogits]:
    """Returns a head's largest logits of the features and of the filtered features, [n] each.

    TSF acts at the head input; what the head does with it stays its own business.

    Raises:
        InputError: the head does not return [n, num_classes] finite numbers.
    """
    features = jnp.asarray(features)
    filtered = _filter(features, basis, attenuation)
    return _largest(head, features, num_classes, name), _largest(head, filtered, num_classes, name)


def function_logits_of_tasks(
    heads: Sequence[Any],
    features: Float[np.ndarray | Array, "n d"],
    bases: Float[Array, "tasks r d"],
    attenuation: Float[Array, ""],
    class_counts: Sequence[int],
) -> tuple[TaskLogits, TaskLogits]:
    """Returns raw and filtered largest logits of every task's head, [n, tasks] each."""
    results = [
        function_logits(
            head, features, bases[task], attenuation, class_counts[task], f"head of task {task}"
        )
        for task, head in enumerate(heads)
    ]
    raw, filtered = zip(*results, strict=True)
    return _columns(raw), _columns(filtered)


def count_classes(head: Any, width: int, name: str) -> int:
    """Returns how many logits the head returns for a feature.

    Raises:
        InputError: it returns something else than one row of logits.
    """
    logits = _logits(head, jnp.ones((1, width), jnp.float32), name)
    if logits.ndim != 2 or len(logits) != 1 or logits.shape[1] == 0:
        raise InputError(f"{name}: expected logits of shape [1, classes], found {[*logits.shape]}")
    return logits.shape[1]


def _logits(head: Any, features: Float[Array, "n d"], name: str) -> Float[np.ndarray, "..."]:
    logits = inputs.host_array(head.logits(features), f"{name}: logits")
    inputs.check_real(logits.dtype, f"{name}: logits")
    return inputs.float32(logits)


def _largest(head: Any, features: Float[Array, "n d"], num_classes: int, name: str) -> TaskLogits:
    logits = _logits(head, features, name)
    if logits.shape != (len(features), num_classes):
        raise InputError(
            f"{name}: expected logits of shape {[len(features), num_classes]}, "
            f"found {[*logits.shape]}"
        )
    if not np.isfinite(logits).all():
        raise InputError(f"{name}: its logits are not finite")
    return TaskLogits(logits.max(axis=1), logits.argmax(axis=1))


def _columns(results: Sequence[TaskLogits]) -> TaskLogits:
    return TaskLogits(*(np.stack(part, axis=1) for part in zip(*results, strict=True)))
