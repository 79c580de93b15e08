"""Calibrators of every method as files, pickles and copies, and files that are refused."""

import copy
import json
import os
import pickle

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import storage
from fdc_jax.machine.files import write_npz
from tests.calibration import streams
from tests.errors import input_error

SETTINGS = {"attenuation": 0.3, "rlc_weight": 0.9, "neighbours": 2, "projections": 20, "seed": 3}


def saved_and_loaded(calibrator, folder):
    calibrator.save(folder / "calibrator.npz")
    return calibration.load(folder / "calibrator.npz")


WAYS = {
    "file": saved_and_loaded,
    "pickle": lambda calibrator, _: pickle.loads(pickle.dumps(calibrator)),
    "deep copy": lambda calibrator, _: copy.deepcopy(calibrator),
}


KINDS = [("fdc", kind) for kind in ("normalised_linear", "cosine", "nearest_mean")]


@pytest.mark.parametrize(
    ("name", "kind"), [(name, "linear") for name in calibration.METHODS] + KINDS
)
def test_files_pickles_and_copies_learn_as_the_original(name, kind, tmp_path):
    tasks = streams.known(8, 2)
    probes, previous = streams.probe_inputs(tasks), streams.previous_of(tasks)
    own_settings = calibration.METHODS[name].settings
    settings = {key: value for key, value in SETTINGS.items() if key in own_settings}
    original = calibration.make(name, **settings)
    kept = {way: keep(original, tmp_path) for way, keep in WAYS.items()}  # before any task
    for task, before in zip(tasks, previous, strict=True):
        given = [task], kind, True, [before]
        if original.num_tasks:
            streams.fit(copy.copy(original), *given)  # A shallow copy learns on its own.
            original.score(*probes)  # Nothing of this is kept.
        streams.fit(original, *given)
        for way, keep in WAYS.items():
            kept[way] = keep(streams.fit(kept[way], *given), tmp_path)
    fitted = streams.fitted(tasks, kind, previous=previous, method=name, **settings)
    for calibrator in (fitted, *kept.values()):
        assert type(calibrator) is type(original)
        assert calibrator.storage_bytes == original.storage_bytes
        assert calibrator.__getstate__().keys() == original.__getstate__().keys()
        streams.same_scores(calibrator, original, probes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "calibrator.npz"
    streams.fitted(streams.stream(5, 3)).save(path)
    return path


def refused(path, message=""):
    with input_error(f"^{path}: .*{message}"):
        calibration.load(path)


def test_files_of_other_kinds_are_refused_in_one_line(saved, tmp_path):
    np.savez(tmp_path / "objects.npz", format=np.array([None], object))
    np.savez(tmp_path / "features.npz", train_adapted_0=np.zeros((3, 4)))
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
    for path in (*tmp_path.iterdir(), tmp_path / "absent.npz"):
        refused(path, messages.get(path.name, ""))


def test_forged_files_are_refused_and_run_nothing(tmp_path):
    known = [[name, None] for name in calibration.FDC().__getstate__()]
    trees = [
        3,
        {"tuple": ["system", "touch ran"]},
        {"object": ["Settings", {"dict": [["attenuation", 7.0]]}]},
        {"object": ["FDC", {"dict": []}]},
        {"object": ["FDC", {"dict": [*known, ["score", 1]]}]},
        {"array": ["float64", 0, 4, 10**30]},
        {"eval": "touch ran"},
        {},
    ]
    texts = [*map(json.dumps, trees), "[" * 100_000 + "]" * 100_000]
    for number, tree in enumerate(texts):
        path = tmp_path / f"{number}.npz"
        arrays = {"float64": np.zeros(4)}
        digest = storage.checksum(tree, arrays)
        write_npz(path, arrays | {"format": storage.FORMAT, "tree": tree, "sha256": digest})
        refused(path, "(not as this version writes it|expected a calibrator)")
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}
    assert not os.path.exists("ran")
