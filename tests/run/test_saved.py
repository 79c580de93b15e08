"""Opening a work directory again."""

import os
import shutil

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

import fdc_jax
from fdc_jax.data.batches import evaluation_images
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json, write_json, write_manifest
from fdc_jax.run import configuration
from tests import small_runs
from tests.small_runs import contents, results


@pytest.fixture(scope="module")
def opened(finished_run, cache):
    before = contents(finished_run)
    yield fdc_jax.open_run(finished_run)
    assert contents(finished_run) == before


def test_encoders_of_a_finished_run_give_its_saved_features(opened):
    tested = np.array([3, 0, 58])
    test = opened.test_images(tested)
    tasks = opened.tasks
    first, second = (
        evaluation_images(tasks.train, indices[:3], 32) for indices in tasks.train_indices
    )
    for name, rows, images, t in (
        ("test_adapted", tested, test, 2),
        ("test_pretrained", tested, test, 0),
        ("train_adapted_0", slice(3), first, 1),  # after the first task
        ("train_previous_1", slice(3), second, 1),  # before the second one
    ):
        expected = np.load(opened.folder / "features" / f"{name}.npy")[rows]
        assert_allclose(opened.features(images, t), expected, atol=1e-5)
    for head, expected in zip(opened.heads(), opened.calibrator("fdc").heads, strict=True):
        assert_array_equal(head.weight, expected.weight)
    with pytest.raises(InputError, match="expected E_0 to E_2, found E_3"):
        opened.encoder(3)


def test_a_stopped_run_opens_with_its_trained_tasks(stopped_run):
    run = fdc_jax.open_run(stopped_run)
    assert (run.results, run.num_tasks, len(run.heads())) == (None, 2, 1)
    assert len(run.read_records()) == run.calibrator("fdc").num_tasks == 1
    with pytest.raises(InputError, match="expected E_0 to E_1, found E_2"):
        run.encoder(2)
    with pytest.raises(InputError, match=r"predictions.npz"):
        run.test_images(np.arange(2))


def test_folders_and_files_of_other_runs_are_refused(finished_run, tmp_path):
    (tmp_path / "seed_2").mkdir()
    with pytest.raises(InputError, match=r"of several seeds, open one: .*seed_2"):
        fdc_jax.open_run(tmp_path)
    weights = small_runs.other_weights(tmp_path)
    with pytest.raises(InputError, match=r"expected the weights of .*, found "):
        fdc_jax.open_run(finished_run, weights=str(weights)).encoder(0)
    run = fdc_jax.open_run(finished_run)
    run.predictions = run.predictions | {"label": run.predictions["label"][::-1]}
    with pytest.raises(InputError, match=r"predictions.npz: expected labels of"):
        run.test_images(np.arange(2))


@pytest.mark.ci
def test_weights_are_located_by_their_checksum(cache, tmp_path):
    weights, folder = small_runs.other_weights(tmp_path), tmp_path / "run"
    fields = small_runs.config(cache, encoder__weights=str(weights), num_tasks=1, train__epochs=1)
    small_runs.run(fields, folder)
    assert fdc_jax.open_run(folder).encoders.pretrained.path == weights
    copy = weights.rename(tmp_path / "copy.npz")
    shutil.copy(small_runs.REPOSITORY / "fdc_jax/assets/digits_vit.npz", weights)
    for _ in ("other weights", "none"):
        with pytest.raises(InputError, match=r"needs the weights of its encoder, .*: --weights=F"):
            fdc_jax.open_run(folder).encoder(0)
        weights.unlink(missing_ok=True)
    assert fdc_jax.open_run(folder, weights=str(copy)).encoders.pretrained.path == copy


def test_a_run_of_an_earlier_version_is_opened_and_resumes(finished_run, cache, tmp_path):
    """Later fields have their defaults; a field that is gone is ignored."""
    copy = small_runs.copied(finished_run, tmp_path / "copy")
    path = copy / "config.json"
    saved = read_json(path)
    earlier = saved | {"train.gone": 1, "num_tasks": None}
    for name in saved:
        if name.startswith(("learner.slca.", "encoder.heads", "evaluation.e", "train.schedule")):
            del earlier[name]
    write_json(path, earlier)
    fields = configuration.flatten(fdc_jax.open_run(copy).config)
    for name in saved.keys() - earlier.keys():
        assert fields[name] == saved[name], name
    (copy / "results.json").unlink()
    small_runs.run(small_runs.config(cache), copy)
    small_runs.same_outcome(finished_run, copy)


def in_layout_of_0_2_0(folder):
    """Moves calibrators out of the checkpoints, whose cursors counted the tasks that are done."""
    for checkpoint in (folder / "checkpoints").iterdir():
        path = checkpoint / "cursor" / "metadata"
        cursor = read_json(path)
        cursor["training_time"] = cursor.pop("seconds")
        cursor["tasks_done"] = cursor.pop("task") + (cursor.pop("phase") != "training")
        write_json(path, cursor)
        shutil.rmtree(checkpoint / "calibrators")
        write_manifest(checkpoint)
    return folder


def test_finished_run_of_0_2_0_is_opened(opened, finished_run, tmp_path):
    run = fdc_jax.open_run(in_layout_of_0_2_0(small_runs.copied(finished_run, tmp_path / "run")))
    image = np.zeros((8, 8), np.uint8)
    pd.testing.assert_frame_equal(run.predict(image), opened.predict(image))


def test_stopped_run_of_0_2_0_names_the_version_that_resumes_it(stopped_run, cache, tmp_path):
    folder = in_layout_of_0_2_0(small_runs.copied(stopped_run, tmp_path / "run"))
    before = contents(folder)
    with pytest.raises(InputError, match=r"are of fdc_jax 0.2.0; resume the run with that vers"):
        small_runs.run(small_runs.config(cache), folder)
    assert contents(folder) == before


# Commands on a folder, in a process that notes every file that it opens and every address. Its
# cache has the programs that other tests compiled, and its report has no figures.
COMMANDS = """
import os, sys
seen = []
def look(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir") or event.startswith("socket."):
        seen.append(f"{event} {arguments}")
sys.addaudithook(look)
from fdc_jax import export, latency, predict
from fdc_jax.machine.files import user_cache
from fdc_jax.report import report_command as pages, analysis, figures
folder, own, stranger, image, compiled = sys.argv[1:]
os.symlink(compiled, user_cache() / "compiled")
figures.draw, analysis.OF_THE_FIRST = lambda groups: [], ()
latency.measure_run.__defaults__ = ((1, 1, 1),)
codes = [
    predict.main([folder, image, f"--output={own}/labels.csv"]),
    pages.main([folder, f"--output={own}/report", "--sweep=none"]),
    export.main([folder, f"{own}/out"]),
    latency.main([folder]),
]
import jax
assert jax.config.jax_compilation_cache_dir == f"{own}/cache/compiled"
touched = [line for line in seen if stranger in line or "socket.connect" in line]
assert not touched, touched
print(codes)
"""


@pytest.mark.ci
def test_opened_folder_cannot_name_files_of_this_machine(finished_run, tmp_path):
    """No cache, images or weights that it names are read, and nothing is downloaded."""
    folder, known, stranger = (tmp_path / name for name in ("run", "own", "stranger"))
    small_runs.copied(finished_run, folder)
    images = stranger / "images"
    for name in "0123456789":
        (images / "train" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(images / "train" / name / "0.png")
    shutil.copytree(images / "train", images / "test")
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"]
    (stranger / "cache").mkdir()
    (stranger / "cache" / "compiled").symlink_to(compiled)
    forged = {
        "cache_dir": str(stranger / "cache"),
        "data.dir": str(images),
        "data.source": str(images),
        "benchmark": "photos",
        "encoder.weights": str(images / "weights.npz"),
    }
    saved, record = read_json(folder / "config.json"), results(folder)
    write_json(folder / "config.json", saved | forged)
    write_json(folder / "results.json", record | {"config": record["config"] | forged})
    known.mkdir()
    image = shutil.copy(images / "test" / "0" / "0.png", known)
    environment = {name: value for name, value in os.environ.items() if "COMPILATION" not in name}
    environment["FDC_JAX_CACHE"] = str(known / "cache")
    command = ("-c", COMMANDS, folder, known, stranger, image, compiled)
    printed = small_runs.python(*command, env=environment)
    assert printed.splitlines()[-1] == "[0, 0, 0, 2]"  # The images of latency are to be named.
    assert (known / "cache").stat().st_mode & 0o777 == 0o700
    assert "needs the images of" in (known / "report" / "report.html").read_text()


def test_learner_outside_the_package_runs_only_if_named(finished_run, tmp_path):
    copy = small_runs.copied(finished_run, tmp_path / "copy")
    name = "tests.learners.grows"
    write_json(copy / "config.json", read_json(copy / "config.json") | {"learner.name": name})
    run = fdc_jax.open_run(copy)
    with pytest.raises(InputError, match="to run its code, name it: --learner="):
        run.encoder(1)
    fdc_jax.open_run(copy, learner=name).encoder(1)
