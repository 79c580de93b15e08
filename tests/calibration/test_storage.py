"""Calibrators of every method as files, pickles and copies, and files that are refused."""

import copy
import json
import os
import pickle

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import storage
from fdc_jax.errors import InputError
from fdc_jax.machine.files import write_npz
from tests.calibration import streams

SETTINGS = {"attenuation": 0.3, "rlc_weight": 0.9, "neighbours": 2, "projections": 30, "seed": 3}


def saved_and_loaded(calibrator, folder):
    calibrator.save(folder / "calibrator.npz")
    return calibration.load(folder / "calibrator.npz")


WAYS = {
    "file": saved_and_loaded,
    "pickle": lambda calibrator, _: pickle.loads(pickle.dumps(calibrator)),
    "deep copy": lambda calibrator, _: copy.deepcopy(calibrator),
}


def settings_of(name):
    return {key: SETTINGS[key] for key in calibration.METHODS[name].settings if key in SETTINGS}


def make(name):
    return calibration.make(name, **settings_of(name))


def fit_task(calibrator, task, previous):
    head, pretrained = task.head, task.pretrained
    calibrator.fit_task(task.adapted, task.labels, head, pretrained, previous=previous)


@pytest.mark.parametrize("name", calibration.METHODS)
def test_files_pickles_and_copies_learn_as_the_original(name, tmp_path):
    tasks = streams.known(8, 3)
    probes, previous = streams.probe_inputs(tasks), streams.previous_of(tasks)
    original = make(name)
    kept = {way: keep(original, tmp_path) for way, keep in WAYS.items()}  # before any task
    for pair in zip(tasks, previous, strict=True):
        if original.num_tasks:
            fit_task(copy.copy(original), *pair)  # A shallow copy learns on its own.
        fit_task(original, *pair)
        for way, keep in WAYS.items():
            fit_task(kept[way], *pair)
            kept[way] = keep(kept[way], tmp_path)
    for calibrator in (original, *kept.values()):
        calibrator.finalize()
    kept["finalized"] = saved_and_loaded(original, tmp_path)
    fitted = streams.fitted(tasks, previous=previous, method=name, **settings_of(name))
    for calibrator in (fitted, *kept.values()):
        assert type(calibrator) is type(original)
        assert calibrator.storage_bytes == original.storage_bytes
        assert calibrator.__getstate__().keys() == original.__getstate__().keys()
        streams.same_scores(calibrator, original, probes)


@pytest.mark.parametrize("kind", ["normalised_linear", "cosine", "nearest_mean"])
def test_heads_of_every_kind_are_kept(kind, tmp_path):
    tasks = streams.stream(3, 2)
    calibrator = streams.fitted(tasks, kind)
    loaded = saved_and_loaded(calibrator, tmp_path)
    assert type(loaded.heads[0]) is type(calibrator.heads[0])
    streams.same_scores(loaded, calibrator, streams.probe_inputs(tasks))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "calibrator.npz"
    streams.fitted(streams.stream(5, 3)).save(path)
    return path


def refused(path, message=None):
    with pytest.raises(InputError, match=message) as caught:
        calibration.load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_files_of_other_kinds_are_refused_in_one_line(saved, tmp_path):
    (tmp_path / "text.npz").write_bytes(b"no archive")
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", format=np.array([None], object))
    np.savez(tmp_path / "features.npz", train_adapted_0=np.zeros((3, 4)))
    np.savez(tmp_path / "times.npz", format=storage.FORMAT, tree="0", t=np.zeros(2, "M8[s]"))
    arrays = dict(np.load(saved))
    np.savez(tmp_path / "changed.npz", **arrays | {"float32": arrays["float32"] + 1})
    np.savez(tmp_path / "unknown.npz", **arrays | {"more": np.zeros(3)})
    np.savez(tmp_path / "old.npz", **arrays | {"format": "fdc_jax calibrator, 3"})
    messages = {
        "absent.npz": "no such file",
        "features.npz": f"expected a file of kind '{storage.FORMAT}', found ''",
        "changed.npz": "damaged: its content is not what was written",
        "unknown.npz": "expected arrays by their type, found more",
        "old.npz": "expected a file of kind .*; `fdc posthoc` fits it again",
    }
    for path in (*tmp_path.iterdir(), tmp_path / "absent.npz", tmp_path):
        refused(path, messages.get(path.name))


def forged(path, tree, **arrays):
    """Writes a file whose checksum is right."""
    tree = json.dumps(tree)
    write_npz(
        path,
        arrays | {"format": storage.FORMAT, "tree": tree, "sha256": storage.checksum(tree, arrays)},
    )
    return path


def test_forged_files_are_refused_and_run_nothing(tmp_path):
    state = calibration.FDC().__getstate__()
    known = {"dict": [[name, None] for name in state]}
    trees = [
        3,
        None,
        {"tuple": ["View", 1, 2, 3]},
        {"tuple": ["system", "touch ran"]},
        {"object": ["Popen", {"dict": []}]},
        {"object": ["Settings", {"dict": [["attenuation", 7.0]]}]},
        {"object": ["Settings", {"dict": [["unknown", 7.0]]}]},
        {"object": ["FDC", {"dict": []}]},
        {"object": ["FDC", {"dict": [*known["dict"], ["score", 1]]}]},
        {"array": ["float32", 0, 4]},
        {"array": ["float64", 0, 4, 10**30]},
        {"dict": [[[1], 2]]},
        {"eval": "touch ran"},
        {},
    ]
    for number, tree in enumerate(trees):
        path = forged(tmp_path / f"{number}.npz", tree, float64=np.zeros(4))
        refused(path, "not as this version writes it|expected a calibrator")
    deep = "[" * 100_000 + "]" * 100_000
    arrays = {"format": storage.FORMAT, "tree": deep, "sha256": storage.checksum(deep, {})}
    write_npz(tmp_path / "deep.npz", arrays)
    refused(tmp_path / "deep.npz")
    assert not any(path.suffix != ".npz" for path in tmp_path.iterdir())
    assert not os.path.exists("ran")
