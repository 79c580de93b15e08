"""FDC at scale: time, memory and storage of a streaming fit, by the number of tasks.

    python -m benchmarks.calibration_scale --output=scale.json
    python -m benchmarks.calibration_scale --tasks=10,100 --views=2
    python -m benchmarks.calibration_scale --tasks=100 --classes=2184 --images=43680 --stretch=1000

Features are drawn chunk by chunk from a counter-based generator, again in each pass, and never held
as a whole; drawing is timed apart. Every number of tasks is measured in a process of its own, whose
largest resident memory is that of the point. The time of task t is a + b t, where b is what each
earlier task adds through foreign residuals; both come from a least-squares fit over the tasks.
--stretch=T computes, from these two and from the storage formula, what T tasks of the same size
would take; such numbers are marked as computed.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import check_numbers, in_a_process, run, write_report
from fdc_jax import calibration, heads
from fdc_jax.errors import InputError

CHUNK = 4096
BATCHES = (64, 1024)


class Point(NamedTuple):
    """What is measured in one process."""

    tasks: int
    images: int
    classes: int
    width: int
    views: int
    seed: int

    def images_of(self, task: int) -> int:
        """Images of a task, one more in the first ones where they do not divide."""
        return self.images // self.tasks + (task < self.images % self.tasks)

    def classes_of(self, task: int) -> int:
        """Classes of a task, likewise."""
        return self.classes // self.tasks + (task < self.classes % self.tasks)


def _generator(*coordinates: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(coordinates)))


class Features:
    """One task: class centres plus noise, of which an eighth of the axes has 80 % of the energy.

    Each task has strong axes of its own. The adapted view is the pretrained one, turned and
    stretched a little.
    """

    def __init__(self, point: Point, task: int):
        self.point, self.task = point, task
        self.count, self.classes = point.images_of(task), point.classes_of(task)
        self.first_class = sum(point.classes_of(earlier) for earlier in range(task))
        rng = _generator(point.seed, task)
        self.centres = 0.2 * rng.standard_normal((self.classes, point.width), np.float32)
        strong = max(1, point.width // 8)
        weak = 0.25 * strong / max(1, point.width - strong)
        self.scale = np.full(point.width, np.sqrt(weak), np.float32)
        self.scale[rng.permutation(point.width)[:strong]] = 1.0
        self.seconds = np.zeros(2)  # wall and processor time of drawing

    @property
    def head(self) -> heads.LinearHead:
        """The head whose rows are the class centres."""
        return heads.LinearHead(jnp.asarray(self.centres), jnp.zeros(self.classes))

    def chunk(self, start: int, rows: int) -> tuple[Any, Any, Any]:
        """Draws samples; they depend on their position alone."""
        start_of_clock = clock()
        noise = _generator(self.point.seed, self.task, 1 + start).standard_normal(
            (rows, self.point.width), np.float32
        )
        row = np.arange(start, start + rows) % self.classes
        noise *= self.scale
        noise += self.centres[row]
        adapted = noise if self.point.views == 1 else np.float32(1.1) * np.roll(noise, 1, axis=1)
        pretrained = None if self.point.views == 1 else noise
        self.seconds += clock() - start_of_clock
        return adapted, pretrained, self.first_class + row

    def source(self) -> Iterator[tuple[Any, Any, Any]]:
        """Walks over the task once."""
        for start in range(0, self.count, CHUNK):
            yield self.chunk(start, min(CHUNK, self.count - start))


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def clock() -> np.ndarray:
    """Wall time and processor time of this process, all threads together, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def timed(call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """Returns a result with the wall and the processor time that it took."""
    start = clock()
    result = call()
    return result, clock() - start


def measure(point: Point, repeats: int) -> dict[str, Any]:
    """Fits all tasks of a point and scores with them."""
    calibrator = calibration.FDC(pretrained_view_weight=float(point.views == 2))
    before = peak_bytes()
    fit, drawing = np.zeros((2, point.tasks, 2))
    for task in range(point.tasks):
        features = Features(point, task)
        head = features.head
        _, both = timed(lambda f=features, h=head: calibrator.fit_task(f.source, None, h))
        drawing[task] = features.seconds
        fit[task] = both - drawing[task]
        if point.tasks >= 100 and (task + 1) % (point.tasks // 10) == 0:
            print(f"{task + 1} tasks, {fit.sum(axis=0)} s", file=sys.stderr, flush=True)
    fitted = peak_bytes()
    foreign = sum(view.nbytes for each in calibrator.foreign or [] for view in each)
    _, finalize = timed(calibrator.finalize)
    finalized = peak_bytes()
    calibrator.finalize(release=True)
    adapted, pretrained, _ = Features(point, 0).chunk(0, max(BATCHES))
    _, first_score = timed(lambda: calibrator.score(adapted, pretrained))
    score = {
        str(size): score_milliseconds(calibrator, adapted, pretrained, size, repeats)
        for size in BATCHES
    }
    rank = float(np.mean([len(view.basis) for each in calibrator.tasks for view in each.views]))
    return {
        **point._asdict(),
        "mean_rank": rank,
        "wall": times(fit[:, 0], drawing[:, 0], finalize[0]),
        "processor": times(fit[:, 1], drawing[:, 1], finalize[1]),
        "first_score_seconds": float(first_score[0]),
        "score_milliseconds": score,
        "storage_bytes": calibrator.storage_bytes,
        "storage_bytes_by_formula": storage(point, rank),
        "foreign_residual_bytes": foreign,
        "memory_bytes": {
            "before": before,
            "fitted": fitted,
            "finalized": finalized,
            "peak": peak_bytes(),
        },
    }


def score_milliseconds(
    calibrator: calibration.FDC, adapted: Any, pretrained: Any, size: int, repeats: int
) -> dict[str, float]:
    """Medians of wall and processor time for a batch, after a warm-up."""
    batch = adapted[:size], None if pretrained is None else pretrained[:size]
    calibrator.score(*batch)
    each = [timed(lambda: calibrator.score(*batch))[1] for _ in range(repeats)]
    return dict(zip(("wall", "processor"), (1e3 * np.median(each, axis=0)).tolist(), strict=True))


def times(fit: np.ndarray, drawing: np.ndarray, finalize: float) -> dict[str, float]:
    """Seconds of fitting, and what they are made of."""
    own, per_earlier = growth(fit)
    return {
        "fit_seconds": float(fit.sum()),
        "first_task_seconds": float(fit[0]),
        "task_alone_seconds": own,
        "earlier_task_seconds": per_earlier,
        "share_of_earlier_tasks": per_earlier * pairs(len(fit)) / float(fit.sum()),
        "finalize_seconds": float(finalize),
        "drawing_seconds": float(drawing.sum()),
    }


def pairs(tasks: int) -> int:
    """Number of pairs of a task and an earlier one."""
    return tasks * (tasks - 1) // 2


def growth(seconds: np.ndarray) -> tuple[float, float]:
    """Fits the time of a task as that of its own and of each earlier one.

    The first tasks compile; they and the slowest tenth, which something else held up, are left out.
    """
    tasks = np.arange(len(seconds))
    chosen = tasks >= min(3, len(seconds) - 2)
    slope, own = 0.0, float(np.median(seconds))
    for _ in range(2):
        if chosen.sum() < 2:
            break
        slope, own = np.polyfit(tasks[chosen], seconds[chosen], 1)
        beyond = seconds - (own + slope * tasks)
        chosen &= beyond <= np.quantile(beyond[chosen], 0.9)
    return max(float(own), 0.0), max(float(slope), 0.0)


def storage(point: Point, rank: float) -> int:
    """The paper's accounting: bases, prototypes, means and scalars in float32, for a mean rank."""
    numbers = (point.tasks * (rank + 1) + point.classes) * point.width + 4 * point.tasks
    numbers += 3 if point.tasks > 1 else 0
    return round(4 * (point.views * numbers + 2 * point.tasks))


def stretched(result: dict[str, Any], tasks: int) -> dict[str, Any]:
    """Computes what more tasks of the same size would take, from what one point measured."""
    measured = Point(*(result[name] for name in Point._fields))
    factor = tasks / measured.tasks
    point = measured._replace(
        tasks=tasks,
        images=round(factor * measured.images),
        classes=round(factor * measured.classes),
    )
    return {
        "computed": "from the measured point, a + b t per task and the storage formula",
        **point._asdict(),
        **{
            f"{kind}_fit_seconds": result[kind]["task_alone_seconds"] * tasks
            + result[kind]["earlier_task_seconds"] * pairs(tasks)
            for kind in ("wall", "processor")
        },
        "storage_bytes": storage(point, result["mean_rank"]),
        "storage_bytes_per_class": 4 * point.views * point.width,
        "foreign_residual_bytes": round(
            4 * point.views * pairs(tasks) * measured.images / measured.tasks
        ),
        "score_milliseconds": {
            size: {clock: factor * value for clock, value in each.items()}
            for size, each in result["score_milliseconds"].items()
        },
    }


def line(result: dict[str, Any]) -> str:
    """A result for the screen."""
    memory, score = result["memory_bytes"], result["score_milliseconds"]
    wall, processor = result["wall"], result["processor"]
    return (
        f"{result['tasks']} tasks, {result['classes']} classes, {result['images']} images, width "
        f"{result['width']}, views {result['views']}, rank {result['mean_rank']:.0f}: fit "
        f"{wall['fit_seconds']:.1f} s ({processor['fit_seconds']:.1f} s of processor time, "
        f"{100 * processor['share_of_earlier_tasks']:.0f} % against earlier tasks; drawing "
        f"{wall['drawing_seconds']:.1f} s), finalize {wall['finalize_seconds']:.2f} s, peak "
        f"{memory['peak'] / 2**20:.0f} MiB, statistics {result['storage_bytes'] / 2**20:.1f} MiB, "
        f"foreign residuals {result['foreign_residual_bytes'] / 2**20:.1f} MiB, score "
        f"{score['64']['wall']:.1f} ms per 64 ({score['64']['processor']:.1f} ms of processor time)"
    )


def stretched_line(result: dict[str, Any]) -> str:
    """A computed result for the screen."""
    return (
        f"computed from it: {result['tasks']} tasks, {result['classes']} classes, fit "
        f"{result['processor_fit_seconds']:.1f} s of processor time, statistics "
        f"{result['storage_bytes'] / 2**20:.1f} MiB, foreign residuals "
        f"{result['foreign_residual_bytes'] / 2**20:.1f} MiB"
    )


def main() -> None:
    """Measures every number of tasks, prints a line for each and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--tasks", default="10,100,1000")
    parser.add_argument("--images", type=int, default=1_300_000, help="of all tasks together")
    parser.add_argument("--classes", type=int, default=1000, help="likewise")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--views", type=int, choices=(1, 2), default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, help="of scoring; the median counts")
    parser.add_argument("--stretch", type=int, default=0, help="compute so many tasks from each")
    parser.add_argument("--output", help="a .json file for the measurements")
    parser.add_argument("--here", action="store_true", help="one point in this process, to stdout")
    options = parser.parse_args()
    try:
        numbers = [int(each) for each in options.tasks.split(",")]
    except ValueError:
        numbers = [0]
    least = max(numbers)
    if min(numbers) < 2 or options.classes < least or options.images < options.classes:
        raise InputError(
            "expected at least two tasks, a class for each and an image for each class, found "
            f"--tasks={options.tasks} --classes={options.classes} --images={options.images}"
        )
    check_numbers(options, "width", "views", "repeats")
    points = [
        Point(tasks, options.images, options.classes, options.width, options.views, options.seed)
        for tasks in numbers
    ]
    if options.here:
        print(json.dumps(measure(points[0], options.repeats)))
        return
    results = []
    for point in points:
        arguments = [f"--{name}={value}" for name, value in point._asdict().items()]
        arguments += ["--here", f"--repeats={options.repeats}"]
        results.append(
            in_a_process("benchmarks.calibration_scale", arguments, f"{point.tasks} tasks")
        )
        print(line(results[-1]), flush=True)
        if options.stretch:
            print(stretched_line(stretched(results[-1], options.stretch)), flush=True)
        found = {
            "results": results,
            "stretched": [stretched(each, options.stretch) for each in results if options.stretch],
            "device": jax.devices()[0].device_kind,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        }
        write_report("benchmarks.calibration_scale", options, found)


if __name__ == "__main__":
    sys.exit(run("benchmarks/calibration_scale.py", main))
