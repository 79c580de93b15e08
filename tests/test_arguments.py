"""Arguments of the public functions: a wrong value is an InputError that names the argument."""

import os
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

import fdc_jax
from fdc_jax import calibration, export, report
from fdc_jax.errors import InputError
from fdc_jax.estimator import ContinualClassifier
from fdc_jax.features import feature_files
from tests.calibration import streams
from tests.errors import input_error

FIRST, SECOND = streams.known(0, 2)
ROWS = len(SECOND.labels)


NO_PATHS = {
    "None": None,
    "NUL": "a\0b.npz",
    "too long": "a" * 5000,
}


@pytest.fixture(scope="module")
def fdc():
    return streams.fitted([FIRST, SECOND])


@pytest.mark.parametrize("kind", NO_PATHS)
def test_a_value_that_is_no_path_is_an_input_error(tmp_path, monkeypatch, fdc, kind):
    monkeypatch.chdir(tmp_path)
    path = NO_PATHS[kind]
    calls = (
        (calibration.load, path),
        (fdc.save, path),
        (fdc_jax.open_run, path),
        (feature_files.load, path),
        (export.write, path, "export"),
        (report.write, ["run"], path),
    )
    for function, *arguments in calls:
        with pytest.raises(InputError) as caught:
            function(*arguments)
        message = str(caught.value)
        assert ": " in message and len(message) < 300, function
    assert not os.listdir()


def masked(array):
    mask = np.zeros(array.shape, bool)
    mask.flat[1] = True
    return np.ma.masked_array(array, mask)


def second(**changes):
    names = ("adapted", "labels", "head", "pretrained", "classes")
    return {name: getattr(SECOND, name) for name in names} | {"previous": SECOND.adapted} | changes


WRONG = {
    "matrix": lambda array: array.view(np.matrix),
    "masked": masked,
    "objects": lambda array: array.astype(object),
    "complex": lambda array: array.astype(complex),
    "truth values": lambda array: array > 0,
    "text": lambda array: array.astype(str),
    "dictionary": lambda array: {"x": array},
}
NAMES = ("adapted features", "labels", "pretrained features", "classes", "previous features")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", WRONG)
def test_fit_task_names_the_argument(name, kind):
    argument = name.split()[0]
    calibrator = calibration.make("gaussians" if argument == "previous" else "ncm")
    calibrator.fit_task(FIRST.adapted, FIRST.labels, FIRST.head, FIRST.pretrained)
    wrong = WRONG[kind](second()[argument])
    with input_error(f"^{name} of task 1 .from 0.: "):
        calibrator.fit_task(**second(**{argument: wrong}))
    assert calibrator.num_tasks == 1


@pytest.mark.parametrize("kind", WRONG)
def test_heads_and_batches_are_named(fdc, kind):
    wrong = WRONG[kind]
    for field in ("weight", "bias"):
        head = SECOND.head._replace(**{field: wrong(getattr(SECOND.head, field))})
        with input_error(f"^final head {field} of task 1 .from 0.: "):
            fdc.replace_heads([FIRST.head, head])
    with input_error("^head bias of task 1 .from 0.: "):
        streams.fitted([FIRST]).fit_task(**second(head=head))
    with input_error("^adapted features: "):
        fdc.score(wrong(FIRST.adapted), FIRST.pretrained)
    with input_error("^pretrained features: "):
        fdc.score(FIRST.adapted, wrong(FIRST.pretrained))


def test_labels_that_are_no_integers_are_named():
    for labels in (SECOND.labels + np.nan, np.full(ROWS, 2**63), SECOND.labels[:, None]):
        with input_error(r"^labels of task 1 .from 0.: "):
            streams.fitted([FIRST]).fit_task(**second(labels=labels, classes=None))


def test_all_signed_64_bit_integers_are_labels():
    for first in (-(2**63), 2**63 - 4):
        labels = SECOND.rows.astype(np.int64) + first
        calibrator = calibration.make("ncm")
        calibrator.fit_task(SECOND.adapted, labels)
        assert set(calibrator.score(SECOND.adapted).label) <= set(labels.tolist())


@pytest.mark.parametrize("heads_given", [None, 3, len])
def test_heads_that_are_no_sequence_are_named(fdc, heads_given):
    with input_error(r"^heads: expected one per task, 2, found "):
        fdc.replace_heads(heads_given)


def test_random_features_need_integers():
    for setting, value in (
        ("projections", -1),
        ("projections", "7"),
        ("seed", 2.5),
        ("seed", True),
    ):
        with input_error(f"^{setting}: expected a whole number from "):
            calibration.make("anacp-pretrained", **{setting: value})
    assert calibration.make("ranpac", seed=np.int64(3)).seed == 3


def test_the_estimator_refuses_masked_values():
    given = {"X": SECOND.adapted, "y": SECOND.labels, "tasks": np.zeros(ROWS, int)}
    for name, values in given.items():
        with input_error(f"^{name}: expected an array without a mask"):
            ContinualClassifier().fit(**given | {name: masked(values)})


def test_runs_name_wrong_tasks_and_images(finished_run):
    run = fdc_jax.open_run(Path(finished_run))
    for task in (1.5, "1", None, -1, True, 99):
        with input_error(f"^{finished_run}: "):
            run.encoder(task)
    image = np.zeros((8, 8), np.uint8)
    for images in (masked(image), image.view(np.matrix), [None], "a\0b"):
        with pytest.raises(InputError):
            run.predict(images)
    with input_error(r"^top: expected a whole number from 1 on"):
        run.predict(image, top=0)
    for name in (3, "..", "*", "/etc", "a\0b"):
        with pytest.raises(InputError):
            run.calibrator(name)


def layer_of_nnx(weight, bias):
    layer = nnx.Linear(weight.shape[1], len(weight), rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(weight.T)
    layer.bias[...] = jnp.asarray(bias)
    return layer


def layer_of_torch(weight, bias):
    return SimpleNamespace(in_features=16, weight=weight, bias=bias)


def parameters_of_linen(weight, bias):
    return {"kernel": weight.T, "bias": bias}


@pytest.mark.parametrize("made", [layer_of_torch, parameters_of_linen, layer_of_nnx])
def test_linear_layers_of_other_libraries_are_heads(made):
    head = made(SECOND.weight, SECOND.bias)
    for method in ("fdc", "vim"):  # the latter needs linear heads
        expected = calibration.make(method)
        actual = calibration.make(method)
        for calibrator, given in ((expected, SECOND.head), (actual, head)):
            calibrator.fit_task(SECOND.adapted, SECOND.labels, given)
            calibrator.finalize()
        streams.same_scores(actual, expected, [SECOND.adapted])
        actual.replace_heads([head])
        streams.same_scores(actual, expected, [SECOND.adapted])


def test_a_layer_without_a_bias_is_a_head():
    for head in (layer_of_torch(SECOND.weight, None), {"kernel": SECOND.weight.T}):
        calibrator = calibration.make("raw")
        calibrator.fit_task(SECOND.adapted, SECOND.labels, head)
        scores = calibrator.class_scores(SECOND.adapted)
        assert_allclose(scores, SECOND.adapted @ SECOND.weight.T, atol=1e-4)


@pytest.mark.parametrize("head", [len, {"weight": 3}, SimpleNamespace(weight=SECOND.weight)])
def test_other_layers_are_named(head):
    with input_error(r"^head of task 0 \(from 0\): expected one of LinearHead"):
        calibration.make("raw").fit_task(SECOND.adapted, SECOND.labels, head)
