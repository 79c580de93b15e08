"""Training speed of every learner, beside Cumulative-LoRA's.

    python benchmarks/learners.py --output=learners.json
    python benchmarks/learners.py --variant=B/16 --image_size=224 --precision=fast --epochs=20

Each learner learns one task as a warm-up, which compiles, and is measured in the next: what it does
before the task, its training steps, and what it does after it. The steps of the learners take
turns, so that whatever else the machine does slows all of them. Weights and images are random.
Times are medians; `processor` counts the seconds of all cores, which other programs change little.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import tqdm

from benchmarks.measure import check_numbers, noise, run, write_report
from configs import base
from fdc_jax import devices, learners
from fdc_jax.learners import training
from fdc_jax.model import vit

REFERENCE = "cumulative_lora"


def timed(function: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Returns a result once it is there, and the seconds of the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function())
    return result, (time.perf_counter() - clock, time.process_time() - processor)


class Trial:
    """One learner in its second task.

    Args:
        name: of the learner.
        arguments: of the command.
        model: the encoder.
        backbone: its parameters.
    """

    def __init__(self, name: str, arguments: argparse.Namespace, model, backbone):
        self.learner, self.model, self.backbone = learners.find(name), model, backbone
        config: Any = base.get_config()
        config.encoder.variant = arguments.variant
        config.learner.name = name
        classes = arguments.classes
        self.setup = training.Setup(model, (classes, classes), config)
        self.update = self.learner.update(self.setup)
        self.rate = 1.0
        if self.update.schedule:
            self.rate = self.update.schedule(0, arguments.epochs)
        first = self._learn(0, self.learner.initial_state(self.setup), arguments)
        # The first time may still compile something.
        for _ in range(2):
            self._learn(1, first, arguments)
        self.steps: list[tuple[float, float]] = []

    def _learn(self, task: int, state: Any, arguments: argparse.Namespace) -> Any:
        """Learns a task in two steps, times what surrounds them, and returns the state."""
        images = _images(arguments, task)
        context = self.setup, self.backbone
        state, self.before = timed(lambda: self.learner.before_task(*context, state, task, images))
        self.frozen, self.trained = self.learner.start(*context, state, task, jax.random.key(task))
        self.optimizer = self.update.initialise(self.trained)
        self.batches = itertools.cycle(images.augmented())
        for _ in range(2):
            self.step()
        trained = jax.tree.map(jax.numpy.copy, self.trained)
        state, self.after = timed(
            lambda: self.learner.after_task(*context, state, task, self.frozen, trained, images)
        )
        return state

    def step(self) -> tuple[float, float]:
        """Makes one training step and returns its seconds."""
        batch = next(self.batches)
        (self.trained, self.optimizer, _), seconds = timed(
            lambda: self.update.step(
                self.backbone, self.frozen, self.trained, self.optimizer, batch, self.rate
            )
        )
        return seconds


def _images(arguments: argparse.Namespace, task: int) -> training.TaskImages:
    batches = []
    for first in range(0, arguments.images, arguments.batch_size):
        batch = noise(arguments.batch_size, arguments.image_size, arguments.classes, task + first)
        weights = np.arange(arguments.batch_size) < arguments.images - first
        batches.append(batch._replace(weights=weights.astype(np.float32)))
    return training.TaskImages(lambda: iter(batches), lambda: iter(batches))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one record per learner, the reference first."""
    model = vit.build(arguments.variant, arguments.image_size, precision=arguments.precision)
    backbone = vit.initialise(model, arguments.image_size, jax.random.key(0))
    names = dict.fromkeys([REFERENCE, *arguments.learners])
    for name in names:
        learners.find(name)
    names = tqdm.tqdm(names, "warm-up", disable=None)
    trials = {name: Trial(name, arguments, model, backbone) for name in names}
    for _ in tqdm.trange(arguments.repeats, desc="repeats", disable=None):
        for trial in trials.values():
            trial.steps.append(trial.step())
    num_steps = arguments.epochs * -(-arguments.images // arguments.batch_size)
    records = [_record(name, trial, num_steps, arguments) for name, trial in trials.items()]
    for record in records:
        for kind in ("clock", "processor"):
            for what in ("step", "task"):
                record[f"{what}_relative_{kind}"] = (
                    record[f"{what}_seconds"][kind] / records[0][f"{what}_seconds"][kind]
                )
    return records


def _record(
    name: str, trial: Trial, num_steps: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    kinds = ("clock", "processor")
    step = {kind: statistics.median(s[i] for s in trial.steps) for i, kind in enumerate(kinds)}
    before, after = (dict(zip(kinds, s, strict=True)) for s in (trial.before, trial.after))
    return {
        "learner": name,
        "images_per_second": arguments.batch_size / step["clock"],
        "step_seconds": step,
        "before_task_seconds": before,
        "after_task_seconds": after,
        "task_seconds": {
            kind: before[kind] + num_steps * step[kind] + after[kind] for kind in kinds
        },
    }


def main() -> None:
    """Measures and prints one line per learner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--learners", default=",".join(learners.names()), help="of these alone")
    parser.add_argument("--variant", default="Ti/16")
    parser.add_argument("--image_size", type=int, default=128)
    parser.add_argument("--precision", default="parity", help="parity or fast")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--classes", type=int, default=5, help="of a task")
    parser.add_argument("--images", type=int, default=300, help="of a task")
    parser.add_argument("--epochs", type=int, default=5, help="that the time of a task counts")
    parser.add_argument("--repeats", type=int, default=9, help="steps of each learner")
    parser.add_argument("--output", help="a .json file for the measurements")
    arguments = parser.parse_args()
    check_numbers(arguments, "image_size", "batch_size", "classes", "images", "epochs", "repeats")
    devices.keep_freed_memory()
    arguments.learners = [name for name in arguments.learners.split(",") if name]
    records = measure(arguments)
    header = ("learner", "images/s", "step", "task", "step, processor", "task, processor")
    print(f"{header[0]:18}" + "".join(f"{name:>17}" for name in header[1:]))
    for record in records:
        ratios = [
            f"{record[f'{what}_relative_{kind}']:.2f}"
            for kind in ("clock", "processor")
            for what in ("step", "task")
        ]
        cells = [f"{record['images_per_second']:.1f}", *ratios]
        print(f"{record['learner']:18}" + "".join(f"{cell:>17}" for cell in cells))
    print(f"times relative to {REFERENCE}; {devices.describe()}, {arguments.precision}")
    found = {"device": devices.describe(), "learners": records}
    write_report("benchmarks.learners", arguments, found)


if __name__ == "__main__":
    sys.exit(run("benchmarks/learners.py", main))
