"""What of `results.json` no whole run shows."""

import json

import numpy as np
import pytest

from fdc_jax import evaluation
from fdc_jax.errors import InputError
from fdc_jax.run import results, schema


def memory(training, extraction, **fit):
    return {"training": training, "extraction": extraction, "fit": fit}


def test_memory_of_a_calibrator_is_by_how_much_it_raised_the_peak():
    per_task = [memory(700, 5, fdc=3, gaussians=9), memory(720, 1, fdc=0, gaussians=2)]
    expected = {"training": 700, "fdc": 9, "gaussians": 17}
    assert results._peak_memory(per_task) == expected
    # A task that another process trained says nothing of what came on top.
    again = memory(None, 600, fdc=70, gaussians=0)
    assert results._peak_memory([*per_task, again]) == expected


@pytest.mark.parametrize("first", [memory(None, None, fdc=None), memory(None, 7, fdc=1)])
def test_memory_is_unknown_on_a_processor_and_after_a_kill(first):
    expected = {"training": None, "fdc": None}
    assert results._peak_memory([first, memory(700, 1, fdc=1)]) == expected


def test_records_hold_the_labels_of_all_test_images(whole):
    """OmniBenchmark has 5,983 test images and 300 classes; larger sets have more."""
    record = json.loads((whole / "tasks" / "task_000.json").read_text())
    labels = evaluation.pack(np.random.default_rng(0).integers(300, size=50_000))
    record["labels"] = dict.fromkeys(record["labels"], labels)
    assert schema.check(record, schema.Record)["labels"] == record["labels"]
    record["labels"]["fdc"] = "\x1b[31m"
    with pytest.raises(InputError, match="labels"):
        schema.check(record, schema.Record)
