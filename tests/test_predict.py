"""Answers for new images: those of the evaluation, with what they are made of, from anywhere."""

import contextlib
import io
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

import fdc_jax
from fdc_jax import predict
from fdc_jax.calibration import Gaussians
from fdc_jax.data.images import decode
from fdc_jax.run import configuration
from fdc_jax.run.prediction import Predictions
from tests.errors import input_error
from tests.report.test_page import HOSTILE, Reader


@pytest.fixture(scope="module")
def opened(finished_run, cache):
    return fdc_jax.open_run(finished_run)


@pytest.fixture(scope="module")
def files(opened, tmp_path_factory):
    """The files of the test images, in the order of `predictions.npz`."""
    paths = []
    for row, index in enumerate(opened.tasks.test_indices.tolist()):
        paths.append(tmp_path_factory.getbasetemp() / "images" / f"{row:04d}.png")
        paths[row].parent.mkdir(exist_ok=True)
        opened.tasks.test.image(index).save(paths[row])
    return paths


@pytest.fixture(scope="module")
def views(finished_run):
    """Features of the test images in both views."""
    names = ("test_adapted", "test_pretrained")
    return [np.load(finished_run / "features" / f"{name}.npy") for name in names]


@pytest.fixture(scope="module")
def answers(opened, files):
    return opened.predict(files, top=10)


@pytest.fixture(scope="module")
def by_fdc(opened, files):
    return opened.predict(files, top=10, method="fdc")


def same(actual, expected):
    """Equal but for the names of images, and rounding where batches are of another size."""
    pd.testing.assert_frame_equal(
        actual.drop(columns="image").reset_index(drop=True),
        expected.drop(columns="image").reset_index(drop=True),
        check_dtype=False,
        atol=1e-4,
    )


# The same as in the evaluation -------------------------------------------------------------------


def test_files_of_test_images_repeat_the_predictions_of_the_run(opened, files, answers, by_fdc):
    columns, names = opened.predictions, np.array(opened.class_names)
    for method, table in (("gaussians", answers), ("fdc", by_fdc)):
        for prefix, kind in (("", method), ("raw_", "raw")):
            assert_array_equal(table[f"{prefix}class"], names[columns[f"{kind}_label"]])
            assert_array_equal(table[f"{prefix}task"], columns[f"{kind}_task"] + 1)
    assert_array_equal(answers["changed"], answers["raw_class"] != answers["class"])
    assert 0 < answers["changed"].sum() < 60
    pixels = np.concatenate([images for _, images in Predictions(opened, files)])
    assert_array_equal(pixels, opened.test_images(np.arange(60)))
    assert answers["image"].tolist() == [str(path) for path in files]


def test_one_calibrator_gives_label_confidence_and_typicality(opened, views, answers, by_fdc):
    """The class Gaussians where the run has them; FDC states no confidence."""
    gaussians = opened.calibrator()
    assert type(gaussians) is Gaussians and opened.best_calibrator == "gaussians"
    probabilities, typicality = gaussians.assess(*views)
    assert_allclose(answers["confidence"], probabilities.max(axis=1), atol=1e-3)
    assert_allclose(answers["typicality"], typicality, atol=0.02)
    assert_array_equal(answers["unlike_learned"], answers["typicality"] < 0.05)
    assert not {"confidence", "typicality", "unlike_learned"} & {*by_fdc}


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_classes_are_ranked_by_their_scores(opened, views, answers, by_fdc, method):
    calibrator = opened.calibrator(method)
    table = by_fdc if method == "fdc" else answers
    by_class = calibrator.class_scores(*views)
    order = np.argsort(-by_class, axis=1)
    expected = np.take_along_axis(by_class, order, axis=1)
    scores = table.filter(regex=r"^score(_\d+)?$")
    assert_allclose(scores, expected, rtol=1e-4, atol=1e-3)
    clear = np.abs(np.diff(expected, axis=1)).min(axis=1) > 1e-2  # Others may change places.
    assert clear.sum() > 40
    names = np.array(opened.class_names)[np.concatenate(calibrator.classes)[order]]
    assert_array_equal(table.filter(regex=r"^class(_\d+)?$")[clear], names[clear])
    rival_scores = calibrator.score(*views).task_scores.min(axis=1)
    assert_allclose(table["rival_score"], rival_scores, rtol=1e-4, atol=1e-3)


def test_parts_of_a_score_of_fdc_add_up(opened, views, by_fdc):
    terms = opened.calibrator("fdc").terms(*views)
    rows = np.arange(60)
    chosen = by_fdc["task"].to_numpy() - 1
    logits = terms.fuse(rlc=False, pac=False).task_scores
    assert_allclose(by_fdc["filtered_logit"], logits[rows, chosen], atol=1e-3)
    for prefix in ("", "rival_"):
        parts = by_fdc.filter(regex=f"^{prefix}(filtered|residual|affinity)_")
        assert parts.shape[1] == 5
        assert_allclose(parts.sum(axis=1), by_fdc[f"{prefix}score"], atol=1e-4)
    affinity = terms.fuse(rlc=False, pretrained_view=False).task_scores - logits
    assert_allclose(by_fdc["affinity_adapted"], affinity[rows, chosen], atol=1e-4)


def test_stopped_run_predicts_with_its_finished_tasks(stopped_run, files, tmp_path, capsys):
    opened = fdc_jax.open_run(stopped_run)
    predicted = opened.predict(files)
    assert set(predicted["class"]) == set(opened.class_names[:5])
    assert (predicted["task"] == 1).all() and "rival_task" not in predicted
    assert (predicted["class"][:30] == np.repeat(opened.class_names[:5], 6)).mean() > 0.9
    page = tmp_path / "out.html"
    flags = (f"--output={tmp_path / 'out.csv'}", "--method=fdc", f"--html={page}")
    assert predict.main([str(stopped_run), str(files[0]), *flags]) == 0
    assert "the run has learned 1 of its 2 tasks" in capsys.readouterr().err
    assert "unlike anything learned" not in page.read_text()


# From anywhere -----------------------------------------------------------------------------------


def test_images_come_as_files_folders_arrays_and_from_pillow(opened, files, answers, tmp_path):
    """Folders are searched at any depth; a file is named explicitly, whatever its suffix."""
    arrays = [np.asarray(decode(path.read_bytes(), "")) for path in files[:4]]
    (tmp_path / "deep").mkdir()
    shutil.copy(files[0], tmp_path / "b.PNG")
    shutil.copy(files[1], tmp_path / "deep" / "a.png")
    unknown = shutil.copy(files[2], tmp_path / "c.unknown")
    mixed = [tmp_path, unknown, Image.open(files[3])]
    for images in ([np.stack(arrays[:3]), arrays[3]], mixed):
        predicted = opened.predict(images, top=10)
        same(predicted, answers.iloc[:4])
    names = [tmp_path / "b.PNG", tmp_path / "deep" / "a.png", unknown, "image 3"]
    assert predicted["image"].tolist() == [*map(str, names)]
    for image in (arrays[0], Image.open(files[0]), str(files[0])):
        same(opened.predict(image, top=10), answers[:1])


@pytest.mark.parametrize("saved, bits", [(12, 12), (0, 16)])
def test_grey_of_16_bits_has_the_scale_of_the_run(finished_run, saved, bits):
    run = fdc_jax.open_run(finished_run)
    run.config = configuration.replaced(run.config, {"data.grey_bits": saved})
    values = (200, 300, 3000)
    grey = [Image.fromarray(np.full((9, 9), value, np.uint16)) for value in values]
    images = Predictions(run, grey).images
    actual = [np.asarray(images.image(index)).max() for index in range(3)]
    assert actual == [value >> (bits - 8) for value in values]


@pytest.mark.parametrize(
    "images, message",
    [
        ([], "expected images, found none"),
        ("nowhere", "nowhere: no such image or folder"),
        (np.zeros((4, 4, 3)), r"image 0: expected a uint8 array .* found float64 of shape \[4, 4"),
        (Image.new("RGB", (5, 0)), "image 0: cannot decode this image: expected pixels, found non"),
    ],
)
def test_wrong_types_of_images_are_refused(opened, images, message):
    with input_error(message):
        opened.predict(images)


def test_folders_of_known_classes_give_an_accuracy(finished_run, opened, files, tmp_path, capsys):
    """CLASS/IMAGE; one folder is of no class that the run has learned, and one image is loose."""
    labels = opened.predictions["label"].copy()
    folder, page = tmp_path / "labelled", tmp_path / "page.html"
    labels[3:8] = (labels[3:8] + 1) % 10  # in the folder of another class
    for row, path in enumerate(files):
        name = "unknown" if row < 3 else opened.class_names[labels[row]]
        (folder / name / "deep").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name / "deep")
    shutil.copy(files[0], folder)
    flags = [f"--output={tmp_path / 'out.csv'}", f"--html={page}", "--top=2"]
    assert predict.main([str(finished_run), str(folder), *flags]) == 0
    printed = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
    mistaken = (table["true_class"] != table["class"]) & (table["true_class"] != "")
    right = opened.predictions["gaussians_label"][3:] == labels[3:]
    assert page.read_text().count(' mistaken"') == mistaken.sum() == (~right).sum() > 0
    assert f"right on {100 * right.mean():.1f} % of 57 images of known class" in printed
    assert "4 images in no folder of a class that the run has learned" in printed


# The command -------------------------------------------------------------------------------------


BAD = "z\x1b[2J.png"


@pytest.fixture(scope="module")
def command(finished_run, files, tmp_path_factory):
    """The command on 60 images, one of a hostile name, and on a damaged one."""
    folder = tmp_path_factory.mktemp("command") / "images"
    folder.mkdir()
    for path in files:
        shutil.copy(path, folder)
    hostile = f"0010 {HOSTILE.replace('/', '')}\u202e.png"
    (folder / "0010.png").rename(folder / hostile)
    (folder / BAD).touch()
    output = folder.with_name("out.csv")
    page = folder.with_name("out.html")
    arguments = [str(finished_run), str(folder), f"--output={output}", f"--html={page}", "--top=10"]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setattr(predict, "_ON_PAGE", 7)
        code = predict.main(arguments)
    assert code == 2
    assert sorted(os.listdir(folder.parent)) == ["images", "out.csv", "out.html"]
    texts = printed.getvalue(), errors.getvalue(), page.read_text()
    return SimpleNamespace(folder=folder, table=output, texts=texts)


def test_control_characters_of_names_are_escaped(command):
    for text in (*command.texts, command.table.read_text()):
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
    assert "\\x1b[2J" in command.texts[1] and "\\u202e" in command.table.read_text()


def test_command_writes_the_table_of_python(command, answers):
    texts = {name: str for name in answers if "class" in name}
    columns = ["rival_class", "rival_task", "rival_score"]
    same(pd.read_csv(command.table, dtype=texts), answers.drop(columns=columns))


def test_page_states_its_numbers_and_loads_nothing(command):
    text = command.texts[2]
    page = Reader(text)
    assert len(page.all("img")) == 7
    assert "60 images, by class Gaussians on " in " ".join(page.texts("h1"))
    assert "1 image could not be read: images/z\\x1b[2J.png." in " ".join(page.texts("p"))
    assert "Answers by class Gaussians, right on " in text and not page.all("table")
    assert str(command.folder.parent) not in text
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object"})
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("nowhere x.png", "nowhere: expected the work directory of a run, found no config"),
        ("run empty", "empty: expected images in this folder, found none; "),
        ("run x.png --unlike=101", "unlike: expected percent from 0 to 100, found 101"),
        ("begun x.png", "begun: stopped before the first answer; repeat the command of"),
        ("run x.png --method=ncm", "has no calibrator ncm, expected one of fdc, gaussi"),
    ],
)
def test_wrong_arguments_of_predict_are_one_line(
    finished_run, files, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "begun"):
        Path(name).mkdir()
    Path("empty/notes.txt").touch()
    shutil.copy(finished_run / "config.json", "begun")
    shutil.copy(files[0], "x.png")
    Path("run").symlink_to(finished_run)
    assert predict.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("fdc_jax.predict: ") and message in printed.err
    assert not Path("predictions.csv").exists()
