r"""Time, memory and storage of calibrators, in fitting and scoring, by the number of tasks.

    python -m benchmarks.calibration --output=calibration.json
    python -m benchmarks.calibration --tasks=10,100,1000 --images=130000,1300000 --classes=1000 \
        --width=192 --views=1

Features are random and drawn task by task, outside the clock. Every measurement has its own
process, for the peak of resident memory.
"""

import itertools
import resource
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import measure
from fdc_jax import calibration
from fdc_jax.calibration.inputs import VIEWS
from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead

PROGRAM = "benchmarks.calibration"
BATCHES = (64, 1024, 10_000)


class Point(NamedTuple):
    """The size of a measurement, which has its own process."""

    tasks: int
    images: int
    classes: int
    width: int
    views: int

    def of_task(self, task: int) -> tuple[int, int]:
        """Returns the images and classes of a task; the first tasks take the remainders."""
        images, classes = (
            total // self.tasks + (task < total % self.tasks)
            for total in (self.images, self.classes)
        )
        return images, classes

    def features(self, task: int) -> dict[str, Any]:
        """Returns the arguments of `fit_task`: class centres plus noise, and the centres as head.

        An eighth of the axes, drawn per task, has 80 % of the noise's energy. The adapted view is
        the pretrained view, rotated and scaled by 1.1.
        """
        images, classes = self.of_task(task)
        first = sum(self.of_task(earlier)[1] for earlier in range(task))
        rng = np.random.default_rng(task)
        rows = np.arange(images) % classes
        centres = 0.2 * rng.standard_normal((classes, self.width), np.float32)
        strong = max(1, self.width // 8)
        weak = 0.25 * strong / max(1, self.width - strong)
        scale = np.full(self.width, np.sqrt(weak), np.float32)
        scale[rng.permutation(self.width)[:strong]] = 1.0
        drawn = rng.standard_normal((images, self.width), np.float32)
        drawn *= scale
        drawn += centres[rows]
        data = {"labels": first + rows, "head": LinearHead(centres, np.zeros(classes, np.float32))}
        if task:  # The previous encoder's features are shorter by 0.1 %.
            data["previous"] = np.float32(0.999) * drawn
        if self.views == 1:
            return data | {"adapted": drawn, "pretrained": None}
        if task:
            data["previous"] = np.float32(1.099) * np.roll(drawn, 1, axis=1)
        return data | {"adapted": np.float32(1.1) * np.roll(drawn, 1, axis=1), "pretrained": drawn}


def fit_and_score(point: Point, method: str, repeats: int, put: Any = np.asarray) -> Any:
    """Returns the measurements of a calibrator fitted on all tasks of a point.

    `put` moves features to a device; by default they stay on the host. The first task compiles.
    """
    single = {"pretrained_view_weight": 0.0} if (method, point.views) == ("fdc", 1) else {}
    calibrator: Any = calibration.make(method, **single)
    fit = np.zeros((point.tasks, 2))
    for task in range(point.tasks):
        data = point.features(task)
        views = {name for name in ("previous", *VIEWS) if data.get(name) is not None}
        data |= {name: put(data[name]) for name in views}
        fit[task] = measure.timed(lambda data=data: calibrator.fit_task(**data))[1]
    _, finalize = measure.timed(calibrator.finalize)
    record = {**point._asdict(), "method": method, "storage_bytes": calibrator.storage_bytes}
    if method == "fdc":
        residuals = sum(u.nbytes for u in itertools.chain(*calibrator.foreign))
        views = itertools.chain(*(task.views for task in calibrator.tasks))
        record["foreign_residual_bytes"] = residuals
        record["mean_rank"] = float(np.mean([len(view.basis) for view in views]))
    data = point.features(0)
    score = {}
    for size in BATCHES:
        batch: Any = [
            view if view is None else put(np.resize(view, (size, point.width)))
            for view in map(data.get, VIEWS)
        ]
        calibrator.score(*batch)
        times = [measure.timed(lambda b=batch: calibrator.score(*b))[1] for _ in range(repeats)]
        score[str(size)] = measure.named(np.median(times, axis=0), 1e3)
    record |= {
        "fit_seconds": measure.named(fit.sum(axis=0)),
        "fit_seconds_first_task": measure.named(fit[0]),
        "fit_seconds_last_task": measure.named(fit[-1]),
        "finalize_seconds": measure.named(finalize),
        "score_milliseconds": score,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    return record


def line(result: dict[str, Any]) -> str:
    """Returns a result as a line of text."""
    fit = result["fit_seconds"]
    score = result["score_milliseconds"]["64"]
    point = ", ".join(f"{name} {result[name]}" for name in ("method", *Point._fields))
    return (
        f"{point}: fit {fit['clock']:.1f} s ({fit['processor']:.1f} s of the processor), score of "
        f"64 {score['clock']:.1f} ms ({score['processor']:.1f} ms), "
        f"peak {result['peak_memory_bytes'] / 2**20:.1f} MiB"
    )


def main() -> None:
    """Measures every point with every method, prints a line per result, and writes JSON."""
    flags = {"tasks": "20", "images": "6000", "classes": 100, "width": 768, "views": 2}
    parser = measure.parser_of(__doc__, PROGRAM, **flags, repeats=5)
    parser.add_argument("--method", default="fdc", help="some of " + ",".join(calibration.METHODS))
    options = measure.parsed(parser)
    tasks, images = (measure.numbers(options, name) for name in ("tasks", "images"))
    methods = options.method.split(",")
    if unknown := [name for name in methods if name not in calibration.METHODS]:
        raise InputError(f"--method: expected some of {[*calibration.METHODS]}, found {unknown}")
    if not 2 <= min(tasks) <= max(tasks) <= options.classes <= min(images) or options.views > 2:
        raise InputError(
            "expected 2 <= --tasks <= --classes <= --images and 1 or 2 --views, found "
            f"{options.tasks}, {options.classes}, {options.images} and {options.views}"
        )
    rest = options.classes, options.width, options.views
    results, device = [], jax.devices()[0].device_kind
    for method, size, count in itertools.product(methods, images, tasks):
        point = Point(count, size, *rest)
        results.append(measure.in_a_process(fit_and_score, point, method, options.repeats))
        print(line(results[-1]), flush=True)
    measure.write_report(PROGRAM, options, {"results": results, "device": device})


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
