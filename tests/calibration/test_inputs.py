"""Features, labels, heads and settings of calibrators, and one line for each mistake.

tests/test_arguments.py has values of other types.
"""

import contextlib
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import calibration, heads
from fdc_jax.calibration import inputs
from fdc_jax.calibration.calibrator import weak_head
from fdc_jax.calibration.inputs import BLOCK_ROWS
from fdc_jax.errors import InputError
from tests.calibration import streams

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


# Messages of a wrong second task.
WRONG_VIEWS = [
    ("adapted", spoiled(SECOND.adapted, 7, 1e30), "row 7 is not finite, or too large"),
    ("adapted", SECOND.adapted[:, :-1], "expected width 16, found 15"),
    ("adapted", SECOND.adapted[0], r"expected shape .* found \[16\]"),
    ("pretrained", None, "earlier tasks had some, this one has"),
    ("pretrained", SECOND.pretrained[1:], "expected 45 rows"),
]
WRONG_LABELS = [
    (SECOND.labels[:-1], None, "labels of task 1: expected 45 rows .* found 44"),
    (SECOND.labels[None], None, r"labels of task 1: expected shape \[samples\], found"),
    (SECOND.labels - 1, None, "label 2 already belongs to task 0"),
    (SECOND.labels, [3, 4, 5, 9], "label 6 at row 3 is none of the head's classes"),
    (SECOND.labels, [3, 4, 5, 5], "classes of task 1: a label is named twice"),
    (SECOND.labels, [], "classes of task 1: expected 4 labels, one per row of the head, found 0"),
    (np.minimum(SECOND.labels, 5), None, "4 labels, .*, the samples have 3"),
    (np.arange(45) + 3, None, "expected 4 labels, .*, the samples have 45; if a class"),
]
HEADS = [
    (linear(SECOND.weight[:, 1:]), r"weight of task 1: expected shape \[classes, 16\], found"),
    (linear(spoiled(SECOND.weight, 1, 1e38)), "weight of task 1: row 1 is not finite, or too lar"),
    (linear(bias=np.array([0, 0, 0, np.inf])), "bias of task 1: row 3 is not finite"),
    (linear(bias=SECOND.bias[:3]), r"bias of task 1: expected shape \[4\], found \[3\]"),
    (heads.CosineHead(SECOND.weight), "of task 1: expected a linear head like task 0, found cos"),
    (SECOND.weight, r"of task 1: expected one of LinearHead, .* \(fdc_jax.heads\), found ndarray"),
]


def refused(message, **changes):
    with pytest.raises(InputError, match=message.replace(" 1:", r" 1 \(from 0\):")) as caught:
        fit(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["fdc", "gaussians", "anacp-pretrained"])
@pytest.mark.parametrize(("view", "array", "message"), WRONG_VIEWS)
def test_wrong_features_of_a_task_are_named(view, array, message, method):
    views = VIEWS | {view: array}
    refused(f"^{view} features of task 1: {message}", views=views, method=method)


def test_rows_of_later_blocks_and_empty_tasks_are_named():
    features = spoiled(np.ones((BLOCK_ROWS + 9, 16)), BLOCK_ROWS + 2, np.nan)
    refused(f"task 1: row {BLOCK_ROWS + 2} is not", views=VIEWS | {"adapted": features})
    views = {name: view[:0] for name, view in VIEWS.items()}
    refused("task 1: expected at least one sample", views=views, labels=SECOND.labels[:0])


@pytest.mark.parametrize(("labels", "classes", "message"), WRONG_LABELS)
def test_wrong_labels_of_a_task_are_named(labels, classes, message):
    refused(message, labels=labels, classes=classes)


@pytest.mark.parametrize(("head", "message"), HEADS)
def test_wrong_heads_of_a_task_are_named(head, message):
    refused(f"^head {message}", head=head)


@pytest.mark.parametrize("name", calibration.METHODS)
def test_methods_that_read_heads_need_them(name):
    calibrator = calibration.make(name, projections=20)
    with pytest.raises(InputError, match="task"):
        calibrator.score(FIRST.adapted, FIRST.pretrained)
    needs_heads = calibrator.needs_heads
    refusal = pytest.raises(InputError, match="head") if needs_heads else contextlib.nullcontext()
    with refusal:
        calibrator.fit_task(FIRST.adapted, FIRST.labels, None, FIRST.pretrained)
    assert calibrator.num_tasks == (not needs_heads)


# Settings and names -------------------------------------------------------------------------------

SETTINGS = {
    "retained_energy": (0.0, 1.1),
    "attenuation": (-0.1, 1.5, True),
    "rlc_weight": (-1.0, np.bool_(False), 10**400),
    "pac_weight": (float("nan"),),
    "adapted_view_weight": ("one",),
    "pretrained_view_weight": (float("inf"),),
    "neighbours": (0, 1.5, True, 10**400),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_outside_their_range_are_named(setting):
    for value in SETTINGS[setting]:
        with pytest.raises(InputError, match=f"^{setting}: expected"):
            calibration.make("fdc", **{setting: value})


def test_settings_of_numpy_become_plain_numbers():
    calibrator = calibration.make("fdc", pac_weight=np.float32(0.5), neighbours=np.int64(2))
    values = calibrator.settings.pac_weight, calibrator.settings.neighbours
    assert values == (0.5, 2) and [*map(type, values)] == [float, int]


def test_unknown_names_and_settings_are_named():
    with pytest.raises(InputError, match="no field neighbors; did you mean neighbours"):
        calibration.FDC(neighbors=2)
    with pytest.raises(InputError, match=r"^calibrator: .* did you mean gaussians"):
        calibration.make("gausians")
    for wrong in ({"fdc": {}}, None, ["fdc"]):
        with pytest.raises(InputError, match=f"^calibrator: .* found '{type(wrong).__name__}'"):
            calibration.make(wrong)
    with pytest.raises(InputError, match="found 'neighbors'; did you mean neighbours"):
        calibration.make("gaussians", neighbors=2)
    # A caller may give all calibrators the same settings.
    calibration.make("gaussians", neighbours=2, projections=10)
    for name, method in calibration.METHODS.items():
        assert name.partition("-")[0] == method.make().name


def test_more_neighbours_than_classes_are_named():
    with pytest.raises(InputError, match=r"task 0 \(from 0\): 4 neighbours need .* found 3"):
        fit(neighbours=4)
    keep = SECOND.rows < 2
    views = {name: view[keep] for name, view in VIEWS.items()}
    changes = {"views": views, "labels": SECOND.labels[keep], "classes": [3, 4, 5, 6]}
    with pytest.raises(InputError, match=r"task 1 \(from 0\): 3 neighbours need .* found 2"):
        fit(neighbours=3, **changes)


# Scoring ------------------------------------------------------------------------------------------


def test_fdc_is_finalized_after_every_task():
    calibrator = calibration.FDC()
    with pytest.raises(InputError, match="no task was fitted"):
        calibrator.finalize()
    streams.fit(calibrator, [FIRST], dual=False).score(FIRST.adapted)
    calibrator.fit_task(SECOND.adapted, SECOND.labels, linear())
    with pytest.raises(InputError, match="finalize, first"):
        calibrator.score(FIRST.adapted)


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_wrong_batches_are_named(method):
    calibrator, single = fit(method), calibration.make(method)
    for adapted, pretrained, message in [
        (FIRST.adapted[:, :5], FIRST.pretrained, "adapted features: expected width 16, found 5"),
        (FIRST.adapted, FIRST.pretrained[:9], "pretrained features: expected 60 rows like"),
        (FIRST.adapted, None, "pretrained features: expected, since the tasks"),
        (spoiled(FIRST.adapted, 50, np.inf), FIRST.pretrained, "adapted features: row 50 is not"),
    ]:
        with pytest.raises(InputError, match=f"^{message}"):
            calibrator.score(adapted, pretrained)
    streams.fit(single, [FIRST], dual=False)
    with pytest.raises(InputError, match="earlier tasks had none, this one has some"):
        single.fit_task(SECOND.adapted, SECOND.labels, linear(), SECOND.pretrained)
    with pytest.raises(InputError, match="fitted without a pretrained view"):
        single.score(FIRST.adapted, FIRST.pretrained)


@pytest.mark.parametrize("method", calibration.METHODS)
def test_an_empty_batch_has_empty_scores(method):
    calibrator, views = fit(method), (FIRST.adapted[:0], FIRST.pretrained[:0])
    for scores in calibrator.components(*views).values():
        assert scores.task_scores.shape == scores.local_class.shape == (0, 2)
        assert scores.label.shape == (0,)
    assert calibrator.class_scores(*views).shape == (0, 7)


@pytest.mark.parametrize(
    ("new_heads", "message"),
    [
        ([FIRST.head], "heads: expected one per task, 2, found 1"),
        ([FIRST.head, FIRST.head], "1 .from 0.: expected 4 classes, found 3"),
        ([FIRST.head, heads.CosineHead(SECOND.weight)], "^final head of task 1 .*: expected a"),
        ([FIRST.head, None], "^final head of task 1 .from 0.: missing, which fdc reads"),
    ],
)
def test_wrong_final_heads_are_named(new_heads, message):
    calibrator = fit()
    before = calibrator.heads
    with pytest.raises(InputError, match=message):
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


def test_a_head_in_another_order_is_warned_of(warnings):
    fit(head=REVERSED)
    (line,) = warnings()
    assert line.startswith("head of task 1 (from 0): accuracy 0.0% on the task's own training")
    fit()
    fit(head=REVERSED, classes=[6, 5, 4, 3])
    fit(head=REVERSED, method="ncm")  # reads no head
    assert not warnings()


def test_the_first_of_many_heads_in_another_order_is_named(warnings):
    calibrator = calibration.FDC()
    for task in streams.stream(9, 4):
        streams.fit(calibrator, [task._replace(weight=task.weight[::-1], bias=task.bias[::-1])])
    (line,) = warnings()
    assert line.startswith("head of task 0 (from 0): ")
    assert line.endswith("Heads of further tasks are not named")


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
    fit(retained_energy=1.0)
    expected = ["16 directions", "12 directions"] * 2
    assert [line.split(": ")[1][:13] for line in warnings()] == expected


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
    with pytest.raises(InputError, match="too large for float32; scale the features"):
        calibration.make(method, projections=20).fit_task(huge.astype(np.float32), FIRST.labels)


# Arrays of all kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fdc", "gaussians", "ncm", "vim"])
def test_arrays_of_the_caller_are_neither_changed_nor_held(name):
    tasks = streams.known(4, 3)
    previous = streams.previous_of(tasks)
    calibrator = calibration.make(name)
    for task, before in zip(tasks, previous, strict=True):
        arrays = (task.adapted, task.labels, task.pretrained, task.classes, task.weight, task.bias)
        *given, weight, bias = copies = [array.copy() for array in arrays]
        adapted, labels, pretrained, classes = given
        head = heads.LinearHead(weight, bias)
        calibrator.fit_task(adapted, labels, head, pretrained, classes, previous=before)
        for copy, array in zip(copies, arrays, strict=True):
            np.testing.assert_array_equal(copy, array)
            copy[...] = 7
    calibrator.finalize()
    expected = streams.fitted(tasks, previous=previous, method=name)
    streams.same_scores(calibrator, expected, streams.probe_inputs(tasks))


class ArrayTensor:
    """An array of another library: offers one protocol and nothing else."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)


class DlpackTensor:
    def __init__(self, array):
        self.__dlpack_device__ = array.__dlpack_device__
        self.__dlpack__ = array.__dlpack__


@pytest.mark.parametrize("convert", [ArrayTensor, DlpackTensor, jnp.asarray, np.ndarray.tolist])
def test_arrays_of_other_libraries_are_accepted(convert):
    tasks = streams.stream(7, 2)
    probes = streams.probe_inputs(tasks, size=300)
    converted = streams.mapped(tasks, convert, convert)
    actual, expected = streams.fitted(converted), streams.fitted(tasks)
    scores = actual.score(*map(convert, probes)).task_scores
    np.testing.assert_array_equal(scores, expected.score(*probes).task_scores)
    gaussians = streams.fitted(tasks, method="gaussians")
    assessed = zip(gaussians.assess(*map(convert, probes)), gaussians.assess(*probes), strict=True)
    for part, wanted in assessed:
        np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize("method", ["fdc", "gaussians", "ranpac", "fecam"])
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

    def given(view):
        return convert((20 * view).astype(dtype))

    def widened(view):
        return (20 * view).astype(dtype).astype(np.float32)

    results = []
    for change in (given, widened):
        previous = [None, change(tasks[1].adapted)]
        changed = streams.mapped(tasks, change, change)
        options = {"method": method, "previous": previous, "projections": 20}
        calibrator = streams.fitted(changed, **options)
        results.append(calibrator.score(*map(change, streams.probe_inputs(tasks))).task_scores)
    actual, expected = results
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype
