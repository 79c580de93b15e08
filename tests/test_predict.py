"""Answers for new images: those of the evaluation, with what they are made of, from anywhere."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fdc_jax
from fdc_jax import export, predict
from fdc_jax.data.images import decode
from fdc_jax.errors import InputError
from tests import small_runs
from tests.report.test_page import HOSTILE, Reader


@pytest.fixture(scope="module")
def opened(whole, cache):
    return fdc_jax.open_run(whole)


@pytest.fixture(scope="module")
def files(opened, tmp_path_factory):
    return small_runs.test_files(opened, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def said(opened, files):
    return predict.predict(opened, files, top=10)


def same(found, expected):
    """Equal but for the names of images, and rounding where batches are of another size."""
    pd.testing.assert_frame_equal(
        found.drop(columns="image").reset_index(drop=True),
        expected.drop(columns="image").reset_index(drop=True),
        check_dtype=False,
        atol=1e-4,
    )


# The same as in the evaluation -------------------------------------------------------------------


def agrees(table, opened, method="fdc"):
    """Labels and tasks are those of `predictions.npz`."""
    columns, names = opened.predictions, np.array(opened.class_names)
    for prefix, kind in (("", method), ("raw_", "raw")):
        assert table[f"{prefix}class"].tolist() == names[columns[f"{kind}_label"]].tolist()
        np.testing.assert_array_equal(table[f"{prefix}task"], columns[f"{kind}_task"] + 1)
    np.testing.assert_array_equal(
        table["changed"], columns["raw_label"] != columns[f"{method}_label"]
    )


def test_files_of_test_images_get_the_predictions_of_the_run(whole, opened, files, said):
    agrees(said, opened)
    assert 0 < said["changed"].sum() < 60
    pixels = np.concatenate([images for _, images in predict.Predictions(opened, files)])
    np.testing.assert_array_equal(pixels, opened.test_images(np.arange(60)))
    views = [np.load(whole / "features" / f"test_{v}.npy") for v in ("adapted", "pretrained")]
    scores = opened.calibrator().score(*views)
    np.testing.assert_allclose(said["score"], scores.task_scores.max(axis=1), atol=1e-4)
    np.testing.assert_allclose(said["rival_score"], scores.task_scores.min(axis=1), atol=1e-4)
    assert said["image"].tolist() == [str(path) for path in files]


def test_parts_add_up_and_classes_are_ranked(whole, opened, said):
    fdc = opened.calibrator()
    views = [np.load(whole / "features" / f"test_{v}.npy") for v in ("adapted", "pretrained")]
    by_class, labels = fdc.class_scores(*views), np.concatenate(fdc.classes)
    expected = -np.sort(-by_class, axis=1)
    columns = ["", *(f"_{place}" for place in range(2, 11))]
    found = said[[f"score{suffix}" for suffix in columns]].to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)
    names = np.array(opened.class_names)[labels[np.argsort(-by_class, axis=1)]]
    clear = np.abs(np.diff(expected, axis=1)).min(axis=1) > 1e-3  # Others may change places.
    assert clear.sum() > 50
    ranked = said[[f"class{suffix}" for suffix in columns]].to_numpy()
    np.testing.assert_array_equal(ranked[clear], names[clear])
    terms, rows, chosen = fdc.terms(*views), np.arange(60), said["task"].to_numpy() - 1
    logits = terms.fuse(rlc=False, pac=False).task_scores
    np.testing.assert_allclose(said["filtered_logit"], logits[rows, chosen], atol=1e-3)
    np.testing.assert_allclose(said["rival_filtered_logit"], logits[rows, 1 - chosen], atol=1e-3)
    parts = ["filtered_logit"]
    parts += [f"{part}_{v}" for part in ("residual", "affinity") for v in ("adapted", "pretrained")]
    for prefix in ("", "rival_"):
        total = sum(said[prefix + part] for part in parts)
        np.testing.assert_allclose(total, said[f"{prefix}score"], atol=1e-4)
    only = terms.fuse(rlc=False, pretrained_view=False).task_scores - logits
    np.testing.assert_allclose(said["affinity_adapted"], only[rows, chosen], atol=1e-4)


def test_every_calibrator_of_the_run_answers_by_its_name(opened, files, tmp_path, capsys):
    found = predict.predict(opened, files, top=10, method="gaussians")
    agrees(found, opened, "gaussians")
    assert not any("affinity" in name for name in found)
    scores = found[["score", *(f"score_{place}" for place in range(2, 11))]].to_numpy()
    assert (np.diff(scores, axis=1) <= 0).all()
    page = tmp_path / "out.html"
    arguments = [*map(str, files[:3]), "--method=gaussians", f"--html={page}"]
    output = f"--output={tmp_path / 'out.csv'}"
    assert predict.main([str(opened.folder), *arguments, output]) == 0
    assert "class Gaussians with drift compensation" in capsys.readouterr().err
    assert "decided by class Gaussians" in page.read_text()


def test_a_stopped_run_answers_with_the_tasks_that_it_has(half, files, tmp_path, capsys):
    opened = fdc_jax.open_run(half)
    found = predict.predict(opened, files)
    assert set(found["class"]) == set(opened.class_names[:5])
    assert (found["task"] == 1).all() and "rival_task" not in found
    right = found["class"][:30] == np.repeat(opened.class_names[:5], 6)
    assert right.mean() > 0.9
    output = tmp_path / "out.csv"
    page = tmp_path / "out.html"
    arguments = [str(half), *map(str, files[:3]), f"--output={output}"]
    assert predict.main([*arguments, f"--html={page}"]) == 0
    assert "the run has learned 1 of its 2 tasks" in capsys.readouterr().err
    shown = Reader(page.read_text())
    assert len(shown.all("img")) == 3 and not shown.all("table")
    assert "Raw: what the heads alone say." in page.read_text()
    assert "Next: the best class of any other task." not in page.read_text()


def test_an_exported_run_answers_alike(whole, opened, files, said, tmp_path):
    export.write(whole, tmp_path / "out")
    found = predict.predict(fdc_jax.open_run(tmp_path / "out"), files, top=10)
    pd.testing.assert_frame_equal(found, said)


# From anywhere -----------------------------------------------------------------------------------


def test_images_come_as_files_folders_arrays_and_from_pillow(opened, files, said, tmp_path):
    first = said.iloc[:4]
    arrays = [np.asarray(decode(path.read_bytes(), "")) for path in files[:4]]
    mixed = [files[0], arrays[1], Image.open(files[2]), str(files[3])]
    for images in (
        arrays,
        np.stack(arrays),
        mixed,
        iter(files[:4]),
        [np.stack(arrays[:3]), files[3]],
    ):
        same(predict.predict(opened, images, top=10), first)
    assert predict.predict(opened, mixed)["image"].tolist() == [
        *(str(files[0]), "image 1", "image 2", str(files[3])),
    ]
    same(predict.predict(opened, arrays[0], top=10), first[:1])
    same(predict.predict(opened, Image.open(files[0]), top=10), first[:1])
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    for path, name in zip(files, ("b.PNG", "deep/c.png", "deep/deeper/a.png"), strict=False):
        shutil.copy(path, tmp_path / name)
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / ".hidden.png").write_bytes(b"")
    # Explicitly, whatever it is called.
    other = shutil.copy(files[3], tmp_path / "deep" / "d.unknown")
    found = predict.predict(opened, [tmp_path, other], top=10)
    names = ("b.PNG", "deep/c.png", "deep/deeper/a.png", "deep/d.unknown")
    assert found["image"].tolist() == [str(tmp_path / name) for name in names]
    same(found, first)


def test_thousands_are_never_in_memory_at_once(whole, files, monkeypatch):
    opened = fdc_jax.open_run(whole)
    opened.config["evaluation.batch_size"] = 4
    reads = []
    read = predict._read
    monkeypatch.setattr(predict, "_read", lambda *a: reads.append(a) or read(*a))
    found = predict.Predictions(opened, files)
    assert len(found) == 15
    ahead = [len(reads) - 4 * batch for batch, _ in enumerate(found, start=1)]
    assert len(reads) == 60 and max(ahead) <= 4 * 10


def test_unreadable_images_are_named_and_the_rest_goes_on(opened, files, said, tmp_path, caplog):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(files[0].read_bytes()[:60])
    found = predict.predict(opened, [files[0], broken, files[1]], top=10)
    assert found.index.tolist() == [0, 2]
    same(found, said.iloc[:2])
    assert [record.getMessage() for record in caplog.records] == [
        f"{broken}: cannot decode this image: image file is truncated"
    ]
    with pytest.raises(InputError, match=r"no image could be read: .*broken.jpg: cannot decode"):
        predict.predict(opened, broken)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "expected images, found none"),
        ("nowhere", "nowhere: no such image or folder"),
        (np.zeros((4, 4, 3)), r"image 0: expected a uint8 array .* found float64 of shape \[4, 4"),
        ([np.zeros((4, 4), np.uint8), np.zeros(3, np.uint8)], r"image 1: expected .* \[3\]"),
        (7, "expected paths, arrays or images, found int"),
        (np.array("nowhere.png"), "image 0: expected a uint8 array"),
        (pd.Series(["nowhere"]), "nowhere: no such image or folder"),
        (np.array(["nowhere"]), "nowhere: no such image or folder"),
        (Image.new("RGB", (5, 0)), "image 0: cannot decode this image: expected pixels, found non"),
    ],
)
def test_what_is_no_image_is_refused(opened, images, message):
    with pytest.raises(InputError, match=message):
        predict.predict(opened, images)


def test_what_is_no_run_or_no_number_of_classes_is_refused(whole, opened, files):
    with pytest.raises(InputError, match="run: expected what open_run returns, found Posix"):
        predict.predict(whole, files)
    with pytest.raises(InputError, match=r"top: expected a whole number from 1 on, found 2\.0"):
        predict.predict(opened, files, top=2.0)


# The command -------------------------------------------------------------------------------------


def test_the_command_writes_a_table_and_a_page(whole, files, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predict, "_ON_PAGE", 7)
    # Whether or not the package of `.heic` is there.
    monkeypatch.setattr("fdc_jax.data.folder.IMAGE_SUFFIXES", (".jpg", ".png"))
    folder = tmp_path / "images"
    folder.mkdir()
    for path in files:
        shutil.copy(path, folder / path.name)
    name = HOSTILE.replace("/", "") + ".png"
    (folder / "0010.png").rename(folder / f"0010 {name}")
    (folder / "zero.png").write_bytes(b"")
    for other in ("a.HEIC", "b.heic", "c.gif"):
        (folder / other).write_bytes(b"")
    output, page = tmp_path / "out.csv", tmp_path / "out.html"
    arguments = [str(whole), str(folder), f"--output={output}", f"--html={page}", "--top=10"]
    results = json.loads((whole / "results.json").read_text())
    right = {name: results["accuracy"][name] for name in ("fdc", "gaussians")}
    assert predict.main(arguments) == 2
    printed = capsys.readouterr()
    errors = printed.err.splitlines()
    assert errors[-1] == "fdc_jax.predict: 1 of 61 images could not be read"
    assert f"{folder / 'zero.png'}: cannot decode this image" in printed.err
    assert (
        f"{folder}: skipped files without the suffix of an image: 3 (2 .heic, 1 .gif; pip"
        in errors[0]
    )
    changed = int(said["changed"].sum())
    strange = f"{said['unlike_learned'].sum()} unlike anything learned"
    assert f"50 more; {strange}; of {changed} images the heads alone would have said" in printed.out
    assert ("--method=" in printed.out + printed.err) == (right["fdc"] < max(right.values()))
    table = pd.read_csv(output, dtype={name: str for name in said if "class" in name})
    same(table, said)
    text = page.read_text()
    read = Reader(text)
    assert "60 images, by Cumulative-LoRA on " in " ".join(read.texts("h1"))
    pictures = read.all("img")
    assert len(pictures) == 7 and all(each["src"].startswith("data:image/") for each in pictures)
    assert "1 image could not be read: images/zero.png." in " ".join(read.texts("p"))
    assert "Next: the best class of any other task." in text
    order = said["confidence"] - said["unlike_learned"]  # unlike anything learned first
    names = sorted(folder.glob("*.png"))
    shown = [f"images/{names[row].name}" for row in np.argsort(order, kind="stable")[:7]]
    assert [each["alt"] for each in pictures] == shown
    assert "<script" not in text and str(tmp_path) not in text
    assert {tag for tag, _ in read.elements}.isdisjoint({"script", "link", "iframe", "object"})
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out.csv", "out.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "x.png"], "nowhere: expected the work directory of a run, found no config"),
        (["WHOLE", "EMPTY"], "empty: expected images in this folder, found none; skipped, as no"),
        (
            ["WHOLE", "EMPTY", "--output=x.png"],
            "a file that ends in .csv or .jsonl, found",
        ),
        (["WHOLE", "IMAGE", "--top=0"], "top: expected a whole number from 1 on, found 0"),
        (["WHOLE", "IMAGE", "--method=ncm"], "has no calibrator ncm, expected one of fdc, gaussi"),
    ],
)
def test_bad_input_is_one_line(whole, files, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none")
    places = {"WHOLE": whole, "EMPTY": tmp_path / "empty", "IMAGE": files[0]}
    assert predict.main([str(places.get(word, word)) for word in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("fdc_jax.predict: ") and message in printed.err
    assert not list(tmp_path.glob("*.csv"))


def test_lines_of_json_are_the_table_and_quiet_prints_errors_alone(
    whole, files, said, tmp_path, capsys
):
    output = tmp_path / "out.jsonl"
    images = [str(path) for path in files]
    assert predict.main([str(whole), *images, f"--output={output}", "--top=10", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads(output.read_text().splitlines()[0])["image"] in output.read_text()
    same(pd.read_json(output, orient="records", lines=True, dtype=False), said)


def test_how_sure_an_answer_is_the_gaussians_say_whoever_answers(whole, opened, said):
    views = [np.load(whole / "features" / f"test_{v}.npy") for v in ("adapted", "pretrained")]
    gaussians, columns = opened.calibrator("gaussians"), opened.predictions
    (chances, typicality), rows = gaussians.assess(*views), np.arange(60)
    place = {label: column for column, label in enumerate(np.concatenate(gaussians.classes))}
    expected = chances[rows, [place[label] for label in columns["fdc_label"]]]
    np.testing.assert_allclose(said["confidence"], expected, atol=1e-3)
    np.testing.assert_allclose(said["typicality"], typicality, atol=0.02)
