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
from fdc_jax.data import folder
from fdc_jax.data.images import decode
from fdc_jax.run import configuration
from fdc_jax.run.prediction import Predictions
from tests import small_runs
from tests.errors import input_error
from tests.report.test_page import HOSTILE, Reader


@pytest.fixture(scope="module")
def opened(finished_run, cache):
    return fdc_jax.open_run(finished_run)


@pytest.fixture(scope="module")
def files(opened, tmp_path_factory):
    return small_runs.test_files(opened, tmp_path_factory.mktemp("images"))


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
        assert_array_equal(table["changed"], table["raw_class"] != table["class"])
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
    assert not {"confidence", "typicality", "unlike_learned"} & {*by_fdc}
    assert not any("affinity" in name for name in answers)


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_classes_are_ranked_by_their_scores(opened, views, answers, by_fdc, method):
    calibrator = opened.calibrator(method)
    table = {"fdc": by_fdc, "gaussians": answers}[method]
    by_class = calibrator.class_scores(*views)
    labels = np.concatenate(calibrator.classes)[np.argsort(-by_class, axis=1)]
    expected = -np.sort(-by_class, axis=1)
    scores = table.filter(regex=r"^score(_\d+)?$").to_numpy()
    assert_allclose(scores, expected, rtol=1e-4, atol=1e-3)
    clear = np.abs(np.diff(expected, axis=1)).min(axis=1) > 1e-2  # Others may change places.
    assert clear.sum() > 40
    ranked = table.filter(regex=r"^class(_\d+)?$").to_numpy()
    assert_array_equal(ranked[clear], np.array(opened.class_names)[labels[clear]])
    rival_scores = calibrator.score(*views).task_scores.min(axis=1)
    assert_allclose(table["rival_score"], rival_scores, rtol=1e-4, atol=1e-3)


def test_parts_of_a_score_of_fdc_add_up(opened, views, by_fdc):
    terms = opened.calibrator("fdc").terms(*views)
    rows = np.arange(60)
    chosen = by_fdc["task"].to_numpy() - 1
    logits = terms.fuse(rlc=False, pac=False).task_scores
    assert_allclose(by_fdc["filtered_logit"], logits[rows, chosen], atol=1e-3)
    assert_allclose(by_fdc["rival_filtered_logit"], logits[rows, 1 - chosen], atol=1e-3)
    parts = ["filtered_logit", "residual_adapted", "residual_pretrained"]
    parts += ["affinity_adapted", "affinity_pretrained"]
    for prefix in ("", "rival_"):
        total = by_fdc[[prefix + part for part in parts]].sum(axis=1)
        assert_allclose(total, by_fdc[f"{prefix}score"], atol=1e-4)
    affinity = terms.fuse(rlc=False, pretrained_view=False).task_scores - logits
    assert_allclose(by_fdc["affinity_adapted"], affinity[rows, chosen], atol=1e-4)


def test_stopped_run_predicts_with_its_finished_tasks(stopped_run, files, tmp_path, capsys):
    opened = fdc_jax.open_run(stopped_run)
    predicted = opened.predict(files)
    assert set(predicted["class"]) == set(opened.class_names[:5])
    assert (predicted["task"] == 1).all() and "rival_task" not in predicted
    assert (predicted["class"][:30] == np.repeat(opened.class_names[:5], 6)).mean() > 0.9
    flags = (f"--output={tmp_path / 'out.csv'}", "--method=fdc", f"--html={tmp_path / 'out.html'}")
    assert predict.main([str(stopped_run), *map(str, files[:3]), *flags]) == 0
    assert "the run has learned 1 of its 2 tasks" in capsys.readouterr().err
    text = (tmp_path / "out.html").read_text()
    assert text.count("<img") == 3 and "unlike anything learned" not in text


# From anywhere -----------------------------------------------------------------------------------


def test_images_come_as_files_folders_arrays_and_from_pillow(opened, files, answers, tmp_path):
    first = answers.iloc[:4]
    arrays = [np.asarray(decode(path.read_bytes(), "")) for path in files[:4]]
    for images in (arrays, np.stack(arrays), iter(files[:4]), [np.stack(arrays[:3]), files[3]]):
        same(opened.predict(images, top=10), first)
    for image in (arrays[0], Image.open(files[0])):
        same(opened.predict(image, top=10), first[:1])
    mixed = [files[0], arrays[1], Image.open(files[2]), str(files[3])]
    predicted = opened.predict(mixed, top=10)
    same(predicted, first)
    names = [str(files[0]), "image 1", "image 2", str(files[3])]
    assert predicted["image"].tolist() == names


def test_folders_of_images_are_searched_at_any_depth(opened, files, answers, tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    # The last is named explicitly, whatever its suffix.
    names = ("b.PNG", "deep/c.png", "deep/deeper/a.png", "deep/d.unknown")
    paths = [tmp_path / name for name in names]
    for path, copy in zip(files, paths, strict=False):
        shutil.copy(path, copy)
    (tmp_path / ".hidden.png").touch()
    predicted = opened.predict([tmp_path, paths[-1]], top=10)
    assert predicted["image"].tolist() == [str(path) for path in paths]
    same(predicted, answers.iloc[:4])


@pytest.mark.parametrize("saved, bits", [(12, 12), (16, 16), (0, 16)])
def test_grey_of_16_bits_has_the_scale_of_the_run(finished_run, cache, saved, bits):
    run = fdc_jax.open_run(finished_run)
    run.config = configuration.replaced(run.config, {"data.grey_bits": saved})
    values = (200, 300, 3000, 5000)
    grey = [Image.fromarray(np.full((9, 9), value, np.uint16)) for value in values]
    images = Predictions(run, grey).images
    actual = [int(np.asarray(images.image(index)).max()) for index in range(4)]
    assert actual == [min(value >> (bits - 8), 255) for value in values]


def test_further_frames_are_counted(opened, answers, files, tmp_path, caplog):
    pages = [Image.open(file) for file in files[:3]]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    shutil.copy(files[1], tmp_path / "single.png")
    for _ in range(2):
        caplog.clear()
        same(opened.predict(tmp_path, top=10), answers[:2])
        text = f"skipped frames after the first of: 1 ({tmp_path}/pages.tif)"
        assert [record.getMessage() for record in caplog.records] == [text]


def test_images_are_read_in_bounded_portions(finished_run, files, monkeypatch):
    opened = fdc_jax.open_run(finished_run)
    opened.config = configuration.replaced(opened.config, {"evaluation.batch_size": 4})
    reads, read = [], folder.file_bytes
    monkeypatch.setattr(folder, "file_bytes", lambda path: reads.append(path) or read(path))
    batches = Predictions(opened, files)
    assert len(batches) == 15
    for batch, _ in enumerate(batches, start=1):
        assert len(reads) - 4 * batch <= 4 * 10
    assert len(reads) == 60


def test_unreadable_images_are_named_and_skipped(opened, files, answers, tmp_path, caplog):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(files[0].read_bytes()[:60])
    predicted = opened.predict([files[0], broken, files[1]], top=10)
    assert predicted.index.tolist() == [0, 2]
    same(predicted, answers.iloc[:2])
    assert [record.getMessage() for record in caplog.records] == [
        f"{broken}: cannot decode this image: image file is truncated"
    ]
    with input_error(r"no image could be read: .*broken.jpg: cannot decode"):
        opened.predict(broken)


@pytest.mark.parametrize(
    "images, message",
    [
        ([], "expected images, found none"),
        ("nowhere", "nowhere: no such image or folder"),
        (np.zeros((4, 4, 3)), r"image 0: expected a uint8 array .* found float64 of shape \[4, 4"),
        ([np.zeros((4, 4), np.uint8), np.zeros(3, np.uint8)], r"image 1: expected .* \[3\]"),
        (7, "expected paths, arrays or images, found int"),
        (np.array("nowhere.png"), "image 0: expected a uint8 array"),
        (np.array(["nowhere"]), "nowhere: no such image or folder"),
        (Image.new("RGB", (5, 0)), "image 0: cannot decode this image: expected pixels, found non"),
    ],
)
def test_wrong_types_of_images_are_refused(opened, images, message):
    with input_error(message):
        opened.predict(images)


def test_folders_of_known_classes_give_an_accuracy(finished_run, opened, files, tmp_path, capsys):
    """CLASS/IMAGE; one folder is of no class that the run has learned, and one image is loose."""
    labels = opened.predictions["label"].copy()
    folder = tmp_path / "labelled"
    labels[3:8] = (labels[3:8] + 1) % 10  # in the folder of another class
    for row, path in enumerate(files):
        name = "unknown" if row < 3 else opened.class_names[labels[row]]
        (folder / name / "deep").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name / "deep")
    shutil.copy(files[0], folder)
    output = tmp_path / "out.csv"
    page = tmp_path / "page.html"
    command = [str(finished_run), str(folder), f"--output={output}", f"--html={page}", "--top=2"]
    assert predict.main(command) == 0
    printed = capsys.readouterr().out
    table = pd.read_csv(output, dtype=str, keep_default_na=False)
    labelled = table["true_class"] != ""
    right = table["true_class"] == table["class"]
    assert (~labelled).sum() == 4 and len(table) == 61
    known = opened.predictions["gaussians_label"][3:] == labels[3:]
    assert right.sum() == known.sum() < 57
    assert f"right on {100 * known.mean():.1f} % of 57 images of known class" in printed
    assert "4 images in no folder of a class that the run has learned" in printed
    mistakes = table[~right & labelled]
    assert page.read_text().count(' mistaken"') == len(mistakes)
    rows = printed.partition("taken for")[2]
    shares = [float(share) for share in re.findall(r"^ *\S+ +\d+ +([\d.]+)", rows, re.MULTILINE)]
    assert shares[0] < shares[-1] and shares == sorted(shares)  # the worst first


def test_control_characters_of_names_are_escaped(finished_run, files, tmp_path, capsys):
    folder = tmp_path / "new"
    page = tmp_path / "page.html"
    output = tmp_path / "out.csv"
    folder.mkdir()
    shutil.copy(files[0], folder / "a\x1b[31m\u202eb.png")
    (folder / "c\x1b[2J.png").write_text("no image")
    predict.main([str(finished_run), str(folder), f"--output={output}", f"--html={page}"])
    for text in (page.read_text(), output.read_text(), *capsys.readouterr()):
        assert "a\\x1b[31m\\u202eb.png" in text or "c\\x1b[2J.png" in text
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)


# The command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(finished_run, files, tmp_path_factory):
    """The command on 60 images, one of a hostile name, on a damaged one and on three others."""
    folder = tmp_path_factory.mktemp("command") / "images"
    folder.mkdir()
    for path in files:
        shutil.copy(path, folder)
    hostile = HOSTILE.replace("/", "")
    (folder / "0010.png").rename(folder / f"0010 {hostile}.png")
    for name in ("zero.png", "a.HEIC", "b.heic", "c.gif"):
        (folder / name).touch()
    output = folder.with_name("out.csv")
    page = folder.with_name("out.html")
    arguments = [str(finished_run), str(folder), f"--output={output}", f"--html={page}", "--top=10"]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setattr(predict, "_ON_PAGE", 7)
        # Whether or not the package of `.heic` is there.
        patch.setattr("fdc_jax.data.folder.IMAGE_SUFFIXES", (".jpg", ".png"))
        code = predict.main(arguments)
    assert code == 2
    assert sorted(os.listdir(folder.parent)) == ["images", "out.csv", "out.html"]
    return SimpleNamespace(
        folder=folder,
        table=output,
        printed=printed.getvalue(),
        errors=errors.getvalue(),
        page=page.read_text(),
    )


def test_threshold_of_unlike_images_is_percent_of_typicality(finished_run, files, tmp_path, capsys):
    output = tmp_path / "out.csv"
    arguments = [str(finished_run), *map(str, files[:40]), f"--output={output}", "--unlike=60"]
    assert predict.main(arguments) == 0
    table = pd.read_csv(output)
    assert_array_equal(table["unlike_learned"], table["typicality"] < 0.6)
    text = f"{table['unlike_learned'].sum()} unlike anything learned (60 % of new images"
    assert 0 < table["unlike_learned"].sum() < 40 and text in capsys.readouterr().out


def test_command_names_unreadable_and_skipped_files(command):
    first, *_, last = command.errors.splitlines()
    assert last == "fdc_jax.predict: 1 of 61 images could not be read"
    assert f"{command.folder / 'zero.png'}: cannot decode this image" in command.errors
    text = "skipped files without the suffix of an image: 3 (2 .heic, 1 .gif; pip"
    assert f"{command.folder}: {text}" in first


def test_command_prints_a_summary(command, answers):
    strange = f"{answers['unlike_learned'].sum()} unlike anything learned"
    strange += " (5 % of new images of learned classes are)"
    raw = f"raw logits give another class for {answers['changed'].sum()} images; wrote"
    assert f"50 more; {strange}; {raw}" in command.printed
    assert "answers by class Gaussians, right on" in command.errors
    assert "--method=fdc" in command.errors and "--method=gaussians" not in command.errors


def test_command_writes_the_table_of_python(command, answers):
    texts = {name: str for name in answers if "class" in name}
    columns = ["rival_class", "rival_task", "rival_score"]
    same(pd.read_csv(command.table, dtype=texts), answers.drop(columns=columns))


def test_page_shows_the_least_certain_of_every_kind(command, answers):
    """Images unlike anything learned, uncertain ones, and others; seven in all."""
    unlike = answers["unlike_learned"]
    uncertain = ~unlike & (answers["confidence"] < 0.5)
    kinds = [answers[unlike], answers[uncertain], answers[~unlike & ~uncertain]]
    share = 7 // sum(len(kind) > 0 for kind in kinds)
    numbers = [min(len(kind), share) for kind in kinds[:2]]
    numbers.append(7 - sum(numbers))
    assert 0 < numbers[0] < 7 and 0 < numbers[2] < 7
    rows = []
    for kind, number in zip(kinds, numbers, strict=True):
        rows.extend(kind.sort_values("confidence", kind="stable").index[:number])
    page = Reader(command.page)
    names = sorted(command.folder.glob("*.png"))
    pictures = page.all("img")
    assert [picture["alt"] for picture in pictures] == [f"images/{names[row].name}" for row in rows]
    assert all(picture["src"].startswith("data:image/") for picture in pictures)
    assert len(page.all("option")) == 1 + answers["class"].iloc[rows].nunique()


def test_page_states_its_numbers_and_loads_nothing(command):
    page = Reader(command.page)
    assert "60 images, by class Gaussians on " in " ".join(page.texts("h1"))
    assert "1 image could not be read: images/zero.png." in " ".join(page.texts("p"))
    assert "Answers by class Gaussians, right on " in command.page and not page.all("table")
    assert "<script" not in command.page and str(command.folder.parent) not in command.page
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object"})
    assert not re.search(r"(src|href)=\"(?!#|data:)", command.page)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("nowhere x.png", "nowhere: expected the work directory of a run, found no config"),
        ("run empty", "empty: expected images in this folder, found none; "),
        ("run empty --output=x.png", "a file that ends in .csv, found"),
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
    assert not list(tmp_path.glob("*.csv"))


def test_quiet_prints_errors_alone_and_names_five_classes(finished_run, files, tmp_path, capsys):
    output = tmp_path / "out.csv"
    command = [str(finished_run), str(files[0]), f"--output={output}", "--quiet"]
    assert predict.main(command) == 0
    assert capsys.readouterr() == ("", "")
    ranked = [name for name in pd.read_csv(output) if name.startswith("class")]
    assert ranked == ["class", "class_2", "class_3", "class_4", "class_5"]
