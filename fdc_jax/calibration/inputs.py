"""What calibrators accept: features, labels and heads, checked and cut into blocks.

Features and labels come as arrays of NumPy, JAX or any library that offers `__array__` or
`__dlpack__`, or as memory maps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.heads import KINDS

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Rows that are read and computed with at once.
BLOCK_ROWS = 1024

VIEWS = ("adapted", "pretrained")

# Number types of ml_dtypes, whose kind NumPy does not know.
_SHORT_FLOATS = ("bfloat", "float8", "float6", "float4", "int4", "uint4", "int2", "uint2")


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


def check_finite(features: np.ndarray, name: str) -> None:
    """Raises InputError naming the first row of features that is not finite in float32."""
    for _ in blocks(features, name):
        pass


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


def score_views(
    adapted: Any, pretrained: Any, widths: Sequence[int], needs_pretrained: bool
) -> list[np.ndarray]:
    """Returns the features of one or both views to be scored.

    `widths` are d and, where the tasks have a pretrained view, e; `needs_pretrained` tells whether
    such a view must be given where the tasks have it.
    """
    if pretrained is None and len(widths) == 2 and needs_pretrained:
        raise InputError(
            "pretrained features: expected, since the tasks were fitted with them; leave them "
            "out only where that view has no weight"
        )
    if pretrained is not None and len(widths) == 1:
        raise InputError("pretrained features: the tasks were fitted without a pretrained view")
    views = [
        feature_array(value, f"{view} features", width)
        for view, value, width in zip(VIEWS, (adapted, pretrained), widths, strict=False)
        if not (value is None and view == "pretrained")
    ]
    if len(views[-1]) != len(views[0]):
        raise InputError(
            f"pretrained features: expected {len(views[0])} rows like the adapted features, "
            f"found {len(views[1])}"
        )
    return views


def blocks(
    features: np.ndarray, name: str | None = None
) -> Iterator[tuple[slice, Float[np.ndarray, "block d"]]]:
    """Yields some rows of features at a time in float32, with their place.

    Where they have a `name`, raises InputError for the first row that is not finite.
    """
    for start in range(0, len(features), BLOCK_ROWS):
        place = slice(start, start + BLOCK_ROWS)
        if name is None:
            yield place, float32(features[place])
        else:
            yield place, finite_features(features[place], name, start=start)


# A task ------------------------------------------------------------------------------------------


class TaskInput(NamedTuple):
    """What `fit_task` is given, checked but for the features' values.

    Attributes:
        task: its number, counted from 0.
        views: adapted features and, where given, pretrained ones.
        labels: of all samples.
        classes: label of each head row.
        counts: samples of each of them.
        head: None where none is given.
    """

    task: int
    views: list[np.ndarray]
    labels: Int[np.ndarray, " n"]
    classes: Int[np.ndarray, " c"]
    counts: Int[np.ndarray, " c"]
    head: Any

    @property
    def rows(self) -> Int[np.ndarray, " n"]:
        """The place of each sample's label among `classes`."""
        order = np.argsort(self.classes)
        return order[np.searchsorted(self.classes, self.labels, sorter=order)]

    def name(self, view: int) -> str:
        """What messages call the features of a view."""
        return f"{VIEWS[view]} features of task {self.task}"


def task_views(
    adapted: Any, labels: Any, pretrained: Any, task: int, widths: Sequence[int]
) -> tuple[list[np.ndarray], Int[np.ndarray, " n"]]:
    """Returns features and labels of a task, alike in rows and with the views of earlier tasks."""
    given = [adapted] if pretrained is None else [adapted, pretrained]
    if widths and len(given) != len(widths):
        had, have = ("none", "some") if len(widths) == 1 else ("some", "none")
        raise InputError(
            f"pretrained features of task {task}: earlier tasks had {had}, this one has {have}; "
            "give them for all tasks or for none"
        )
    views: list[np.ndarray] = []
    for view, value, width in zip(VIEWS, given, widths or (None, None), strict=False):
        views.append(feature_array(value, f"{view} features of task {task}", width))
    labels = label_array(labels, f"labels of task {task}")
    for name, array in (("pretrained features", views[-1]), ("labels", labels)):
        if len(array) != len(views[0]):
            raise InputError(
                f"{name} of task {task}: expected {len(views[0])} rows like the adapted features, "
                f"found {len(array)}"
            )
    if not len(labels):
        raise InputError(f"task {task}: expected at least one sample, found none")
    return views, labels


def task_classes(
    labels: Int[np.ndarray, " n"],
    task: int,
    num_classes: int | None,
    named: Any,
    earlier: Sequence[Int[np.ndarray, " _"]],
) -> tuple[Int[np.ndarray, " c"], Int[np.ndarray, " c"]]:
    """Returns the label and the number of samples of each head row.

    Args:
        labels: of all samples of the task.
        task: its number, for messages.
        num_classes: rows of its head, None where it has none.
        named: the label of each row; None for the distinct labels, ascending.
        earlier: labels of earlier tasks.

    Raises:
        InputError: a label is an earlier task's or no row's, or a row has no label.
    """
    values, first, counts = np.unique(labels, return_index=True, return_counts=True)
    if named is not None:
        named = class_labels(named, f"classes of task {task}")
    if num_classes is None:
        num_classes = len(values if named is None else named)
    if named is not None:
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


def checked_head(head: Any, name: str, width: int, like: Any) -> Any:
    """Returns a head of `heads.KINDS` with float32 arrays; `width` is that of its input.

    Raises:
        InputError: no such head, another kind than the head `like`, or an array of another shape
            than [c, width] and [c], not of real numbers, or not finite.
    """
    if type(head) not in KINDS:
        raise InputError(
            f"{name}: expected one of {', '.join(kind.__name__ for kind in KINDS)} "
            f"(fdc_jax.heads), found {type(head).__name__}"
        )
    if type(head) is not type(like):
        raise InputError(
            f"{name}: expected a {KINDS[type(like)]} head like task 0, found {KINDS[type(head)]}"
        )
    parts: dict[str, np.ndarray] = {}
    for part, value in head._asdict().items():
        plain = isinstance(value, int | float)
        array = host_array(np.asarray(value) if plain else value, f"{name}: {part}")
        check_real(array.dtype, f"{name}: {part}")
        parts[part] = float32(array).copy()  # Whoever gave it may go on training it.
    matrix, *others = parts
    rows = parts[matrix]
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] != width:
        raise InputError(
            f"{name}: {matrix}: expected shape [classes, {width}], found {[*rows.shape]}"
        )
    if "bias" in parts and parts["bias"].ndim == 0:
        parts["bias"] = np.full(len(rows), parts["bias"])
    for part in others:
        shape = (len(rows),) if part == "bias" else ()
        if parts[part].shape != shape:
            expected = f"shape {[*shape]}" if shape else "a number"
            raise InputError(f"{name}: {part}: expected {expected}, found {[*parts[part].shape]}")
    for part, values in parts.items():
        if not np.isfinite(values).all():
            row = int(
                np.argmin(
                    np.isfinite(values.reshape(max(values.shape[:1], default=1), -1)).all(axis=1)
                )
            )
            raise InputError(f"{name}: {part}: row {row} is not finite")
    return type(head)(**parts)
