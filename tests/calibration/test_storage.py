"""Calibrators of every method as files, pickles and copies, and files that are refused."""

import copy
import json
import os
import pickle

import numpy as np
import pytest

from fdc_jax import calibration, heads
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


def make(name):
    own = {key: SETTINGS[key] for key in calibration.METHODS[name].settings if key in SETTINGS}
    return calibration.make(name, **own)


@pytest.mark.parametrize("name", calibration.METHODS)
def test_what_is_kept_in_mid_stream_goes_on_as_if_it_had_not_been(name, tmp_path):
    stream = streams.known(8, 3)
    inputs, previous = streams.probe_inputs(stream), streams.previous_of(stream)
    whole = make(name)
    kept = {way: keep(whole, tmp_path) for way, keep in WAYS.items()}  # Before any task.
    for task, before in zip(stream, previous, strict=True):
        views = task.adapted, task.labels, streams.head_of(task, "linear"), task.pretrained
        for way, each in [*kept.items(), ("", whole)]:
            each.fit_task(*views, previous=before)
            if way:
                kept[way] = WAYS[way](each, tmp_path)
    for each in (whole, *kept.values()):
        each.finalize()
    scored = WAYS["file"](whole, tmp_path)
    for each in (scored, *kept.values()):
        assert type(each) is type(whole) and each.storage_bytes == whole.storage_bytes
        assert each.__getstate__().keys() == whole.__getstate__().keys()
        streams.same_scores(each, whole, inputs)
        np.testing.assert_array_equal(each.class_scores(*inputs), whole.class_scores(*inputs))


@pytest.mark.parametrize("name", calibration.METHODS)
def test_a_copy_goes_its_own_way(name):
    stream = streams.known(8, 2)
    inputs, previous = streams.probe_inputs(stream), streams.previous_of(stream)
    whole, other = make(name), make(name)
    for number, (task, before) in enumerate(zip(stream, previous, strict=True)):
        views = task.adapted, task.labels, streams.head_of(task, "linear"), task.pretrained
        if number == 0:
            other.fit_task(*views, previous=before)
            whole.fit_task(*views, previous=before)
        else:
            copy.copy(whole).fit_task(*views, previous=before)
    for each in (whole, other):
        each.finalize()
    streams.same_scores(whole, other, inputs)


@pytest.mark.parametrize("kind", ["normalised_linear", "cosine", "nearest_mean"])
def test_heads_of_every_kind_are_kept(kind, tmp_path):
    stream = streams.stream(3, 2)
    found = streams.fitted(stream, kind)
    again = saved_and_loaded(found, tmp_path)
    assert type(again.heads[0]) is type(found.heads[0]) in heads.KINDS
    streams.same_scores(again, found, streams.probe_inputs(stream))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "calibrator.npz"
    streams.fitted(streams.stream(5, 3)).save(path)
    return path


def refused(path, message=None):
    with pytest.raises(InputError, match=message) as caught:
        calibration.load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_files_of_other_kinds_are_one_line(saved, tmp_path):
    (tmp_path / "text.npz").write_bytes(b"no archive")
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", format=np.array([None], object))
    np.savez(tmp_path / "features.npz", train_adapted_0=np.zeros((3, 4)))
    np.savez(tmp_path / "times.npz", format=storage.FORMAT, tree="0", t=np.zeros(2, "M8[s]"))
    arrays = dict(np.load(saved))
    np.savez(tmp_path / "changed.npz", **arrays | {"float32": arrays["float32"] + 1})
    np.savez(tmp_path / "unknown.npz", **arrays | {"more": np.zeros(3)})
    np.savez(tmp_path / "old.npz", **arrays | {"format": "fdc_jax calibrator, 3"})
    said = {
        "absent.npz": "no such file",
        "features.npz": f"expected a file of kind '{storage.FORMAT}', found ''",
        "changed.npz": "damaged: its content is not what was written",
        "unknown.npz": "expected arrays by their type, found more",
        "old.npz": "expected a file of kind .*; `fdc posthoc` fits it again",
    }
    for path in (*tmp_path.iterdir(), tmp_path / "absent.npz", tmp_path):
        refused(path, said.get(path.name))


def forged(path, tree, **arrays):
    """Writes a file whose checksum is right."""
    tree = json.dumps(tree)
    write_npz(
        path,
        arrays | {"format": storage.FORMAT, "tree": tree, "sha256": storage.checksum(tree, arrays)},
    )
    return path


def test_unknown_kinds_and_trees_are_refused_and_nothing_is_run(tmp_path):
    state = calibration.FDC().__getstate__()
    known = {"dict": [[name, None] for name in state]}
    trees = [
        3,
        None,
        {"tuple": ["View", 1, 2, 3]},
        {"tuple": ["system", "touch ran"]},
        {"object": ["Popen", {"dict": []}]},
        {"object": ["View", {"dict": []}]},
        {"object": ["Settings", {"dict": [["attenuation", 7.0]]}]},
        {"object": ["Settings", {"dict": [["unknown", 7.0]]}]},
        {"object": ["FDC", {"dict": []}]},
        {"object": ["FDC", {"dict": [*known["dict"], ["score", 1]]}]},
        {"object": ["FDC", 5]},
        {"array": ["float32", 0, 4]},
        {"array": ["float64", 0, 4, 10**30]},
        {"dict": [[[1], 2]]},
        {"eval": "touch ran"},
        {"tuple": [], "array": []},
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
