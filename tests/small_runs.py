"""Runs that take seconds, in this process: two epochs of mid-task checkpoints, five tasks."""

import json
import shutil

from configs import digits
from fdc_jax import command
from fdc_jax.errors import Interrupted
from fdc_jax.interruption import StopRequest


def config(cache, train_per_class, test_per_class, **fields):
    """Two tasks of five digits, one epoch, no report, with a cache folder.

    Args:
        cache: the folder.
        train_per_class: images.
        test_per_class: images.
        fields: others, with `__` for the dot.
    """
    found = digits.get_config()
    found.cache_dir = str(cache)
    found.classes_per_task = 5
    found.data.train_per_class = train_per_class
    found.data.test_per_class = test_per_class
    found.train.epochs = 1
    found.report = False
    for field, value in fields.items():
        found.update_from_flattened_dict({field.replace("__", "."): value})
    return found


class StopsAt(StopRequest):
    """Asks to stop at the nth look, as if the process had been sent SIGTERM."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks
        self.agree = self.count

    def count(self, number):
        self.looks -= 1
        return 15 if self.looks < 0 else number


def stopped(config, workdir, looks):
    """Runs until a number of looks at the stop request, which come with every step and batch."""
    try:
        command.run(config, str(workdir), True, StopsAt(looks))
    except Interrupted:
        return
    raise AssertionError("the run ended before it was stopped")


def events(workdir, kind):
    """Returns the events of a kind."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == kind]


def copied(workdir, target):
    """Returns a copy of a work directory."""
    shutil.copytree(workdir, target)
    return target
