"""The events of `metrics.jsonl` for TensorBoard and Weights & Biases, if they are installed.

A process that resumes a run first passes on the events that the file has, each event once.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_KEYS = ("event", "time", "task", "epoch", "step", "tasks_done")  # fields that are not logged


class Loggers:
    """The loggers of `config.log`, which get the events of a run and of its file."""

    def __init__(self, names: str, events: Path):
        self._names, self._folder = list(filter(None, names.split(","))), events.parent
        self._sinks: list[Callable[..., None]] = []
        self._seen: list[tuple[Any, ...]] = []
        for line in events.read_text("utf-8").splitlines() if names and events.exists() else ():
            if line.endswith("}"):  # The last line may be incomplete.
                self.add(json.loads(line))

    def add(self, event: dict[str, Any]) -> None:
        """Passes an event on, unless it is a repetition after a stop within a task."""
        kind = event["event"]
        task = event.get("task", 0)
        key = kind, task, event.get("epoch")
        values = {name: value for name, value in event.items() if name not in _KEYS}
        if not self._names or not values or key in self._seen:
            return
        for name in () if self._seen else self._names:
            try:
                self._sinks.append(KINDS[name](self._folder, event["time"]))
            except Exception as error:  # whatever a library raises: not installed, not logged in
                logging.getLogger(__name__).warning("config.log: %s left out: %s", name, error)
        self._seen.append(key)
        step = sum(seen[0] == kind for seen in self._seen) if kind == "epoch" else task + 1
        for sink in self._sinks:
            sink(dict(_flat(kind, values)), step, len(self._seen), event["time"])


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{name}/{key}", part)
    elif not isinstance(value, str | None):  # Labels of images are packed as text.
        yield name, float(value)


def _tensorboard(folder: Path, start: float) -> Callable[..., None]:
    from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]

    for path in folder.glob("tensorboard/events.out.tfevents.*"):
        path.unlink()
    writer = Writer(str(folder / "tensorboard"))

    def write(values: dict[str, float], step: int, number: int, time: float) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, wall_time=time)
        writer.flush()

    return write


def _wandb(folder: Path, start: float) -> Callable[..., None]:
    import wandb  # pyright: ignore[reportMissingImports]

    # If a run resumes under its name, the service skips steps that it has.
    options = {"id": f"{1000 * start:.0f}", "resume": "allow", "reinit": "finish_previous"}
    run = wandb.init(project="fdc_jax", name=folder.name, dir=folder, **options)
    return lambda values, step, number, time: run.log(values | {"step": step}, step=number)


KINDS = {"tensorboard": _tensorboard, "wandb": _wandb}
