"""Feature files: what FDC needs from any class-incremental learner, as plain NumPy arrays.

A file is an `.npz`, or a folder of `.npy` files of the same names, which are memory-mapped.
Numbers may have half precision, float16 or bfloat16. For each task t = 0 .. T-1:

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
from fdc_jax.errors import InputError, did_you_mean, nearest
from fdc_jax.machine.files import read_folder, read_npy, read_npz, write_npy

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
            tasks, a label of two tasks, a test label that is no class.
    """
    path = Path(path)
    arrays = read_folder(path) if path.is_dir() else read_npz(path)
    # What NumPy makes of bfloat16 when it writes it.
    short = {name: array for name, array in arrays.items() if array.dtype == "V2"}
    arrays |= {name: array.view(ml_dtypes.bfloat16) for name, array in short.items()}
    try:
        return _feature_set(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _feature_set(arrays: Arrays) -> FeatureSet:
    whole, parts = _sorted_out(arrays)
    classes = [
        _labels(part, "head_classes", t)
        if "head_classes" in part
        else np.unique(_labels(part, "train_labels", t))
        for t, part in enumerate(parts)
    ]
    every = np.concatenate(classes)
    if len(np.unique(every)) < len(every):
        for task, own in enumerate(classes):
            inputs.check_new(own, task, classes[:task])
    kind = _kind(whole)
    tasks = tuple(_task(part, t, classes, kind) for t, part in enumerate(parts))
    test, test_labels = _features(whole, "test_adapted"), None
    if "test_labels" in whole:
        test_labels = _labels(whole, "test_labels")
        if len(test_labels) != len(test):
            raise InputError(
                f"test_labels: expected {len(test)} rows as in test_adapted, found "
                f"{len(test_labels)}"
            )
        known = np.isin(test_labels, every)
        if not known.all():
            row = int(np.argmin(known))
            raise InputError(
                f"test_labels: row {row} is label {test_labels[row]}, no class of any task"
            )
    return FeatureSet(tasks, test, _features(whole, "test_pretrained"), test_labels)


def _sorted_out(arrays: Arrays) -> tuple[Arrays, Sequence[Arrays]]:
    """Returns the arrays of the whole file, and those of each task without its number.

    Refuses names that are unknown or missing.
    """
    whole: dict[str, np.ndarray] = {}
    numbered: dict[int, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        if match := _TASK_NAME.fullmatch(name):
            numbered.setdefault(int(match[2]), {})[match[1]] = array
        elif name in _WHOLE:
            whole[name] = array
        else:
            known = [*_WHOLE, *(f"{each}_t" for each in _PER_TASK)]
            raise InputError(f"{name}: unknown array{nearest(name, known)}")
    last = max(numbered, default=0)
    parts = [numbered.get(t, {}) for t in range(last + 1)]
    if "train_previous" in parts[0]:
        raise InputError("train_previous_0: expected from t = 1 on; nothing precedes task 0")
    given = whole.keys() | {stem for part in parts for stem in part}
    needed = dict.fromkeys(("train_adapted", "train_labels", "head_weight"), 0)
    needed |= {"train_pretrained": 0} if {"train_pretrained", "test_pretrained"} & given else {}
    needed |= {"train_previous": 1} if "train_previous" in given else {}
    for stem, first in needed.items():
        for t in range(first, last + 1):
            if stem not in parts[t]:
                expected = f"expected for each task t = {first} .. {last}"
                raise InputError(f"{stem}_{t}: missing; {expected}")
    for name in ("test_adapted", *["test_pretrained"] * ("train_pretrained" in needed)):
        if name not in whole:
            raise InputError(f"{name}: missing; expected beside the arrays of {last + 1} tasks")
    for t, part in enumerate(parts):
        beside = [name for name in _FINAL[1:] if name in part]
        if beside and _FINAL[0] not in part:
            raise InputError(f"{_FINAL[0]}_{t}: missing, but there is a {beside[0]}_{t}")
    return whole, parts


def _features(arrays: Arrays, stem: str, t: int | None = None) -> Any:
    """Returns features unread, None where there are none; calibrators look at their numbers."""
    array = arrays.get(stem)
    if array is not None and array.ndim != 2:
        name = stem if t is None else f"{stem}_{t}"
        raise InputError(f"{name}: expected shape [samples, width], found {[*array.shape]}")
    return array


def _labels(arrays: Arrays, stem: str, t: int | None = None) -> Int[np.ndarray, " n"]:
    return inputs.label_array(arrays[stem], stem if t is None else f"{stem}_{t}")


def _kind(whole: Arrays) -> str:
    """Returns the kind that all heads of a file are of."""
    stored = whole.get("head_kind", np.array("linear"))
    value = stored.item() if stored.ndim == 0 else stored
    kind = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    if kind not in _TYPES:
        raise InputError(did_you_mean("head_kind", kind, _TYPES))
    return kind


def _task(
    part: Arrays, t: int, classes: Sequence[Int[np.ndarray, " c"]], kind: str
) -> TaskFeatures:
    adapted, previous = (_features(part, f"train_{each}", t) for each in ("adapted", "previous"))
    if previous is not None and previous.shape != adapted.shape:
        raise InputError(
            f"train_previous_{t}: expected shape {[*adapted.shape]} as train_adapted_{t}, found "
            f"{[*previous.shape]}"
        )
    return TaskFeatures(
        adapted,
        _features(part, "train_pretrained", t),
        _labels(part, "train_labels", t),
        _head(part, "", t, classes, kind),
        classes[t],
        _head(part, "final_", t, classes, kind) if _FINAL[0] in part else None,
        previous,
    )


def _head(
    part: Arrays, prefix: str, t: int, classes: Sequence[Int[np.ndarray, " c"]], kind: str
) -> heads.Head:
    """Returns a head of a task; refuses one of another kind or without a row for each class."""
    names = [f"{prefix}{name}" for name in _parts(kind)]
    for name in (f"{prefix}{each}" for each in _HEAD):
        if name in part and name not in names:
            raise InputError(f"{name}_{t}: {kind} heads, as head_kind says they are, have none")
    counts, found = [len(each) for each in classes], len(np.atleast_1d(part[names[0]]))
    first, own = sum(counts[:t]), counts[t]
    if found != own:
        hint = ""
        if found in (first + own, sum(counts)):  # It often is one head of several tasks.
            hint = (
                ", as many as several tasks have together; expected the task's own rows alone, "
                f"weight[{first}:{first + own}] where rows stand task by task, and so for the bias"
            )
        raise InputError(
            f"{names[0]}_{t}: found {found} rows for the {own} classes of task {t}{hint}"
        )
    return _TYPES[kind](*(part[name] for name in names if name in part))


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
    """Writes arrays into a folder, each file whole or not at all.

    Args:
        folder: made when missing.
        arrays: by name; what is None is removed.
    """
    for name, array in arrays.items():
        path = Path(folder) / f"{name}.npy"
        if array is None:
            path.unlink(missing_ok=True)
        else:
            write_npy(path, array)


def _head_arrays(head: Any) -> dict[str, np.ndarray]:
    """Returns the parts of a head in float32, by their names."""
    return {
        name: np.asarray(part, np.float32)
        for name, part in zip(_parts(heads.KINDS[type(head)]), head, strict=True)
    }
