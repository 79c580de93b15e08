"""Training speed of every learner, beside Cumulative-LoRA's.

    python -m benchmarks.learners --output=learners.json
    python -m benchmarks.learners --variant=B/16 --image_size=224 --precision=fast --epochs=20

Each learner learns one task as a warm-up, which compiles, and is measured in the next: what it does
before the task, its training steps, and what it does after it. The steps of the learners take
turns, so that whatever else the machine does slows all of them. Weights and images are random.
Times are medians; `processor` counts the seconds of all cores, which other programs change little.
"""

import argparse
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tabulate
import tqdm

from benchmarks import measure, synthetic
from benchmarks.measure import ENCODER, named, noise, parsed, run, timed, write_report
from fdc_jax import learners
from fdc_jax.learners import training
from fdc_jax.machine import devices
from fdc_jax.model import vit

PROGRAM = "benchmarks.learners"
REFERENCE = "cumulative_lora"
_WHAT = ("step", "task")


class Trial:
    """One learner in its second task."""

    def __init__(self, name: str, arguments: argparse.Namespace, model, backbone):
        self.backbone, stream = backbone, (arguments.classes,) * 2
        self.learner, self.update, self.rate = synthetic.learning(name, model, stream)
        first = self._learn(0, self.learner.initial_state(), arguments)
        # The first time may still compile something.
        for _ in range(2):
            self._learn(1, first, arguments)
        self.steps: list[np.ndarray] = []

    def _learn(self, task: int, state: Any, arguments: argparse.Namespace) -> Any:
        """Learns a task in two steps, times what surrounds them, and returns the state."""
        images = _images(arguments, task)
        given: Any = (self.backbone, state, task, images)
        state, self.before = timed(lambda: self.learner.before_task(*given))
        key = jax.random.key(task)
        self.frozen, self.trained = self.learner.start_task(self.backbone, state, task, key)
        self.optimizer = self.update.initialise(self.trained)
        self.batches = itertools.cycle(images.augmented())
        for _ in range(2):
            self.step()
        given = (*given[:3], self.frozen, jax.tree.map(jnp.copy, self.trained), images)
        state, self.after = timed(lambda: self.learner.after_task(*given))
        return state

    def step(self) -> np.ndarray:
        """Makes one training step and returns its seconds."""
        given: Any = (self.backbone, self.frozen, self.trained, self.optimizer, next(self.batches))
        found, seconds = timed(lambda: self.update.step(*given, self.rate))
        self.trained, self.optimizer, _ = found
        return seconds


def _images(arguments: argparse.Namespace, task: int) -> training.TaskImages:
    batch = noise(arguments.batch_size, arguments.image_size, arguments.classes, task)
    batches = [batch] * -(-arguments.images // arguments.batch_size)
    return training.TaskImages(lambda: iter(batches), lambda: iter(batches))


def trials_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one record per learner, the reference first."""
    model = measure.encoder(arguments)
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
    records, first = [], {}
    for name, trial in trials.items():
        step = np.median(trial.steps, axis=0)
        seconds = {"step": step, "before_task": trial.before, "after_task": trial.after}
        seconds["task"] = trial.before + num_steps * step + trial.after
        first = first or seconds
        record = {"learner": name, "images_per_second": arguments.batch_size / step[0]}
        record |= {f"{what}_seconds": named(each) for what, each in seconds.items()}
        for what in _WHAT:
            relative = named(seconds[what] / first[what])
            record |= {f"{what}_relative_{kind}": value for kind, value in relative.items()}
        records.append(record)
    return records


def main() -> None:
    """Measures and prints one line per learner."""
    flags = {"variant": "Ti/16", "image_size": 128, "classes": 5, "images": 300, "epochs": 5}
    flags = ENCODER | flags | {"repeats": 9, "learners": ",".join(learners.names())}
    arguments = parsed(measure.parser_of(__doc__, PROGRAM, **flags))
    devices.keep_freed_memory()
    arguments.learners = [name for name in arguments.learners.split(",") if name]
    records = trials_of(arguments)
    header = ["learner", "images/s", "step", "task", "step, processor", "task, processor"]
    fields = [f"{what}_relative_{kind}" for kind in ("clock", "processor") for what in _WHAT]
    rows = [[each[name] for name in ("learner", "images_per_second", *fields)] for each in records]
    print(tabulate.tabulate(rows, header, tablefmt="plain", floatfmt=".2f"))
    print(f"times relative to {REFERENCE}; {devices.describe()}, {arguments.precision}")
    found = {"device": devices.describe(), "learners": records}
    write_report(PROGRAM, arguments, found)


if __name__ == "__main__":
    sys.exit(run(PROGRAM, main))
