"""The JSON files of a run: values that contradict each other or that no measurement gives."""

import json

import msgspec
import numpy as np
import pytest

from fdc_jax import evaluation
from fdc_jax.errors import InputError
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import read_json, write_json
from fdc_jax.run import records

COMPONENTS = {"raw": 1.0, "full": 2.0, "pac+rlc": 3.0}
POINTS = [{"task": task, "accuracy": {"raw": 100.0005}} for task in (0, 1)]
RESULTS = {
    **dict(benchmark="a", learner="b", seed=2**32 - 1, num_tasks=2, num_classes=2),
    **dict(accuracy={"raw": 0.0}, components=COMPONENTS, class_names=["x", "y"]),
    **dict(curve=POINTS, config={}, num_test_images=3),
}
WRONG = {
    "curve: expected tasks below 1": {"num_tasks": 1},
    "curve: expected tasks below 2": {"curve": POINTS[::-1]},
    "accuracy: expected raw among": {"accuracy": {"fdc": 1.0, "oracle": 2.0}},
    "accuracy: expected raw among the": {"curve": [POINTS[0], {"task": 1, "accuracy": {}}]},
    "components: expected raw": {"components": {"raw": 1.0, "full": 2.0}},
    "class_names: expected 2, found 1": {"class_names": ["x"]},
    "accuracy.*: expected a number <= 100.001, found": {"accuracy": {"raw": 100.01}},
    r"class_names\[0\]: expected text of accepted ch": {"class_names": ["a\u202e", "b"]},
    "curve: expected a list of length >= 1, found": {"curve": []},
}


@pytest.mark.parametrize("message", WRONG)
def test_impossible_results_are_refused(message):
    convert(RESULTS, records.Results)
    with pytest.raises(InputError, match=message):
        convert(RESULTS | WRONG[message], records.Results)


def test_records_hold_the_labels_of_many_images(finished_run):
    """OmniBenchmark has 5,983 test images and 300 classes; larger sets have more."""
    record = read_json(finished_run / "tasks" / "task_000.json")
    labels = {"fdc": evaluation.pack(np.random.default_rng(0).integers(300, size=50_000))}
    assert convert(record | {"labels": labels}, records.Record).labels == labels
    with pytest.raises(InputError, match="labels"):
        convert(record | {"labels": {"fdc": "\x1b[31m"}}, records.Record)


@pytest.mark.parametrize(
    ("name", "kind"), [("results.json", records.Results), ("tasks/task_001.json", records.Record)]
)
def test_files_are_unchanged_by_reading_and_writing(finished_run, name, kind):
    content = records.read(finished_run / name, kind, "")
    assert json.loads(msgspec.json.encode(content)) == read_json(finished_run / name)


def test_absent_and_later_fields_are_accepted(tmp_path):
    """A task without test images has no accuracy."""
    path = tmp_path / "results.json"
    point = POINTS[1] | {"task_accuracy": {"raw": [None, 50.0]}}
    write_json(path, RESULTS | {"curve": [point], "of a later version": 1})
    content = records.read(path, records.Results, "")
    assert content.curve[0].task_accuracy["raw"] == [None, 50.0]
    write_json(path, RESULTS | {"seed": "1"})
    with pytest.raises(InputError) as error:
        records.read(path, records.Results, "remove it")
    assert str(error.value) == f"{path}: seed: expected a whole number, found '1'; remove it"
