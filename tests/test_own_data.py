"""Photographs of a user's own, from a folder to the report, through the commands."""

import csv
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import fdc_jax
from configs import own
from fdc_jax import configuration
from fdc_jax.data import prepare
from fdc_jax.errors import InputError
from tests import small_runs

CLASSES = ("oak", "ash", "elm", "fir", "yew", "box")
ORDER = ("fir", "box", "oak", "yew", "ash", "elm")
SIZES = (3, 1, 2)


def texture(rng, angle, colour):
    """A photograph of stripes with noise, of a direction and a colour."""
    y, x = np.mgrid[:40, :48]
    waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) / 3 + rng.uniform(0, 6))
    pixels = 128 + 60 * waves[..., None] * colour + rng.normal(0, 25, (40, 48, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Photographs in train/CLASS and test/CLASS, prepared as `trees`; returns the data folder."""
    root, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        colour = np.eye(3)[number % 3]
        for split, count in (("train", 12), ("val", 5)):
            folder = root / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                picture = texture(rng, number * np.pi / 6, colour)
                picture.save(folder / f"{index}.{('jpg', 'png')[index % 2]}")
    (root / "order.txt").write_text("\n".join(ORDER) + "\n")
    prepare.prepare("trees", root / "photos", root / "data", quiet=True)
    return root


SETTINGS = {
    "encoder.variant": "digits",
    "encoder.weights": "digits",
    "encoder.image_size": 32,
    "train.epochs": 2,
    "train.batch_size": 8,
    "checkpoint.every_steps": 3,
}


def start(data, cache, workdir):
    return subprocess.Popen(
        [
            *(sys.executable, "main.py", "--config=configs/own.py", "--config.benchmark=trees"),
            *(f"--config.classes_per_task={','.join(map(str, SIZES))}", f"--workdir={workdir}"),
            *(f"--config.class_order={data / 'order.txt'}", f"--config.data.dir={data / 'data'}"),
            *(f"--config.{field}={value}" for field, value in SETTINGS.items()),
        ],
        cwd=small_runs.REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "FDC_JAX_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def killed(data, cache, tmp_path_factory):
    """The work directory of a run that was killed in its second task and went on."""
    workdir = tmp_path_factory.mktemp("run") / "trees"
    process = start(data, cache, workdir)
    small_runs.wait_for(workdir, "evaluation", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (workdir / "results.json").exists()
    small_runs.finish(start(data, cache, workdir))
    return workdir


def test_a_killed_run_goes_on_under_the_name(killed):
    small_runs.nothing_done_twice(killed)
    results = small_runs.results(killed)
    assert (results["benchmark"], results["split"]) == ("trees", "given")
    assert results["class_names"] == list(ORDER)
    assert results["config"]["class_order"] == list(ORDER)
    assert results["config"]["classes_per_task"] == list(SIZES)
    assert (results["num_tasks"], results["num_classes"], results["num_test_images"]) == (3, 6, 30)
    columns = small_runs.predictions(killed)
    assert columns["class_names"].tolist() == list(ORDER)
    assert np.bincount(columns["label"]).tolist() == [5] * 6
    assert np.bincount(columns["task"]).tolist() == [5 * size for size in SIZES]


def test_the_report_has_the_names_and_no_number_of_the_paper(killed):
    page = (killed / "report" / "report.html").read_text()
    assert "Cumulative-LoRA on trees" in page
    assert all(name in page for name in CLASSES)
    assert "--config.benchmark=trees" in page
    for table in (killed / "report" / "tables").glob("*.csv"):
        rows = list(csv.reader(table.read_text().splitlines()))
        assert all("paper" not in row for row in rows), table.name


def test_a_run_opens_without_its_data(killed, data, cache, monkeypatch):
    monkeypatch.setenv("FDC_JAX_CACHE", str(cache))
    run = fdc_jax.open_run(killed)
    assert len(run.test_images(np.arange(4))) == 4
    gone = fdc_jax.open_run(killed, data_dir=str(data / "nowhere"))
    assert list(gone.class_names) == list(ORDER)
    assert len(gone.heads()) == 3 and gone.experiment.setup.classes_per_task == SIZES
    with pytest.raises(InputError, match=r"benchmark must be one of .*nowhere; found 'trees'"):
        gone.test_images(np.arange(4))


def test_its_photographs_get_the_names_that_the_run_gave_them(killed, data, cache, monkeypatch):
    monkeypatch.setenv("FDC_JAX_CACHE", str(cache))
    run = fdc_jax.open_run(killed, data_dir=str(data / "nowhere"))
    found = run.predict(data / "photos" / "val").set_index("image")
    assert len(found) == 30
    labels = np.array(ORDER)[run.predictions["fdc_label"]]
    for row, label in enumerate(labels):
        name, index = ORDER[row // 5], row % 5
        path = data / "photos" / "val" / name / f"{index}.{('jpg', 'png')[index % 2]}"
        assert found["class"][str(path)] == label, path


def config(data, **fields):
    found = own.get_config()
    found.benchmark = "trees"
    found.data.dir = str(data / "data")
    found.classes_per_task = SIZES
    found.class_order = (str(data / "order.txt"),)
    found.update_from_flattened_dict(SETTINGS)
    for field, value in fields.items():
        setattr(found, field, value)
    return found


def test_a_finished_run_is_tied_to_its_classes(killed, data, cache, tmp_path):
    again = shutil.copytree(killed, tmp_path / "again")
    known = dict(cache_dir=str(cache), report=False)
    results = small_runs.run(config(data, **known), again)
    assert results == small_runs.results(killed)
    for field, value in (("class_order", CLASSES), ("classes_per_task", 2)):
        other = config(data, **known, **{field: value})
        with pytest.raises(InputError, match=f"holds a run of another configuration: {field} was"):
            small_runs.run(other, again)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(benchmark=""),
            "config.benchmark: expected the name of a prepared data set, found ''",
        ),
        (dict(classes_per_task=-1), "classes_per_task: expected a whole number, or a list"),
        (dict(classes_per_task=(3, 0, 3)), r"classes_per_task: expected .* found \[3, 0, 3\]"),
        (dict(classes_per_task="five"), "classes_per_task: expected a whole number.* 'five'"),
        (dict(class_order=("a", "b"), class_order_seed=7), "seed: expected -1 beside .* found 7"),
        (dict(class_order=("nowhere.txt",)), "class_order: cannot read nowhere.txt: No such file"),
    ],
)
def test_settings_that_are_refused(data, fields, message):
    with pytest.raises(InputError, match=message):
        configuration.validate(config(data, **fields))


def test_an_order_is_read_from_its_file(data, tmp_path):
    found = config(data, class_order=(str(data / "order.txt"),))
    configuration.validate(found)
    assert found.class_order == ORDER
    configuration.validate(found)
    assert found.class_order == ORDER
    for content, message in ((b"", "found nothing"), (b"oak\n", "found oak"), (b"\xff\n", "read")):
        (tmp_path / "order.txt").write_bytes(content)
        with pytest.raises(InputError, match=f"config.class_order: .*{message}"):
            configuration.validate(config(data, class_order=(str(tmp_path / "order.txt"),)))
