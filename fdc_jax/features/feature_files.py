"""Feature files: what FDC needs from any class-incremental learner, as plain NumPy arrays.

A file is an `.npz`, or a folder of `.npy` files of the same names, which are memory-mapped, or of
Parquet (`features.parquet`). Numbers may be of half precision, float16 or bfloat16. For each task
t = 0 .. T-1:

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fdc_jax import heads
from fdc_jax.calibration import inputs
from fdc_jax.errors import InputError, nearest
from fdc_jax.features import parquet
from fdc_jax.machine.files import (
    MANIFEST,
    check_manifest,
    printable,
    read_folder,
    read_manifest,
    read_npy,
    read_npz,
    sha256,
    write_manifest,
    write_npy,
)

_TYPES: dict[str, Any] = {kind: of_kind for of_kind, kind in heads.KINDS.items()}
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
    """A feature file; arrays of a folder are memory-mapped, of an npz in memory."""

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


# Reading -----------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> FeatureSet:
    """Reads a feature file, an `.npz` or a folder.

    What the arrays of a file have to be together is checked here; the features, labels and head of
    a task, and whether they suit the tasks before it, calibrators check when they are fitted.

    Raises:
        InputError: one line with the file and the array of the first fault: a damaged file, an
            unknown, missing or superfluous array, a head with rows for the classes of several
            tasks, a test label that is no class.
    """
    path = Path(path)
    if path.is_dir():
        check_manifest(path, f"write it again, or remove {MANIFEST} if that was intended")
    columns = parquet.read(path)
    arrays = columns | (read_folder(path) if path.is_dir() else read_npz(path))
    # What NumPy makes of bfloat16 when it writes it.
    short = {name: array for name, array in arrays.items() if array.dtype == "V2"}
    arrays |= {name: array.view(ml_dtypes.bfloat16) for name, array in short.items()}
    try:
        return _feature_set(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _feature_set(arrays: Arrays) -> FeatureSet:
    count, two_views = _check_names(arrays), "test_pretrained" in arrays
    classes = [_classes(arrays, t) for t in range(count)]
    tasks = tuple(_task(arrays, t, classes, two_views) for t in range(count))
    test, test_labels = _features(arrays, "test_adapted"), None
    if "test_labels" in arrays:
        test_labels = _labels(arrays, "test_labels")
        if len(test_labels) != len(test):
            raise InputError(
                f"test_labels: expected {len(test)} rows as in test_adapted, found "
                f"{len(test_labels)}"
            )
        known = np.isin(test_labels, np.concatenate(classes))
        if not known.all():
            row = int(np.argmin(known))
            raise InputError(
                f"test_labels: row {row} is label {test_labels[row]}, no class of any task"
            )
    pretrained = _features(arrays, "test_pretrained") if two_views else None
    return FeatureSet(tasks, test, pretrained, test_labels)


def _check_names(arrays: Arrays) -> int:
    """Returns the number of tasks; refuses names that are unknown or missing, and bfloat16."""
    last = 0
    for name in arrays:
        if match := _TASK_NAME.fullmatch(name):
            last = max(last, int(match[2]))
        elif name not in _WHOLE:
            raise InputError(f"{printable(name)}: unknown array{_suggestion(name[:80])}")
    if "train_previous_0" in arrays:
        raise InputError("train_previous_0: expected from t = 1 on; nothing precedes task 0")

    def some(*stems: str) -> bool:
        return any(name.startswith(stems) for name in arrays)

    tasks = range(last + 1)
    needed = {"train_adapted": tasks, "train_labels": tasks, "head_weight": tasks}
    test = ["test_adapted"]
    if some("train_pretrained", "test_pretrained"):
        needed["train_pretrained"] = tasks
        test.append("test_pretrained")
    if some("train_previous"):
        needed["train_previous"] = tasks[1:]
    for stem, numbers in needed.items():
        for t in numbers:
            if f"{stem}_{t}" not in arrays:
                raise InputError(
                    f"{stem}_{t}: missing; expected for each task t = {numbers[0]} .. {last}"
                )
    for name in test:
        if name not in arrays:
            raise InputError(f"{name}: missing; expected beside the arrays of {last + 1} tasks")
    for t, part in ((t, part) for t in tasks for part in _FINAL[1:]):
        if f"{part}_{t}" in arrays and f"final_head_weight_{t}" not in arrays:
            raise InputError(f"final_head_weight_{t}: missing, but there is a {part}_{t}")
    return last + 1


def _suggestion(name: str) -> str:
    number = re.search(r"[0-9]{1,6}$", name)
    known = [f"{each}_{int(number[0]) if number else 't'}" for each in _PER_TASK]
    hint = nearest(name, [*_WHOLE, *known])
    return hint or "; expected names such as train_adapted_0 or test_adapted"


def _features(arrays: Arrays, name: str) -> Float[np.ndarray, "n d"]:
    """Returns features unread; calibrators look at their numbers."""
    if arrays[name].ndim != 2:
        raise InputError(f"{name}: expected shape [samples, width], found {[*arrays[name].shape]}")
    return arrays[name]


def _labels(arrays: Arrays, name: str) -> Int[np.ndarray, " n"]:
    return inputs.label_array(arrays[name], name)


def _classes(arrays: Arrays, t: int) -> Int[np.ndarray, " c"]:
    """Returns the label of each row of a task's head."""
    if f"head_classes_{t}" in arrays:
        return _labels(arrays, f"head_classes_{t}")
    return np.unique(_labels(arrays, f"train_labels_{t}"))


def _task(
    arrays: Arrays, t: int, classes: Sequence[Int[np.ndarray, " c"]], two_views: bool
) -> TaskFeatures:
    adapted = _features(arrays, f"train_adapted_{t}")
    final = previous = None
    if f"final_head_weight_{t}" in arrays:
        final = _head(arrays, "final_", t, classes)
    if (name := f"train_previous_{t}") in arrays:
        previous = _features(arrays, name)
        if previous.shape != adapted.shape:
            raise InputError(
                f"{name}: expected shape {[*adapted.shape]} as train_adapted_{t}, found "
                f"{[*previous.shape]}"
            )
    return TaskFeatures(
        adapted,
        _features(arrays, f"train_pretrained_{t}") if two_views else None,
        _labels(arrays, f"train_labels_{t}"),
        _head(arrays, "", t, classes),
        classes[t],
        final,
        previous,
    )


def _head(
    arrays: Arrays, prefix: str, t: int, classes: Sequence[Int[np.ndarray, " c"]]
) -> heads.Head:
    """Returns the head of a task, of the kind that all heads of a file are of."""
    stored = arrays.get("head_kind", np.array("linear"))
    value = stored.item() if stored.ndim == 0 else stored
    kind = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    if kind not in _TYPES:
        raise InputError(
            f"head_kind: expected one of {', '.join(_TYPES)}; found {printable(kind, 40)}"
        )
    parts = [f"{prefix}{part}_{t}" for part in _parts(kind)]
    for name in (f"{prefix}{part}_{t}" for part in _HEAD):
        if name in arrays and name not in parts:
            raise InputError(f"{name}: {kind} heads, as head_kind says they are, have none")
    _check_rows(parts[0], len(np.atleast_1d(arrays[parts[0]])), t, [len(each) for each in classes])
    return _TYPES[kind](*(arrays[part] for part in parts if part in arrays))


def _check_rows(name: str, found: int, t: int, counts: Sequence[int]) -> None:
    """Refuses a head without one row for each class, which often is one head of several tasks."""
    first, own = sum(counts[:t]), counts[t]
    if found == own:
        return
    hint = ""
    if found in (first + own, sum(counts)):
        hint = (
            ", as many as several tasks have together; expected the task's own rows alone, "
            f"weight[{first}:{first + own}] where rows stand task by task, and so for the bias"
        )
    raise InputError(f"{name}: found {found} rows for the {own} classes of task {t}{hint}")


def _parts(kind: str) -> tuple[str, ...]:
    """Returns what the parts of a head are called in a file; all but the first may be absent."""
    return ("head_weight", *(f"head_{part}" for part in _TYPES[kind]._fields[1:]))


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
        head: of the same kind in all tasks of a folder.
        pretrained: [n, d'] features of the pretrained encoder, in all tasks or none.
        classes: [c] label of each row of the head; ascending distinct labels when None.
        previous: [n, d] features of the encoder before this task, from the second task on.

    Raises:
        InputError: the head is of another kind than those of earlier tasks, or the disk refuses.
    """
    path, kind = Path(folder) / "head_kind.npy", heads.KINDS[type(head)]
    if task > 0 and path.exists() and (stored := str(read_npy(path))) != kind:
        raise InputError(f"{path}: expected {kind} as the head of task {task}, is {stored}")
    given = dict(zip(_TRAIN, (adapted, pretrained, labels), strict=True))
    given |= {"head_classes": classes, "train_previous": previous, **_head_arrays(head)}
    of_task = {f"{name}_{task}": given.get(name) for name in _PER_TASK}
    write(folder, {"head_kind": np.array(kind), **of_task})


def write_final_heads(folder: str | os.PathLike[str], final: Sequence[heads.Head]) -> None:
    """Writes those heads, one per task, that differ from the heads a folder's tasks have."""
    given: dict[str, ArrayLike | None] = {}
    for task, head in enumerate(final):
        parts = _head_arrays(head)
        own = {name: Path(folder) / f"{name}_{task}.npy" for name in parts}
        if all(
            own[name].exists() and np.array_equal(read_npy(own[name]), parts[name])
            for name in parts
        ):
            parts = {}
        given |= {f"final_{name}_{task}": parts.get(name) for name in _HEAD}
    write(folder, given)


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
    write(folder, dict(zip(_WHOLE, (adapted, pretrained, labels), strict=False)))


def write(folder: str | os.PathLike[str], arrays: Mapping[str, ArrayLike | None]) -> None:
    """Writes arrays into a folder, each file whole or not at all, and their checksums.

    Args:
        folder: made when missing.
        arrays: by name; what is None is removed.
    """
    paths = {name: Path(folder) / f"{name}.npy" for name in arrays}
    before = read_manifest(folder)
    known = {name: digest for name, digest in before.items() if name[:-4] not in paths}
    # What is stopped in here leaves files without a checksum, not with a wrong one.
    if known != before:
        write_manifest(folder, known)
    for name, array in arrays.items():
        if array is None:
            paths[name].unlink(missing_ok=True)
        else:
            write_npy(paths[name], array)
            known[paths[name].name] = sha256(paths[name])
    write_manifest(folder, known)


def _head_arrays(head: Any) -> dict[str, np.ndarray]:
    """Returns the parts of a head in float32, by their names."""
    return {
        name: np.asarray(part, np.float32)
        for name, part in zip(_parts(heads.KINDS[type(head)]), head, strict=True)
    }
