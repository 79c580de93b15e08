"""Feature files: what FDC needs from any class-incremental learner, as plain NumPy arrays.

A file is an `.npz`, or a folder of `.npy` files of the same names, which are memory-mapped. For
each task t = 0 .. T-1:

    train_adapted_t     [n_t, d]   features of the training images by the encoder after task t
    train_labels_t      [n_t]      integers; no class may occur in two tasks
    head_weight_t       [c_t, d]   rows in ascending order of labels unless head_classes_t is there
    head_bias_t         [c_t]      optional, zeros when absent; linear and normalised_linear heads
    head_classes_t      [c_t]      optional, the label of each row of the head
    head_scale_t        scalar     optional, cosine heads only, 1 when absent
    train_pretrained_t  [n_t, d']  optional, by the pretrained encoder; in all tasks or none
    train_previous_t    [n_t, d]   optional, by the encoder after task t - 1, of the same images in
                                   the same order; for all t >= 1 or none
    final_head_weight_t [c_t, d]   optional, where the learner changed the head after task t: what
                                   test images meet; with final_head_bias_t or final_head_scale_t
                                   as above, rows in the same order

and for the whole file:

    test_adapted        [n, d]     features of the test images by the final encoder
    test_pretrained     [n, d']    present exactly when train_pretrained_t is
    test_labels         [n]        optional
    head_kind           string     optional: linear (default), normalised_linear (linear on h/|h|),
                                   cosine, or nearest_mean (rows of head_weight_t are class means)

Statistics come from the head of a task's own time, `head_weight_t`; predictions are made with the
final heads, which are the same where there is no `final_head_weight_t`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fdc_jax import heads
from fdc_jax.errors import InputError, nearest
from fdc_jax.machine.files import printable, read_folder, read_npy, read_npz, write_npy

_TYPES: dict[str, Any] = {kind: of_kind for of_kind, kind in heads.KINDS.items()}
# What stands beside the rows of a head of each kind.
_BESIDE = {
    "linear": "head_bias",
    "normalised_linear": "head_bias",
    "cosine": "head_scale",
    "nearest_mean": None,
}
_HEAD = ("head_weight", "head_bias", "head_scale")
_FINAL = tuple(f"final_{name}" for name in _HEAD)
_TRAIN = ("train_adapted", "train_pretrained", "train_labels")
_PER_TASK = (*_TRAIN, "train_previous", "head_classes", *_HEAD, *_FINAL)
_WHOLE = ("test_adapted", "test_pretrained", "test_labels", "head_kind")
_TASK_NAME = re.compile(rf"({'|'.join(_PER_TASK)})_(0|[1-9][0-9]{{0,5}})")

Arrays = Mapping[str, np.ndarray]


class TaskFeatures(NamedTuple):
    """One task: training features, labels, head, and the label of each row of the head.

    `final_head` is None where the head stayed what it was; `previous` are features of the same
    images by the encoder before the task, None in the first task and where nobody asked.
    """

    adapted: Float[np.ndarray, "n d"]
    pretrained: Float[np.ndarray, "n d2"] | None
    labels: Int[np.ndarray, " n"]
    head: heads.Head
    classes: Int[np.ndarray, " c"]
    final_head: heads.Head | None = None
    previous: Float[np.ndarray, "n d"] | None = None

    def fit(self, calibrator: Any) -> None:
        """Gives a calibrator this task, as the next one; see `FeatureSet.fit`."""
        named = {"classes": self.classes, "previous": self.previous}
        calibrator.fit_task(self.adapted, self.labels, self.head, self.pretrained, **named)


class FeatureSet(NamedTuple):
    """A checked feature file; arrays of a folder are memory-mapped, of an npz in memory."""

    tasks: tuple[TaskFeatures, ...]
    test_adapted: Float[np.ndarray, "n d"]
    test_pretrained: Float[np.ndarray, "n d2"] | None
    test_labels: Int[np.ndarray, " n"] | None

    @property
    def final_heads(self) -> list[heads.Head] | None:
        """Heads to predict with, one per task; None when all are those of their own time."""
        if all(task.final_head is None for task in self.tasks):
            return None
        return [task.final_head or task.head for task in self.tasks]

    @property
    def test_tasks(self) -> Int[np.ndarray, " n"]:
        """Index of the task of each test label; raises InputError where there are none."""
        if self.test_labels is None:
            raise InputError("test_labels: absent, so the true tasks are not known")
        task_of = {int(c): t for t, task in enumerate(self.tasks) for c in task.classes}
        return np.array([task_of[int(label)] for label in self.test_labels])

    def fit(self, calibrator: Any) -> Any:
        """Fits a calibrator to all tasks and gives it the final heads; returns the same one.

        Args:
            calibrator: one of `calibration.METHODS`, fresh.

        Raises:
            InputError: the calibrator refuses a task or a head.
        """
        for task in self.tasks:
            task.fit(calibrator)
        calibrator.finalize()
        if self.final_heads is not None:
            calibrator.replace_heads(self.final_heads)
        return calibrator


def load(path: str | os.PathLike[str]) -> FeatureSet:
    """Reads a feature file, an `.npz` or a folder, and checks what it is made of.

    Raises:
        InputError: one line with the file and the array of the first fault: a damaged file, an
            unknown, missing or superfluous array, a gap in the task numbers, a shape or type that
            does not fit, a label outside its head, a class in two tasks, one head for the classes
            of several tasks.
    """
    path = Path(path)
    arrays = read_folder(path) if path.is_dir() else read_npz(path)
    try:
        return _check(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


# Checking ----------------------------------------------------------------------------------------


def _check(arrays: Arrays) -> FeatureSet:
    num_tasks = _check_names(arrays)
    labels = [_labels(arrays, f"train_labels_{t}") for t in range(num_tasks)]
    classes = _classes(arrays, labels)
    tasks, two_views = [], "test_pretrained" in arrays
    for t in range(num_tasks):
        rows, pretrained, final, previous = f"train_labels_{t}", None, None, None
        adapted = _matrix(arrays, f"train_adapted_{t}", "train_adapted_0", rows)
        if two_views:
            pretrained = _matrix(arrays, f"train_pretrained_{t}", "train_pretrained_0", rows)
        head = _checked_head(arrays, "", t, labels, classes)
        if f"train_previous_{t}" in arrays:
            previous = _matrix(arrays, f"train_previous_{t}", "train_adapted_0", rows)
        beside = [f"{name}_{t}" for name in _FINAL[1:] if f"{name}_{t}" in arrays]
        if f"final_head_weight_{t}" in arrays:
            final = _checked_head(arrays, "final_", t, labels, classes)
        elif beside:
            raise InputError(f"final_head_weight_{t}: missing, but there is a {beside[0]}")
        of_task = (adapted, pretrained, labels[t], head, classes[t], final, previous)
        tasks.append(TaskFeatures(*of_task))
    test = _matrix(arrays, "test_adapted", "train_adapted_0")
    pretrained = test_labels = None
    if two_views:
        pretrained = _matrix(arrays, "test_pretrained", "train_pretrained_0", "test_adapted")
    if "test_labels" in arrays:
        test_labels = _labels(arrays, "test_labels")
        if len(test_labels) != len(test):
            raise InputError(
                f"test_labels: expected {len(test)} rows as in test_adapted, found "
                f"{len(test_labels)}"
            )
        outside = ~np.isin(test_labels, np.concatenate(classes))
        if outside.any():
            row = int(np.argmax(outside))
            raise InputError(
                f"test_labels: row {row} is label {test_labels[row]}, no class of any task"
            )
    return FeatureSet(tuple(tasks), test, pretrained, test_labels)


def _check_names(arrays: Arrays) -> int:
    """Returns the number of tasks; refuses unknown and missing names."""
    last = 0
    for name in arrays:
        if match := _TASK_NAME.fullmatch(name):
            last = max(last, int(match[2]))
        elif name not in _WHOLE:
            raise InputError(f"{printable(name)}: unknown array{_suggestion(name[:80])}")
    two_views = any(name.startswith(("train_pretrained", "test_pretrained")) for name in arrays)
    train = [name for name in (*_TRAIN, "head_weight") if two_views or name != "train_pretrained"]
    moved = [t for t in range(1, last + 1) if f"train_previous_{t}" in arrays]
    if moved and len(moved) < last:
        lacking = next(t for t in range(1, last + 1) if t not in moved)
        raise InputError(
            f"train_previous_{lacking}: missing; expected for every task from t = 1 on or for none"
        )
    if "train_previous_0" in arrays:
        raise InputError("train_previous_0: expected from t = 1 on; nothing precedes task 0")
    test = ["test_adapted", "test_pretrained"] if two_views else ["test_adapted"]

    def expected() -> Iterator[str]:
        for t in range(last + 1):
            yield from (f"{name}_{t}" for name in train)
        yield from test

    for name in expected():
        if name not in arrays:
            raise InputError(
                f"{name}: missing; expected {', '.join(f'{each}_t' for each in train)} for each "
                f"task t = 0 .. {last}, and {' and '.join(test)}"
            )
    return last + 1


def _suggestion(name: str) -> str:
    number = re.search(r"[0-9]{1,6}$", name)
    known = [f"{each}_{int(number[0]) if number else 't'}" for each in _PER_TASK]
    hint = nearest(name, [*_WHOLE, *known])
    return hint or "; expected names such as train_adapted_0 or test_adapted"


def _classes(
    arrays: Arrays, labels: Sequence[Int[np.ndarray, " n"]]
) -> list[Int[np.ndarray, " c"]]:
    """Returns the label of each head row of every task; refuses samples of another task's class.

    A class that two tasks claim belongs to the one with more of its samples, else to the first.
    """
    classes = []
    for t, of_task in enumerate(labels):
        name = f"head_classes_{t}"
        classes.append(_labels(arrays, name) if name in arrays else np.unique(of_task))
        if len(np.unique(classes[t])) != len(classes[t]):
            raise InputError(f"{name}: expected distinct classes")
    names = np.unique(np.concatenate([*labels, *classes]))
    counts = np.stack(
        [np.bincount(np.searchsorted(names, each), minlength=len(names)) for each in labels]
    )
    named = np.stack([np.isin(names, each) for each in classes])
    owners = np.argmax(2 * counts + named, axis=0)
    for t, of_task in enumerate(labels):
        claimed = named[t] | (counts[t] > 0)
        for c in np.flatnonzero(claimed & ~(named[t] & (owners == t))):
            label, owner, count = names[c], owners[c], counts[t, c]
            if not count:  # The head has a row for a class of another task.
                _refuse_one_head(f"head_weight_{t}", len(classes[t]), t, labels, classes)
                raise InputError(
                    f"head_classes_{t}: class {label} is already a class of task {owner}"
                )
            row = f"train_labels_{t}: row {int(np.argmax(of_task == label))} is label {label}"
            if owner == t:
                raise InputError(f"{row}, no class of its head")
            raise InputError(
                f"{row}, which is a class of task {owner} (with {counts[owner, c]} samples there "
                f"and {count} here); expected tasks without common classes"
            )
    return classes


def _checked_head(
    arrays: Arrays, prefix: str, t: int, labels: Sequence[np.ndarray], classes: Sequence[np.ndarray]
) -> heads.Head:
    name = f"{prefix}head_weight_{t}"
    found, expected = len(_matrix(arrays, name, "train_adapted_0")), len(classes[t])
    if found != expected:
        _refuse_one_head(name, found, t, labels, classes)
        source = "head_classes" if f"head_classes_{t}" in arrays else "the distinct labels"
        raise InputError(
            f"{name}: expected one row for each class of {source}, {expected}, found {found}"
        )
    return _read_head(arrays, t, prefix)


def _refuse_one_head(
    name: str, found: int, t: int, labels: Sequence[np.ndarray], classes: Sequence[np.ndarray]
) -> None:
    """Raises InputError where a head has rows for several tasks' classes; says which to take."""
    own = [np.unique(each) for each in labels]
    for tasks, reading in (
        (own[: t + 1], f"tasks 0 .. {t} have together: one head that grows"),
        (own, "all tasks have together: one head over all classes"),
    ):
        together = np.concatenate(tasks)
        if found != len(together) or found == len(own[t]):
            continue
        if found == len(classes[t]):  # head_classes names the rows.
            rows = np.flatnonzero(np.isin(classes[t], own[t]))
        elif np.array_equal(np.sort(together), np.arange(found)):  # Labels are numbers of rows.
            rows = own[t]
        else:  # In order of the tasks.
            rows = np.arange(len(own[t])) + sum(len(each) for each in own[:t])
        first, last = int(rows.min()), int(rows.max())
        part = f"{first}:{last + 1}" if last - first < len(rows) else printable(str(rows.tolist()))
        raise InputError(
            f"{name}: found {found} rows for the {len(own[t])} classes of task {t}, as many as "
            f"{reading}; expected those of the task alone, weight[{part}], and so for the bias"
        )


def _matrix(
    arrays: Arrays, name: str, columns: str, rows: str | None = None
) -> Float[np.ndarray, "n d"]:
    """Returns an array as it is; whether its numbers are finite, the calibrators check.

    It must have as many columns as an array checked before (or itself), as many rows as another.
    """
    array = arrays[name]
    if array.ndim != 2 or not array.size:
        raise InputError(
            f"{name}: expected a matrix with at least one row and column, found {array.dtype} of "
            f"shape {array.shape}"
        )
    for axis, what, other in ((0, "rows", rows), (1, "columns", columns)):
        if other and array.shape[axis] != arrays[other].shape[axis]:
            raise InputError(
                f"{name}: expected {arrays[other].shape[axis]} {what} as in {other}, found "
                f"{array.shape[axis]}"
            )
    _check_type(name, array)
    return array


def _check_type(name: str, array: np.ndarray) -> None:
    if array.dtype.kind == "V":
        raise InputError(
            f"{name}: is stored as {array.dtype}, which is what NumPy makes of bfloat16 and other "
            "types that it does not know; save it as float32, such as with tensor.float() in "
            "PyTorch or array.astype('float32') in JAX"
        )
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"{name}: expected floating-point numbers, found {array.dtype}")


def _labels(arrays: Arrays, name: str) -> Int[np.ndarray, " n"]:
    """Returns an array as labels in int64."""
    array = arrays[name]
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(
            f"{name}: expected a vector of integers, at least one; found {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: row {int(np.argmax(array))} is {array.max()}, beyond 64 bits")
    return np.asarray(array, np.int64)


# Heads -------------------------------------------------------------------------------------------


def _read_head(arrays: Arrays, t: int, prefix: str = "") -> heads.Head:
    """Returns the head of a task, of the kind that all heads of a file are of."""
    stored = arrays.get("head_kind", np.array("linear"))
    value = stored.item() if stored.ndim == 0 else stored
    kind = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    if kind not in _TYPES:
        raise InputError(
            f"head_kind: expected one of {', '.join(_TYPES)}; found {printable(kind, 40)}"
        )
    beside = _BESIDE[kind]
    for name in _HEAD[1:]:
        if f"{prefix}{name}_{t}" in arrays and name != beside:
            owners = " or ".join(owner for owner, own in _BESIDE.items() if own == name)
            raise InputError(
                f"{prefix}{name}_{t}: expected only for {owners} heads, head_kind is {kind}"
            )
    rows = np.array(arrays[f"{prefix}head_weight_{t}"], np.float32)
    if beside is None:
        return _TYPES[kind](rows)
    name, scale = f"{prefix}{beside}_{t}", beside == "head_scale"
    shape = () if scale else (len(rows),)
    array = arrays.get(name, np.full(shape, 1.0 if scale else 0.0, np.float32))
    if array.shape != shape:
        raise InputError(f"{name}: expected numbers of shape {shape}, found {array.shape}")
    _check_type(name, array)
    part = np.asarray(array, np.float32)
    return _TYPES[kind](rows, float(part) if scale else part)


def _head_arrays(head: Any, task: int) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the kind of a head, and its arrays in float32 by their names in a file."""
    kind = heads.KINDS.get(type(head))
    if kind is None:
        raise InputError(
            f"head of task {task}: expected a {' or '.join(_TYPES)} head, which can be stored as "
            f"arrays; found {type(head).__name__}"
        )
    named = zip(("head_weight", _BESIDE[kind] or ""), head, strict=False)
    return kind, {name: np.asarray(part, np.float32) for name, part in named}


# Writing -----------------------------------------------------------------------------------------


def write_task(
    folder: str | os.PathLike[str],
    task: int,
    adapted: ArrayLike,
    labels: ArrayLike,
    head: heads.Head,
    pretrained: ArrayLike | None = None,
    classes: ArrayLike | None = None,
    previous: ArrayLike | None = None,
) -> None:
    """Writes the arrays of one task into a folder, each file whole or not at all.

    Arrays the folder held for this task and that are not given now are removed.

    Args:
        folder: made when missing.
        task: index from 0.
        adapted: [n, d] training features of the encoder after this task.
        labels: [n] integers.
        head: of a kind that can be stored; all tasks of a folder need the same kind.
        pretrained: [n, d'] features of the pretrained encoder, in all tasks or none.
        classes: [c] label of each row of the head; ascending distinct labels when None.
        previous: [n, d] features of the encoder before this task, from the second task on.

    Raises:
        InputError: the head is of another kind, or the disk refuses.
    """
    folder = Path(folder)
    kind, given = _head_arrays(head, task)
    if task > 0:
        _check_stored_kind(folder, kind, f"the head of task {task}")
    write_npy(folder / "head_kind.npy", np.array(kind))
    given |= dict(zip(_TRAIN, (adapted, pretrained, labels), strict=True))
    given |= {"head_classes": classes, "train_previous": previous}
    for name in _PER_TASK:
        _write_or_remove(folder / f"{name}_{task}.npy", given.get(name))


def write_final_heads(folder: str | os.PathLike[str], final: Sequence[heads.Head]) -> None:
    """Writes those heads, one per task, that differ from the heads a folder's tasks have.

    Raises:
        InputError: a head is of another kind than in the folder, or the disk refuses.
    """
    folder = Path(folder)
    for task, head in enumerate(final):
        kind, parts = _head_arrays(head, task)
        _check_stored_kind(folder, kind, f"the final head of task {task}")
        first = {name: folder / f"{name}_{task}.npy" for name in parts}
        same = all(
            path.exists() and np.array_equal(read_npy(path), parts[name])
            for name, path in first.items()
        )
        for name in _HEAD:
            final_part = None if same else parts.get(name)
            _write_or_remove(folder / f"final_{name}_{task}.npy", final_part)


def write_test(
    folder: str | os.PathLike[str],
    adapted: ArrayLike,
    pretrained: ArrayLike | None = None,
    labels: ArrayLike | None = None,
) -> None:
    """Writes the test features, and labels [n] if known, each file whole or not at all.

    Args:
        folder: made when missing.
        adapted: [n, d] features of the final encoder.
        pretrained: [n, d'] features of the pretrained encoder, if the tasks have them.
        labels: [n] integers, if known.
    """
    given = dict(zip(_WHOLE, (adapted, pretrained, labels), strict=False))
    for name, array in given.items():
        _write_or_remove(Path(folder) / f"{name}.npy", array)


def _check_stored_kind(folder: Path, kind: str, which: str) -> None:
    path = folder / "head_kind.npy"
    stored = str(read_npy(path)) if path.exists() else kind
    if stored != kind:
        raise InputError(f"{path}: expected {kind} as {which}, is {stored}")


def _write_or_remove(path: Path, array: ArrayLike | None) -> None:
    if array is None:
        path.unlink(missing_ok=True)
    else:
        write_npy(path, array)
