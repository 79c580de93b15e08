"""What tables and figures are made from, against counts by hand and the definitions."""

import math
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from fdc_jax.report import figures, formatting, quantities, tables
from tests.report import made_up


def group(*columns, **changed):
    """A group with a seed for each set of predictions."""
    members = [made_up.run(seed, "digits", num_tasks=3) for seed, _ in enumerate(columns, 1)]
    for run, of in zip(members, columns, strict=True):
        run.predictions = of
        run.results = msgspec.structs.replace(run.results, **changed)
    return made_up.groups(*members)[0]


def by_hand():
    """Six images of tasks 0 (classes 0, 1) and 2 (4, 5); none of task 1 (2, 3)."""
    return {
        "task": np.array([0, 0, 0, 0, 2, 2]),
        "label": np.array([0, 0, 1, 1, 4, 5]),
        "raw_task": np.array([0, 0, 1, 2, 0, 2]),
        "raw_label": np.array([0, 1, 2, 4, 0, 5]),
        "fdc_task": np.array([0, 0, 0, 0, 1, 2]),
        "fdc_label": np.array([0, 0, 1, 0, 3, 4]),
    }


def test_routes_by_hand():
    made = group(by_hand())
    rows = [[50, 25, 25], [0, 0, 0], [50, 0, 50]]
    assert figures.confusion(made, "raw") == pytest.approx(np.array(rows))
    rows = [[100, 0, 0], [0, 0, 0], [0, 50, 50]]
    assert figures.confusion(made, "fdc") == pytest.approx(np.array(rows))
    assert figures.confusion(made, "gaussians") is None
    other = by_hand() | {"raw_task": by_hand()["task"]}
    both = figures.confusion(group(by_hand(), other), "raw")
    assert both == pytest.approx(np.array([[75, 12.5, 12.5], [0, 0, 0], [25, 0, 75]]))


# After each task: tasks down, tasks across.
MATRIX = [[90.0], [95.0, 80.0], [60.0, 50.0, 70.0]]


def recorded(rows=MATRIX):
    """A curve with the accuracy on every task after each task, the same for all methods."""
    point = made_up.run(1, "digits").results.curve[0]
    names = (*made_up.METHODS, "oracle")
    return [
        msgspec.structs.replace(point, task=task, task_accuracy=dict.fromkeys(names, row))
        for task, row in enumerate(rows)
    ]


def test_accuracies_of_tasks_and_forgetting_by_hand():
    made = group(by_hand(), curve=recorded())
    found = tables.of_tasks(made).frame
    assert list(found) == ["Raw", "FDC", formatting.method_title("gaussians"), "Task given"]
    expected = {1: "60.0", 2: "50.0", 3: "70.0"}
    # Task 1 was best after task 2.
    expected |= {"Forgetting": "32.5", "Backward transfer": "-30.0"}
    assert found["FDC"].to_dict() == expected
    long = tables.of_matrices([made])
    cells = long[long["calibrator"] == "fdc"].pivot(
        index="after", columns="task", values="accuracy"
    )
    np.testing.assert_array_equal(cells, [[90, np.nan, np.nan], [95, 80, np.nan], [60, 50, 70]])


def test_a_task_without_images_is_left_out():
    made = group(by_hand(), curve=recorded([[90.0], [80.0, None], [70.0, None, 60.0]]))
    found = tables.of_tasks(made).frame["FDC"].to_dict()
    assert math.isnan(found.pop(2)) and found == {
        **{1: "70.0", 3: "60.0"},
        **{"Forgetting": "20.0", "Backward transfer": "-20.0"},
    }
    assert "Forgetting" not in tables.of_tasks(group(by_hand(), curve=recorded()[1:])).frame.index


def test_the_curve_has_the_tasks_that_were_evaluated():
    made = group(by_hand(), by_hand())
    found = figures.curve(made)
    assert found.shape == (6, 4)
    expected = made.results.curve[2].accuracy["gaussians"]
    assert found.loc[(1, 3), "gaussians"] == expected
    few = figures.curve(group(by_hand(), curve=recorded()[1:]))
    assert [task for _, task in few.index] == [2, 3]
    assert figures.curve(group(by_hand(), curve=recorded()[2:])) is None


def measured(results):
    """The numbers of a run by calibrator (row) and quantity (column)."""
    numbers = quantities.measured(results)
    return numbers.pivot(index="calibrator", columns="quantity", values="value")


@given(st.sampled_from([*quantities.TABLE]), st.sampled_from(quantities.NAMES), st.floats(0, 9))
def test_names_of_quantities_are_read_as_they_are_written(quantity, calibrator, value):
    of = quantities.TABLE[quantity].of
    if quantities.TABLE[quantity].swept:
        pair = "fdc", f"{quantity}={value:g}"
    elif of == "calibrators":
        pair = calibrator, quantity
    else:
        pair = (of[0] if of else ""), quantity
    assert quantities.parse(quantities.name_of(*pair)) == pair


def test_without_the_pretrained_view_the_adapted_view_is_all_there_is():
    of = made_up.run(learner="splitlora").results
    for name in [name for name in of.components if name.endswith("_view")]:
        del of.components[name]
    accuracies = measured(of)["accuracy"].dropna()
    assert accuracies["selected"] == of.components["pac+rlc"]
    assert accuracies["adapted_view"] == of.components["full"]
    assert "pac+rlc_pretrained_view" not in accuracies


def test_a_run_without_fdc_has_its_other_calibrators():
    of = made_up.results(accuracy={"raw": 50.0, "ncm": 60.0, "oracle": 90.0}, components={})
    of["average_incremental_accuracy"] = {"raw": None}
    run = made_up.MadeUpRun(Path(), of)
    numbers = measured(run.results)
    assert numbers["gain"]["ncm"] == 10.0
    assert "fdc" not in numbers["gain"].dropna() and "aia" not in numbers
    assert made_up.groups(run)[0].methods == ["raw", "ncm"]
