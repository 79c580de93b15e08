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

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fdc_jax import heads
from fdc_jax.errors import InputError
from fdc_jax.files import printable, read_folder, read_npy, read_npz, write_npy

# Each kind's type, and the array that stands beside its rows.
_KINDS: dict[str, tuple[Any, str | None]] = {
    "linear": (heads.LinearHead, "head_bias"),
    "normalised_linear": (heads.NormalisedLinearHead, "head_bias"),
    "cosine": (heads.CosineHead, "head_scale"),
    "nearest_mean": (heads.NearestMeanHead, None),
}
_HEAD = ("head_weight", "head_bias", "head_scale")
_PER_TASK = (
    "train_adapted",
    "train_pretrained",
    "train_labels",
    "head_classes",
    *_HEAD,
    *(f"final_{name}" for name in _HEAD),
)
_REQUIRED = ("train_adapted", "train_labels", "head_weight")
_WHOLE = ("test_adapted", "test_pretrained", "test_labels", "head_kind")
_TASK_NAME = re.compile(rf"({'|'.join(_PER_TASK)})_(0|[1-9][0-9]{{0,5}})")
_CHECKED_ROWS = 4096


class TaskFeatures(NamedTuple):
    """One task: training features, labels, head, and the label of each row of the head.

    `final_head` is None where the head stayed what it was.
    """

    adapted: Float[np.ndarray, "n d"]
    pretrained: Float[np.ndarray, "n d2"] | None
    labels: Int[np.ndarray, " n"]
    head: heads.Head
    classes: Int[np.ndarray, " c"]
    final_head: heads.Head | None = None


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
        """Index of the task of each test label.

        Raises:
            InputError: the file has no test labels.
        """
        if self.test_labels is None:
            raise InputError("test_labels: absent, so the true tasks are not known")
        task_of = {int(c): t for t, task in enumerate(self.tasks) for c in task.classes}
        return np.array([task_of[int(label)] for label in self.test_labels])

    def fit(self, calibrator: Any) -> Any:
        """Fits a calibrator to all tasks and gives it the final heads; returns the same one.

        Args:
            calibrator: FDC, a comparator, or whatever else has `fit_task` and `finalize`; with a
                method `replace_heads` it predicts with the heads that it is given.

        Raises:
            InputError: the calibrator refuses a task or a head.
        """
        for task in self.tasks:
            calibrator.fit_task(task.adapted, task.labels, task.head, task.pretrained, task.classes)
        calibrator.finalize()
        # Methods that read no head cannot take others.
        replace_heads = getattr(calibrator, "replace_heads", None)
        if self.final_heads is not None and replace_heads is not None:
            replace_heads(self.final_heads)
        return calibrator


def load(path: str | os.PathLike[str]) -> FeatureSet:
    """Reads and checks a whole feature file before anything is computed from it.

    Args:
        path: an `.npz` or a folder of `.npy` files.

    Raises:
        InputError: one line with the file, the array and the place of the first fault: a damaged
            file, an unknown, missing or superfluous array, a gap in the task numbers, a shape or
            type that does not fit, a number that is not finite in float32, a label outside its
            head, a class in two tasks, one head for the classes of several tasks.
    """
    path = Path(path)
    arrays = read_folder(path) if path.is_dir() else read_npz(path)
    try:
        return _check(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_task(arrays: Mapping[str, np.ndarray], t: int) -> TaskFeatures:
    """Returns one task out of arrays that `write_task` wrote, by name, with the head of its time.

    Raises:
        InputError: its head is of another kind than `head_kind` says.
    """
    labels = arrays[f"train_labels_{t}"]
    return TaskFeatures(
        arrays[f"train_adapted_{t}"],
        arrays.get(f"train_pretrained_{t}"),
        labels,
        _read_head(arrays, t, _read_kind(arrays), arrays[f"head_weight_{t}"]),
        arrays.get(f"head_classes_{t}", np.unique(labels)),
    )


# Checking ----------------------------------------------------------------------------------------


def _check(arrays: Mapping[str, np.ndarray]) -> FeatureSet:
    num_tasks = _check_names(arrays)
    kind = _read_kind(arrays)
    labels = [_labels(arrays, f"train_labels_{t}") for t in range(num_tasks)]
    classes = _classes(arrays, labels)
    tasks = tuple(_check_task(arrays, t, kind, labels[t], classes) for t in range(num_tasks))
    test = _matrix(arrays, "test_adapted", "train_adapted_0")
    pretrained = test_labels = None
    if "test_pretrained" in arrays:
        pretrained = _matrix(arrays, "test_pretrained", "train_pretrained_0")
        _check_rows("test_pretrained", pretrained, "test_adapted", test)
    if "test_labels" in arrays:
        test_labels = _labels(arrays, "test_labels")
        _check_rows("test_labels", test_labels, "test_adapted", test)
        outside = ~np.isin(test_labels, np.concatenate(classes))
        if outside.any():
            row = int(np.argmax(outside))
            raise InputError(
                f"test_labels: row {row} is label {test_labels[row]}, no class of any task"
            )
    return FeatureSet(tasks, test, pretrained, test_labels)


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


def _classes(
    arrays: Mapping[str, np.ndarray], labels: Sequence[Int[np.ndarray, " n"]]
) -> list[Int[np.ndarray, " c"]]:
    """Returns the label of each head row of every task; refuses samples of another task's class.

    A class that two tasks claim belongs to the one that has samples and names it in head_classes,
    else to the one with more of its samples.
    """
    classes, counts = [], []
    claims: dict[int, tuple[bool, int, int]] = {}
    for t, of_task in enumerate(labels):
        name = f"head_classes_{t}"
        present, count = np.unique(of_task, return_counts=True)
        own = _labels(arrays, name) if name in arrays else present
        if len(np.unique(own)) != len(own):
            raise InputError(f"{name}: expected distinct classes")
        classes.append(own)
        counts.append(dict(zip(present.tolist(), count.tolist(), strict=True)))
        for c in own.tolist():
            claim = (name in arrays and c in counts[t], counts[t].get(c, 0), -t)
            claims[c] = max(claim, claims.get(c, claim))
    for t, of_task in enumerate(labels):
        named = f"head_classes_{t}" in arrays
        for c in sorted({*counts[t], *classes[t].tolist()}):
            owner = -claims[c][2] if c in claims else None
            if owner == t:
                continue
            if c not in counts[t]:  # The head has a row for a class of another task.
                _refuse_one_head(arrays, f"head_weight_{t}", t, classes)
                raise InputError(f"head_classes_{t}: class {c} is already a class of task {owner}")
            row = f"train_labels_{t}: row {int(np.argmax(of_task == c))} is label {c}"
            if owner is None:
                raise InputError(f"{row}, no class of its head")
            raise InputError(
                f"{row}, which is a class of task {owner} (with {counts[owner].get(c, 0)} samples "
                f"there and {counts[t][c]} here){', and no class of its head' if named else ''}; "
                "expected tasks without common classes"
            )
    return classes


def _check_task(
    arrays: Mapping[str, np.ndarray],
    t: int,
    kind: str,
    labels: Int[np.ndarray, " n"],
    classes: list[Int[np.ndarray, " c"]],
) -> TaskFeatures:
    name = f"train_adapted_{t}"
    adapted = _matrix(arrays, name, "train_adapted_0")
    _check_rows(f"train_labels_{t}", labels, name, adapted)
    pretrained = None
    if "test_pretrained" in arrays:
        pretrained = _matrix(arrays, f"train_pretrained_{t}", "train_pretrained_0")
        _check_rows(f"train_pretrained_{t}", pretrained, name, adapted)
    weight = _matrix(arrays, f"head_weight_{t}", name)
    _check_head_rows(arrays, f"head_weight_{t}", t, classes)
    final, final_head = f"final_head_weight_{t}", None
    if final in arrays:
        final_weight = _matrix(arrays, final, f"head_weight_{t}")
        _check_head_rows(arrays, final, t, classes)
        final_head = _read_head(arrays, t, kind, final_weight, "final_")
    for other in _HEAD[1:]:
        if final not in arrays and f"final_{other}_{t}" in arrays:
            raise InputError(f"{final}: missing, but there is a final_{other}_{t}")
    head = _read_head(arrays, t, kind, weight)
    return TaskFeatures(adapted, pretrained, labels, head, classes[t], final_head)


def _check_head_rows(
    arrays: Mapping[str, np.ndarray], name: str, t: int, classes: list[Int[np.ndarray, " c"]]
) -> None:
    found = len(arrays[name])
    if found != len(classes[t]):
        _refuse_one_head(arrays, name, t, classes)
        source = "head_classes" if f"head_classes_{t}" in arrays else "the distinct labels"
        raise InputError(
            f"{name}: expected one row for each class of {source}, {len(classes[t])}, found {found}"
        )


def _refuse_one_head(
    arrays: Mapping[str, np.ndarray], name: str, t: int, classes: list[Int[np.ndarray, " c"]]
) -> None:
    """Raises InputError where a head has rows for several tasks' classes; says which to take."""
    found = arrays[name].shape[0] if arrays[name].ndim else 0
    labels = [np.unique(_labels(arrays, f"train_labels_{i}")) for i in range(len(classes))]
    for tasks, reading in (
        (labels[: t + 1], f"tasks 0 .. {t} have together: one head that grows"),
        (labels, "all tasks have together: one head over all classes"),
    ):
        together = np.concatenate(tasks)
        if found != len(together) or found == len(labels[t]):
            continue
        if found == len(classes[t]):  # head_classes names the rows.
            rows = np.flatnonzero(np.isin(classes[t], labels[t]))
        elif set(together.tolist()) == set(range(found)):  # Labels are numbers of rows.
            rows = labels[t]
        else:  # In order of the tasks.
            rows = np.arange(len(labels[t])) + sum(len(each) for each in labels[:t])
        first, last = int(rows.min()), int(rows.max())
        part = f"{first}:{last + 1}" if last - first < len(rows) else printable(str(rows.tolist()))
        raise InputError(
            f"{name}: found {found} rows for the {len(labels[t])} classes of task {t}, as many as "
            f"{reading}; expected those of the task alone, weight[{part}], and so for the bias"
        )


def _matrix(
    arrays: Mapping[str, np.ndarray], name: str, reference: str
) -> Float[np.ndarray, "n d"]:
    """Returns an array as it is, after the one look at all its numbers.

    Args:
        arrays: of the file.
        name: of the array, which must be there.
        reference: an earlier array with as many columns; `name` itself is its own measure.

    Raises:
        InputError: not a matrix of that many columns, empty, or not finite in float32.
    """
    array = arrays[name]
    _check_floating(name, array)
    if array.ndim != 2:
        raise InputError(
            f"{name}: expected a matrix of floating-point numbers, found {array.dtype} of shape "
            f"{array.shape}"
        )
    if not array.size:
        raise InputError(f"{name}: expected at least one row and column, found {array.shape}")
    if array.shape[1] != arrays[reference].shape[1]:
        raise InputError(
            f"{name}: expected {arrays[reference].shape[1]} columns as in {reference}, found "
            f"{array.shape[1]}"
        )
    for start in range(0, len(array), _CHECKED_ROWS):
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.asarray(array[start : start + _CHECKED_ROWS], np.float32))
        if not finite.all():
            row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
            raise InputError(
                f"{name}: row {start + int(row)}, column {int(column)} is "
                f"{array[start + row, column]}; expected numbers that are finite in float32"
            )
    return array


def _check_floating(name: str, array: np.ndarray) -> None:
    if array.dtype.kind == "V":
        raise InputError(
            f"{name}: is stored as {array.dtype}, which is what NumPy makes of bfloat16 and other "
            "types that it does not know; save it as float32, such as with tensor.float() in "
            "PyTorch or array.astype('float32') in JAX"
        )
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(
            f"{name}: expected floating-point numbers, found {array.dtype} of shape {array.shape}"
        )


def _labels(arrays: Mapping[str, np.ndarray], name: str) -> Int[np.ndarray, " n"]:
    """Returns an array as labels in int64.

    Raises:
        InputError: not a vector of integers, empty, or beyond 64 bits.
    """
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


def _check_rows(name: str, array: np.ndarray, reference: str, other: np.ndarray) -> None:
    if len(array) != len(other):
        raise InputError(
            f"{name}: expected {len(other)} rows as in {reference}, found {len(array)}"
        )


# Heads -------------------------------------------------------------------------------------------


def _read_kind(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the kind that all heads of a file are of, `linear` when it names none."""
    array = arrays.get("head_kind", np.array("linear"))
    kind = f"{array.dtype} of shape {array.shape}"
    if array.ndim == 0 and array.dtype.kind in "US":
        kind = str(array) if array.dtype.kind == "U" else array.item().decode("ascii", "replace")
    if kind not in _KINDS:
        raise InputError(
            f"head_kind: expected one of {', '.join(_KINDS)}; found {printable(kind, 40)}"
        )
    return kind


def _read_head(
    arrays: Mapping[str, np.ndarray], t: int, kind: str, weight: np.ndarray, prefix: str = ""
) -> heads.Head:
    """Returns the head whose rows are `weight`, with what stands beside them in the file."""
    make, beside = _KINDS[kind]
    for name in _HEAD[1:]:
        if f"{prefix}{name}_{t}" in arrays and name != beside:
            owners = " or ".join(owner for owner, (_, own) in _KINDS.items() if own == name)
            raise InputError(
                f"{prefix}{name}_{t}: expected only for {owners} heads, head_kind is {kind}"
            )
    rows = jnp.asarray(np.asarray(weight, np.float32))
    if beside is None:
        return make(rows)
    name, scale = f"{prefix}{beside}_{t}", beside == "head_scale"
    shape = () if scale else (len(rows),)
    array = arrays.get(name, np.full(shape, 1.0 if scale else 0.0, np.float32))
    _check_floating(name, array)
    if array.shape != shape:
        raise InputError(f"{name}: expected numbers of shape {shape}, found {array.shape}")
    with np.errstate(over="ignore"):
        numbers = np.asarray(array, np.float32)
    if not np.isfinite(numbers).all():
        row = "" if scale else f"row {int(np.argmin(np.isfinite(numbers)))} "
        raise InputError(f"{name}: {row}is not finite in float32")
    return make(rows, float(numbers) if scale else jnp.asarray(numbers))


def _head_arrays(head: heads.Head, task: int) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the kind of a head, and its arrays in float32 by their names in a file."""
    for kind, (stored, beside) in _KINDS.items():
        if isinstance(head, stored):
            parts: Any = head
            named = zip(("head_weight", beside), parts, strict=False)
            return kind, {key: np.asarray(part, np.float32) for key, part in named if key}
    raise InputError(
        f"head of task {task}: expected a {' or '.join(_KINDS)} head, which can be stored as "
        f"arrays; found {type(head).__name__}"
    )


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
        head: of a kind that can be stored; all tasks of a folder need the same kind.
        pretrained: [n, d'] features of the pretrained encoder, in all tasks or none.
        classes: [c] label of each row of the head; ascending distinct labels when None.

    Raises:
        InputError: the head is of another kind, or the disk refuses.
    """
    folder = Path(folder)
    kind, parts = _head_arrays(head, task)
    if task > 0:
        _check_stored_kind(folder, kind, f"the head of task {task}")
    write_npy(folder / "head_kind.npy", np.array(kind))
    given: dict[str, ArrayLike | None] = {
        **parts,
        "head_classes": classes,
        "train_adapted": adapted,
        "train_pretrained": pretrained,
        "train_labels": labels,
    }
    for name in _PER_TASK:
        _write_or_remove(folder / f"{name}_{task}.npy", given.get(name))


def write_final_heads(folder: str | os.PathLike[str], final: Sequence[heads.Head]) -> None:
    """Writes those heads into a folder that differ from the heads its tasks were written with.

    Args:
        folder: holds the tasks.
        final: what test images meet, one head per task.

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
