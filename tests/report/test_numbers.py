"""The numbers of tables and figures, against counts by hand and the definitions."""

import math

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from fdc_jax.report import figures, quantities, tables
from tests.report import made_up

# Six images of tasks 0 (classes 0, 1) and 2 (4, 5); none of task 1 (2, 3).
PREDICTIONS = {
    "task": np.array([0, 0, 0, 0, 2, 2]),
    "label": np.array([0, 0, 1, 1, 4, 5]),
    "raw_task": np.array([0, 0, 1, 2, 0, 2]),
    "raw_label": np.array([0, 1, 2, 4, 0, 5]),
    "fdc_task": np.array([0, 0, 0, 0, 1, 2]),
    "fdc_label": np.array([0, 0, 1, 0, 3, 4]),
}
# After each task (row) on every task (column).
MATRIX = [[90.0], [95.0, 80.0], [60.0, 50.0, 70.0]]


def group(*predictions, curve=None):
    """A group with a seed for each set of predictions."""
    members = []
    for seed, columns in enumerate(predictions or [PREDICTIONS], 1):
        run = made_up.run(seed, "digits", num_tasks=3)
        run.predictions, run.results.curve = columns, curve or run.results.curve
        members.append(run)
    return made_up.groups(*members)[0]


def curve_of(rows, first=0):
    """A curve with the accuracy on every task after each task, the same for all methods."""
    point = made_up.run(1, "digits").results.curve[0]
    names = (*made_up.METHODS, "oracle")
    return [
        msgspec.structs.replace(point, task=task, task_accuracy=dict.fromkeys(names, row))
        for task, row in enumerate(rows, first)
    ]


def test_shares_of_chosen_tasks_by_hand():
    shares = figures.confusion(group(), "raw")
    np.testing.assert_allclose(shares, [[50, 25, 25], [0, 0, 0], [50, 0, 50]])
    shares = figures.confusion(group(), "fdc")
    np.testing.assert_allclose(shares, [[100, 0, 0], [0, 0, 0], [0, 50, 50]])
    assert figures.confusion(group(), "gaussians") is None
    cells = [text.get_text() for text in figures.task_confusion(group()).axes[0].texts]
    assert cells == ["50", "25", "25", "0", "0", "0", "50", "0", "50"]
    perfect = PREDICTIONS | {"raw_task": PREDICTIONS["task"]}
    shares = figures.confusion(group(PREDICTIONS, perfect), "raw")
    np.testing.assert_allclose(shares, [[75, 12.5, 12.5], [0, 0, 0], [25, 0, 75]])


@pytest.mark.parametrize(
    ("rows", "final", "forgetting"),
    [
        # Task 1 was best after task 2.
        (MATRIX, {1: "60.0", 2: "50.0", 3: "70.0"}, ("32.5", "-30.0")),
        # Task 2 has no test images.
        ([[90.0], [80.0, None], [70.0, None, 60.0]], {1: "70.0", 3: "60.0"}, ("20.0", "-20.0")),
    ],
)
def test_accuracies_of_tasks_and_forgetting_by_hand(rows, final, forgetting):
    column = tables.of_tasks(group(curve=curve_of(rows))).frame["FDC"].dropna()
    labels = ("Forgetting", "Backward transfer")
    assert column.to_dict() == final | dict(zip(labels, forgetting, strict=True))


def test_accuracy_matrix_in_long_form():
    long = tables.of_matrices([group(curve=curve_of(MATRIX))]).query("calibrator == 'fdc'")
    cells = long.pivot(index="after", columns="task", values="accuracy")
    np.testing.assert_array_equal(cells, [[90, np.nan, np.nan], [95, 80, np.nan], MATRIX[2]])


def test_curve_has_the_evaluated_tasks_alone():
    seeds = group(PREDICTIONS, PREDICTIONS)
    curve = figures.curve(seeds)
    assert curve.shape == (6, 4)
    assert curve.loc[(1, 3), "gaussians"] == seeds.results.curve[2].accuracy["gaussians"]
    few = group(curve=curve_of(MATRIX[1:], first=1))
    assert [task for _, task in figures.curve(few).index] == [2, 3]
    assert "Forgetting" not in tables.of_tasks(few).frame.index
    assert figures.curve(group(curve=curve_of(MATRIX[2:], first=2))) is None


@given(st.sampled_from([*quantities.TABLE]), st.sampled_from(quantities.NAMES), st.floats(0, 9))
def test_names_of_quantities_are_read_as_written(quantity, calibrator, value):
    row = quantities.TABLE[quantity]
    if row.swept:
        calibrator, quantity = "fdc", f"{quantity}={value:g}"
    elif row.of != "calibrators":
        calibrator = row.of[0] if row.of else ""
    name = quantities.column_name(calibrator, quantity)
    assert quantities.parse(name) == (calibrator, quantity)


def measured(results):
    """The numbers of a run by calibrator (row) and quantity (column)."""
    numbers = quantities.measured(results)
    return numbers.pivot(index="calibrator", columns="quantity", values="value")


def test_all_components_are_of_the_adapted_view_if_alone():
    results = made_up.run(learner="splitlora").results
    for name in [name for name in results.components if name.endswith("_view")]:
        del results.components[name]
    accuracies = measured(results)["accuracy"].dropna()
    assert accuracies["selected"] == results.components["pac+rlc"]
    assert accuracies["adapted_view"] == results.components["full"]
    assert "pac+rlc_pretrained_view" not in accuracies


def test_a_run_without_fdc_has_its_other_calibrators():
    run = made_up.run()
    run.results.accuracy = {"raw": 50.0, "ncm": 60.0, "oracle": 90.0}
    run.results.components, run.results.average_incremental_accuracy = {}, {"raw": None}
    numbers = measured(run.results)
    assert numbers["gain"]["ncm"] == 10.0 and math.isnan(numbers["gain"].get("fdc", math.nan))
    assert "aia" not in numbers
    assert made_up.groups(run)[0].methods == ["raw", "ncm"]
