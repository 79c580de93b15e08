"""Feature files: what FDC needs from any class-incremental learner, as plain NumPy arrays.

A file is an `.npz`, or a folder of `.npy` files of the same names, which are memory-mapped. For
each task t = 0 .. T-1:

    train_adapted_t     [n_t, d]   features of the training images by the encoder after task t
    train_labels_t      [n_t]      integers; no class may occur in two tasks
    head_weight_t       [c_t, d]   rows in ascending order of labels unless head_classes_t is there
    head_bias_t         [c_t]      optional, zeros when absent; linear heads only
    head_classes_t      [c_t]      optional, the label of each row of the head
    head_scale_t        scalar     optional, cosine heads only, 1 when absent
    train_pretrained_t  [n_t, d']  optional, by the pretrained encoder; in all tasks or none

and for the whole file:

    test_adapted        [n, d]     features of the test images by the final encoder
    test_pretrained     [n, d']    present exactly when train_pretrained_t is
    test_labels         [n]        optional
    head_kind           string     optional: linear (default), cosine, or nearest_mean (the rows of
                                   head_weight_t are class means)
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fdc_jax import heads
from fdc_jax.array_files import printable, read_folder, read_npy, read_npz, write_npy
from fdc_jax.errors import InputError

HEAD_KINDS = ("linear", "cosine", "nearest_mean")

_PER_TASK = (
    "train_adapted",
    "train_pretrained",
    "train_labels",
    "head_weight",
    "head_bias",
    "head_classes",
    "head_scale",
)
_REQUIRED = ("train_adapted", "train_labels", "head_weight")
_WHOLE = ("test_adapted", "test_pretrained", "test_labels", "head_kind")
_TASK_NAME = re.compile(rf"({'|'.join(_PER_TASK)})_(0|[1-9][0-9]{{0,5}})")
_CHECKED_ROWS = 4096


class TaskFeatures(NamedTuple):
    """One task: training features, labels, head, and the label of each row of the head."""

    adapted: Float[np.ndarray, "n d"]
    pretrained: Float[np.ndarray, "n d2"] | None
    labels: Int[np.ndarray, " n"]
    head: heads.Head
    classes: Int[np.ndarray, " c"]


class FeatureSet(NamedTuple):
    """A checked feature file; arrays of a folder are memory-mapped, of an npz in memory."""

    tasks: tuple[TaskFeatures, ...]
    test_adapted: Float[np.ndarray, "n d"]
    test_pretrained: Float[np.ndarray, "n d2"] | None
    test_labels: Int[np.ndarray, " n"] | None

    @property
    def test_tasks(self) -> Int[np.ndarray, " n"]:
        """Index of the task of each test label.

        Raises:
            InputError: the file has no test labels.
        """
        if self.test_labels is None:
            raise InputError("test_labels: absent, so the true tasks are not known")
        task_of = {int(c): t for t, task in enumerate(self.tasks) for c in task.classes}
        return np.array([task_of[int(label)] for label in self.test_labels])


def load(path: str | os.PathLike[str]) -> FeatureSet:
    """Reads and checks a whole feature file before anything is computed from it.

    Args:
        path: an `.npz` or a folder of `.npy` files.

    Raises:
        InputError: one line with the file, the array and the place of the first fault: a damaged
            file, an unknown, missing or superfluous array, a gap in the task numbers, a shape or
            type that does not fit, a number that is not finite in float32, a label outside its
            head, a class in two tasks.
    """
    path = Path(path)
    arrays = read_folder(path) if path.is_dir() else read_npz(path)
    try:
        return _check(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


# Checking ----------------------------------------------------------------------------------------


def _check(arrays: Mapping[str, np.ndarray]) -> FeatureSet:
    num_tasks = _check_names(arrays)
    two_views = "test_pretrained" in arrays
    kind = _head_kind(arrays)
    tasks: list[TaskFeatures] = []
    owner: dict[int, int] = {}
    for t in range(num_tasks):
        tasks.append(_check_task(arrays, t, kind, two_views))
        for label in tasks[t].classes.tolist():
            if label in owner:
                raise InputError(
                    f"train_labels_{t}: class {label} is already a class of task {owner[label]}; "
                    "expected tasks without common classes"
                )
            owner[label] = t
    test = _features(arrays, "test_adapted", tasks[0].adapted.shape[1], "train_adapted_0")
    pretrained = labels = None
    if two_views:
        first = tasks[0].pretrained
        assert first is not None
        pretrained = _features(arrays, "test_pretrained", first.shape[1], "train_pretrained_0")
        _same_rows("test_pretrained", pretrained, "test_adapted", test)
    if "test_labels" in arrays:
        labels = _labels(arrays, "test_labels")
        _same_rows("test_labels", labels, "test_adapted", test)
        _labels_within(labels, list(owner), "test_labels", "any task")
    return FeatureSet(tuple(tasks), test, pretrained, labels)


def _check_names(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns the number of tasks; refuses unknown and missing names."""
    found: dict[int, set[str]] = {}
    for name in arrays:
        match = _TASK_NAME.fullmatch(name)
        if match:
            found.setdefault(int(match[2]), set()).add(match[1])
        elif name not in _WHOLE:
            raise InputError(f"{printable(name)}: unknown array{_suggestion(name)}")
    if not found:
        raise InputError("train_adapted_0: missing; expected tasks numbered from 0")
    num_tasks = max(found) + 1
    with_pretrained = {t for t in found if "train_pretrained" in found[t]}
    for t in range(num_tasks):
        if t not in found:
            raise InputError(
                f"train_adapted_{t}: missing; there is a task {num_tasks - 1}, so expected tasks "
                f"0 .. {num_tasks - 1} without gaps"
            )
        for name in _REQUIRED:
            if name not in found[t]:
                raise InputError(f"{name}_{t}: missing")
        if bool(with_pretrained) != (t in with_pretrained):
            raise InputError(
                f"train_pretrained_{t}: missing, but task {min(with_pretrained)} has one; expected "
                "it in all tasks or none"
            )
    if "test_adapted" not in arrays:
        raise InputError("test_adapted: missing")
    if bool(with_pretrained) != ("test_pretrained" in arrays):
        state = "missing, but" if with_pretrained else "found, but no"
        raise InputError(
            f"test_pretrained: {state} train_pretrained_t is there; expected both or neither"
        )
    return num_tasks


def _suggestion(name: str) -> str:
    stem, number = re.fullmatch(r"(.*?)(_?[0-9]*)", name, re.DOTALL).groups()  # pyright: ignore
    near = difflib.get_close_matches(stem, _PER_TASK if number else (*_WHOLE, *_PER_TASK), 1)
    if not near:
        return "; expected names such as train_adapted_0 or test_adapted"
    if near[0] in _WHOLE:
        return f"; did you mean {near[0]}?"
    return f"; did you mean {near[0]}_{number.strip('_')[:6] or 't'}?"


def _head_kind(arrays: Mapping[str, np.ndarray]) -> str:
    if "head_kind" not in arrays:
        return "linear"
    array = arrays["head_kind"]
    kind = str(array) if array.ndim == 0 and array.dtype.kind in "US" else None
    if array.dtype.kind == "S" and array.ndim == 0:
        kind = array.item().decode("ascii", "replace")
    if kind not in HEAD_KINDS:
        found = kind or f"{array.dtype} of shape {array.shape}"
        raise InputError(f"head_kind: expected one of {', '.join(HEAD_KINDS)}; found {found[:40]}")
    return kind


def _check_task(
    arrays: Mapping[str, np.ndarray], t: int, kind: str, two_views: bool
) -> TaskFeatures:
    dimension = None if t == 0 else arrays["train_adapted_0"].shape[1]
    adapted = _features(arrays, f"train_adapted_{t}", dimension, "train_adapted_0")
    labels = _labels(arrays, f"train_labels_{t}")
    _same_rows(f"train_labels_{t}", labels, f"train_adapted_{t}", adapted)
    pretrained = None
    if two_views:
        dimension = None if t == 0 else arrays["train_pretrained_0"].shape[1]
        pretrained = _features(arrays, f"train_pretrained_{t}", dimension, "train_pretrained_0")
        _same_rows(f"train_pretrained_{t}", pretrained, f"train_adapted_{t}", adapted)
    name = f"head_weight_{t}"
    weight = _features(arrays, name, adapted.shape[1], f"train_adapted_{t}")
    if f"head_classes_{t}" in arrays:
        classes = _labels(arrays, f"head_classes_{t}")
        if len(np.unique(classes)) != len(classes):
            raise InputError(f"head_classes_{t}: expected distinct classes")
    else:
        classes = np.unique(labels)
    if len(classes) != len(weight):
        source = "head_classes" if f"head_classes_{t}" in arrays else "the distinct labels"
        raise InputError(
            f"{name}: expected one row for each class of {source}, {len(classes)}, "
            f"found {len(weight)}"
        )
    _labels_within(labels, classes.tolist(), f"train_labels_{t}", "its head")
    return TaskFeatures(adapted, pretrained, labels, _head(arrays, t, kind, weight), classes)


def _head(arrays: Mapping[str, np.ndarray], t: int, kind: str, weight: np.ndarray) -> heads.Head:
    rows = jnp.asarray(np.asarray(weight, np.float32))
    for name, owner in (("head_bias", "linear"), ("head_scale", "cosine")):
        if f"{name}_{t}" in arrays and kind != owner:
            raise InputError(f"{name}_{t}: expected only for {owner} heads, head_kind is {kind}")
    if kind == "nearest_mean":
        return heads.NearestMeanHead(rows)
    if kind == "cosine":
        return heads.CosineHead(rows, float(_small(arrays, f"head_scale_{t}", (), 1.0)))
    return heads.LinearHead(rows, jnp.asarray(_small(arrays, f"head_bias_{t}", (len(rows),), 0.0)))


def _small(
    arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], default: float
) -> np.ndarray:
    if name not in arrays:
        return np.full(shape, default, np.float32)
    array = arrays[name]
    if array.shape != shape or array.dtype.kind != "f":
        raise InputError(
            f"{name}: expected floating-point numbers of shape {shape}, found {array.dtype} of "
            f"shape {array.shape}"
        )
    with np.errstate(over="ignore"):
        array = np.asarray(array, np.float32)
    if not np.isfinite(array).all():
        place = np.unravel_index(int(np.argmin(np.isfinite(array))), shape)
        row = f"row {place[0]} " if shape else ""
        raise InputError(f"{name}: {row}is not finite in float32")
    return array


def _features(
    arrays: Mapping[str, np.ndarray], name: str, dimension: int | None, reference: str
) -> Float[np.ndarray, "n d"]:
    array = arrays[name]
    if array.ndim != 2 or array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(
            f"{name}: expected a matrix of floating-point numbers, found {array.dtype} of shape "
            f"{array.shape}"
        )
    if not array.size:
        raise InputError(f"{name}: expected at least one row and column, found {array.shape}")
    if dimension is not None and array.shape[1] != dimension:
        raise InputError(
            f"{name}: expected {dimension} columns as in {reference}, found {array.shape[1]}"
        )
    for start in range(0, len(array), _CHECKED_ROWS):
        with np.errstate(over="ignore"):
            rows = np.asarray(array[start : start + _CHECKED_ROWS], np.float32)
        finite = np.isfinite(rows)
        if not finite.all():
            row, column = np.unravel_index(int(np.argmin(finite)), rows.shape)
            value = array[start + row, column]
            raise InputError(
                f"{name}: row {start + int(row)}, column {int(column)} is {value}; expected "
                "numbers that are finite in float32"
            )
    return array


def _labels(arrays: Mapping[str, np.ndarray], name: str) -> Int[np.ndarray, " n"]:
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{name}: expected a vector of integers, found {array.dtype} of shape {array.shape}"
        )
    if not array.size:
        raise InputError(f"{name}: expected at least one label, found none")
    if array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: row {int(np.argmax(array))} is {array.max()}, beyond 64 bits")
    return np.asarray(array, np.int64)


def _same_rows(name: str, array: np.ndarray, reference: str, other: np.ndarray) -> None:
    if len(array) != len(other):
        raise InputError(
            f"{name}: expected {len(other)} rows as in {reference}, found {len(array)}"
        )


def _labels_within(
    labels: Int[np.ndarray, " n"], classes: list[int], name: str, where: str
) -> None:
    outside = ~np.isin(labels, classes)
    if outside.any():
        row = int(np.argmax(outside))
        raise InputError(f"{name}: row {row} is label {labels[row]}, no class of {where}")


# Writing -----------------------------------------------------------------------------------------


def write_task(
    folder: str | os.PathLike[str],
    task: int,
    adapted: ArrayLike,
    labels: ArrayLike,
    head: heads.Head,
    pretrained: ArrayLike | None = None,
    classes: ArrayLike | None = None,
) -> None:
    """Writes the arrays of one task into a folder, each file whole or not at all.

    Arrays the folder held for this task and that are not given now are removed.

    Args:
        folder: made when missing.
        task: index from 0.
        adapted: [n, d] training features of the encoder after this task.
        labels: [n] integers.
        head: a linear, cosine or nearest-mean head; all tasks of a folder need the same kind.
        pretrained: [n, d'] features of the pretrained encoder, in all tasks or none.
        classes: [c] label of each row of the head; ascending distinct labels when None.

    Raises:
        InputError: the head is of another kind, or the disk refuses.
    """
    folder = Path(folder)
    if isinstance(head, heads.LinearHead):
        kind, parts = "linear", {"head_weight": head.weight, "head_bias": head.bias}
    elif isinstance(head, heads.CosineHead):
        kind, parts = "cosine", {"head_weight": head.weight, "head_scale": head.scale}
    elif isinstance(head, heads.NearestMeanHead):
        kind, parts = "nearest_mean", {"head_weight": head.means}
    else:
        raise InputError(
            f"head of task {task}: expected a linear, cosine or nearest-mean head, which can be "
            f"stored as arrays; found {type(head).__name__}"
        )
    kind_file = folder / "head_kind.npy"
    if task > 0 and kind_file.exists():
        stored = str(read_npy(kind_file))
        if stored != kind:
            raise InputError(
                f"{kind_file}: expected {kind} as the head of task {task}, is {stored}"
            )
    write_npy(kind_file, np.array(kind))
    given: dict[str, ArrayLike | None] = {
        **{name: np.asarray(part, np.float32) for name, part in parts.items()},
        "head_classes": classes,
        "train_adapted": adapted,
        "train_pretrained": pretrained,
        "train_labels": labels,
    }
    for name in _PER_TASK:
        _write_or_remove(folder / f"{name}_{task}.npy", given.get(name))


def write_test(
    folder: str | os.PathLike[str],
    adapted: ArrayLike,
    pretrained: ArrayLike | None = None,
    labels: ArrayLike | None = None,
) -> None:
    """Writes the test features into a folder, each file whole or not at all.

    Args:
        folder: made when missing.
        adapted: [n, d] features of the final encoder.
        pretrained: [n, d'] features of the pretrained encoder, if the tasks have them.
        labels: [n] integers, if known.
    """
    folder = Path(folder)
    write_npy(folder / "test_adapted.npy", adapted)
    _write_or_remove(folder / "test_pretrained.npy", pretrained)
    _write_or_remove(folder / "test_labels.npy", labels)


def _write_or_remove(path: Path, array: ArrayLike | None) -> None:
    if array is None:
        path.unlink(missing_ok=True)
    else:
        write_npy(path, array)
