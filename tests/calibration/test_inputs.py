"""Every bad input gives one line that names the array, the task and the place."""

import logging

import numpy as np
import pytest

from fdc_jax import calibration, heads
from fdc_jax.calibration.components import WHITENED_CLASSES
from fdc_jax.errors import InputError
from tests.calibration import streams

FIRST, SECOND = streams.stream(0, 2)


def linear(task):
    return heads.LinearHead(task.weight, task.bias)


SECOND_HEAD = linear(SECOND)


def head_of(weight=SECOND.weight, bias=SECOND.bias):
    return heads.LinearHead(weight, bias)


def spoiled(array, row, value):
    copy = np.array(array)
    copy[row, 0] = value
    return copy


def fit(
    adapted=SECOND.adapted,
    labels=SECOND.labels,
    head=SECOND_HEAD,
    pretrained=SECOND.pretrained,
    classes=None,
    **settings,
):
    """Fits the first task as it is and the second with what the test changes."""
    calibrator = streams.new(**settings)
    calibrator.fit_task(FIRST.adapted, FIRST.labels, linear(FIRST), FIRST.pretrained)
    before = calibrator.num_tasks, list(calibrator.tasks), len(calibrator.heads)
    try:
        calibrator.fit_task(adapted, labels, head, pretrained, classes)
    except InputError:
        # A refused task leaves no trace.
        assert (calibrator.num_tasks, list(calibrator.tasks), len(calibrator.heads)) == before
        raise
    calibrator.finalize()
    return calibrator


BAD_TASKS = [
    (dict(adapted=spoiled(SECOND.adapted, 7, np.nan)), "adapted features of task 1: row 7 is not"),
    (dict(pretrained=spoiled(SECOND.pretrained, 3, np.inf)), "pretrained features of task 1: row"),
    (dict(adapted=SECOND.adapted[:, :-1]), "adapted features of task 1: expected width 16"),
    (dict(adapted=SECOND.adapted[0]), r"features of task 1: expected shape .* found \[16\]"),
    (dict(labels=SECOND.labels[:-1]), "labels of task 1: expected 45 rows .* found 44"),
    (dict(labels=SECOND.labels.astype(float)), "labels of task 1: expected integers, found fl"),
    (dict(labels=SECOND.labels - 1), "label 2 already belongs to task 0"),
    (dict(classes=[3, 4, 5, 9]), "label 6 at row 3 is none of the head's classes"),
    (dict(classes=[3, 4, 5, 5]), "classes of task 1: label 5 is named twice"),
    (
        dict(adapted=SECOND.adapted[:0], labels=SECOND.labels[:0], pretrained=np.zeros((0, 12))),
        "task 1: expected at least one sample",
    ),
    (dict(pretrained=None), "of task 1: earlier samples had some, these have none"),
    (dict(head=head_of(weight=SECOND.weight[:, 1:])), "head of task 1: weight: expected shape"),
    (dict(head=head_of(spoiled(SECOND.weight, 2, np.nan))), "head of task 1: weights: row 2"),
    (dict(head=heads.CosineHead(SECOND.weight)), "head of task 1: expected a linear head like ta"),
    (dict(head=SECOND.weight), "head of task 1: expected a head with a method logits"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TASKS)
def test_messages_of_fit_task(change, message):
    with pytest.raises(InputError, match=message) as caught:
        fit(**change)
    assert "\n" not in str(caught.value)


def test_a_task_whose_residuals_do_not_vary_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit(SECOND.adapted[[0] * 45])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("task 1: the residual ratios of its training samples (45) do not vary ")


def test_ordinary_tasks_are_not_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        fit()
        fit(retained_energy=1.0)
    assert not caplog.records


def test_neighbours_beyond_the_classes_of_a_task():
    with pytest.raises(InputError, match=r"task 0: 4 neighbours need .* found 3"):
        fit(neighbours=4)
    keep, head = SECOND.rows < 2, head_of(np.zeros((5, 16)), np.zeros(5))
    views = SECOND.adapted[keep], SECOND.labels[keep], head, SECOND.pretrained[keep]
    with pytest.raises(InputError, match=r"task 1: 3 neighbours need .* found 2"):
        fit(*views, [3, 4, 5, 6, 7], neighbours=3)


def test_scoring_needs_finalized_tasks():
    calibrator = streams.new()
    with pytest.raises(InputError, match="no task was fitted"):
        calibrator.finalize()
    with pytest.raises(InputError, match="finalize, first"):
        calibrator.score(FIRST.adapted)
    streams.fit(calibrator, [FIRST], dual=False).score(FIRST.adapted)
    calibrator.fit_task(SECOND.adapted, SECOND.labels, linear(SECOND))
    with pytest.raises(InputError, match="finalize, first"):
        calibrator.score(FIRST.adapted)


@pytest.mark.parametrize(
    ("adapted", "pretrained", "message"),
    [
        (FIRST.adapted[:, :5], FIRST.pretrained, "adapted features: expected width 16, found 5"),
        (FIRST.adapted, FIRST.pretrained[:9], "pretrained features: expected 60 rows"),
        (FIRST.adapted, None, "pretrained features: expected, since"),
        (spoiled(FIRST.adapted, 50, np.inf), FIRST.pretrained, "adapted features: row 50 is not"),
    ],
)
def test_messages_of_score(adapted, pretrained, message):
    with pytest.raises(InputError, match=message):
        fit().score(adapted, pretrained)


def test_pretrained_features_without_a_pretrained_view():
    calibrator = streams.new()
    calibrator.fit_task(FIRST.adapted, FIRST.labels, linear(FIRST))
    with pytest.raises(InputError, match="earlier samples had none, these have some"):
        calibrator.fit_task(SECOND.adapted, SECOND.labels, linear(SECOND), SECOND.pretrained)
    calibrator.finalize()
    with pytest.raises(InputError, match="fitted without a pretrained view"):
        calibrator.score(FIRST.adapted, FIRST.pretrained)


@pytest.mark.parametrize(
    ("new_heads", "message"),
    [
        ([linear(FIRST)], "heads: expected one per task, 2, found 1"),
        ([linear(FIRST), linear(FIRST)], "head of task 1: expected 4 classes, found 3"),
        ([linear(FIRST), heads.CosineHead(SECOND.weight)], "task 1: expected a linear head"),
    ],
)
def test_messages_of_replace_heads(new_heads, message):
    with pytest.raises(InputError, match=message):
        fit().replace_heads(new_heads)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"neighbours": 3}, "neighbours: expected at most 2, the classes of task 1, found 3"),
        ({"eta": 1}, "setting of FDC: expected one of retained_energy, .*, found 'eta'"),
        ({"attenuation": 2}, "attenuation: expected 0 <= x <= 1, found 2"),
    ],
)
def test_settings_are_checked_against_tasks_before_any_is_fitted(settings, message):
    with pytest.raises(InputError, match=f"^{message}"):
        calibration.check(settings, (4, 2, 5))


def test_settings_that_suit_the_tasks_are_returned_whole():
    found = calibration.check({"neighbours": 2, **{"pac_weight": 3}}, (4, 2, 5))
    assert (found.neighbours, found.pac_weight, found.rlc_weight) == (2, 3.0, 1.0)
    assert type(calibration.from_settings({"neighbours": 2})) is calibration.FDC
    assert calibration.check(WHITENED_CLASSES, [1]).affinity.scope == "class"


def giving(logits):
    return heads.FunctionHead(lambda _, features: logits(features))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (heads.LinearHead(SECOND.weight.astype(complex), SECOND.bias), "weight: .* complex128"),
        (heads.CosineHead(SECOND.weight, True), "scale: .* bool"),
        (giving(lambda h: h[:, 0]), r"expected logits of shape \[1, classes\]"),
        (giving(lambda h: None), "logits: cannot be read as an array"),
        (giving(lambda h: h[:, :4] * np.nan), "its logits are not finite"),
        (giving(lambda h: h[:, : 4 if len(h) == 1 else 2]), "expected logits of shape"),
    ],
)
def test_heads_without_real_numbers_or_logits(head, message):
    with pytest.raises(InputError, match=f"^head of task 0: {message}"):
        streams.new().fit_task(SECOND.adapted, SECOND.labels, head)


SETTINGS = {
    "retained_energy": (0.0, 1.1),
    "attenuation": (-0.1, 1.5, True),
    "rlc_weight": (-1.0, np.bool_(False)),
    "pac_weight": (float("nan"),),
    "adapted_view_weight": ("one",),
    "pretrained_view_weight": (float("inf"),),
    "neighbours": (0, 1.5, True),
    "affinity_reference": ("foreign", "pooled"),
    "affinity_metric": ("euclidean",),
    "affinity_evidence": ("log",),
    "affinity_scope": ("class",),
    "transport": (1,),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_outside_their_range(setting):
    for value in SETTINGS[setting]:
        with pytest.raises(InputError, match=f"^{setting}: expected"):
            calibration.from_settings({setting: value})
