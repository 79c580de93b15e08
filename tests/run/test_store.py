"""Work directories: other settings of FDC, repair, locks, and opening them again."""

import logging
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import fdc_jax
from fdc_jax.calibration.components import WHITENED
from fdc_jax.data.batches import evaluation_images
from fdc_jax.errors import InputError
from fdc_jax.machine.files import locked
from tests import small_runs
from tests.small_runs import config, results, same_outcome
from tests.small_runs import run as go


def contents(workdir):
    """Every file but those that say when something happened."""
    return {
        path.relative_to(workdir).as_posix(): path.read_bytes()
        for path in workdir.rglob("*")
        if path.is_file() and path.name not in ("metrics.jsonl", ".lock")
    }


@pytest.fixture
def copy(whole, tmp_path):
    return small_runs.copied(whole, tmp_path / "copy")


# Other settings of FDC ---------------------------------------------------------------------------


OTHER = dict(fdc__retained_energy=0.9, fdc__attenuation=0.25)


@pytest.fixture(scope="module")
def anew(tmp_path_factory, cache):
    """A run with other settings from its start."""
    workdir = tmp_path_factory.mktemp("runs") / "anew"
    go(config(cache, **OTHER), workdir)
    return workdir


@pytest.mark.parametrize("start", ["whole", "half"])
def test_other_settings_of_fdc_refit_what_was_trained(
    request, start, whole, anew, cache, tmp_path, caplog
):
    """A finished run and one that stopped end as if they had been run with the new settings."""
    workdir = small_runs.copied(request.getfixturevalue(start), tmp_path / "run")
    trained = len(small_runs.events(workdir, "epoch"))
    with caplog.at_level(logging.WARNING):
        go(config(cache, **OTHER), workdir)
    assert "fitted again from saved features: fdc.attenuation was 0.5, is 0.25" in caplog.text
    assert len(small_runs.events(workdir, "epoch")) == max(4, trained)
    same_outcome(anew, workdir)
    assert results(workdir)["timing"].keys() == results(whole)["timing"].keys()


def test_the_whitened_affinity_leaves_the_papers_numbers(whole, copy, cache):
    fields = {f"fdc__{name}": value for name, value in WHITENED.items()}
    found, expected = go(config(cache, **fields), copy), results(whole)
    assert found.keys() - expected.keys() == {"whitened"}
    for key in expected.keys() - {"timing", "config", "versions", "curve"}:
        assert found[key] == expected[key], key
    after = small_runs.predictions(copy)
    right = 100 * np.mean(after.pop("whitened_label") == after["label"])
    after.pop("whitened_task")
    small_runs.assert_equal(after, small_runs.predictions(whole))
    assert found["whitened"]["accuracy"] == pytest.approx(right)
    assert found["whitened"]["storage_bytes"] > found["fdc_storage_bytes"]


@pytest.mark.parametrize(
    ("lost", "field", "message"),
    [
        (
            "train_adapted_0.npy",
            {"fdc__neighbours": 2},
            r"neighbours was 1, is 2.*_0.npy is mi",
        ),
        # Features of the encoder before each task were never written.
        (None, {"fdc__transport": True}, r"was trained without fdc.transport, .* the first one"),
    ],
)
def test_settings_without_the_features_that_they_need_are_refused(
    copy, cache, lost, field, message
):
    if lost:
        (copy / "features" / lost).unlink()
    before = contents(copy)
    with pytest.raises(InputError, match=message):
        go(config(cache, **field), copy)
    assert contents(copy) == before


# Repair ------------------------------------------------------------------------------------------


def damage(path):
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("damaged", ("predictions.npz", "features/test_adapted.npy")),
        ("missing", ("calibrator.npz",)),
        ("damaged", ("calibrator.npz", "calibrators/calibrator_002.npz", "predictions.npz")),
    ],
)
def test_a_finished_run_makes_again_what_is_missing(whole, copy, cache, caplog, kind, names):
    for name in names:
        damage(copy / name) if kind == "damaged" else (copy / name).unlink()
    with caplog.at_level(logging.WARNING):
        go(config(cache), copy)
    assert "made again: " in caplog.text and names[0] in caplog.text
    assert len(small_runs.events(copy, "epoch")) == 4
    same_outcome(whole, copy)
    expected = contents(whole)
    for name in ("features/test_adapted.npy", "features/train_adapted_1.npy"):
        assert contents(copy)[name] == expected[name]
    with np.load(copy / "calibrator.npz") as ours, np.load(whole / "calibrator.npz") as theirs:
        for name in theirs.files:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_what_only_training_gives_is_not_trained_again_unasked(copy, cache):
    finished = results(copy)
    damage(copy / "features" / "train_adapted_0.npy")
    with pytest.raises(InputError, match=r"train_adapted_0.npy: missing or damaged.*remove"):
        go(config(cache), copy)
    for path in (copy / "features").iterdir():
        path.unlink()
    (copy / "features").rmdir()
    assert go(config(cache), copy) == finished
    (copy / "predictions.npz").unlink()
    assert go(config(cache), copy)["accuracy"] == finished["accuracy"]
    # Half of the features, without those of training, would be of no use.
    assert not (copy / "features").exists()
    assert go(config(cache), copy)["accuracy"] == finished["accuracy"]
    (copy / "predictions.npz").unlink()
    for path in (copy / "checkpoints").iterdir():
        path.rename(copy / f"elsewhere_{path.name}")
    with pytest.raises(InputError, match=r"no checkpoint to make it from; remove .*results.json"):
        go(config(cache), copy)


def test_config_files_are_never_rewritten_silently(copy, cache):
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"train.rank": 10', '"train.rank": 3'))
    for rank in (10, 3):
        with pytest.raises(InputError, match=r"config.json says train.rank 3, results.json 10"):
            go(config(cache, train__rank=rank), copy)
    (copy / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds a run without its config.json"):
        go(config(cache), copy)
    assert not (copy / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("config.json", "put it back, or choose another --workdir"),
        ("results.json", "remove it, and the run writes it again"),
        ("tasks/task_001.json", "remove it, and its accuracies are measured again"),
    ],
)
def test_unreadable_json_names_the_remedy(whole, copy, cache, name, remedy):
    (copy / name).write_text("{")
    if name.startswith("tasks"):
        (copy / "results.json").unlink()
    with pytest.raises(InputError, match=rf"{name}: unreadable JSON \(.*\); {remedy}"):
        go(config(cache), copy)
    if name != "config.json":
        (copy / name).unlink()
        go(config(cache), copy)
        same_outcome(whole, copy)


# Whose directory it is ---------------------------------------------------------------------------


def other_weights(folder):
    """Writes the encoder with other numbers."""
    path = folder / "weights.npz"
    with np.load(small_runs.REPOSITORY / "fdc_jax/assets/digits_vit.npz") as file:
        np.savez(path, **{name: file[name] * 1.01 for name in file.files})
    return path


def test_another_run_is_refused(copy, cache, tmp_path):
    with pytest.raises(InputError, match=r"of another configuration: train.rank was 10, is 3;"):
        go(config(cache, train__rank=3), copy)
    weights = other_weights(tmp_path)
    with pytest.raises(InputError, match="weights sha256 was "):
        go(config(cache, encoder__weights=str(weights)), copy)
    with pytest.raises(InputError, match="holds a run of a single seed"):
        go(config(cache, seed=(1, 2)), copy)
    (tmp_path / "several" / "seed_1").mkdir(parents=True)
    with pytest.raises(InputError, match="holds runs of several seeds"):
        go(config(cache), tmp_path / "several")
    with pytest.raises(InputError, match="expected a folder to write in"):
        go(config(cache), weights)


def test_one_process_per_work_directory(copy, cache):
    """The lock of a process that was killed is free, though its name still stands there."""
    script = (
        "import fcntl, os, sys, time\n"
        "file = open(sys.argv[1], 'a+')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(f'process {os.getpid()} on elsewhere')\n"
        "file.flush()\n"
        "print('locked', flush=True)\n"
        "time.sleep(600)\n"
    )
    path = copy / ".lock"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    name = f"process {other.pid} on elsewhere"
    with pytest.raises(InputError, match=f"copy is in use by {name}; wait for it, stop it or"):
        go(config(cache), copy)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert path.read_text() == name
    with locked(copy):
        assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(InputError, match=f"in use by process {os.getpid()} on "):
            go(config(cache), copy)
    assert path.read_text() == ""
    go(config(cache), copy)


# Opening -----------------------------------------------------------------------------------------


def test_a_finished_run_is_opened_without_a_change(whole, cache):
    before = contents(whole)
    run = fdc_jax.open_run(whole)
    assert (run.num_tasks, run.config["train.rank"]) == (2, 10)
    assert run.results == results(whole)
    assert sorted(run.class_names) == [str(digit) for digit in range(10)]
    rows = np.array([3, 0, 58])
    images = run.test_images(rows)
    assert (images.shape, images.dtype) == ((3, 32, 32, 3), np.uint8)
    for name, t in (("test_adapted", 2), ("test_pretrained", 0)):
        expected = np.load(whole / "features" / f"{name}.npy")[rows]
        np.testing.assert_allclose(run.features(rows, t), expected, atol=1e-5)
        np.testing.assert_array_equal(run.features(images, t), run.features(rows, t))
    train = np.load(whole / "features" / "train_adapted_0.npy")
    tasks = run.experiment.tasks
    first = evaluation_images(tasks.train, tasks.train_indices[0][:4], 32)
    np.testing.assert_allclose(run.features(first, 1), train[:4], atol=1e-5)
    adapted, pretrained = (
        np.load(whole / "features" / f"test_{view}.npy") for view in ("adapted", "pretrained")
    )
    fdc = run.calibrator()
    np.testing.assert_array_equal(
        fdc.score(adapted, pretrained).label, run.predictions["fdc_label"]
    )
    for head, other in zip(run.heads(), fdc.heads, strict=True):
        np.testing.assert_array_equal(head.weight, other.weight)
    with pytest.raises(InputError, match="expected E_0 to E_2, found E_3"):
        run.encoder(3)
    assert contents(whole) == before


def test_a_stopped_run_is_opened_as_far_as_it_went(half):
    run = fdc_jax.open_run(half)
    assert (run.results, run.num_tasks, len(run.heads())) == (None, 2, 1)
    assert run.calibrator().num_tasks == 1
    run.encoder(1)
    with pytest.raises(InputError, match="expected E_0 to E_1, found E_2"):
        run.encoder(2)
    with pytest.raises(InputError, match=r"predictions.npz"):
        run.test_images(np.arange(2))


def test_what_is_no_run_or_another_one_is_refused(copy, tmp_path):
    with pytest.raises(InputError, match=r"found no config.json"):
        fdc_jax.open_run(tmp_path)
    (tmp_path / "seed_2").mkdir()
    with pytest.raises(InputError, match=r"of several seeds, open one: .*seed_2"):
        fdc_jax.open_run(tmp_path)
    weights = other_weights(tmp_path)
    with pytest.raises(InputError, match=r"expected the weights that .* was run with"):
        fdc_jax.open_run(copy, weights=str(weights)).encoder(0)
    with np.load(copy / "predictions.npz") as file:
        columns = dict(file)
    np.savez(copy / "predictions.npz", **columns | {"label": columns["label"][::-1]})
    with pytest.raises(InputError, match="predictions are not of the test images"):
        fdc_jax.open_run(copy).test_images(np.arange(2))
