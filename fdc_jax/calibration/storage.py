"""A fitted calibrator as one `.npz` file, and back.

Bases are stored with the columns that each task retains, one task after the other, without
padding. `numpy_scorer.py` reads the same fields.
"""

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fdc_jax.calibration.foreign import ForeignReference
from fdc_jax.calibration.head_rows import common_kind
from fdc_jax.calibration.inputs import VIEWS, host_array
from fdc_jax.calibration.measures import SCALE_FLOOR
from fdc_jax.calibration.settings import NUMBERS, Settings
from fdc_jax.calibration.statistics import Task, ViewStatistics
from fdc_jax.calibration.whitening import DEVIATION_FLOOR, TaskAffinity, WithinClass
from fdc_jax.errors import InputError
from fdc_jax.files import write_atomically
from fdc_jax.heads import CosineHead, LinearHead, NearestMeanHead, NormalisedLinearHead

FORMAT = "fdc_jax calibrator"
# 1 had no within-class metric; it is still read.
SCHEMA = 2
MOMENTS = ("residual_mean", "residual_std", "distance_mean", "distance_std")
# How far lengths and inner products of unit vectors may be off in a file.
UNIT_TOLERANCE = 1e-3


class State(NamedTuple):
    """Everything that a finalized calibrator consists of.

    Attributes:
        settings: its settings.
        tasks: statistics per task.
        heads: one per task.
        references: foreign reference per view.
        foreign: standardised foreign residuals per task and view; None once released.
        shared: per view, what the whitened metric is made of; empty with the cosine.
    """

    settings: Settings
    tasks: list[Task]
    heads: list[Any]
    references: list[ForeignReference | None]
    foreign: list[list[Float[np.ndarray, "earlier n"]]] | None
    shared: list[WithinClass]


def to_arrays(state: State) -> dict[str, np.ndarray]:
    """Returns the state as named arrays. Heads that are functions are left out."""
    tasks = state.tasks
    arrays: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA, **state.settings._asdict()}
    arrays["class_sizes"] = [len(task.classes) for task in tasks]
    arrays["classes"] = np.concatenate([task.classes for task in tasks])
    arrays["class_counts"] = np.concatenate([task.views[0].class_counts for task in tasks])
    arrays["samples"] = [task.samples for task in tasks]
    arrays["raw_scale"] = [task.raw_scale for task in tasks]
    arrays["filtered_scale"] = [task.filtered_scale for task in tasks]
    arrays.update(_head_arrays(state.heads))
    for index, name in enumerate(VIEWS[: len(tasks[0].views)]):
        views = [task.views[index] for task in tasks]
        arrays[f"{name}_mean"] = np.stack([view.mean for view in views])
        arrays[f"{name}_rank"] = [len(view.basis) for view in views]
        arrays[f"{name}_basis"] = np.concatenate([view.basis for view in views])
        arrays[f"{name}_prototypes"] = np.concatenate([view.prototypes for view in views])
        for moment in MOMENTS:
            arrays[f"{name}_{moment}"] = [getattr(view, moment) for view in views]
        arrays[f"{name}_foreign_fit"] = np.array(state.references[index] or (), np.float64)
        if state.shared:
            scatter = np.asarray(state.shared[index].scatter)
            arrays[f"{name}_within_scatter"] = scatter[np.triu_indices(len(scatter))]
            own = [view.whitened for view in views if view.whitened]
            arrays[f"{name}_class_means"] = np.concatenate([each.class_means for each in own])
            arrays[f"{name}_cosine_mean"] = [each.mean for each in own]
            arrays[f"{name}_cosine_std"] = [each.std for each in own]
        if state.foreign is not None:
            residuals = [task[index].ravel() for task in state.foreign]
            arrays[f"{name}_foreign"] = np.concatenate(residuals)
    return {name: np.asarray(value) for name, value in arrays.items()}


def save(path: str | os.PathLike[str], state: State) -> None:
    """Writes the state to one file, whole or not at all.

    Raises:
        InputError: the file system refuses.
    """
    with write_atomically(path) as file:
        fields: dict[str, Any] = to_arrays(state)
        np.savez(file, **fields)


def load(path: str | os.PathLike[str], heads: Sequence[Any] | None = None) -> State:
    """Reads what `save` wrote.

    Args:
        path: the file.
        heads: heads to use instead of the stored ones; needed when these are functions, which are
            not stored.

    Raises:
        InputError: the file is missing, damaged, of another kind or schema, or needs `heads`.
    """
    fields = _Fields(path, _read(path))
    if fields.text("format") != FORMAT:
        raise InputError(f"{path}: format: expected {FORMAT!r}, found {fields.text('format')!r}")
    if not 1 <= (schema := fields.whole("schema")) <= SCHEMA:
        raise InputError(f"{path}: schema: expected version 1 to {SCHEMA}, found {schema}")
    try:
        settings = _read_settings(fields, schema)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    sizes = fields.counts("class_sizes", None, 1)
    tasks, rows = len(sizes), int(sizes.sum())
    if not tasks:
        raise InputError(f"{path}: class_sizes: expected at least one task, found none")
    ends = np.cumsum(sizes)[:-1]
    classes = np.split(fields.distinct("classes", rows), ends)
    samples = fields.counts("samples", tasks, 1)
    counts = np.split(fields.counts("class_counts", rows, 0), ends)
    _check_counts(fields, counts, samples, settings.neighbours)
    raw_scale = fields.scales("raw_scale", tasks)
    filtered_scale = fields.scales("filtered_scale", tasks)
    known = (f"pretrained_{part}" for part in ("mean", "rank", "basis", "prototypes", *MOMENTS))
    names = VIEWS[: 2 if any(name in fields.arrays for name in known) else 1]
    whitened = settings.affinity_metric == "whitened"
    views = [_read_view(fields, name, counts, ends, whitened) for name in names]
    result = [
        Task(
            [view[task] for view in views],
            classes[task],
            int(samples[task]),
            float(raw_scale[task]),
            float(filtered_scale[task]),
        )
        for task in range(tasks)
    ]
    return State(
        settings,
        result,
        _read_heads(fields, ends, views[0]) if heads is None else list(heads),
        [_read_reference(fields, f"{name}_foreign_fit", tasks) for name in names],
        _read_foreign(fields, names, samples),
        [
            _read_shared(fields, name, len(view[0].mean), int(samples.sum()))
            for name, view in zip(names, views, strict=True)
            if whitened
        ],
    )


def _read_settings(fields: "_Fields", schema: int) -> Settings:
    words = ["affinity_reference"]
    numbers = [name for name in NUMBERS if schema > 1 or name != "affinity_shrinkage"]
    if schema > 1:
        words += ["affinity_metric", "affinity_evidence", "affinity_scope"]
    values: dict[str, Any] = {name: fields.number(name) for name in numbers}
    values |= {name: fields.text(name) for name in words}
    return Settings(**values, neighbours=fields.whole("neighbours")).checked()


def _read_shared(fields: "_Fields", name: str, width: int, images: int) -> WithinClass:
    size = width * (width + 1) // 2
    triangle = fields.array(f"{name}_within_scatter", np.float32, (size,))
    upper = np.zeros((width, width), np.float32)
    upper[np.triu_indices(width)] = triangle
    lower = np.triu(upper, 1).T
    if upper.diagonal().min() < 0:
        raise InputError(
            f"{fields.path}: {name}_within_scatter: expected no variance below 0, found "
            f"{upper.diagonal().min():g}"
        )
    return WithinClass(jnp.asarray(upper + lower), images)


def _head_arrays(heads: Sequence[Any]) -> dict[str, Any]:
    kind = common_kind(heads)
    arrays: dict[str, Any] = {"head_kind": kind}
    if kind in ("linear", "normalised_linear"):
        arrays["head_bias"] = np.concatenate([_float32(head.bias) for head in heads])
    if kind == "cosine":
        arrays["head_scale"] = np.array([float(head.scale) for head in heads], np.float32)
    if kind != "function":
        matrices = [head.means if kind == "nearest_mean" else head.weight for head in heads]
        arrays["head_weight"] = np.concatenate([_float32(each) for each in matrices])
    return arrays


def _float32(values: Any) -> np.ndarray:
    return host_array(values, "head").astype(np.float32)


def _read(path: str | os.PathLike[str]) -> Mapping[str, np.ndarray]:
    name = "archive"
    try:
        # NumPy leaves a damaged archive open unless it is opened here.
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise InputError(f"{path}: archive: damaged, or no .npz file at all")
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            arrays = {}
            for name in archive.files:
                arrays[name] = archive[name]
            return arrays
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except InputError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: {name}: damaged or no saved calibrator ({reason})") from error


def _check_counts(
    fields: "_Fields", counts: Sequence[np.ndarray], samples: np.ndarray, neighbours: int
) -> None:
    for task, (found, expected) in enumerate(zip(counts, samples.tolist(), strict=True)):
        if found.sum() != expected:
            raise InputError(
                f"{fields.path}: class_counts: expected {expected} samples in task {task}, as in "
                f"samples, found {found.sum()}"
            )
        if (present := int((found > 0).sum())) < neighbours:
            raise InputError(
                f"{fields.path}: neighbours: expected at most {present}, the classes with samples "
                f"of task {task}, found {neighbours}"
            )


def _read_view(
    fields: "_Fields",
    name: str,
    counts: Sequence[np.ndarray],
    ends: np.ndarray,
    whitened: bool,
) -> list[ViewStatistics]:
    tasks, rows = len(counts), sum(map(len, counts))
    mean = fields.array(f"{name}_mean", np.float32, (tasks, None))
    ranks = fields.counts(f"{name}_rank", tasks, 0)
    width = mean.shape[1]
    basis = fields.array(f"{name}_basis", np.float32, (int(ranks.sum()), width))
    prototypes = fields.array(f"{name}_prototypes", np.float32, (rows, width))
    lengths = np.linalg.norm(prototypes, axis=1)
    wrong = np.minimum(lengths, np.abs(lengths - 1.0)) > UNIT_TOLERANCE
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(
            f"{fields.path}: {name}_prototypes: expected rows of length 1 or 0, found "
            f"{lengths[row]:.6g} at row {row}"
        )
    bases = np.split(basis, np.cumsum(ranks)[:-1])
    for task, each in enumerate(bases):
        if len(each) > width or np.any(
            np.abs(each @ each.T - np.eye(len(each), dtype=np.float32)) > UNIT_TOLERANCE
        ):
            raise InputError(
                f"{fields.path}: {name}_basis: expected orthonormal rows, task {task} has others"
            )
    moments = [
        fields.scales(f"{name}_{moment}", tasks)
        if moment.endswith("std")
        else fields.array(f"{name}_{moment}", np.float64, (tasks,))
        for moment in MOMENTS
    ]
    affinities: list[TaskAffinity | None] = [None] * tasks
    if whitened:
        own_mean = fields.array(f"{name}_cosine_mean", np.float64, (tasks,))
        own_std = fields.scales(f"{name}_cosine_std", tasks, DEVIATION_FLOOR)
        means = fields.array(f"{name}_class_means", np.float32, (rows, width))
        affinities = [
            TaskAffinity(*parts)
            for parts in zip(
                np.split(means, ends), own_mean.tolist(), own_std.tolist(), strict=True
            )
        ]
    return [
        ViewStatistics(*parts[:4], *(float(value) for value in parts[4:]))._replace(
            whitened=affinity
        )
        for affinity, *parts in zip(
            affinities, mean, bases, np.split(prototypes, ends), counts, *moments, strict=True
        )
    ]


def _read_heads(fields: "_Fields", ends: np.ndarray, views: Sequence[ViewStatistics]) -> list[Any]:
    kind = fields.text("head_kind")
    if kind == "function":
        raise InputError(
            f"{fields.path}: head_kind: its heads are functions, which are not stored; give them "
            "with heads"
        )
    rows = sum(len(view.class_counts) for view in views)
    weights = _split(fields.array("head_weight", np.float32, (rows, len(views[0].mean))), ends)
    if kind in ("linear", "normalised_linear"):
        make = LinearHead if kind == "linear" else NormalisedLinearHead
        biases = _split(fields.array("head_bias", np.float32, (rows,)), ends)
        return [make(*parts) for parts in zip(weights, biases, strict=True)]
    if kind == "cosine":
        scales = fields.array("head_scale", np.float32, (len(views),))
        return [CosineHead(*parts) for parts in zip(weights, scales, strict=True)]
    if kind == "nearest_mean":
        return [NearestMeanHead(weight) for weight in weights]
    raise InputError(f"{fields.path}: head_kind: unknown kind {kind!r}")


def _split(array: np.ndarray, ends: np.ndarray) -> list[Any]:
    return np.split(array, ends)


def _read_reference(fields: "_Fields", name: str, tasks: int) -> ForeignReference | None:
    found = fields.array(name, np.float64, (0 if tasks == 1 else 3,))
    if tasks == 1:
        return None
    reference = ForeignReference(*found.tolist())
    for part in ("variance", "scale"):
        if not (value := getattr(reference, part)) >= SCALE_FLOOR:
            raise InputError(
                f"{fields.path}: {name}: {part}: expected at least {SCALE_FLOOR}, found {value:g}"
            )
    return reference


def _read_foreign(
    fields: "_Fields", names: Sequence[str], samples: np.ndarray
) -> list[list[np.ndarray]] | None:
    if f"{names[0]}_foreign" not in fields.arrays:
        return None
    sizes = np.arange(len(samples)) * samples
    views = [
        np.split(
            fields.array(f"{name}_foreign", np.float32, (int(sizes.sum()),)), np.cumsum(sizes)[:-1]
        )
        for name in names
    ]
    return [
        [view[task].reshape(task, samples[task]) for view in views] for task in range(len(samples))
    ]


class _Fields:
    """Named arrays of a file, each checked when it is asked for."""

    def __init__(self, path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]):
        self.path, self.arrays = path, arrays

    def array(self, name: str, dtype: Any, shape: tuple[int | None, ...]) -> np.ndarray:
        if name not in self.arrays:
            raise InputError(f"{self.path}: {name}: missing")
        found = self.arrays[name]
        fits = found.ndim == len(shape) and all(
            size in (None, actual) for size, actual in zip(shape, found.shape, strict=True)
        )
        if found.dtype != dtype or not fits:
            expected = [size if size is not None else "any" for size in shape]
            raise InputError(
                f"{self.path}: {name}: expected {np.dtype(dtype).name} of shape {expected}, "
                f"found {found.dtype.name} of shape {[*found.shape]}"
            )
        # What float32 cannot hold is infinite when it scores. NaN compares false.
        limit = np.finfo(np.float32).max
        if found.dtype.kind == "f" and not (np.abs(found) <= limit).all():
            raise InputError(f"{self.path}: {name}: holds values that are not finite in float32")
        return found

    def text(self, name: str) -> str:
        found = self.arrays.get(name)
        if found is None or found.shape != () or found.dtype.kind != "U":
            raise InputError(f"{self.path}: {name}: expected a word, as in a saved calibrator")
        return str(found)

    def number(self, name: str) -> float:
        return float(self.array(name, np.float64, ()))

    def whole(self, name: str) -> int:
        return int(self.array(name, np.int64, ()))

    def counts(self, name: str, length: int | None, least: int) -> np.ndarray:
        found = self.array(name, np.int64, (length,))
        if found.size and found.min() < least:
            raise InputError(f"{self.path}: {name}: expected counts from {least}")
        return found

    def scales(self, name: str, length: int, floor: float = SCALE_FLOOR) -> np.ndarray:
        """Returns standard deviations, whose floor fitting keeps."""
        found = self.array(name, np.float64, (length,))
        if found.min() < floor:
            task = int(np.argmin(found))
            raise InputError(
                f"{self.path}: {name}: expected at least {floor}, found {found[task]:g} "
                f"in task {task}"
            )
        return found

    def distinct(self, name: str, length: int) -> np.ndarray:
        found = self.array(name, np.int64, (length,))
        values, counts = np.unique(found, return_counts=True)
        if (counts > 1).any():
            raise InputError(
                f"{self.path}: {name}: expected every label once, found "
                f"{values[counts > 1][0]} again"
            )
        return found
