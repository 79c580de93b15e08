"""Features, labels, heads and settings of calibrators, and one line for each mistake.

tests/test_arguments.py has values of other types.
"""

import copy
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import calibration, heads
from fdc_jax.calibration import inputs
from fdc_jax.calibration.calibrator import weak_head
from fdc_jax.calibration.inputs import BLOCK_ROWS
from fdc_jax.errors import InputError
from tests.calibration import streams
from tests.errors import input_error

FIRST, SECOND = streams.known(0, 2)
VIEWS = {"adapted": SECOND.adapted, "pretrained": SECOND.pretrained}


def linear(weight=SECOND.weight, bias=SECOND.bias):
    return heads.LinearHead(weight, bias)


REVERSED = linear(SECOND.weight[::-1], SECOND.bias[::-1])


def spoiled(array, row, value):
    array = np.array(array)
    array[row, 0] = value
    return array


def fit(method="fdc", head=None, classes=None, labels=SECOND.labels, views=VIEWS, **settings):
    """Fits the first task as it is and the second with what the test changes."""
    calibrator = calibration.make(method, **{"projections": 20} | settings)
    calibrator.fit_task(FIRST.adapted, FIRST.labels, FIRST.head, FIRST.pretrained)
    before = dict(vars(calibrator))
    head = linear() if head is None else head
    try:
        calibrator.fit_task(views["adapted"], labels, head, views.get("pretrained"), classes)
    except InputError:
        # A refused task leaves no trace: nothing was replaced, and lists are never changed.
        assert all(value is before[name] for name, value in vars(calibrator).items())
        raise
    calibrator.finalize()
    return calibrator


MANY = spoiled(np.ones((BLOCK_ROWS + 9, 16)), BLOCK_ROWS + 2, 1e30)
FEW = {name: view[SECOND.rows < 2] for name, view in VIEWS.items()}
EMPTY = {name: view[:0] for name, view in VIEWS.items()}
# Messages of a wrong second task, and what is wrong with it.
WRONG = {
    f"^adapted features of task 1: row {BLOCK_ROWS + 2} is not finite, or too large": {
        "views": VIEWS | {"adapted": MANY}
    },
    "^pretrained features of task 1: earlier tasks had some, this one has": {
        "views": {"adapted": SECOND.adapted}
    },
    "task 1: expected at least one sample": {"views": EMPTY, "labels": SECOND.labels[:0]},
    "labels of task 1: expected 45 rows .* found 44": {"labels": SECOND.labels[:-1]},
    "label 2 already belongs to task 0": {"labels": SECOND.labels - 1},
    "classes of task 1: a label is named twice": {"classes": [3, 4, 5, 5]},
    "4 labels, .*, the samples have 3; if a class": {"labels": np.minimum(SECOND.labels, 5)},
    "task 1: 3 neighbours need .* found 2": {
        "views": FEW,
        "labels": SECOND.labels[SECOND.rows < 2],
        "classes": [3, 4, 5, 6],
        "neighbours": 3,
    },
    "^head weight of task 1: row 1 is not finite, or too large": {
        "head": linear(spoiled(SECOND.weight, 1, 1e38))
    },
    "^head of task 1: expected a linear head like task 0, found cos": {
        "head": heads.CosineHead(SECOND.weight)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_task_is_named_and_leaves_no_trace(message):
    with input_error(message.replace(" 1:", r" 1 \(from 0\):")):
        fit(**WRONG[message])


@pytest.mark.parametrize("name", calibration.METHODS)
def test_methods_that_read_heads_need_them(name):
    calibrator = calibration.make(name, projections=20)
    with input_error("task"):
        calibrator.score(FIRST.adapted, FIRST.pretrained)
    if calibrator.needs_heads:
        with input_error("head"):
            calibrator.fit_task(FIRST.adapted, FIRST.labels, None, FIRST.pretrained)
        assert calibrator.num_tasks == 0


# Settings and names -------------------------------------------------------------------------------

SETTINGS = {
    "retained_energy": (0.0, 1.1),
    "attenuation": (-0.1, 1.5, True),
    "rlc_weight": (-1.0, np.bool_(False), 10**400),
    "pac_weight": (float("nan"), "one"),
    "neighbours": (0, 1.5, 10**400),
}


def test_settings_outside_their_range_are_named():
    for setting, values in SETTINGS.items():
        for value in values:
            with input_error(f"^{setting}: expected"):
                calibration.make("fdc", **{setting: value})


def test_settings_of_numpy_become_plain_numbers():
    settings = calibration.make("fdc", pac_weight=np.float32(0.5), neighbours=np.int64(2)).settings
    assert repr((settings.pac_weight, settings.neighbours)) == "(0.5, 2)"


def test_unknown_names_and_settings_are_named():
    with input_error("no field neighbors; did you mean neighbours"):
        calibration.FDC(neighbors=2)
    with input_error("found 'neighbors'; did you mean neighbours"):
        calibration.make("gaussians", neighbors=2)
    with input_error(r"^calibrator: .* did you mean gaussians"):
        calibration.make("gausians")
    # A caller may give all calibrators the same settings.
    calibration.make("gaussians", neighbours=2, projections=10)


# Scoring ------------------------------------------------------------------------------------------


def test_fdc_is_finalized_after_every_task():
    calibrator = calibration.FDC()
    for task in (FIRST, SECOND):
        calibrator.fit_task(task.adapted, task.labels, task.head)
        with input_error("finalize, first"):
            calibrator.score(FIRST.adapted)
        calibrator.finalize()


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_wrong_batches_are_named(method):
    calibrator, single = fit(method), calibration.make(method)
    for adapted, pretrained, message in [
        (FIRST.adapted[:, :5], FIRST.pretrained, "adapted features: expected width 16, found 5"),
        (FIRST.adapted, FIRST.pretrained[:9], "pretrained features: expected 60 rows like"),
        (FIRST.adapted, None, "pretrained features: expected, since the tasks"),
    ]:
        with input_error(f"^{message}"):
            calibrator.score(adapted, pretrained)
    streams.fit(single, [FIRST], dual=False)
    with input_error("fitted without a pretrained view"):
        single.score(FIRST.adapted, FIRST.pretrained)


@pytest.mark.parametrize("method", calibration.METHODS)
def test_an_empty_batch_has_empty_scores(method):
    calibrator, views = fit(method), (FIRST.adapted[:0], FIRST.pretrained[:0])
    for scores in calibrator.components(*views).values():
        assert scores.task_scores.shape == (0, 2) and scores.label.shape == (0,)
    assert calibrator.class_scores(*views).shape == (0, 7)


@pytest.mark.parametrize(
    ("new_heads", "message"),
    [
        ([FIRST.head, FIRST.head], "1 .from 0.: expected 4 classes, found 3"),
        ([FIRST.head, None], "^final head of task 1 .from 0.: missing, which fdc reads"),
    ],
)
def test_wrong_final_heads_are_named(new_heads, message):
    calibrator = fit()
    before = calibrator.heads
    with input_error(message):
        calibrator.replace_heads(new_heads)
    assert calibrator.heads is before


# Warnings -----------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog):
    """Returns the messages that were logged since the last call."""

    def messages():
        logged = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return logged

    with caplog.at_level(logging.WARNING, "fdc_jax"):
        yield messages


def test_the_first_head_in_another_order_is_named(warnings):
    calibrator = calibration.FDC()
    for task in streams.stream(9, 4):
        streams.fit(calibrator, [task._replace(weight=task.weight[::-1], bias=task.bias[::-1])])
    (line,) = warnings()
    assert line.startswith("head of task 0 (from 0): accuracy ")
    assert line.endswith("Heads of further tasks are not named")
    fit()
    fit(head=REVERSED, classes=[6, 5, 4, 3])
    fit(head=REVERSED, method="ncm")  # reads no head
    assert not warnings()


@pytest.mark.parametrize(("right", "warned"), [(29, True), (30, False)])
def test_a_head_is_warned_of_below_three_times_chance(right, warned):
    rows = np.arange(100) % 10
    task = inputs.TaskInput(0, [], rows, np.arange(10), np.bincount(rows), None, None)
    predicted = np.where(np.arange(100) < right, rows, (rows + 1) % 10)
    assert bool(weak_head(task, predicted)) == warned


def test_a_task_without_residuals_is_warned_of(warnings):
    views = VIEWS | {"adapted": SECOND.adapted[[0] * 45]}
    fit(views=views, head=linear(np.zeros((4, 16)), np.array([1, 0, 0, 0])))
    (line,) = (line for line in warnings() if "RLC" in line)
    start = "adapted features of task 1 (from 0): 0 directions hold all variance of 45 samples"
    assert line.startswith(start)


def test_a_lack_of_drift_compensation_is_warned_of_once(warnings):
    tasks = streams.stream(9, 4)
    streams.fitted(tasks, previous=streams.previous_of(tasks), method="gaussians")
    assert not warnings()
    calibrator = streams.fitted(tasks, method="gaussians")
    assert warnings() == [calibrator.note]


@pytest.mark.parametrize("method", ["ridge", "ranpac"])
def test_products_too_large_for_float32_are_named(method):
    """Each feature has a finite length; sums over samples have not."""
    huge = FIRST.adapted * np.sqrt(3e38 / np.square(FIRST.adapted).sum(axis=1).max())
    with input_error("too large for float32; scale the features"):
        calibration.make(method, projections=20).fit_task(huge.astype(np.float32), FIRST.labels)


# Arrays of all kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fdc", "gaussians", "vim"])
def test_arrays_of_the_caller_are_neither_changed_nor_held(name):
    tasks = streams.known(4, 3)
    previous = streams.previous_of(tasks)
    calibrator = calibration.make(name)
    for task, before in zip(tasks, previous, strict=True):
        fields = [task[:2], task.labels, task.classes, task.head]
        copies = copy.deepcopy(fields)
        (adapted, pretrained), labels, classes, head = copies
        calibrator.fit_task(adapted, labels, head, pretrained, classes, previous=before)
        np.testing.assert_equal(copies, fields)
        for array in jax.tree.leaves(copies):
            array[...] = 7
    calibrator.finalize()
    expected = streams.fitted(tasks, previous=previous, method=name)
    streams.same_scores(calibrator, expected, streams.probe_inputs(tasks))


class DlpackTensor:
    """An array of another library: offers one protocol and nothing else."""

    def __init__(self, array):
        self.__dlpack_device__ = array.__dlpack_device__
        self.__dlpack__ = array.__dlpack__


@pytest.mark.parametrize("convert", [DlpackTensor, np.ndarray.tolist])
def test_arrays_of_other_libraries_are_accepted(convert):
    tasks = streams.stream(7, 2)
    probes = streams.probe_inputs(tasks)
    scores = streams.fitted(streams.mapped(tasks, convert, convert)).score(*map(convert, probes))
    expected = streams.fitted(tasks).score(*probes)
    np.testing.assert_array_equal(scores.task_scores, expected.task_scores)


@pytest.mark.parametrize("method", ["fdc", "gaussians", "ranpac"])
@pytest.mark.parametrize(
    ("dtype", "convert"),
    [
        (jnp.bfloat16, np.asarray),
        (jnp.bfloat16, jnp.asarray),
        (np.dtype(">f8"), np.asarray),
        (np.int16, np.asarray),
    ],
)
def test_number_types_are_widened_before_any_statistic(dtype, convert, method):
    tasks = streams.stream(8, 2)
    probes = streams.probe_inputs(tasks)

    def scores(change):
        previous = [None, change(tasks[1].adapted)]
        changed = streams.mapped(tasks, change, change)
        options = {"method": method, "previous": previous, "projections": 20}
        return streams.fitted(changed, **options).score(*map(change, probes)).task_scores

    actual = scores(lambda view: convert((20 * view).astype(dtype)))
    expected = scores(lambda view: (20 * view).astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(actual, expected, strict=True)
