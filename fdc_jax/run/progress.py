"""The progress of a run on the screen: a bar in a terminal, plain lines elsewhere, or nothing."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import tqdm

from fdc_jax.data.batches import Batch, TrainBatches
from fdc_jax.errors import TrainingError
from fdc_jax.machine import devices
from fdc_jax.run import estimate

_LINE_EVERY = 30.0  # seconds between plain lines when the output is no terminal


class Progress:
    """One bar over steps, such as those of the training of all tasks, with the time left.

    Args:
        quiet: show nothing.
        label: starts every line.
        unit: the name of a step.
    """

    def __init__(self, quiet: bool = False, label: str = "", unit: str = "step"):
        self._quiet, self._label, self._unit = quiet, label, unit
        self._bar: Any = None

    def start(self, total: int, done: int) -> None:
        """Sets the number of steps, and how many are done."""
        self._total, self._done = total, done
        self._clock: float | None = None

    def step(self, stage: str, **values: Any) -> None:
        """Counts a step, and shows its values and the time left; the first step compiles."""
        now = time.perf_counter()
        self._done += 1
        if self._clock is None:
            self._clock, self._first, self._last_line = now, self._done, -math.inf
            if not self._quiet and sys.stderr.isatty():
                counts = {"total": self._total, "initial": self._done, "unit": self._unit}
                self._bar = tqdm.tqdm(**counts, dynamic_ncols=True, smoothing=0.05)
        elif self._bar is not None:
            self._bar.set_description_str(self._label + stage, refresh=False)
            self._bar.set_postfix(values, refresh=False)
            self._bar.update()
        elif now - self._last_line >= _LINE_EVERY:
            self._last_line = now
            left = (now - self._clock) / (self._done - self._first) * (self._total - self._done)
            numbers = ", ".join(f"{name} {value}" for name, value in values.items())
            self.line(
                f"{stage}: {self._unit} {self._done} of {self._total}, {numbers}, "
                f"about {estimate.duration(left)} left"
            )

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        if not self._quiet:
            tqdm.tqdm.write(self._label + text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


class StepLog:
    """Watches training steps: losses, which must be finite, speed, and the time of each task.

    Args:
        event: keeps an event of a kind with its values.
        progress: shows every step.
        seconds: of the training of the task in work, by their names in a record, from a cursor.
    """

    peak_memory: int | None = None  # bytes on the fullest device after the last training here

    def __init__(
        self, event: Callable[..., None], progress: Progress, seconds: Mapping[str, float]
    ):
        self._event, self._progress = event, progress
        self.seconds: dict[str, float] = dict(seconds)
        self._compiled = False  # The first step of a process, which compiles, stands apart.
        self._pending: tuple[int, Any] | None = None

    def begin(self, batches: TrainBatches, num_tasks: int) -> None:
        """Starts the log of a task at the first step of its batches."""
        self._batches, self._num_tasks = batches, num_tasks
        if batches.start_step == 0:
            self.seconds = {"training_images": 0, "training_seconds": 0.0}
            self.seconds |= {"compile_seconds": 0.0, "input_wait_seconds": 0.0}
        self._event("training", task=batches.task, step=batches.start_step)
        self._restart(batches.start_step)

    def _restart(self, first: int) -> None:
        self._first, self._clock = first, time.perf_counter()
        self._watch = devices.Stopwatch()
        self._waited = self._batches.input_wait_seconds

    def step(self, step: int, loss: Any, batch: Batch) -> None:
        """Checks the loss of the step before while this step runs."""
        if not self._compiled:
            loss.block_until_ready()
            self.seconds["compile_seconds"] += sum(self._watch.read())
            self._restart(step + 1)
            self._compiled = True
        else:
            self.seconds["training_images"] += int(batch.weights.sum())
        self.look()
        self._pending, self._last = (step, loss), step

    def look(self) -> None:
        """Checks the loss of the last step; raises TrainingError if it is not finite."""
        if self._pending is None:
            return
        (step, loss), self._pending = self._pending, None
        task, epoch = self._batches.task, step // self._batches.steps_per_epoch
        value = float(loss)
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} in task {task + 1}, epoch {epoch + 1}, step {step + 1}; "
                "lower config.train.increment_learning_rate or config.train.head_learning_rate; "
                "earlier checkpoints are kept"
            )
        if step == 0 and value == 0.0:
            self._progress.line(
                f"task {task + 1}: a loss of 0 trains nothing; it needs two classes"
            )
        images = (step + 1 - self._first) * self._batches.batch_size
        speed = images / (time.perf_counter() - self._clock)
        if (step + 1) % self._batches.steps_per_epoch == 0:
            numbers = {"loss": value, "images_per_second": round(speed, 1)}
            self._event("epoch", task=task, epoch=epoch, **numbers)
        self._progress.step(
            f"task {task + 1}/{self._num_tasks} epoch {epoch + 1}/{self._batches.epochs}",
            loss=f"{value:.3f}",
            images_per_second=f"{speed:.0f}",
        )

    def pause(self) -> None:
        """Checks the last loss and adds up the time so far."""
        self.look()
        self.end()
        self._restart(self._last + 1)

    def end(self) -> None:
        """Adds up the time of the task and measures its peak memory."""
        self.peak_memory = devices.peak_memory()
        elapsed = self._watch.read()
        self.seconds["training_seconds"] += elapsed.seconds
        self.seconds["compile_seconds"] += elapsed.compile_seconds
        self.seconds["input_wait_seconds"] += self._batches.input_wait_seconds - self._waited
