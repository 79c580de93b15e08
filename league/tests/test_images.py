"""The league's images: those of the list in any copy, and folders for other code."""

import dataclasses
import functools
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from PIL import Image

import fdc_jax
from fdc_jax.data import images as pixels
from fdc_jax.data import sources
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json, write_manifest
from league import __main__ as command
from league import records, settings, submissions
from league.images import LIST, write_listed
from league.page import RECORDS
from tests import small_runs

FACTS = {
    **{"method": "guess", "calibrator": "raw", "code": "somebody/toolbox", "commit": "0123abcd"},
    **{"changes": "none", "seed": 3, "passes": 2, "processor_seconds": 1.5, "versions": {}},
}


def recorded(images, arrays, facts, folder):
    """Returns the exit code of `record` for a dump and its facts, both written into a folder."""
    np.savez(folder / "dump.npz", **arrays)
    (folder / "facts.json").write_text(json.dumps(facts))
    given = f"--images={images}", f"--facts={folder / 'facts.json'}"
    return command.main(
        ["record", str(folder / "dump.npz"), *given, f"--output={folder / 'records'}"]
    )


def test_predictions_of_other_code_on_the_images(images, whole, tmp_path):
    """Rows and labels follow from the names of files and folders alone."""
    files = sorted(images.glob("test/*/*.png"))
    label = np.array([int(file.parent.name[:3]) for file in files])
    np.testing.assert_array_equal(label, small_runs.predictions(whole)["label"])
    assert len(list(images.glob("train/*/*.png"))) == 120

    run = fdc_jax.open_run(whole)
    at = run.tasks.test_indices[7]
    np.testing.assert_array_equal(
        np.asarray(Image.open(files[7]).convert("RGB")), np.asarray(run.tasks.test.image(int(at)))
    )
    guess = np.where(np.arange(60) % 3, label, (label + 5) % 10)
    scores = np.eye(2)[guess // 5]
    dump = {"label_0": label[:30], "label_1": guess, "task_scores": scores}
    assert recorded(images, dump, FACTS, tmp_path) == 0
    record = json.loads((tmp_path / "records" / "guess-raw-somebody_toolbox-3.json").read_text())
    assert record["accuracy"] == pytest.approx(200 / 3)
    assert record["curve"] == pytest.approx([100.0, 200 / 3])
    assert record["task_recall"] == pytest.approx({"1": 200 / 3, "2": 100, "3": 100, "5": 100})
    assert {name: record[name] for name in FACTS} == FACTS
    assert record["data"] == small_runs.results(whole)["data"]
    files[0].write_bytes(b"")
    with pytest.raises(InputError, match="is not what was written; write the images again"):
        submissions.of_dump(tmp_path / "dump.npz", images, FACTS)


def test_images_that_cannot_be_written_are_refused_before_any_is(images, tmp_path, capsys):
    assert command.main(["export", str(images)]) == 2
    assert "expected a new folder, found one" in capsys.readouterr().err
    assert command.main(["export", str(tmp_path / "new"), "--config.train.epoch=7"]) == 2
    assert (
        "--config.train.epoch: no such field; did you mean train.epochs?" in capsys.readouterr().err
    )
    assert command.main(["export", str(tmp_path / "new"), "--config.train.epochs=-1"]) == 2
    assert "config.train.epochs: expected" in capsys.readouterr().err


def test_images_are_written_in_the_order_of_a_file(images, cache, tmp_path):
    names = json.loads((images / "protocol.json").read_text())["class_order"][::-1]
    (tmp_path / "order.txt").write_text("\n".join(names))
    fields = [f"--config.class_order={tmp_path / 'order.txt'}", "--config.class_order_seed=-1"]
    fields += ["--config.benchmark=digits", "--config.data.source=", f"--config.cache_dir={cache}"]
    assert command.main(["export", str(tmp_path / "new"), *fields]) == 0
    assert json.loads((tmp_path / "new" / "protocol.json").read_text())["class_order"] == names
    assert (tmp_path / "new" / "test" / f"000_{names[0]}").is_dir()


@pytest.mark.parametrize(
    ("arrays", "facts", "said"),
    [
        ({"label_0": None}, FACTS, "dump.npz: expected whole numbers label_0, found label_1"),
        ({"label_1": [0] * 59}, FACTS, "predictions.label: expected 60 numbers below 10"),
        ({"task_scores": [[0, 1]] * 59}, FACTS, "expected shape (60, 2), found (59, 2)"),
        (
            {"label_1": [0.9] * 60},
            FACTS,
            "expected whole numbers label_1, found label_1 of float64",
        ),
        ({"label_1": [65536] * 60}, FACTS, "expected numbers from 0 to 65535"),
        ({"label_1": [-1] * 60}, FACTS, "expected numbers from 0 to 65535, found -1"),
        ({"label_0": [7] * 30}, FACTS, "predictions.label_after.0: expected 30 numbers below 5"),
        ({"task_scores": [["a", "b"]] * 60}, FACTS, "expected finite numbers"),
        ({}, [], "--facts: expected an object"),
        ({"task_scores": [[0, np.nan]] * 60}, FACTS, "expected finite numbers"),
        ({"task_score": [[0, 1]] * 60}, FACTS, "did you mean task_scores"),
        ({}, FACTS | {"code": "fdc_jax"}, "--facts: code: expected a repository"),
        ({}, FACTS | {"accuracy": 99.0}, "--facts: Additional properties are not allowed"),
        ({}, FACTS | {"sead": 1}, "('sead' was unexpected)"),
        ({}, {}, "--facts: 'method' is a required property"),
    ],
)
def test_a_dump_that_says_too_little_is_refused(images, arrays, facts, said, tmp_path, capsys):
    arrays = {"label_0": [0] * 30, "label_1": [0] * 60} | arrays
    given = {name: each for name, each in arrays.items() if each is not None}
    assert recorded(images, given, facts, tmp_path) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"manifest": "[]"}, "manifest.json: expected checksums; write the images again"),
        ({"manifest": '{"sha256": {}, "sha256": {}}'}, "a name occurs twice among sha256"),
        ({"protocol": "{}"}, "protocol.json: is not what was written"),
        ({"manifest": '{"sha256": {}}'}, "json: is not in manifest.json; write the images again"),
        ({"protocol": "{}", "manifest": None}, "'class_order' is a required"),
        ({"protocol": "[]", "manifest": None}, "protocol.json: expected an object"),
    ],
)
def test_a_damaged_folder_of_images_is_refused(images, tmp_path, files, said):
    """A manifest of None is written anew, so that it names the damaged protocol."""
    np.savez(tmp_path / "dump.npz", label_0=[0] * 30, label_1=[0] * 60)
    for name, content in files.items():
        if content is None:
            write_manifest(images)
        else:
            (images / f"{name}.json").write_text(content)
    with pytest.raises(InputError, match=said):
        submissions.of_dump(tmp_path / "dump.npz", images, FACTS)


def copy_of_data(split, rows):
    """Images of three classes, number i of colour i, in an order of somebody's."""
    colours = [np.full((2, 2, 3), i, np.uint8) for i in rows]
    return Dataset(
        name="plain",
        split=split,
        partition="given",
        labels=np.array(rows) % 3,
        ids=tuple(f"{split}_{row:05d}" for row in range(len(rows))),
        class_names=("ant", "bee", "cat"),
        read=lambda index: Image.fromarray(colours[index]),
        pixel_hashes=lambda: [pixels.pixels_sha256(each) for each in colours],
    )


def checksum(number):
    return pixels.pixels_sha256(np.full((2, 2, 3), number, np.uint8)).hex()[:12]


@hypothesis.settings(deadline=None, max_examples=10)
@for_all(st.permutations(range(30)), st.permutations(range(30, 51)))
def test_a_list_of_images_means_the_same_in_every_copy(tmp_path_factory, train_rows, test_rows):
    wanted = {"train": {"bee": [28, 4, 1], "ant": [27, 0], "cat": [5]}}
    wanted["test"] = {"ant": [48], "bee": [40, 31], "cat": [32]}
    listed = {
        split: {kind: [*map(checksum, numbers)] for kind, numbers in of.items()}
        for split, of in wanted.items()
    }
    folder = tmp_path_factory.mktemp("copies") / "images"
    splits = copy_of_data("train", train_rows), copy_of_data("test", test_rows)
    write_listed(folder, splits, listed)
    for split in sources.open_splits("plain", folder.parent, source=str(folder)):
        found = [np.asarray(split.image(row))[0, 0, 0] for row in range(len(split))]
        expected = [
            number for kind in ("ant", "bee", "cat") for number in wanted[split.split][kind]
        ]
        assert found == expected


def test_a_missing_image_of_the_list_is_named(tmp_path):
    listed = {"train": {"bee": [checksum(1), "0" * 12]}}
    with pytest.raises(InputError, match=r"plain, split train: .* 1 are missing, .* bee 0000000"):
        write_listed(tmp_path / "new", [copy_of_data("train", range(30))], listed)
    assert not (tmp_path / "new").exists()


@pytest.mark.ci
def test_the_images_are_those_of_the_records_in_any_copy(shared_asset, tmp_path):
    record = next(iter(records.read(RECORDS / "cifar100").values()))
    splits = []
    prepared = str(shared_asset("tensorflow_datasets"))
    for split in sources.open_splits("cifar100", tmp_path, data_dir=prepared):
        rows, hashes = np.random.default_rng(0).permutation(len(split)), split.pixel_hashes()
        moved = dataclasses.replace(
            split,
            labels=split.labels[rows],
            ids=tuple(map(str, range(len(rows)))),
            read=lambda index, split=split, rows=rows: split.read(int(rows[index])),
            pixel_hashes=functools.partial(list, [hashes[row] for row in rows]),
        )
        splits.append(moved)
    write_listed(tmp_path / "images", splits, read_json(LIST))
    data = settings.get_config().data
    for split in sources.open_splits(
        "league",
        tmp_path,
        source=str(tmp_path / "images"),
        allow_overlap=data.allow_overlap,
    ):
        assert split.checksum == record["data"][f"{split.split}_sha256"]
