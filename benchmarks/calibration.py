"""Time, memory and storage of FDC itself: a streaming fit and scoring, by the number of tasks.

    python -m benchmarks.calibration --output=calibration.json
    python -m benchmarks.calibration --tasks=10,100,1000 --images=1300000 --classes=1000 --views=1

Features are drawn chunk by chunk from a counter-based generator, again in each pass, and never held
as a whole; drawing is timed apart. Every number of tasks is measured in a process of its own, whose
largest resident memory is that of the point.
"""

import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fdc_jax.calibration.components import WHITENED

from benchmarks import measure
from fdc_jax import calibration, heads
from fdc_jax.errors import InputError

PROGRAM = "benchmarks.calibration"
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
        self.seconds = np.zeros(2)  # of clock and processor, for drawing

    @property
    def head(self) -> heads.LinearHead:
        """The head whose rows are the class centres."""
        return heads.LinearHead(jnp.asarray(self.centres), jnp.zeros(self.classes))

    def chunk(self, start: int, rows: int) -> tuple[Any, Any, Any]:
        """Draws samples; they depend on their position alone."""
        drawn, seconds = measure.timed(lambda: self._draw(start, rows))
        self.seconds += seconds
        return drawn

    def _draw(self, start: int, rows: int) -> tuple[Any, Any, Any]:
        rng, width = _generator(self.point.seed, self.task, 1 + start), self.point.width
        noise = rng.standard_normal((rows, width), np.float32)
        row = np.arange(start, start + rows) % self.classes
        noise *= self.scale
        noise += self.centres[row]
        adapted = noise if self.point.views == 1 else np.float32(1.1) * np.roll(noise, 1, axis=1)
        pretrained = None if self.point.views == 1 else noise
        return adapted, pretrained, self.first_class + row

    def source(self) -> Iterator[tuple[Any, Any, Any]]:
        """Walks over the task once."""
        for start in range(0, self.count, CHUNK):
            yield self.chunk(start, min(CHUNK, self.count - start))


def fitted(point: Point) -> calibration.FDC:
    """Returns a calibrator of all tasks of a point that more tasks may follow."""
    calibrator = calibration.FDC()
    for task in range(point.tasks):
        features = Features(point, task)
        calibrator.fit_task(features.source, None, features.head)
    return calibrator


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fit_and_score(point: Point, settings: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Fits all tasks of a point, the first of which compiles, and scores with them."""
    calibrator: Any = calibration.from_settings(
        {"pretrained_view_weight": float(point.views == 2), **settings}
    )
    before = peak_bytes()
    fit, drawing = np.zeros((2, point.tasks, 2))
    for task in range(point.tasks):
        features = Features(point, task)
        head = features.head
        _, both = measure.timed(lambda f=features, h=head: calibrator.fit_task(f.source, None, h))
        drawing[task] = features.seconds
        fit[task] = both - drawing[task]
    fitted = peak_bytes()
    foreign = sum(view.nbytes for each in calibrator.foreign or [] for view in each)
    _, finalize = measure.timed(calibrator.finalize)
    finalized = peak_bytes()
    calibrator.finalize(release=True)
    adapted, pretrained, _ = Features(point, 0).chunk(0, max(BATCHES))
    _, first_score = measure.timed(lambda: calibrator.score(adapted, pretrained))
    score = {}
    for size in BATCHES:
        batch = adapted[:size], None if pretrained is None else pretrained[:size]
        calibrator.score(*batch)
        each = [measure.timed(lambda b=batch: calibrator.score(*b))[1] for _ in range(repeats)]
        score[str(size)] = measure.named(np.median(each, axis=0), 1e3)
    flops = flops_per_image(calibrator, point)
    return {
        **point._asdict(),
        "mean_rank": float(np.mean([len(v.basis) for t in calibrator.tasks for v in t.views])),
        "fit_seconds": measure.named(fit.sum(axis=0)),
        "fit_seconds_first_task": measure.named(fit[0]),
        "fit_seconds_last_task": measure.named(fit[-1]),
        "drawing_seconds": measure.named(drawing.sum(axis=0)),
        "finalize_seconds": measure.named(finalize),
        "first_score_seconds": measure.named(first_score),
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
    first, finalize = found["fit_seconds_first_task"], found["finalize_seconds"]
    memory = {
        "peak": found["memory_bytes"]["peak"],
        "statistics": found["storage_bytes"],
        "foreign residuals": found["foreign_residual_bytes"],
    }
    sizes = ", ".join(f"{name} {value / 2**20:.1f} MiB" for name, value in memory.items())
    return (
        f"{method}, {found['tasks']} tasks, {found['classes']} classes, {found['images']} images, "
        f"width {found['width']}, views {found['views']}, rank {found['mean_rank']:.0f}: fit "
        f"{fit['clock']:.1f} s ({fit['processor']:.1f} s of processor time; the first task "
        f"{first['processor']:.1f} s), finalize {finalize['clock']:.2f} s, {sizes}, score "
        f"{score['clock']:.1f} ms per 64 ({score['processor']:.1f} ms of processor time, "
        f"{100 * found['flops_share_of_forward']:.3f} % of a forward pass's operations)"
    )


def main() -> None:
    """Measures every number of tasks, prints a line for each and writes them as JSON."""
    flags = {"tasks": "20", "images": 6000, "classes": 100, "width": 768, "views": 2}
    parser = measure.parser_of(__doc__, PROGRAM, **flags, repeats=5)
    parser.add_argument("--method", choices=METHODS, default="fdc")
    options = measure.parsed(parser)
    tasks = measure.numbers(options, "tasks")
    if min(tasks) < 2 or options.classes < max(tasks) or options.images < options.classes:
        raise InputError(
            "expected at least two tasks, a class for each and an image for each class, found "
            f"--tasks={options.tasks} --classes={options.classes} --images={options.images}"
        )
    if options.views > 2:
        raise InputError(f"--views: expected 1 or 2, found {options.views}")
    results, sizes = [], (options.images, options.classes, options.width, options.views)
    for number in tasks:
        given = Point(number, *sizes), METHODS[options.method], options.repeats
        results.append(measure.in_a_process(fit_and_score, *given))
        print(line(options.method, results[-1]), flush=True)
    device = jax.devices()[0].device_kind
    measure.write_report(PROGRAM, options, {"results": results, "device": device})


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
