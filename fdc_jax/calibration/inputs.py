"""What calibrators accept: features, labels and heads, checked and cut into blocks.

Features and labels come as arrays of NumPy, JAX or any library that offers `__array__` or
`__dlpack__`, as memory maps, or as functions that give the same chunks at every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.heads import KINDS

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Rows handed to the device at once while fitting. The last block is padded to the same size, so
# that one compiled kernel per feature width serves every task.
BLOCK_ROWS = 512

VIEWS = ("adapted", "pretrained")

# Number types of ml_dtypes, whose kind NumPy does not know.
_SHORT_FLOATS = ("bfloat", "float8", "float6", "float4", "int4", "uint4", "int2", "uint2")

# (adapted, pretrained or None, labels) of consecutive samples.
Chunk = tuple[Any, Any, Any]
# Called once per pass; every call starts again at the first sample.
Source = Callable[[], Iterable[Chunk]]


def host_array(value: Any, name: str) -> np.ndarray:
    """Returns a NumPy view or copy of an array of any library; memory maps stay unread.

    Raises:
        InputError: `value` is no array, or lives on devices of another process.
    """
    if isinstance(value, np.ndarray):
        return value
    if _is_of_jax(value) and not value.is_fully_addressable:
        raise InputError(f"{name}: is spread over devices of other processes; gather it first")
    reason: Exception | str = "it is no array"
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        try:
            return np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = error
    if hasattr(value, "__dlpack__"):
        try:
            # Unlike NumPy's, JAX's reader knows bfloat16.
            import jax.numpy as jnp

            return np.asarray(jnp.from_dlpack(value))
        except (ImportError, TypeError, ValueError, RuntimeError, BufferError) as error:
            reason = error
    raise InputError(f"{name}: cannot be read as an array: {reason}")


def _is_of_jax(value: Any) -> TypeGuard[Array]:
    jax = sys.modules.get("jax")  # Whoever holds an array of JAX has imported it.
    return jax is not None and isinstance(value, jax.Array)


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
    if np.dtype(dtype).kind not in "iuf" and not np.dtype(dtype).name.startswith(_SHORT_FLOATS):
        raise InputError(f"{name}: expected real numbers, found {dtype}")


def float32(array: np.ndarray) -> Float[np.ndarray, ...]:
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


def finite_features(
    value: Any, name: str, width: int | None = None, start: int = 0
) -> Float[np.ndarray, "n d"]:
    """Returns features in float32; `start` is the number of their first row.

    Raises:
        InputError: of `feature_array` and `check_rows`.
    """
    array = float32(feature_array(value, name, width))
    with np.errstate(over="ignore", invalid="ignore"):
        check_rows(name, np.einsum("nd,nd->n", array, array), start)
    return array


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


def task_source(adapted: Any, labels: Any, pretrained: Any, task: int) -> Source:
    """Returns the task's samples as a source, whatever form they came in; see `FDC.fit_task`."""
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


def score_views(
    adapted: Any, pretrained: Any, widths: Sequence[int], needs_pretrained: bool
) -> list[np.ndarray | Array]:
    """Returns the features of one or both views to be scored, on the device if they are there.

    `widths` are d and, where the tasks have a pretrained view, e; `needs_pretrained` tells whether
    such a view must be given where the tasks have it.
    """
    if pretrained is None and len(widths) == 2 and needs_pretrained:
        raise InputError(
            "pretrained features: expected, since the tasks were fitted with them; leave them "
            "out only with pretrained_view_weight 0"
        )
    if pretrained is not None and len(widths) == 1:
        raise InputError("pretrained features: the tasks were fitted without a pretrained view")
    views = []
    for view, value, width in zip(VIEWS, (adapted, pretrained), widths, strict=False):
        if value is None and view == "pretrained":
            continue
        name = f"{view} features"
        if _is_of_jax(value) and value.devices() == sys.modules["jax"].numpy.zeros(()).devices():
            check_feature_shape(value.shape, value.dtype, name, width)
        else:
            value = feature_array(value, name, width)
        views.append(value)
    if len(views[-1]) != len(views[0]):
        raise InputError(
            f"pretrained features: expected {len(views[0])} rows like the adapted features, "
            f"found {len(views[1])}"
        )
    return views


def blocks(
    source: Source, task: int, widths: Sequence[int] = ()
) -> Iterator[tuple[list[Float[np.ndarray, "block _"]], Int[np.ndarray, " block"]]]:
    """Walks over a source once; yields the views and the labels of `BLOCK_ROWS` samples at a time.

    Chunks of any length are gathered into blocks, so the blocks, and with them all statistics, do
    not depend on how the source cuts its samples. Views must be those of earlier tasks, of these
    `widths`, if there are any.
    """
    chunks = source()
    if not isinstance(chunks, Iterable):
        raise InputError(
            f"source of task {task}: expected an iterable of chunks, found {type(chunks).__name__}"
        )
    waiting: list[np.ndarray] = []
    seen = 0
    for chunk in chunks:
        views, labels = _checked_chunk(chunk, task, seen, widths)
        widths = [each.shape[1] for each in views]
        seen += len(labels)
        parts = [*views, labels]
        waiting = waiting or [part[:0] for part in parts]
        # Copies, since a source may fill its arrays anew for the next chunk.
        parts = [np.concatenate(pair) for pair in zip(waiting, parts, strict=True)]
        whole = len(parts[-1]) // BLOCK_ROWS * BLOCK_ROWS
        for start in range(0, whole, BLOCK_ROWS):
            *views, labels = (part[start : start + BLOCK_ROWS] for part in parts)
            yield views, labels
        waiting = [part[whole:] for part in parts]
    if waiting and len(waiting[-1]):
        yield waiting[:-1], waiting[-1]


def _checked_chunk(
    chunk: Chunk, task: int, start: int, widths: Sequence[int]
) -> tuple[list[Float[np.ndarray, "n _"]], Int[np.ndarray, " n"]]:
    try:
        adapted, pretrained, labels = chunk
    except (TypeError, ValueError) as error:
        raise InputError(
            f"source of task {task}: expected (adapted, pretrained or None, labels) per chunk"
        ) from error
    given = [adapted] if pretrained is None else [adapted, pretrained]
    if widths and len(given) != len(widths):
        had, have = ("none", "some") if len(widths) == 1 else ("some", "none")
        raise InputError(
            f"pretrained features of task {task}: earlier samples had {had}, these have {have}; "
            "give them for all tasks or for none"
        )
    views: list[np.ndarray] = []
    for view, features, width in zip(VIEWS, given, widths or (None, None), strict=False):
        name = f"{view} features of task {task}"
        array = finite_features(features, name, width, start)
        views.append(array)
        _check_length(array, views[0], f"{view} features", task)
    labels = label_array(labels, f"labels of task {task}")
    _check_length(labels, views[0], "labels", task)
    return views, labels


def _check_length(array: np.ndarray, adapted: np.ndarray, name: str, task: int) -> None:
    if len(array) != len(adapted):
        raise InputError(
            f"{name} of task {task}: expected {len(adapted)} rows like the adapted features, "
            f"found {len(array)}"
        )


# Labels ------------------------------------------------------------------------------------------


def task_classes(
    labels: Int[np.ndarray, " n"],
    task: int,
    num_classes: int,
    named: Any,
    earlier: Sequence[Int[np.ndarray, " _"]],
) -> tuple[Int[np.ndarray, " c"], Int[np.ndarray, " c"]]:
    """Returns the label and the number of samples of each head row.

    Args:
        labels: of all samples of the task.
        task: its number, for messages.
        num_classes: rows of its head.
        named: the label of each row; None for the distinct labels, ascending.
        earlier: labels of earlier tasks.

    Raises:
        InputError: a label is an earlier task's or no row's, or a row has no label.
    """
    values, first, counts = np.unique(labels, return_index=True, return_counts=True)
    if named is not None:
        named = class_labels(named, f"classes of task {task}")
        if len(named) != num_classes:
            raise InputError(
                f"classes of task {task}: expected {num_classes} labels, one per row of the head, "
                f"found {len(named)}"
            )
    classes = values if named is None else named
    for other, taken in enumerate(earlier):
        if (again := np.isin(classes, taken)).any():
            label = classes[again][0]
            raise InputError(
                f"labels of task {task}: label {label} already belongs to task {other}"
            )
    if named is None:
        strangers = np.argsort(np.argsort(first)) >= num_classes
    else:
        strangers = ~np.isin(values, named)
    if strangers.any():
        row = first[strangers].min()
        where = f"labels of task {task}: label {labels[row]} at row {row}"
        if named is not None:
            raise InputError(f"{where} is none of the head's classes")
        raise InputError(f"{where} is one more than the {num_classes} classes of the head")
    if named is None and len(values) < num_classes:
        raise InputError(
            f"labels of task {task}: found {len(values)} classes, the head has {num_classes} rows; "
            "name their labels with classes"
        )
    known = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return classes, np.array([known.get(label, 0) for label in classes.tolist()], np.int64)


# Heads -------------------------------------------------------------------------------------------


class HeadRows(NamedTuple):
    """A built-in head: logits rows . h + bias, with h first divided by its norm if `normalised`."""

    rows: Float[np.ndarray, "c d"]
    bias: Float[np.ndarray, " c"]
    normalised: bool


def head_kind(head: Any, name: str) -> str:
    """Returns a name of `heads.KINDS`, or "function" for any other head with logits.

    Raises:
        InputError: `head` has no method `logits`.
    """
    kind = KINDS.get(type(head))
    if kind is None and not callable(getattr(head, "logits", None)):
        raise InputError(f"{name}: expected a head with a method logits, found {type(head)}")
    return kind or "function"


def common_kind(heads: Sequence[Any]) -> str | None:
    """Returns the kind shared by all heads, None when there are none.

    Raises:
        InputError: heads of different kinds.
    """
    kinds = [head_kind(head, f"head of task {task}") for task, head in enumerate(heads)]
    for task, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise InputError(
                f"head of task {task}: expected a {kinds[0]} head like task 0, found {kind}"
            )
    return kinds[0] if kinds else None


def head_rows(head: Any, name: str, width: int) -> HeadRows:
    """Returns a built-in head (`heads.KINDS`), checked, in its affine form; `width` is its input's.

    Raises:
        InputError: an array of another shape than [c, width] and [c], not of real numbers, or not
            finite.
    """
    parts = {}
    for part, value in head._asdict().items():
        plain = isinstance(value, int | float)
        array = host_array(np.asarray(value) if plain else value, f"{name}: {part}")
        check_real(array.dtype, f"{name}: {part}")
        parts[part] = array.astype(np.float64)
    matrix, *others = parts
    rows = parts[matrix]
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] != width:
        raise InputError(
            f"{name}: {matrix}: expected shape [classes, {width}], found {[*rows.shape]}"
        )
    for part in others:
        shape = (len(rows),) if part == "bias" else ()
        if parts[part].shape != shape:
            expected = f"shape {[*shape]}" if shape else "a number"
            raise InputError(f"{name}: {part}: expected {expected}, found {[*parts[part].shape]}")
    affine = type(head)(**parts).affine
    bias = np.broadcast_to(affine.bias, len(rows))
    result = HeadRows(float32(affine.rows), float32(bias), affine.normalised)
    for part, values in (("weights", result.rows), ("bias", result.bias)):
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values.reshape(len(rows), -1)).all(axis=1)))
            raise InputError(f"{name}: {part}: row {row} is not finite")
    return result


def read_head(head: Any, name: str, one: Float[Any, "1 d"]) -> tuple[HeadRows | None, int]:
    """Returns a head's affine form, None of a function; and how many classes it has.

    `one` is any input of a head.

    Raises:
        InputError: of `head_kind`, `head_rows` and `function_logits`.
    """
    if head_kind(head, name) == "function":
        return None, function_logits(head, one, None, name).shape[1]
    rows = head_rows(head, name, one.shape[1])
    return rows, len(rows.rows)


def function_logits(
    head: Any, features: Float[Any, "n d"], num_classes: int | None, name: str
) -> Float[np.ndarray, "n c"]:
    """Returns the logits of a head that is a user's own function, in float32.

    Raises InputError unless they are [n, num_classes] finite numbers, with any number of classes
    where `num_classes` is None.
    """
    logits = host_array(head.logits(features), f"{name}: logits")
    check_real(logits.dtype, f"{name}: logits")
    found, rows = logits.shape, len(features)
    classes = num_classes or (found[1] if len(found) == 2 else 0)
    if found != (rows, classes) or not classes:
        expected = f"[{rows}, {num_classes or 'classes'}]"
        raise InputError(f"{name}: expected logits of shape {expected}, found {[*found]}")
    logits = float32(logits)
    if not np.isfinite(logits).all():
        raise InputError(f"{name}: its logits are not finite")
    return logits
