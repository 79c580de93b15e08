"""Time, memory and storage of FDC itself: a streaming fit and scoring, by the number of tasks.

    python -m benchmarks.calibration --output=calibration.json
    python -m benchmarks.calibration --tasks=10,100,1000 --images=1300000 --classes=1000 --views=1

Features are drawn chunk by chunk from a counter-based generator, again in each pass, and never held
as a whole; drawing is timed apart. Every number of tasks is measured in a process of its own, whose
largest resident memory is that of the point.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import check_numbers, in_a_process, run, write_report
from fdc_jax import calibration, heads
from fdc_jax.calibration.components import WHITENED
from fdc_jax.errors import InputError

CHUNK = 4096
BATCHES = (64, 1024)
# One forward pass of ViT-B/16 at 224 pixels.
FORWARD_FLOPS = 35.1e9
METHODS = {"fdc": {}, "whitened": WHITENED}


class Point(NamedTuple):
    """What is measured in one process."""

    tasks: int
    images: int
    classes: int
    width: int
    views: int
    seed: int = 0

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


def _named(times: np.ndarray, unit: float = 1.0) -> dict[str, float]:
    return dict(zip(("wall", "processor"), (unit * times).tolist(), strict=True))


def measure(point: Point, settings: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Fits all tasks of a point, the first of which compiles, and scores with them."""
    calibrator: Any = calibration.from_settings(
        {"pretrained_view_weight": float(point.views == 2), **settings}
    )
    before = peak_bytes()
    fit, drawing = np.zeros((2, point.tasks, 2))
    for task in range(point.tasks):
        features = Features(point, task)
        head = features.head
        _, both = timed(lambda f=features, h=head: calibrator.fit_task(f.source, None, h))
        drawing[task] = features.seconds
        fit[task] = both - drawing[task]
    fitted = peak_bytes()
    foreign = sum(view.nbytes for each in calibrator.foreign or [] for view in each)
    _, finalize = timed(calibrator.finalize)
    finalized = peak_bytes()
    calibrator.finalize(release=True)
    adapted, pretrained, _ = Features(point, 0).chunk(0, max(BATCHES))
    _, first_score = timed(lambda: calibrator.score(adapted, pretrained))
    score = {}
    for size in BATCHES:
        batch = adapted[:size], None if pretrained is None else pretrained[:size]
        calibrator.score(*batch)
        each = [timed(lambda b=batch: calibrator.score(*b))[1] for _ in range(repeats)]
        score[str(size)] = _named(np.median(each, axis=0), 1e3)
    flops = flops_per_image(calibrator, point)
    return {
        **point._asdict(),
        "mean_rank": float(np.mean([len(v.basis) for t in calibrator.tasks for v in t.views])),
        "fit_seconds": _named(fit.sum(axis=0)),
        "fit_seconds_first_task": _named(fit[0]),
        "fit_seconds_last_task": _named(fit[-1]),
        "drawing_seconds": _named(drawing.sum(axis=0)),
        "finalize_seconds": _named(finalize),
        "first_score_seconds": _named(first_score),
        "score_milliseconds": score,
        "flops_share_of_forward": flops / FORWARD_FLOPS,
        "storage_bytes": calibrator.storage_bytes,
        "foreign_residual_bytes": foreign,
        "memory_bytes": {
            "before": before,
            "fitted": fitted,
            "finalized": finalized,
            "peak": peak_bytes(),
        },
    }


def flops_per_image(calibrator: calibration.FDC, point: Point) -> float:
    """Multiply-adds times two of scoring one image: logits, subspaces, prototypes, distances."""
    ranks = sum(len(view.basis) for task in calibrator.tasks for view in task.views)
    products = point.classes + ranks + point.views * point.classes
    if calibrator.storage_bytes > calibrator.paper_storage_bytes:
        # The whitened metric maps each view once and compares it with every class once more.
        products += point.views * (point.width + point.classes)
    return 2.0 * point.width * products + 6.0 * point.width * point.views * point.tasks


def line(method: str, found: dict[str, Any]) -> str:
    """A result for the screen."""
    fit, score = found["fit_seconds"], found["score_milliseconds"]["64"]
    return (
        f"{method}, {found['tasks']} tasks, {found['classes']} classes, {found['images']} images, "
        f"width {found['width']}, views {found['views']}, rank {found['mean_rank']:.0f}: fit "
        f"{fit['wall']:.1f} s ({fit['processor']:.1f} s of processor time; the first task "
        f"{found['fit_seconds_first_task']['processor']:.1f} s), finalize "
        f"{found['finalize_seconds']['wall']:.2f} s, peak "
        f"{found['memory_bytes']['peak'] / 2**20:.0f} MiB, statistics "
        f"{found['storage_bytes'] / 2**20:.1f} MiB, foreign residuals "
        f"{found['foreign_residual_bytes'] / 2**20:.1f} MiB, score {score['wall']:.1f} ms per 64 "
        f"({score['processor']:.1f} ms of processor time, "
        f"{100 * found['flops_share_of_forward']:.3f} % of a forward pass's operations)"
    )


def main() -> None:
    """Measures every number of tasks, prints a line for each and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--tasks", default="20")
    parser.add_argument("--images", type=int, default=6000, help="of all tasks together")
    parser.add_argument("--classes", type=int, default=100, help="likewise")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--views", type=int, choices=(1, 2), default=2)
    parser.add_argument("--method", choices=METHODS, default="fdc")
    parser.add_argument("--repeats", type=int, default=5, help="of scoring; the median counts")
    parser.add_argument("--output", help="a .json file for the measurements")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        numbers = [int(each) for each in options.tasks.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 2 or options.classes < max(numbers) or options.images < options.classes:
        raise InputError(
            "expected at least two tasks, a class for each and an image for each class, found "
            f"--tasks={options.tasks} --classes={options.classes} --images={options.images}"
        )
    check_numbers(options, "width", "views", "repeats")
    if options.here:
        point = Point(numbers[0], options.images, options.classes, options.width, options.views)
        print(json.dumps(measure(point, METHODS[options.method], options.repeats)))
        return
    results = []
    for tasks in numbers:
        arguments = [*sys.argv[1:], "--here", f"--tasks={tasks}"]
        results.append(in_a_process("benchmarks.calibration", arguments, f"{tasks} tasks"))
        print(line(options.method, results[-1]), flush=True)
    device = jax.devices()[0].device_kind
    write_report("benchmarks.calibration", options, {"results": results, "device": device})


if __name__ == "__main__":
    sys.exit(run("benchmarks/calibration.py", main))
