"""What calibrators take as features, labels, heads and settings, and one line for what is wrong."""

import copy
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
LONG = (1300, 40, 700)


def linear(weight=SECOND.weight, bias=SECOND.bias):
    return heads.LinearHead(weight, bias)


FIRST_HEAD = linear(FIRST.weight, FIRST.bias)


def spoiled(array, row, value):
    copy = np.array(array)
    copy[row, 0] = value
    return copy


def fit(
    adapted=SECOND.adapted,
    labels=SECOND.labels,
    head=None,
    pretrained=SECOND.pretrained,
    classes=None,
    method="fdc",
    **settings,
):
    """Fits the first task as it is and the second with what the test changes."""
    calibrator = calibration.make(method, **{"projections": 20} | settings)
    calibrator.fit_task(FIRST.adapted, FIRST.labels, FIRST_HEAD, FIRST.pretrained)
    before = dict(vars(calibrator))
    try:
        calibrator.fit_task(
            adapted, labels, linear() if head is None else head, pretrained, classes
        )
    except InputError:
        # A refused task leaves no trace: nothing was replaced, and lists are never changed.
        assert all(value is before[name] for name, value in vars(calibrator).items())
        assert calibrator.num_tasks == 1
        raise
    calibrator.finalize()
    return calibrator


# One table of all that is said of a task, by what is wrong with the second one.
TASKS = [
    (dict(adapted=spoiled(SECOND.adapted, 7, np.nan)), "adapted features of task 1: row 7 is not"),
    (
        dict(adapted=spoiled(np.ones((BLOCK_ROWS + 9, 16)), BLOCK_ROWS + 2, np.nan)),
        f"task 1: row {BLOCK_ROWS + 2} is not finite",
    ),
    (dict(adapted=spoiled(SECOND.adapted, 7, 1e30)), "row 7 is not finite, or too large"),
    (dict(adapted=SECOND.adapted[:, :-1]), "adapted features of task 1: expected width 16, found"),
    (dict(adapted=SECOND.adapted[0]), r"features of task 1: expected shape .* found \[16\]"),
    (dict(adapted=SECOND.adapted.astype(str)), "adapted features of task 1: expected real numbers"),
    (dict(adapted=3), "adapted features of task 1: cannot be read as an array: found int"),
    (dict(labels=SECOND.labels[:-1]), "labels of task 1: expected 45 rows .* found 44"),
    (dict(labels=SECOND.labels.repeat(2)), "labels of task 1: expected 45 rows .* found 90"),
    (dict(labels=SECOND.labels.astype(float)), "labels of task 1: expected integers, found fl"),
    (dict(labels=SECOND.labels.astype(np.uint64) + 2**63), "does not fit a signed 64-bit integer"),
    (dict(labels=SECOND.labels[None]), r"labels of task 1: expected shape \[samples\], found"),
    (dict(labels=SECOND.labels - 1), "label 2 already belongs to task 0"),
    (dict(classes=[3, 4, 5, 9]), "label 6 at row 3 is none of the head's classes"),
    (dict(classes=[3, 4, 5, 5]), "classes of task 1: a label is named twice"),
    (dict(classes=[]), "classes of task 1: expected 4 labels, one per row of the head, found 0"),
    (dict(classes=[3, 4, 5]), "classes of task 1: expected 4 labels, one per row of the head"),
    (
        dict(labels=np.minimum(SECOND.labels, 5)),
        "4 labels, one per row of the head, the samples have 3",
    ),
    (dict(labels=np.arange(45) + 3), "expected 4 labels, .*, the samples have 45; if a class"),
    (dict(pretrained=None), "pretrained features of task 1: earlier tasks had some, this one has"),
    (dict(pretrained=SECOND.pretrained[1:]), "pretrained features of task 1: expected 45 rows"),
    (
        dict(pretrained=spoiled(SECOND.pretrained, 3, np.inf)),
        "pretrained features of task 1: row 3",
    ),
    (
        dict(adapted=SECOND.adapted[:0], labels=SECOND.labels[:0], pretrained=np.zeros((0, 12))),
        "task 1: expected at least one sample, found none",
    ),
]
HEADS = [
    (
        linear(SECOND.weight[:, 1:]),
        r"weight of task 1: expected shape \[classes, 16\], found \[4, 15\]",
    ),
    (linear(spoiled(SECOND.weight, 2, np.nan)), "weight of task 1: row 2 is not finite"),
    (
        linear(spoiled(SECOND.weight, 1, 1e38)),
        "weight of task 1: row 1 is not finite, or too large for floa",
    ),
    (linear(bias=np.array([0, 0, 0, np.inf])), "bias of task 1: row 3 is not finite"),
    (linear(bias=SECOND.bias[:3]), r"bias of task 1: expected shape \[4\], found \[3\]"),
    (
        linear(SECOND.weight.astype(complex)),
        "weight of task 1: expected real numbers, found complex128",
    ),
    (
        heads.CosineHead(SECOND.weight),
        "of task 1: expected a linear head like task 0, found cosine",
    ),
    (linear(bias=None), "bias of task 1: cannot be read as an array: found NoneType"),
    (SECOND.weight, r"of task 1: expected one of LinearHead, .* \(fdc_jax.heads\), found ndarray"),
]


@pytest.mark.parametrize("method", ["fdc", "gaussians", "anacp-pretrained"])
@pytest.mark.parametrize(("change", "message"), TASKS)
def test_messages_of_fit_task(change, message, method):
    with pytest.raises(InputError, match=message.replace(" 1:", r" 1 \(from 0\):")) as caught:
        fit(**change, method=method)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("head", "message"), HEADS)
def test_messages_of_heads(head, message):
    with pytest.raises(InputError, match="^head " + message.replace(" 1:", r" 1 \(from 0\):")):
        fit(head=head)


def test_a_head_is_needed_by_those_that_read_it():
    for name in calibration.METHODS:
        found = calibration.make(name)
        if found.needs_heads:
            with pytest.raises(InputError, match="head"):
                found.fit_task(FIRST.adapted, FIRST.labels, None, FIRST.pretrained)
            assert found.num_tasks == 0
    assert calibration.FDC.needs_heads and not calibration.Gaussians.needs_heads


@pytest.mark.parametrize("head", [heads.LinearHead, heads.NormalisedLinearHead])
def test_a_head_without_bias_has_biases_of_zero(head):
    found, expected = (calibration.FDC() for _ in range(2))
    bias = np.zeros(3, np.float32)
    found.fit_task(FIRST.adapted, FIRST.labels, head(FIRST.weight))
    expected.fit_task(FIRST.adapted, FIRST.labels, head(FIRST.weight, bias))
    for each in (found, expected):
        each.finalize()
    streams.same_scores(found, expected, [SECOND.adapted])
    np.testing.assert_array_equal(found.heads[0].bias, bias)
    np.testing.assert_array_equal(
        head(FIRST.weight).logits(FIRST.adapted), head(FIRST.weight, bias).logits(FIRST.adapted)
    )


# Settings and names ------------------------------------------------------------------------------

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
def test_settings_outside_their_range(setting):
    for value in SETTINGS[setting]:
        with pytest.raises(InputError, match=f"^{setting}: expected"):
            calibration.make("fdc", **{setting: value})


def test_settings_of_numpy_are_plain_numbers():
    calibrator = calibration.make("fdc", pac_weight=np.float32(0.5), neighbours=np.int64(2))
    values = calibrator.settings.pac_weight, calibrator.settings.neighbours
    assert values == (0.5, 2) and [*map(type, values)] == [float, int]


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(InputError, match="no field neighbors; did you mean neighbours"):
        calibration.FDC(neighbors=2)
    with pytest.raises(InputError, match=r"^calibrator: .* did you mean gaussians"):
        calibration.make("gausians")
    for wrong in ({"fdc": {}}, None, ["fdc"]):
        with pytest.raises(InputError, match=f"^calibrator: .* found '{type(wrong).__name__}'"):
            calibration.make(wrong)
    with pytest.raises(InputError, match="found 'neighbors'; did you mean neighbours"):
        calibration.make("gaussians", neighbors=2)
    # Those of others are for others: a caller gives all calibrators the same settings.
    calibration.make("gaussians", neighbours=2, projections=10)
    for name, method in calibration.METHODS.items():
        made = method.make()
        assert isinstance(made, calibration.Calibrator) and made.num_tasks == 0
        assert name.partition("-")[0] == made.name


def test_neighbours_beyond_the_classes_of_a_task():
    with pytest.raises(InputError, match=r"task 0 \(from 0\): 4 neighbours need .* found 3"):
        fit(neighbours=4)
    keep, head = SECOND.rows < 2, linear(np.zeros((5, 16)), np.zeros(5))
    views = SECOND.adapted[keep], SECOND.labels[keep], head, SECOND.pretrained[keep]
    with pytest.raises(InputError, match=r"task 1 \(from 0\): 3 neighbours need .* found 2"):
        fit(*views, [3, 4, 5, 6, 7], neighbours=3)


# Scoring -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", calibration.METHODS)
def test_nothing_is_scored_before_a_task(method):
    with pytest.raises(InputError, match="task"):
        calibration.make(method).score(FIRST.adapted, FIRST.pretrained)


def test_fdc_is_finalized_after_every_task():
    found = calibration.FDC()
    with pytest.raises(InputError, match="no task was fitted"):
        found.finalize()
    streams.fit(found, [FIRST], dual=False).score(FIRST.adapted)
    found.fit_task(SECOND.adapted, SECOND.labels, linear())
    with pytest.raises(InputError, match="finalize, first"):
        found.score(FIRST.adapted)


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_messages_of_score(method):
    found, one = fit(method=method), calibration.make(method)
    for adapted, pretrained, message in [
        (FIRST.adapted[:, :5], FIRST.pretrained, "adapted features: expected width 16, found 5"),
        (FIRST.adapted, FIRST.pretrained[:9], "pretrained features: expected 60 rows like"),
        (FIRST.adapted, None, "pretrained features: expected, since the tasks"),
        (None, FIRST.pretrained, "adapted features: cannot be read as an array"),
        (spoiled(FIRST.adapted, 50, np.inf), FIRST.pretrained, "adapted features: row 50 is not"),
        (FIRST.adapted, spoiled(FIRST.pretrained, 9, np.nan), "pretrained features: row 9 is not"),
        (FIRST.adapted.astype(bool), FIRST.pretrained, "adapted features: expected real numbers"),
    ]:
        with pytest.raises(InputError, match=f"^{message}"):
            found.score(adapted, pretrained)
    streams.fit(one, [FIRST], dual=False)
    with pytest.raises(InputError, match="earlier tasks had none, this one has some"):
        one.fit_task(SECOND.adapted, SECOND.labels, linear(), SECOND.pretrained)
    with pytest.raises(InputError, match="fitted without a pretrained view"):
        one.score(FIRST.adapted, FIRST.pretrained)


@pytest.mark.parametrize("method", calibration.METHODS)
def test_an_empty_batch_has_empty_scores(method):
    found = fit(method=method)
    for scores in found.components(FIRST.adapted[:0], FIRST.pretrained[:0]).values():
        assert scores.task_scores.shape == scores.local_class.shape == (0, 2)
        assert scores.label.shape == (0,)
    assert found.class_scores(FIRST.adapted[:0], FIRST.pretrained[:0]).shape == (0, 7)


@pytest.mark.parametrize(
    ("new_heads", "message"),
    [
        ([FIRST_HEAD], "heads: expected one per task, 2, found 1"),
        ([FIRST_HEAD, FIRST_HEAD], "1 .from 0.: expected 4 classes, found 3"),
        (
            [FIRST_HEAD, heads.CosineHead(SECOND.weight)],
            "^final head of task 1 .from 0.: expected a",
        ),
        ([FIRST_HEAD, None], "^final head of task 1 .from 0.: missing, which fdc reads"),
    ],
)
def test_messages_of_replace_heads(new_heads, message):
    found = fit()
    before = found.heads
    with pytest.raises(InputError, match=message):
        found.replace_heads(new_heads)
    assert found.heads is before


# Warnings ----------------------------------------------------------------------------------------


def lines(caplog):
    return [(each.name, each.getMessage()) for each in caplog.records]


def test_a_head_in_another_order_is_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit(head=linear(SECOND.weight[::-1], SECOND.bias[::-1]))
    ((logger, line),) = lines(caplog)
    assert logger == "fdc_jax.calibration"
    assert line.startswith("head of task 1 (from 0): accuracy 0.0% on the task's own training")
    caplog.clear()
    # Of classes that are named, in their order; and where no head is read, none is judged.
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit(head=linear(SECOND.weight[::-1], SECOND.bias[::-1]), classes=[6, 5, 4, 3])
        fit(head=linear(SECOND.weight[::-1], SECOND.bias[::-1]), method="ncm")
    assert not lines(caplog)


@pytest.mark.parametrize(("right", "warned"), [(29, True), (30, False)])
def test_a_head_is_warned_of_below_three_times_chance(right, warned):
    rows = np.arange(100) % 10
    task = inputs.TaskInput(0, [], rows, np.arange(10), np.bincount(rows), None, None)
    predicted = np.where(np.arange(100) < right, rows, (rows + 1) % 10)
    assert bool(weak_head(task, predicted)) == warned


def test_a_task_without_residuals_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit(SECOND.adapted[[0] * 45], head=linear(np.zeros((4, 16)), np.array([1, 0, 0, 0])))
    (line,) = (line for _, line in lines(caplog) if "RLC" in line)
    start = "adapted features of task 1 (from 0): 0 directions hold all variance of 45 samples"
    assert line.startswith(start)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit(retained_energy=1.0)
    expected = ["16 directions", "12 directions"] * 2
    assert [line.split(": ")[1][:13] for _, line in lines(caplog)] == expected


def test_of_many_heads_in_another_order_the_first_is_named(caplog):
    stream, found = streams.stream(9, 4), calibration.FDC()
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        for task in stream:
            streams.fit(found, [task._replace(weight=task.weight[::-1], bias=task.bias[::-1])])
            found = copy.deepcopy(found)
    ((_, line),) = lines(caplog)
    assert line.startswith("head of task 0 (from 0): ") and "another order than the labels" in line
    assert line.endswith("labels are of other images. Heads of further tasks are not named")


def test_that_drift_compensation_is_off_is_said_once(caplog):
    stream = streams.stream(9, 4)
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        streams.fitted(stream, previous=streams.previous_of(stream), method="gaussians")
        assert not caplog.records
        found = streams.fitted(stream, method="gaussians")
    assert [line for _, line in lines(caplog)] == [found.note]


@pytest.mark.parametrize("method", ["ridge", "ranpac"])
def test_products_too_large_for_float32_are_one_line(method):
    """Each feature has a finite length; sums over samples have not."""
    huge = FIRST.adapted * np.sqrt(3e38 / np.square(FIRST.adapted).sum(axis=1).max())
    with pytest.raises(InputError, match="too large for float32; scale the features"):
        calibration.make(method, projections=20).fit_task(huge.astype(np.float32), FIRST.labels)


def test_ordinary_tasks_are_not_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit()
    assert not caplog.records


# Arrays of all kinds -----------------------------------------------------------------------------


def test_arrays_of_the_caller_are_neither_changed_nor_held():
    tasks = streams.known(4, 3)
    expected = {
        name: streams.fitted(tasks, previous=streams.previous_of(tasks), method=name)
        for name in ("fdc", "gaussians", "raw", "ncm", "vim")
    }
    inputs_of = streams.probe_inputs(tasks)
    for name, wanted in expected.items():
        found = calibration.make(name)
        for task, before in zip(tasks, streams.previous_of(tasks), strict=True):
            given = [task.adapted.copy(), task.labels.copy(), task.pretrained.copy()]
            weight, bias, classes = task.weight.copy(), task.bias.copy(), np.unique(task.labels)
            for array in given:
                array.flags.writeable = False
            head = heads.LinearHead(weight, bias)
            found.fit_task(*given[:2], head, given[2], classes, previous=before)
            for array in (weight, bias, classes):
                array[...] = 7
        found.finalize()
        streams.same_scores(found, wanted, inputs_of)


def test_memory_maps_are_read_block_by_block(tmp_path, monkeypatch):
    (task,) = streams.known(6, 1, samples=LONG)
    np.save(tmp_path / "features.npy", task.adapted)
    features = np.load(tmp_path / "features.npy", mmap_mode="r")
    largest, convert = [], inputs.float32

    def watched(array):
        if isinstance(array, np.memmap):
            largest.append(len(array))
        return convert(array)

    monkeypatch.setattr(inputs, "float32", watched)
    found = streams.fitted([task._replace(adapted=features)], dual=False)
    assert max(largest) == inputs.BLOCK_ROWS
    streams.same_scores(found, streams.fitted([task], dual=False), [task.adapted[:9]])
    scores = found.score(features)
    np.testing.assert_array_equal(scores.task_scores, found.score(task.adapted).task_scores)
    assert max(largest) == inputs.BLOCK_ROWS


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
def test_arrays_of_other_libraries(convert):
    stream, found = streams.stream(7, 2), calibration.FDC()
    for task in stream:
        head = heads.LinearHead(jnp.asarray(task.weight), jnp.asarray(task.bias))
        found.fit_task(*map(convert, (task.adapted, task.labels)), head, convert(task.pretrained))
    found.finalize()
    probe = streams.probe_inputs(stream, size=300)
    expected = streams.fitted(stream).score(*probe)
    scores = found.score(*map(convert, probe))
    np.testing.assert_array_equal(scores.task_scores, expected.task_scores)
    found = streams.fitted(stream, method="gaussians")
    for ours, theirs in zip(found.assess(*map(convert, probe)), found.assess(*probe), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("method", ["fdc", "gaussians", "ranpac", "fecam"])
@pytest.mark.parametrize(
    ("dtype", "convert"),
    [
        (jnp.bfloat16, np.asarray),
        (jnp.bfloat16, jnp.asarray),
        (np.float16, np.asarray),
        (np.float64, np.asarray),
        (np.dtype(">f4"), np.asarray),
        (np.dtype(">f8"), np.asarray),
        (np.int16, np.asarray),
    ],
)
def test_number_types_are_widened_before_any_statistic(dtype, convert, method):
    stream = streams.stream(8, 2)

    def given(view):
        return convert((20 * view).astype(dtype))

    def widened(view):
        return (20 * view).astype(dtype).astype(np.float32)

    found, expected = (
        streams.fitted(
            streams.mapped(stream, change, change),
            method=method,
            previous=[None, change(stream[1].adapted)],
            projections=20,
        ).score(*map(change, streams.probe_inputs(stream)))
        for change in (given, widened)
    )
    np.testing.assert_array_equal(found.task_scores, expected.task_scores)
    assert found.task_scores.dtype == expected.task_scores.dtype
