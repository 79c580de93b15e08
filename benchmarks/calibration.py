r"""Time, memory and storage of a calibrator: fit and scoring, by the number of tasks.

    python -m benchmarks.calibration --output=calibration.json
    python -m benchmarks.calibration --tasks=10,100,1000 --images=130000,1300000 --classes=1000 \
        --width=192 --views=1

Features are random and drawn task by task, outside the clock. Every number of tasks and of images
is measured in a process of its own, whose largest resident memory is that of the point.
"""

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
    """What is measured in one process."""

    tasks: int
    images: int
    classes: int
    width: int
    views: int

    def of_task(self, task: int) -> tuple[int, int]:
        """Returns images and classes of a task, one more in the first where they do not divide."""
        images, classes = (
            total // self.tasks + (task < total % self.tasks)
            for total in (self.images, self.classes)
        )
        return images, classes

    def features(self, task: int) -> dict[str, Any]:
        """Returns what a calibrator is fitted on: class centres plus noise, and their head.

        An eighth of the axes, each task's own, has 80 % of the noise's energy. The adapted view is
        the pretrained one, turned and stretched a little.
        """
        images, classes = self.of_task(task)
        first = sum(self.of_task(earlier)[1] for earlier in range(task))
        rng, rows = np.random.default_rng(task), np.arange(images) % classes
        centres = 0.2 * rng.standard_normal((classes, self.width), np.float32)
        strong = max(1, self.width // 8)
        weak = 0.25 * strong / max(1, self.width - strong)
        scale = np.full(self.width, np.sqrt(weak), np.float32)
        scale[rng.permutation(self.width)[:strong]] = 1.0
        found = rng.standard_normal((images, self.width), np.float32)
        found *= scale
        found += centres[rows]
        given = {"labels": first + rows, "head": LinearHead(centres, np.zeros(classes, np.float32))}
        if task:  # The encoder before stretched all features a little less.
            given["previous"] = np.float32(0.999) * found
        if self.views == 1:
            return given | {"adapted": found, "pretrained": None}
        if task:
            given["previous"] = np.float32(1.099) * np.roll(found, 1, axis=1)
        return given | {"adapted": np.float32(1.1) * np.roll(found, 1, axis=1), "pretrained": found}


def fit_and_score(point: Point, method: str, repeats: int, place: Any = np.asarray) -> Any:
    """Fits all tasks of a point, the first of which compiles, and scores with them.

    Features lie where `place` puts them, on the host by default.
    """
    single = {"pretrained_view_weight": 0.0} if (method, point.views) == ("fdc", 1) else {}
    calibrator: Any = calibration.make(method, **single)
    fit = np.zeros((point.tasks, 2))
    for task in range(point.tasks):
        given = point.features(task)
        of_views = {name for name in ("previous", *VIEWS) if given.get(name) is not None}
        given |= {name: place(given[name]) for name in of_views}
        fit[task] = measure.timed(lambda given=given: calibrator.fit_task(**given))[1]
    _, finalize = measure.timed(calibrator.finalize)
    found = {**point._asdict(), "method": method, "storage_bytes": calibrator.storage_bytes}
    if method == "fdc":
        residuals = sum(u.nbytes for view in calibrator.foreign for u in view)
        ranks = [len(view.basis) for task in calibrator.tasks for view in task.views]
        found |= {"foreign_residual_bytes": residuals, "mean_rank": float(np.mean(ranks))}
    given, score = point.features(0), {}
    for size in BATCHES:
        batch: Any = [
            view if view is None else place(np.resize(view, (size, point.width)))
            for view in map(given.get, VIEWS)
        ]
        calibrator.score(*batch)
        each = [measure.timed(lambda b=batch: calibrator.score(*b))[1] for _ in range(repeats)]
        score[str(size)] = measure.named(np.median(each, axis=0), 1e3)
    found |= {
        "fit_seconds": measure.named(fit.sum(axis=0)),
        "fit_seconds_first_task": measure.named(fit[0]),
        "fit_seconds_last_task": measure.named(fit[-1]),
        "finalize_seconds": measure.named(finalize),
        "score_milliseconds": score,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    return found


def line(result: dict[str, Any]) -> str:
    """Returns the result as a line for the screen."""
    fit, score = result["fit_seconds"], result["score_milliseconds"]["64"]
    point = ", ".join(f"{name} {result[name]}" for name in ("method", *Point._fields))
    return (
        f"{point}: fit {fit['clock']:.1f} s ({fit['processor']:.1f} s of the processor), score of "
        f"64 {score['clock']:.1f} ms ({score['processor']:.1f} ms), "
        f"peak {result['peak_memory_bytes'] / 2**20:.1f} MiB"
    )


def main() -> None:
    """Measures every number of tasks, prints a line for each and writes them as JSON."""
    flags = {"tasks": "20", "images": "6000", "classes": 100, "width": 768, "views": 2}
    parser = measure.parser_of(__doc__, PROGRAM, **flags, repeats=5)
    parser.add_argument("--method", default="fdc", help="some of " + ",".join(calibration.METHODS))
    options = measure.parsed(parser)
    tasks, images = measure.numbers(options, "tasks"), measure.numbers(options, "images")
    methods = options.method.split(",")
    if unknown := [each for each in methods if each not in calibration.METHODS]:
        raise InputError(f"--method: expected some of {[*calibration.METHODS]}, found {unknown}")
    if not 2 <= min(tasks) <= max(tasks) <= options.classes <= min(images) or options.views > 2:
        raise InputError(
            "expected 2 <= --tasks <= --classes <= --images and 1 or 2 --views, found "
            f"{options.tasks}, {options.classes}, {options.images} and {options.views}"
        )
    rest = options.classes, options.width, options.views
    points = [(Point(n, size, *rest), each) for each in methods for size in images for n in tasks]
    device = {"device": jax.devices()[0].device_kind}
    results = []
    for point, method in points:
        results.append(measure.in_a_process(fit_and_score, point, method, options.repeats))
        print(line(results[-1]), flush=True)
    measure.write_report(PROGRAM, options, {"results": results} | device)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
