"""What calibrators accept: arrays or re-iterable sources, checked and cut into equal blocks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.errors import InputError

# Rows handed to the device at once while fitting. The last block is padded to the same size, so
# that one compiled kernel per feature width serves every task.
BLOCK_ROWS = 512

VIEWS = ("adapted", "pretrained")

# (adapted, pretrained or None, labels) of consecutive samples.
Chunk = tuple[Any, Any, Any]
# Called once per pass; every call starts again at the first sample.
Source = Callable[[], Iterable[Chunk]]


class Block(NamedTuple):
    """Up to `BLOCK_ROWS` samples of one task; rows past `rows` are zero."""

    adapted: Float[np.ndarray, "block d"]
    pretrained: Float[np.ndarray, "block e"] | None
    labels: Int[np.ndarray, " rows"]
    rows: int


def host_array(value: Any, name: str) -> np.ndarray:
    """Returns a NumPy view or copy of an array of any library; memory maps stay unread.

    Raises:
        InputError: `value` is no array, or lives on devices of another process.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise InputError(f"{name}: is spread over devices of other processes; gather it first")
    reason: Exception | str = "it is no array"
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        try:
            return np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = error
    if hasattr(value, "__dlpack__"):
        try:
            return np.asarray(jnp.from_dlpack(value))
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            reason = error
    raise InputError(f"{name}: cannot be read as an array: {reason}")


def feature_array(value: Any, name: str, width: int | None = None) -> np.ndarray:
    """Returns features as a host array [n, width] of their own number type.

    Raises:
        InputError: not two-dimensional, no columns, not real numbers, or another width.
    """
    array = host_array(value, name)
    check_feature_shape(array.shape, array.dtype, name, width)
    return array


def check_feature_shape(shape: tuple[int, ...], dtype: Any, name: str, width: int | None) -> None:
    """Raises InputError unless shape and number type are those of features [n, width]."""
    if len(shape) != 2 or shape[1] == 0:
        raise InputError(f"{name}: expected shape [samples, width], found {list(shape)}")
    check_real(dtype, name)
    if width is not None and shape[1] != width:
        raise InputError(f"{name}: expected width {width}, found {shape[1]}")


def check_real(dtype: Any, name: str) -> None:
    """Raises InputError for objects, text, truth values and complex numbers."""
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise InputError(f"{name}: expected real numbers, found {dtype}")


def float32(array: np.ndarray) -> Float[np.ndarray, "..."]:
    """Returns the array in float32; what does not fit becomes infinite and is reported later."""
    with np.errstate(over="ignore"):
        return np.asarray(array, dtype=np.float32)


def label_array(value: Any, name: str) -> Int[np.ndarray, " n"]:
    """Returns labels as int64 [n].

    Raises:
        InputError: not one-dimensional or not integers.
    """
    array = host_array(value, name)
    if array.ndim != 1:
        raise InputError(f"{name}: expected shape [samples], found {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, found {array.dtype}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: {array.max()} does not fit a signed 64-bit integer")
    return array.astype(np.int64)


def check_rows(name: str, energies: Float[np.ndarray, " n"], start: int = 0) -> None:
    """Raises InputError naming the first row whose sum of squares is not finite in float32."""
    finite = np.isfinite(energies)
    if not finite.all():
        row = start + int(np.argmin(finite))
        raise InputError(f"{name}: row {row} is not finite, or too large for float32")


def check_views(block: Block, widths: Sequence[int], task: int) -> None:
    """Raises InputError unless a task has the views of earlier tasks, of these widths."""
    if (block.pretrained is None) != (len(widths) == 1):
        had, has = ("none", "some") if len(widths) == 1 else ("some", "none")
        raise InputError(
            f"pretrained features of task {task}: earlier tasks had {had}, this one has {has}; "
            "give them for all tasks or for none"
        )
    views = (block.adapted, block.pretrained)
    for name, features, expected in zip(VIEWS, views, widths, strict=False):
        if features is not None and features.shape[1] != expected:
            raise InputError(
                f"{name} features of task {task}: expected width {expected} like the earlier "
                f"tasks, found {features.shape[1]}"
            )


def class_labels(classes: Any, name: str) -> Int[np.ndarray, " c"]:
    """Returns the labels of a head's rows, in row order.

    Raises:
        InputError: not integers, none at all, or a label named twice.
    """
    labels = label_array(classes, name)
    if labels.size == 0:
        raise InputError(f"{name}: expected at least one label, found none")
    values, counts = np.unique(labels, return_counts=True)
    if (counts > 1).any():
        raise InputError(f"{name}: label {values[counts > 1][0]} is named twice")
    return labels


def check_disjoint(labels: np.ndarray, earlier: Sequence[np.ndarray], task: int) -> None:
    """Raises InputError when a label of this task already belongs to an earlier task."""
    for other, taken in enumerate(earlier):
        common = np.intersect1d(labels, taken)
        if common.size:
            raise InputError(
                f"labels of task {task}: label {common[0]} already belongs to task {other}"
            )


def task_source(adapted: Any, labels: Any, pretrained: Any, task: int) -> Source:
    """Returns the task's samples as a source, whatever form they came in.

    Args:
        adapted: features [n, d], or a source, in which case the next two are None.
        labels: labels [n].
        pretrained: features [n, e] or None.
        task: index for messages.

    Raises:
        InputError: an array of the wrong shape or type, or lengths that differ.
    """
    if callable(adapted):
        if labels is not None or pretrained is not None:
            raise InputError(
                f"task {task}: a source gives adapted, pretrained and labels together; "
                "labels and pretrained must be None"
            )
        return cast(Source, adapted)
    adapted = feature_array(adapted, f"adapted features of task {task}")
    labels = label_array(labels, f"labels of task {task}")
    _check_length(labels, adapted, "labels", task)
    if pretrained is not None:
        pretrained = feature_array(pretrained, f"pretrained features of task {task}")
        _check_length(pretrained, adapted, "pretrained features", task)

    def chunks() -> Iterator[Chunk]:
        for start in range(0, len(adapted), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            yield adapted[rows], None if pretrained is None else pretrained[rows], labels[rows]

    return chunks


def score_features(value: Any, name: str, width: int) -> np.ndarray | jax.Array:
    """Returns features [n, width] to be scored: on the device if they are there, else on the host.

    Raises:
        InputError: no array, or of another shape or type.
    """
    if isinstance(value, jax.Array) and value.devices() == jnp.zeros(()).devices():
        check_feature_shape(value.shape, value.dtype, name, width)
        return value
    return feature_array(value, name, width)


def score_views(
    adapted: Any, pretrained: Any, widths: Sequence[int], needs_pretrained: bool
) -> tuple[np.ndarray | jax.Array, np.ndarray | jax.Array | None]:
    """Returns the features of both views to be scored; see `score_features`.

    Args:
        adapted: features [n, d].
        pretrained: features [n, e] or None.
        widths: d and, where the tasks have a pretrained view, e.
        needs_pretrained: whether such a view must be given where the tasks have it.

    Raises:
        InputError: a view is missing, superfluous, of another length than the other or malformed.
    """
    adapted = score_features(adapted, "adapted features", widths[0])
    if pretrained is None:
        if len(widths) == 2 and needs_pretrained:
            raise InputError(
                "pretrained features: expected, since the tasks were fitted with them; leave them "
                "out only with pretrained_view_weight 0"
            )
        return adapted, None
    if len(widths) == 1:
        raise InputError("pretrained features: the tasks were fitted without a pretrained view")
    pretrained = score_features(pretrained, "pretrained features", widths[1])
    if len(pretrained) != len(adapted):
        raise InputError(
            f"pretrained features: expected {len(adapted)} rows like the adapted features, "
            f"found {len(pretrained)}"
        )
    return adapted, pretrained


def padded_rows(features: np.ndarray | jax.Array, rows: int) -> Float[Array, "rows d"]:
    """Returns features in float32 on the device, with zero rows added."""
    missing = ((0, rows - len(features)), (0, 0))
    if isinstance(features, jax.Array):
        features = features.astype(jnp.float32)
        return features if len(features) == rows else jnp.pad(features, missing)
    return jnp.asarray(np.pad(float32(features), missing))


def blocks(source: Source, task: int) -> Iterator[Block]:
    """Walks over a source once, in full blocks and a padded last one.

    Chunks of any length are gathered into blocks, so the blocks, and with them all statistics, do
    not depend on how the source cuts its samples.

    Raises:
        InputError: a chunk is malformed, not finite, or unlike the chunks before it.
    """
    widths: tuple[int, int | None] | None = None
    block: Block | None = None
    seen = 0
    chunks = source()
    if not isinstance(chunks, Iterable):
        raise InputError(
            f"source of task {task}: expected an iterable of chunks, found {type(chunks).__name__}"
        )
    for chunk in chunks:
        adapted, pretrained, labels = _checked_chunk(chunk, task, seen, widths)
        widths = adapted.shape[1], None if pretrained is None else pretrained.shape[1]
        seen += len(adapted)
        taken = 0
        while taken < len(adapted):
            if block is None:
                block = _empty_block(*widths)
            count = min(len(adapted) - taken, BLOCK_ROWS - block.rows)
            into = slice(block.rows, block.rows + count)
            part = slice(taken, taken + count)
            block.adapted[into] = adapted[part]
            block.labels[into] = labels[part]
            if block.pretrained is not None and pretrained is not None:
                block.pretrained[into] = pretrained[part]
            block = block._replace(rows=block.rows + count)
            taken += count
            if block.rows == BLOCK_ROWS:
                yield block
                block = None
    if block is not None:
        yield block._replace(labels=block.labels[: block.rows])


def _empty_block(width: int, pretrained_width: int | None) -> Block:
    """Returns fresh buffers: on a CPU the device may read those of earlier blocks in place."""
    pretrained = None
    if pretrained_width is not None:
        pretrained = np.zeros((BLOCK_ROWS, pretrained_width), np.float32)
    adapted = np.zeros((BLOCK_ROWS, width), np.float32)
    return Block(adapted, pretrained, np.zeros(BLOCK_ROWS, np.int64), 0)


def _checked_chunk(
    chunk: Chunk, task: int, start: int, widths: tuple[int, int | None] | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    try:
        adapted, pretrained, labels = chunk
    except (TypeError, ValueError) as error:
        raise InputError(
            f"source of task {task}: expected (adapted, pretrained or None, labels) per chunk"
        ) from error
    name = f"adapted features of task {task}"
    adapted = _finite(feature_array(adapted, name, widths and widths[0]), name, start)
    labels = label_array(labels, f"labels of task {task}")
    _check_length(labels, adapted, "labels", task)
    if widths is not None and (pretrained is None) != (widths[1] is None):
        raise InputError(f"source of task {task}: some chunks have pretrained features, some none")
    if pretrained is not None:
        name = f"pretrained features of task {task}"
        pretrained = _finite(feature_array(pretrained, name, widths and widths[1]), name, start)
        _check_length(pretrained, adapted, "pretrained features", task)
    return adapted, pretrained, labels


def _finite(array: np.ndarray, name: str, start: int) -> Float[np.ndarray, "n d"]:
    array = float32(array)
    with np.errstate(over="ignore", invalid="ignore"):
        check_rows(name, np.einsum("nd,nd->n", array, array), start)
    return array


def _check_length(array: np.ndarray, adapted: np.ndarray, name: str, task: int) -> None:
    if len(array) != len(adapted):
        raise InputError(
            f"{name} of task {task}: expected {len(adapted)} rows like the adapted features, "
            f"found {len(array)}"
        )
