"""Tasks that are fitted apart, on any machines, and joined: `--shard` and `--merge` of `posthoc`.

A task is the smallest part of the work. What it leaves is the same wherever it is fitted, and is
joined in the order of tasks, so that any number of shards ends in the arrays of one machine, byte
by byte. FDC walks twice: residuals against earlier tasks need the bases of all of these.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fdc_jax import calibration
from fdc_jax.calibration import FDC, Calibrator, foreign, inputs, methods, storage
from fdc_jax.errors import InputError, counted
from fdc_jax.features.feature_files import FeatureSet

# One walk is enough for the first three, which are fitted together where no other is named.
TOGETHER = ("gaussians", "mahalanobis", "ncm")
METHODS = (*TOGETHER, "mahalanobis-pretrained", "ncm-pretrained", "fdc")


def tasks_of(shard: str, count: int) -> range:
    """Returns which of `count` tasks belong to a shard "i/n"; InputError where it is none."""
    number, _, of = shard.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise InputError(f"--shard: expected i/n with 0 <= i < n, found {shard!r}")
    return range(*(each * count // int(of) for each in (int(number), int(number) + 1)))


def one_task(
    name: str, features: FeatureSet, task: int, settings: Mapping[str, Any], basis: FDC | None
) -> Calibrator | list[foreign.Residuals]:
    """Returns a method fitted on a task alone or, with a basis, the task's residuals by view."""
    given = features.tasks[task]
    if basis is not None:
        views, _ = inputs.task_views(given.adapted, given.labels, given.pretrained, task, [])
        known = basis.tasks[:task]
        return [foreign.residuals(view, known, index) for index, view in enumerate(views)]
    fitted = calibration.make(name, **settings)
    fitted.first = task
    given.fit(fitted)
    if features.final_heads is not None:
        fitted.replace_heads([features.final_heads[task]])
    return fitted


def part(features: FeatureSet, tasks: range, names: Sequence[str], *how: Any) -> dict[str, Any]:
    """Returns what a shard writes: each of its tasks by method, and what all shards agree in."""
    fitted = {name: [one_task(name, features, task, *how) for task in tasks] for name in names}
    settings, basis = how
    rows = [len(task.labels) for task in features.tasks]
    of = {"rows": rows, "settings": settings, "second": basis is not None, "methods": [*names]}
    return {"of": of, "tasks": [tasks.start, tasks.stop], "fitted": fitted}


def plan(features: FeatureSet, tasks: range, names: Sequence[str], *how: Any) -> str:
    """Returns what a shard reads, and how long it takes, of which its first task is fitted."""
    if not tasks:
        return "no task: there are more shards than tasks"
    chosen = [features.tasks[task] for task in tasks]
    read = [(each.adapted, each.pretrained, each.previous) for each in chosen]
    size = sum(array.nbytes for arrays in read for array in arrays if array is not None)
    rows, start = sum(len(each.adapted) for each in chosen), time.perf_counter()
    for name in names:
        one_task(name, features, tasks[0], *how)
    hours = (time.perf_counter() - start) / 3600 * rows / len(chosen[0].adapted)
    passes = "2 passes" if "fdc" in names else "1 pass"
    sizes = f"{counted(len(chosen), 'task')}, {counted(rows, 'row')}, {counted(size, 'byte')}"
    return f"{sizes}, {passes}, about {hours:.3f} hours a pass"


def merged(paths: Sequence[str], basis: FDC | None) -> dict[str, Any]:
    """Returns the calibrators of all parts by name.

    FDC's has no residuals until a second pass, whose parts need it as their `basis`.

    Raises:
        InputError: a file is no part, or parts are of different files, methods or passes, or tasks
            are in none of them or in two.
    """
    # What parts hold of tasks is read one part at a time, as it may not fit in memory twice.
    starts = sorted(map(_outline, paths), key=lambda each: each[:2])
    whole, reached, of = {}, 0, starts[0][2]
    if of["second"] and not basis:
        raise InputError(f"{starts[0][1]}: is of a second pass: expected --basis, as for the part")
    if basis and not of["second"]:
        raise InputError(f"--basis: expected parts of a second pass, found {starts[0][1]}")
    for (start, stop), path, own in starts:
        if own != of or start != reached:
            raise InputError(
                f"{path}: expected task {reached} and those after it, of the same features and "
                f"methods as {starts[0][1]}; found task {start}"
            )
        reached = stop
        for name, pieces in _part(path)["fitted"].items():
            for piece in pieces:
                if basis is not None:
                    whole[name] = foreign.appended(whole.get(name, []), piece)
                elif whole.setdefault(name, piece) is not piece:
                    whole[name].join(piece)
    if reached != len(of["rows"]):
        raise InputError(f"--merge: task {reached} and those after it are in no part")
    if basis is not None:
        basis.foreign, basis.references = whole["fdc"], []
        basis.finalize()
        return {"fdc": basis}
    if "fdc" in whole:
        whole["fdc"].foreign = None
    return whole


def _outline(path: str) -> tuple[list[int], str, dict[str, Any]]:
    part = _part(path)
    return part["tasks"], path, part["of"]


def _part(path: str) -> dict[str, Any]:
    part = storage.read(path, methods.TYPES)
    if not isinstance(part, dict) or part.keys() != {"of", "tasks", "fitted"}:
        raise InputError(f"{path}: expected a part, as --shard writes it")
    return part
