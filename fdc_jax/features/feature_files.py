"""Feature files: the input of calibrators from any class-incremental learner (docs/features.md).

A file is an `.npz`, or a folder of `.npy` files of the same names, which are memory-mapped. Names
of a task's arrays end in its number, from 0. Statistics use a head as it was after its task,
`head_weight_t`; predictions use `final_head_weight_t` if the learner changed the head later.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fdc_jax import heads
from fdc_jax.calibration import inputs
from fdc_jax.errors import InputError, did_you_mean, nearest
from fdc_jax.machine.files import ArrayFolder, named_path, read_npy, read_npz, write_npy

_TYPES: dict[str, Any] = {kind: of_kind for of_kind, kind in heads.KINDS.items()}
_HEAD = ("head_weight", "head_bias", "head_scale")
_FINAL = tuple(f"final_{name}" for name in _HEAD)
_TRAIN = ("train_adapted", "train_pretrained", "train_labels", "train_previous")
_PER_TASK = (*_TRAIN, "head_classes", *_HEAD, *_FINAL)
_WHOLE = ("test_adapted", "test_pretrained", "test_labels", "head_kind")
_TASK_NAME = re.compile(rf"({'|'.join(_PER_TASK)})_(0|[1-9][0-9]{{0,5}})")

_VIEWS = ("adapted", "pretrained", "previous")
# Names of arrays by the names in messages of calibrators, where tasks count from 0, too.
_ARRAYS = {f"{view} features": f"train_{view}" for view in _VIEWS}
_ARRAYS |= {"labels": "train_labels", "classes": "head_classes"}
_ARRAYS |= dict.fromkeys(("head weight", "head means", "head"), "head_weight")
_ARRAYS |= {"head bias": "head_bias", "head scale": "head_scale"}
_NAME = re.compile(rf"(final )?({'|'.join(_ARRAYS)}) of task (\d+) \(from 0\)|^(\w+) features")

Arrays = Mapping[str, np.ndarray]


class TaskFeatures(NamedTuple):
    """Training features, labels and heads of a task."""

    adapted: Float[Any, "n d"]  # E_t(D_t)
    pretrained: Float[Any, "n d2"] | None  # E_0(D_t)
    labels: Int[np.ndarray, " n"]
    head: heads.Head | None  # for all tasks or for none
    classes: Int[np.ndarray, " c"]  # label of each head row
    final_head: heads.Head | None = None  # None if the head never changed
    previous: Float[Any, "n d"] | None = None  # E_{t-1}(D_t), of the same images

    def fit(self, calibrator: Any) -> None:
        """Fits a calibrator to the task; see `FeatureSet.fit`."""
        views = {"pretrained": self.pretrained, "previous": self.previous}
        calibrator.fit_task(self.adapted, self.labels, self.head, classes=self.classes, **views)


class Tasks(Sequence[TaskFeatures]):
    """The tasks of a feature file; an item of a folder holds memory maps of its features."""

    def __init__(self, arrays: Arrays, small: Sequence[TaskFeatures]):
        self._arrays, self._small = arrays, small

    def __len__(self) -> int:
        return len(self._small)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[t] for t in range(len(self))[index]]
        t = range(len(self))[index]
        views = {view: self._arrays.get(f"train_{view}_{t}") for view in _VIEWS}
        return self._small[t]._replace(**views)


class FeatureSet(NamedTuple):
    """The content of a feature file; features of a folder are memory-mapped."""

    tasks: Sequence[TaskFeatures]
    test_adapted: Float[np.ndarray, "n d"]
    test_pretrained: Float[np.ndarray, "n d2"] | None
    test_labels: Int[np.ndarray, " n"] | None

    @property
    def final_heads(self) -> list[heads.Head | None] | None:
        """Returns the heads that predict, by task; None if no head changed after its task."""
        if all(task.final_head is None for task in self.tasks):
            return None
        return [task.final_head or task.head for task in self.tasks]

    @property
    def test_tasks(self) -> Int[np.ndarray, " n"]:
        """Returns the task of every test label, from 0; raises InputError without test labels."""
        if self.test_labels is None:
            raise InputError("test_labels: missing, so that the true tasks are not known")
        task_of: dict[int, int] = {}
        for t, task in enumerate(self.tasks):
            task_of |= dict.fromkeys(map(int, task.classes), t)
        return np.array([task_of[int(label)] for label in self.test_labels])

    def check(self) -> None:
        """Reads the values of all arrays, also of those that a calibrator does not use.

        Raises:
            InputError: an array is damaged: text, another width, or a row that is not finite.
        """
        widths: list[int] = []
        for t, task in enumerate(self.tasks):
            views, _ = inputs.task_views(task.adapted, task.labels, task.pretrained, t, widths)
            widths = [view.shape[1] for view in views]
            if task.previous is not None:
                name = inputs.input_name("previous features", t)
                inputs.feature_array(task.previous, name, widths[0])
            for part, head in (("head", task.head), ("final head", task.final_head)):
                if head is not None:
                    inputs.checked_head(head, part, t, widths[0], head)
        inputs.score_views(self.test_adapted, self.test_pretrained, widths, False)

    def fit(self, calibrator: Any) -> Any:
        """Fits a new calibrator to all tasks with the final heads, and returns it.

        Raises:
            InputError: a task or a head does not suit the calibrator.
        """
        for task in self.tasks:
            task.fit(calibrator)
        calibrator.finalize()
        if self.final_heads is not None:
            calibrator.replace_heads(self.final_heads)
        return calibrator


# Reading -----------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], renumbered: bool = False) -> FeatureSet:
    """Reads a feature file, an `.npz` or a folder. `FeatureSet.check` checks values of arrays.

    Args:
        path: the file.
        renumbered: count classes from 0 by task and label, as runs do.

    Raises:
        InputError: the file is damaged; an array is unknown, missing or superfluous, or has another
            number of rows than others of its task; a label belongs to two tasks or to none. The
            message is one line with the file and the array.
    """
    path = named_path("features", path)
    arrays = ArrayFolder(path) if path.is_dir() else read_npz(path, _num_tasks)
    with errors_of(path):
        return _feature_set(arrays, renumbered)


@contextlib.contextmanager
def errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises InputErrors again, of their type, with the file, and with arrays as arguments."""

    def array(match: re.Match[str]) -> str:
        final, part, task, test = match.groups()
        if test:
            return f"test_{test}"
        prefix = "final_" if final else ""
        return f"{prefix}{_ARRAYS[part]}_{task}"

    try:
        yield
    except InputError as error:
        raise type(error)(f"{path}: {_NAME.sub(array, str(error))}") from error


def _feature_set(arrays: Arrays, renumbered: bool) -> FeatureSet:
    count = _num_tasks(arrays)
    _check_complete(arrays, count)
    classes = []
    for t in range(count):
        named = f"head_classes_{t}" in arrays
        name = f"head_classes_{t}" if named else f"train_labels_{t}"
        values = inputs.label_array(arrays[name], name)
        classes.append(values if named else np.unique(values))
        inputs.check_new(classes[t], name, classes[:t])
    if (kind := str(arrays.get("head_kind", "linear"))) not in _TYPES:
        raise InputError(did_you_mean("head_kind", kind, _TYPES))
    tasks = [_small(arrays, t, classes, kind) for t in range(count)]
    test = _features(arrays, "test_adapted")
    labels = None
    if "test_labels" in arrays:
        labels = inputs.label_array(arrays["test_labels"], "test_labels")
        inputs.same_length(labels, test, "test_labels", "test_adapted")
        if not (known := np.isin(labels, np.concatenate(classes))).all():
            row = int(np.argmin(known))
            raise InputError(f"test_labels: row {row} is label {labels[row]}, no class of any task")
    pretrained = _features(arrays, "test_pretrained", test, "test_adapted")
    if renumbered:
        order = np.concatenate([*map(np.sort, classes)])
        tasks = [
            task._replace(labels=_positions(order, task.labels), classes=_positions(order, own))
            for task, own in zip(tasks, classes, strict=True)
        ]
        labels = None if labels is None else _positions(order, labels)
    return FeatureSet(Tasks(arrays, tasks), test, pretrained, labels)


def _positions(order: Int[np.ndarray, " c"], labels: Any) -> Int[np.ndarray, " n"]:
    """Returns the index of each label in the order of classes."""
    sorter = np.argsort(order)
    return sorter[np.searchsorted(order, np.asarray(labels), sorter=sorter)].astype(np.int32)


def _num_tasks(names: Iterable[str]) -> int:
    """Returns the number of tasks from names of arrays; raises InputError for an unknown one."""
    last = 0
    for name in names:
        if match := _TASK_NAME.fullmatch(name):
            last = max(last, int(match[2]))
        elif name not in _WHOLE:
            known = [*_WHOLE, *(f"{stem}_t" for stem in _PER_TASK)]
            raise InputError(f"{name}: unknown array{nearest(name, known)}")
    return last + 1


def _check_complete(arrays: Arrays, count: int) -> None:
    """Raises InputError for a missing array that others require, and for `train_previous_0`."""
    if "train_previous_0" in arrays:
        raise InputError("train_previous_0: expected from t = 1 on; nothing precedes task 0")
    first_tasks: dict[str, int] = dict.fromkeys(("train_adapted", "train_labels"), 0)
    stems = {name.rpartition("_")[0] for name in arrays}
    if stems.intersection(_HEAD + _FINAL):
        first_tasks["head_weight"] = 0
    if two_views := "train_pretrained" in stems or "test_pretrained" in arrays:
        first_tasks["train_pretrained"] = 0
    if "train_previous" in stems:
        first_tasks["train_previous"] = 1
    for stem, first in first_tasks.items():
        for t in range(first, count):
            if f"{stem}_{t}" not in arrays:
                expected = f"expected for each task t = {first} .. {count - 1}"
                raise InputError(f"{stem}_{t}: missing; {expected}")
    for name in ("test_adapted", "test_pretrained") if two_views else ("test_adapted",):
        if name not in arrays:
            raise InputError(f"{name}: missing; expected beside the arrays of {count} tasks")
    for t in range(count):
        final_parts = [name for name in _FINAL[1:] if f"{name}_{t}" in arrays]
        if final_parts and f"{_FINAL[0]}_{t}" not in arrays:
            raise InputError(f"{_FINAL[0]}_{t}: missing, but there is a {final_parts[0]}_{t}")


def _features(arrays: Arrays, name: str, like: Any = None, like_name: str = "") -> Any:
    """Returns features, whose values are not read, or None if the file has no such array."""
    array = arrays.get(name)
    if array is None:
        return None
    if array.ndim != 2 or not array.size:
        expected = "shape [samples, width] with at least one sample"
        raise InputError(f"{name}: expected {expected}, found {[*array.shape]}")
    if like is not None:
        inputs.same_length(array, like, name, like_name)
    return array


def _small(
    arrays: Arrays, t: int, classes: Sequence[Int[np.ndarray, " c"]], kind: str
) -> TaskFeatures:
    """Returns a task without its features, after checks of their shapes."""
    name, label_name = f"train_adapted_{t}", f"train_labels_{t}"
    adapted = _features(arrays, name)
    labels = inputs.label_array(arrays[label_name], label_name)
    inputs.same_length(labels, adapted, label_name, name)
    _features(arrays, f"train_pretrained_{t}", adapted, name)
    previous = _features(arrays, f"train_previous_{t}")
    if previous is not None and previous.shape != adapted.shape:
        expected = f"shape {[*adapted.shape]} as {name}"
        raise InputError(f"train_previous_{t}: expected {expected}, found {[*previous.shape]}")
    head, final = (_head(arrays, prefix, t, classes, kind) for prefix in ("", "final_"))
    return TaskFeatures(None, None, labels, head, classes[t], final)


def _head(
    arrays: Arrays, prefix: str, t: int, classes: Sequence[Int[np.ndarray, " c"]], kind: str
) -> heads.Head | None:
    """Returns a head of a task, if any; raises InputError unless it has a row for every class."""
    names = [f"{prefix}{name}_{t}" for name in _array_names(kind)]
    if names[0] not in arrays:
        return None
    for name in (f"{prefix}{stem}_{t}" for stem in _HEAD):
        if name in arrays and name not in names:
            raise InputError(f"{name}: {kind} heads, as head_kind says they are, have none")
    counts, rows = [*map(len, classes)], len(np.atleast_1d(arrays[names[0]]))
    first = sum(counts[:t])
    count = counts[t]
    if rows != count:
        hint = ""
        if rows in (first + count, sum(counts)):  # probably one head of several tasks
            own, order = f"{first}:{first + count}", "rows stand task by task"
            if rows == sum(counts) and np.max(np.concatenate(classes)) < rows:
                ascending = np.array_equal(classes[t], np.arange(first, first + count))
                order = order if ascending else "row c is of label c"
                own = own if ascending else f"np.unique(train_labels_{t})"
            hint = (
                ", as many as several tasks have together; expected the task's own rows alone, "
                f"weight[{own}] if {order}, and so for the bias"
            )
        raise InputError(f"{names[0]}: found {rows} rows for the {count} classes of task {t}{hint}")
    return _TYPES[kind](*(np.array(arrays[name]) for name in names if name in arrays))


def _array_names(kind: str) -> tuple[str, ...]:
    """Returns the names of a head's arrays in a file; all but the first may be absent."""
    return ("head_weight", *(f"head_{field}" for field in _TYPES[kind]._fields[1:]))


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
    """Writes the arrays of a task, counted from 0, into a folder and removes its other arrays.

    Arguments are those of `Calibrator.fit_task`.

    Raises:
        InputError: earlier tasks have heads of another kind, or a file cannot be written.
    """
    path = named_path("folder", folder) / "head_kind.npy"
    head = heads.as_head(head)
    kind = heads.KINDS[type(head)]
    if task > 0 and path.exists() and (stored := str(read_npy(path))) != kind:
        raise InputError(f"{path}: expected {kind}, the kind of head {task} (from 0), is {stored}")
    by_stem = dict(zip(_TRAIN, (adapted, pretrained, labels, previous), strict=True))
    by_stem |= {"head_classes": classes, **_head_arrays(head)}
    by_name = {f"{name}_{task}": by_stem.get(name) for name in _PER_TASK}
    write(folder, {"head_kind": np.array(kind), **by_name})


def write_final_heads(folder: str | os.PathLike[str], final: Sequence[heads.Head]) -> None:
    """Writes the final heads, one per task, that differ from the heads in a folder."""
    changed: dict[str, ArrayLike | None] = {}
    path = named_path("folder", folder)
    for task, head in enumerate(final):
        arrays = _head_arrays(head)
        files = {path / f"{name}_{task}.npy": array for name, array in arrays.items()}
        if all(file.exists() and np.array_equal(read_npy(file), files[file]) for file in files):
            arrays = {}
        changed |= {f"final_{name}_{task}": arrays.get(name) for name in _HEAD}
    write(folder, changed)


def write_test(
    folder: str | os.PathLike[str],
    adapted: ArrayLike,
    pretrained: ArrayLike | None = None,
    labels: ArrayLike | None = None,
) -> None:
    """Writes the test features by the final and the pretrained encoder, and labels if known."""
    write(folder, dict(zip(_WHOLE, (adapted, pretrained, labels), strict=False)))


def write(folder: str | os.PathLike[str], arrays: Mapping[str, ArrayLike | None]) -> None:
    """Writes arrays by name into a folder, each file whole or not at all; None removes a file."""
    for name, array in arrays.items():
        path = named_path("folder", folder) / f"{name}.npy"
        if array is None:
            path.unlink(missing_ok=True)
        else:
            write_npy(path, array)


def _head_arrays(head: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a head in float32 by their names in a file."""
    names = _array_names(heads.KINDS[type(head)])
    return {name: np.asarray(array, np.float32) for name, array in zip(names, head, strict=True)}
