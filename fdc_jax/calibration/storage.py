"""A fitted calibrator as one `.npz` file, and back.

Bases are stored with the directions that each task retains, one task after the other, without
padding. Everything is checked when it is read: a file that loads is one that a fit could give.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from fdc_jax.calibration.fdc import (
    FDC,
    SCALE_FLOOR,
    ForeignReference,
    Settings,
    Task,
    ViewStatistics,
)
from fdc_jax.calibration.inputs import VIEWS, common_kind, host_array
from fdc_jax.calibration.transported import (
    RANK,
    Gaussians,
    TransportedFDC,
    TransportedSettings,
    from_settings,
)
from fdc_jax.calibration.whitened import (
    DEVIATION_FLOOR,
    TaskAffinity,
    WhitenedFDC,
    WhitenedSettings,
)
from fdc_jax.errors import InputError
from fdc_jax.heads import KINDS
from fdc_jax.machine.files import read_npz

FORMAT = "fdc_jax calibrator"
# 1 had no within-class metric, 2 no Gaussians; both are still read.
SCHEMA = 3
_SETTINGS = {1: Settings, 2: WhitenedSettings, 3: TransportedSettings}
MOMENTS = ("residual_mean", "residual_std", "distance_mean", "distance_std")
# How far lengths and inner products of unit vectors may be off in a file.
UNIT_TOLERANCE = 1e-3


def to_arrays(calibrator: FDC) -> dict[str, np.ndarray]:
    """Returns what `load` makes the same calibrator of, but for heads that are functions."""
    calibrator.require_finalized()
    tasks = calibrator.tasks
    settings = {field.name: field.default for field in fields(TransportedSettings)}
    arrays: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA}
    arrays |= settings | asdict(calibrator.settings)
    arrays["class_sizes"] = [len(task.classes) for task in tasks]
    arrays["classes"] = np.concatenate([task.classes for task in tasks])
    arrays["class_counts"] = np.concatenate([task.views[0].class_counts for task in tasks])
    arrays["samples"] = [task.samples for task in tasks]
    arrays["raw_scale"] = [task.raw_scale for task in tasks]
    arrays["filtered_scale"] = [task.filtered_scale for task in tasks]
    arrays |= _head_arrays(calibrator.heads)
    for index, name in enumerate(VIEWS[: calibrator.num_views]):
        views = [task.views[index] for task in tasks]
        arrays[f"{name}_mean"] = np.stack([view.mean for view in views])
        arrays[f"{name}_rank"] = [len(view.basis) for view in views]
        arrays[f"{name}_basis"] = np.concatenate([view.basis for view in views])
        arrays[f"{name}_prototypes"] = np.concatenate([view.prototypes for view in views])
        for moment in MOMENTS:
            arrays[f"{name}_{moment}"] = [getattr(view, moment) for view in views]
        reference = calibrator.references[index]
        arrays[f"{name}_foreign_fit"] = np.array(reference or (), np.float64)
        if isinstance(calibrator, WhitenedFDC) and calibrator.shared:
            own = [each[index] for each in calibrator.affinities]
            arrays[f"{name}_within_scatter"] = _half(calibrator.shared[index])
            arrays[f"{name}_class_means"] = np.concatenate([each.class_means for each in own])
            arrays[f"{name}_cosine_mean"] = [each.mean for each in own]
            arrays[f"{name}_cosine_std"] = [each.std for each in own]
        if isinstance(calibrator, TransportedFDC):
            known = calibrator.gaussians[index]
            arrays[f"{name}_moved_means"] = known.means
            arrays[f"{name}_moved_factors"] = known.factors
            arrays[f"{name}_moved_scatter"] = _half(known.scatter)
        if calibrator.foreign is not None:
            residuals = [task[index].ravel() for task in calibrator.foreign]
            arrays[f"{name}_foreign"] = np.concatenate(residuals)
    return {name: np.asarray(value) for name, value in arrays.items()}


def load(
    path: str | os.PathLike[str] | Mapping[str, np.ndarray],
    heads: Sequence[Any] | Callable[[int], Sequence[Any]] | None = None,
) -> FDC:
    """Reads a calibrator that `save` wrote, of this or an earlier schema; it scores as it did.

    Args:
        path: the file, or its arrays by name.
        heads: heads to predict with instead of the stored ones; needed when these are functions,
            which are not stored. Or what gives those of the first tasks, asked only then.

    Raises:
        InputError: the file is missing, damaged, of another kind or schema, or needs `heads`.
    """
    arrays = path if isinstance(path, Mapping) else read_npz(path)
    path = "calibrator" if isinstance(path, Mapping) else path
    stored = _Fields(path, arrays)
    if stored.text("format") != FORMAT:
        raise stored.error(f"format: expected {FORMAT!r}, found {stored.text('format')!r}")
    if not 1 <= (schema := stored.setting("schema", int)) <= SCHEMA:
        raise stored.error(f"schema: expected version 1 to {SCHEMA}, found {schema}")
    known = fields(_SETTINGS[schema])
    try:
        calibrator = from_settings({f.name: stored.setting(f.name, type(f.default)) for f in known})
    except InputError as error:
        raise error if str(error).startswith(f"{path}") else stored.error(str(error)) from error
    sizes = stored.array("class_sizes", np.int64, (None,), least=1)
    tasks, rows = len(sizes), int(sizes.sum())
    if not tasks:
        raise stored.error("class_sizes: expected at least one task, found none")
    ends = np.cumsum(sizes)[:-1]
    labels = stored.array("classes", np.int64, (rows,))
    values, times = np.unique(labels, return_counts=True)
    if (times > 1).any():
        raise stored.error(
            f"classes: expected every label once, found {values[times > 1][0]} again"
        )
    samples = stored.array("samples", np.int64, (tasks,), least=1)
    counts = np.split(stored.array("class_counts", np.int64, (rows,), least=0), ends)
    _check_counts(stored, counts, samples, calibrator.settings.neighbours)
    scales = [
        stored.array(name, np.float64, (tasks,), least=SCALE_FLOOR).tolist()
        for name in ("raw_scale", "filtered_scale")
    ]
    known = (f"pretrained_{part}" for part in ("mean", "rank", "basis", "prototypes", *MOMENTS))
    names = VIEWS[: 2 if any(name in stored.arrays for name in known) else 1]
    views = [_read_view(stored, name, counts, ends) for name in names]
    widths = {name: len(view[0].mean) for name, view in zip(names, views, strict=True)}
    columns = (np.split(labels, ends), samples.tolist(), *scales)
    calibrator.tasks = [
        Task(list(own), *others)
        for own, *others in zip(zip(*views, strict=True), *columns, strict=True)
    ]
    calibrator.references = [
        _read_reference(stored, f"{name}_foreign_fit", tasks) for name in names
    ]
    calibrator.foreign = _read_foreign(stored, names, samples)
    if isinstance(calibrator, WhitenedFDC) and calibrator.uses_metric:
        affinities = [_read_affinities(stored, name, ends, rows, widths[name]) for name in names]
        calibrator.affinities = [list(task) for task in zip(*affinities, strict=True)]
        calibrator.shared = [
            _read_scatter(stored, f"{name}_within_scatter", width) for name, width in widths.items()
        ]
    if isinstance(calibrator, TransportedFDC):
        calibrator.gaussians = [
            Gaussians(
                stored.array(f"{name}_moved_means", np.float32, (rows, width)),
                stored.array(f"{name}_moved_factors", np.float32, (rows, RANK, width)),
                _read_scatter(stored, f"{name}_moved_scatter", width),
            )
            for name, width in widths.items()
        ]
    try:
        if callable(heads):
            heads = heads(tasks) if stored.text("head_kind") == "function" else None
        calibrator.replace_heads(_read_heads(stored, ends, views[0]) if heads is None else heads)
    except InputError as error:
        known = heads is not None or str(error).startswith(f"{path}")
        raise error if known else stored.error(str(error)) from error
    calibrator._finalized = True
    return calibrator


def _half(symmetric: np.ndarray) -> np.ndarray:
    return symmetric[np.triu_indices(len(symmetric))]


def _read_scatter(stored: _Fields, name: str, width: int) -> np.ndarray:
    upper = np.zeros((width, width), np.float32)
    half = stored.array(name, np.float32, (width * (width + 1) // 2,))
    upper[np.triu_indices(width)] = half
    if upper.diagonal().min() < 0:
        raise stored.error(
            f"{name}: expected no variance below 0, found {upper.diagonal().min():g}"
        )
    return upper + np.triu(upper, 1).T


def _read_affinities(
    stored: _Fields, name: str, ends: np.ndarray, rows: int, width: int
) -> list[TaskAffinity]:
    tasks = len(ends) + 1
    mean = stored.array(f"{name}_cosine_mean", np.float64, (tasks,)).tolist()
    std = stored.array(f"{name}_cosine_std", np.float64, (tasks,), least=DEVIATION_FLOOR).tolist()
    means = np.split(stored.array(f"{name}_class_means", np.float32, (rows, width)), ends)
    return [TaskAffinity(*parts) for parts in zip(means, mean, std, strict=True)]


def _head_arrays(heads: Sequence[Any]) -> dict[str, Any]:
    kind = common_kind(heads)
    arrays: dict[str, Any] = {"head_kind": kind}
    if kind == "function":
        return arrays
    for place, part in enumerate(heads[0]._fields):
        values = [host_array(np.asarray(head[place]), "head").astype(np.float32) for head in heads]
        name = "weight" if place == 0 else part
        arrays[f"head_{name}"] = np.stack(values) if part == "scale" else np.concatenate(values)
    return arrays


def _read_heads(stored: _Fields, ends: np.ndarray, views: Sequence[ViewStatistics]) -> list[Any]:
    kind = stored.text("head_kind")
    if kind == "function":
        raise stored.error(
            "head_kind: its heads are functions, which are not stored; give them with heads"
        )
    makes = {name: make for make, name in KINDS.items()}
    if kind not in makes:
        raise stored.error(f"head_kind: unknown kind {kind!r}")
    rows = sum(len(view.class_counts) for view in views)
    parts = [np.split(stored.array("head_weight", np.float32, (rows, len(views[0].mean))), ends)]
    if "bias" in makes[kind]._fields:
        parts.append(np.split(stored.array("head_bias", np.float32, (rows,)), ends))
    if "scale" in makes[kind]._fields:
        parts.append(list(stored.array("head_scale", np.float32, (len(views),))))
    return [makes[kind](*each) for each in zip(*parts, strict=True)]


def _check_counts(
    stored: _Fields, counts: Sequence[np.ndarray], samples: np.ndarray, neighbours: int
) -> None:
    for task, (found, expected) in enumerate(zip(counts, samples.tolist(), strict=True)):
        if found.sum() != expected:
            raise stored.error(
                f"class_counts: expected {expected} samples in task {task}, as in samples, found "
                f"{found.sum()}"
            )
        if (present := int((found > 0).sum())) < neighbours:
            raise stored.error(
                f"neighbours: expected at most {present}, the classes with samples of task {task}, "
                f"found {neighbours}"
            )


def _read_view(
    stored: _Fields, name: str, counts: Sequence[np.ndarray], ends: np.ndarray
) -> list[ViewStatistics]:
    tasks, rows = len(counts), sum(map(len, counts))
    mean = stored.array(f"{name}_mean", np.float32, (tasks, None))
    ranks = stored.array(f"{name}_rank", np.int64, (tasks,), least=0)
    width = mean.shape[1]
    basis = stored.array(f"{name}_basis", np.float32, (int(ranks.sum()), width))
    prototypes = stored.array(f"{name}_prototypes", np.float32, (rows, width))
    lengths = np.linalg.norm(prototypes, axis=1)
    wrong = np.minimum(lengths, np.abs(lengths - 1.0)) > UNIT_TOLERANCE
    if wrong.any():
        row = int(np.argmax(wrong))
        raise stored.error(
            f"{name}_prototypes: expected rows of length 1 or 0, found {lengths[row]:.6g} at row "
            f"{row}"
        )
    bases = np.split(basis, np.cumsum(ranks)[:-1])
    for task, each in enumerate(bases):
        if len(each) > width or np.any(
            np.abs(each @ each.T - np.eye(len(each), dtype=np.float32)) > UNIT_TOLERANCE
        ):
            raise stored.error(f"{name}_basis: expected orthonormal rows, task {task} has others")
    moments = []
    for moment in MOMENTS:
        least = SCALE_FLOOR if moment.endswith("std") else -np.inf
        moments.append(stored.array(f"{name}_{moment}", np.float64, (tasks,), least).tolist())
    columns = (mean, bases, np.split(prototypes, ends), counts, *moments)
    return [ViewStatistics(*parts) for parts in zip(*columns, strict=True)]


def _read_reference(stored: _Fields, name: str, tasks: int) -> ForeignReference | None:
    if tasks == 1:
        stored.array(name, np.float64, (0,))
        return None
    # Of the three numbers, the variance and the scale have a floor.
    least = (-np.inf, SCALE_FLOOR, SCALE_FLOOR)
    return ForeignReference(*stored.array(name, np.float64, (3,), least).tolist())


def _read_foreign(
    stored: _Fields, names: Sequence[str], samples: np.ndarray
) -> list[list[np.ndarray]] | None:
    if f"{names[0]}_foreign" not in stored.arrays:
        return None
    sizes = np.arange(len(samples)) * samples
    views = [
        np.split(
            stored.array(f"{name}_foreign", np.float32, (int(sizes.sum()),)), np.cumsum(sizes)[:-1]
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

    def error(self, message: str) -> InputError:
        return InputError(f"{self.path}: {message}")

    def array(
        self, name: str, dtype: Any, shape: tuple[int | None, ...], least: Any = -np.inf
    ) -> np.ndarray:
        """Returns an array of a type and shape, None for any size; no number is below `least`."""
        if name not in self.arrays:
            raise self.error(f"{name}: missing")
        found = self.arrays[name]
        fits = found.ndim == len(shape) and all(
            size in (None, actual) for size, actual in zip(shape, found.shape, strict=True)
        )
        if found.dtype != dtype or not fits:
            expected = [size if size is not None else "any" for size in shape]
            raise self.error(
                f"{name}: expected {np.dtype(dtype).name} of shape {expected}, found "
                f"{found.dtype.name} of shape {[*found.shape]}"
            )
        # What float32 cannot hold is infinite when it scores. NaN compares false.
        limit = np.finfo(np.float32).max
        if found.dtype.kind == "f" and not (np.abs(found) <= limit).all():
            raise self.error(f"{name}: holds values that are not finite in float32")
        if (low := found < least).any():
            place = int(np.argmax(low))
            floor = np.broadcast_to(least, found.shape)[place]
            raise self.error(
                f"{name}: expected at least {floor:g}, found {found[place]:g} at place {place}"
            )
        return found

    def text(self, name: str) -> str:
        found = self.arrays.get(name)
        if found is None or found.shape != () or found.dtype.kind != "U":
            raise self.error(f"{name}: expected a word, as in a saved calibrator")
        return str(found)

    def setting(self, name: str, kind: type) -> Any:
        """Returns a number, a truth value or a word."""
        types = {float: np.float64, int: np.int64, bool: np.bool_}
        return self.text(name) if kind is str else kind(self.array(name, types[kind], ()))
