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
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from fdc_jax import head_arrays, heads
from fdc_jax.array_checks import check_labels_within, check_same_rows, label_vector, matrix
from fdc_jax.array_files import printable, read_folder, read_npy, read_npz, write_npy
from fdc_jax.errors import InputError

_PER_TASK = (
    "train_adapted",
    "train_pretrained",
    "train_labels",
    "head_classes",
    *head_arrays.NAMES,
    *(f"final_{name}" for name in head_arrays.NAMES),
)
_REQUIRED = ("train_adapted", "train_labels", "head_weight")
_WHOLE = ("test_adapted", "test_pretrained", "test_labels", "head_kind")
_TASK_NAME = re.compile(rf"({'|'.join(_PER_TASK)})_(0|[1-9][0-9]{{0,5}})")


class Calibrator(Protocol):
    """What learns from tasks one after the other, as all of `fdc_jax.calibration` do.

    With a method `replace_heads`, it predicts with the heads that it is given.
    """

    def fit_task(
        self,
        adapted: Float[np.ndarray, "n d"],
        labels: Int[np.ndarray, " n"],
        head: heads.Head,
        pretrained: Float[np.ndarray, "n d2"] | None,
        classes: Int[np.ndarray, " c"],
        /,
    ) -> None:
        """Takes one more task."""
        ...

    def finalize(self) -> None:
        """Ends the fit."""
        ...


_Calibrator = TypeVar("_Calibrator", bound=Calibrator)


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

    def fit(self, calibrator: _Calibrator) -> _Calibrator:
        """Fits a calibrator to all tasks and gives it the final heads; returns the same one.

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
    kind = head_arrays.read_kind(arrays)
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
    test = matrix(arrays, "test_adapted", tasks[0].adapted.shape[1], "train_adapted_0")
    pretrained = labels = None
    if two_views:
        first = tasks[0].pretrained
        assert first is not None
        pretrained = matrix(arrays, "test_pretrained", first.shape[1], "train_pretrained_0")
        check_same_rows("test_pretrained", pretrained, "test_adapted", test)
    if "test_labels" in arrays:
        labels = label_vector(arrays, "test_labels")
        check_same_rows("test_labels", labels, "test_adapted", test)
        check_labels_within(labels, list(owner), "test_labels", "any task")
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


def _check_task(
    arrays: Mapping[str, np.ndarray], t: int, kind: str, two_views: bool
) -> TaskFeatures:
    dimension = None if t == 0 else arrays["train_adapted_0"].shape[1]
    adapted = matrix(arrays, f"train_adapted_{t}", dimension, "train_adapted_0")
    labels = label_vector(arrays, f"train_labels_{t}")
    check_same_rows(f"train_labels_{t}", labels, f"train_adapted_{t}", adapted)
    pretrained = None
    if two_views:
        dimension = None if t == 0 else arrays["train_pretrained_0"].shape[1]
        pretrained = matrix(arrays, f"train_pretrained_{t}", dimension, "train_pretrained_0")
        check_same_rows(f"train_pretrained_{t}", pretrained, f"train_adapted_{t}", adapted)
    name = f"head_weight_{t}"
    weight = matrix(arrays, name, adapted.shape[1], f"train_adapted_{t}")
    if f"head_classes_{t}" in arrays:
        classes = label_vector(arrays, f"head_classes_{t}")
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
    check_labels_within(labels, classes.tolist(), f"train_labels_{t}", "its head")
    head = head_arrays.read(arrays, t, kind, weight)
    return TaskFeatures(
        adapted, pretrained, labels, head, classes, _final_head(arrays, t, kind, weight)
    )


def _final_head(
    arrays: Mapping[str, np.ndarray], t: int, kind: str, weight: np.ndarray
) -> heads.Head | None:
    name = f"final_head_weight_{t}"
    if name not in arrays:
        for other in head_arrays.NAMES:
            if f"final_{other}_{t}" in arrays:
                raise InputError(f"{name}: missing, but there is a final_{other}_{t}")
        return None
    final = matrix(arrays, name, weight.shape[1], f"head_weight_{t}")
    check_same_rows(name, final, f"head_weight_{t}", weight)
    return head_arrays.read(arrays, t, kind, final, "final_")


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
    kind, parts = head_arrays.to_arrays(head, task)
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
        kind, parts = head_arrays.to_arrays(head, task)
        _check_stored_kind(folder, kind, f"the final head of task {task}")
        first = {name: folder / f"{name}_{task}.npy" for name in parts}
        same = all(
            path.exists() and np.array_equal(read_npy(path), parts[name])
            for name, path in first.items()
        )
        for name in head_arrays.NAMES:
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
