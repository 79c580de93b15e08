"""What the page says of a run, against counts by hand and the definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax import evaluation
from fdc_jax.report import overview
from fdc_jax.report.runs import Group, RunFolder
from tests.report import made_up


class Predicted(RunFolder):
    """A run whose predictions lie in its results."""

    @property
    def predictions(self):
        """The columns."""
        return self.results["columns"]


def group(*columns, **results):
    """A group with a run for each set of columns."""
    accuracy = {"raw": 50.0, "fdc": 60.0, "oracle": 90.0}
    found = [
        Predicted(f"seed_{seed}", {"seed": seed, "accuracy": accuracy, "columns": c, **results})
        for seed, c in enumerate(columns, 1)
    ]
    return Group("cifar100", "cumulative_lora", "", True, found)


def by_hand():
    """Six images of tasks 0 (classes 0, 1) and 2 (4, 5); none of task 1 (2, 3)."""
    return {
        "task": np.array([0, 0, 0, 0, 2, 2]),
        "label": np.array([0, 0, 1, 1, 4, 5]),
        "oracle_label": np.array([0, 1, 1, 0, 5, 5]),
        "raw_task": np.array([0, 0, 1, 2, 0, 2]),
        "raw_label": np.array([0, 1, 2, 4, 0, 5]),
        "fdc_task": np.array([0, 0, 0, 0, 1, 2]),
        "fdc_label": np.array([0, 0, 1, 0, 3, 4]),
        "fdc_oracle_label": np.array([0, 0, 1, 0, 4, 4]),
    }


def test_routes_and_shares_by_hand():
    made = group(by_hand())
    rows = [[50, 25, 25], [0, 0, 0], [50, 0, 50]]
    assert overview.confusion(made, "raw") == pytest.approx(np.array(rows))
    rows = [[100, 0, 0], [0, 0, 0], [0, 50, 50]]
    assert overview.confusion(made, "fdc") == pytest.approx(np.array(rows))
    rows = [[25, 25, 25, 25], [0] * 4, [50, 0, 0, 50], [100 / 3, 50 / 3, 50 / 3, 100 / 3]]
    assert overview.shares(made, "raw") == pytest.approx(np.array(rows))
    rows = [[75, 25, 0, 0], [0] * 4, [0, 50, 50, 0], [50, 100 / 3, 50 / 3, 0]]
    assert overview.shares(made, "fdc") == pytest.approx(np.array(rows))


def test_several_seeds_are_averaged():
    other = by_hand() | {"raw_task": by_hand()["task"], "raw_label": by_hand()["oracle_label"]}
    both = overview.confusion(group(by_hand(), other), "raw")
    assert both == pytest.approx(np.array([[75, 12.5, 12.5], [0, 0, 0], [25, 0, 75]]))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(0, 1)] * 3), min_size=1))
def test_shares_of_tasks_weighted_by_images_are_those_of_all(rows):
    """Labels 2 t and 2 t + 1 belong to task t."""
    task, chosen, true, local, oracle = np.array(rows).T
    given_task = 2 * task + oracle
    label = np.where(chosen == task, given_task, 2 * chosen + local)
    columns = {"task": task, "label": 2 * task + true, "oracle_label": given_task}
    columns |= {"raw_task": chosen, "raw_label": label, "fdc_task": task, "fdc_label": 2 * task}
    *tasks, whole = overview.shares(group(columns), "raw")
    images = np.bincount(task)
    assert np.transpose(tasks) @ images / len(rows) == pytest.approx(whole)
    assert whole.sum() == pytest.approx(100)
    assert whole[0] == pytest.approx(evaluation.accuracy(columns["label"], label))


# After each task: tasks down, tasks across.
MATRIX = [[90.0], [95.0, 80.0], [60.0, 50.0, 70.0]]


def recorded(rows=MATRIX):
    """Results with the accuracy on every task after each task."""
    kinds = overview.KINDS
    curve = [{"task_accuracy": dict.fromkeys(kinds, row)} for row in rows]
    return {"num_tasks": len(rows), "curve": curve}


def test_forgetting_and_backward_transfer_by_hand():
    made = group({}, **recorded())
    matrix = overview.accuracy_matrix(made.runs[0], "fdc")
    assert np.isnan(matrix[np.triu_indices(3, 1)]).all()
    # Task 0 was best after task 1.
    assert overview.forgetting(matrix) == pytest.approx(((95 - 60) + (80 - 50)) / 2)
    assert overview.backward_transfer(matrix) == pytest.approx(((60 - 90) + (50 - 80)) / 2)
    found = overview.over_tasks(made, overview.forgetting)
    assert found.keys() == set(overview.KINDS) and found["raw"] == pytest.approx([32.5])


def test_a_task_without_images_is_left_out():
    made = group({}, **recorded([[90.0], [80.0, None], [70.0, None, 60.0]]))
    found = overview.over_tasks(made, overview.backward_transfer)
    assert found["raw"] == pytest.approx([-20])
    single = group({}, **recorded([[90.0]]))
    assert overview.over_tasks(single, overview.forgetting) == {}


def test_a_row_for_each_task():
    columns = made_up.predictions(1, num_tasks=3)
    found = overview.tasks(group(columns, **recorded()))
    assert found["classes"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert found["fdc_learned"].tolist() == [90.0, 80.0, 70.0]
    mine = columns["task"] == 2
    for kind in overview.KINDS:
        right = columns[f"{kind}_label"] == columns["label"]
        assert found[kind][2] == pytest.approx(100 * right[mine].mean())
    assert "fdc_learned" not in overview.tasks(group(columns))
    assert overview.tasks(group({})).empty


def test_sentences_count_images():
    assert overview.sentences(group(by_hand())) == [
        "FDC puts right 2 images that the raw logits get wrong, and spoils 1 image that they get "
        "right.",
        "Knowing the task of every image would put right 80 % of the errors of the raw logits.",
    ]
    perfect = {"raw": 100.0, "fdc": 100.0, "oracle": 100.0}
    assert overview.sentences(group({}, accuracy=perfect)) == []


def test_the_interval_is_over_seeds_or_over_images():
    one, three = made_up.groups(made_up.run(1)), made_up.groups()
    interval = overview.gain_interval(three[0])
    accuracies = [three[0].values(kind) for kind in ("raw", "fdc")]
    expected = evaluation.paired_gain(*accuracies)
    assert interval == (expected.low, expected.high, "seeds")
    columns = one[0].runs[0].predictions
    labels = [columns[f"{name}label"] for name in ("", "raw_", "fdc_")]
    expected = evaluation.bootstrap_gain(*labels)
    assert overview.gain_interval(one[0]) == (expected.low, expected.high, "images")
    without = group({}, {})
    assert overview.gain_interval(without._replace(runs=without.runs[:1])).of == ""


def test_the_command_sets_what_departs_from_the_file_of_the_benchmark():
    config = {
        "train.epochs": 3,
        "data.dir": "/home/somebody/data",
        "encoder.weights": "/home/somebody/mine weights.npz",
        "learner.name": "inflora_ca",
        "learner.inflora.lamb": 0.5,
        "learner.loda.rho": 0.5,
        "gone.field": 1,
    }
    members = [made_up.run(seed, "digits", "inflora_ca", **config) for seed in (1, 2)]
    lines = overview.command(made_up.groups(*members)[0]).split(" \\\n    ")
    assert lines[0] == "python main.py --config=configs/digits.py"
    assert set(lines[1:]) == {
        "--config.train.epochs=3",
        "--config.data.dir=FOLDER",
        "--config.encoder.weights='mine weights.npz'",
        "--config.learner.name=inflora_ca",
        "--config.learner.inflora.lamb=0.5",
        "--config.seed=1,2",
        "--workdir=runs/again",
    }
