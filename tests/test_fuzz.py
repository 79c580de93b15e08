"""Mutations of all that is read again: the same answer, or one InputError line that names the file.

A kind and a number determine a mutation; `-m slow` tries 200 of every kind.
"""

import contextlib
import copy
import functools
import json
import logging
import re
import shutil
import warnings

import jax
import numpy as np
import pytest

from fdc_jax import export, open_run
from fdc_jax.errors import InputError, escaped
from fdc_jax.machine import files
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.run import resume
from tests.run.test_damaged import VALUES, use

pytestmark = pytest.mark.ci


def damaged(rng, path):
    """Flips, cuts, overwrites or inserts bytes."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.integers(1, 5)):
        start = int(rng.integers(0, len(content) + 1))
        match rng.integers(0, 6):
            case 0 | 1 | 2 if start < len(content):
                content[start] ^= 1 << int(rng.integers(0, 8))
            case 3:
                del content[start:]
            case 4:
                content[start:start] = rng.bytes(int(rng.integers(1, 20)))
            case 5:
                content[start : start + 8] = b"\xff" * 8
    path.write_bytes(bytes(content))


def altered_json(rng, path):
    """Removes, renames, wraps, negates or replaces one value."""
    root = node = [json.loads(path.read_text())]
    key = 0
    while isinstance(node[key], dict | list) and node[key] and rng.random() < 0.9:
        node = node[key]
        keys = [*node] if isinstance(node, dict) else range(len(node))
        key = keys[rng.integers(len(keys))]
    value = node[key]
    match rng.integers(0, 8):
        case 0 if node is not root:
            del node[key]
        case 1 if isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        case 2:
            node[key] = [value]
        case 3 if isinstance(value, int | float):
            node[key] = -1e9 * value
        case _:
            node[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
    path.write_text(json.dumps(root[0]))


def altered_arrays(rng, path):
    """Removes, renames, reshapes, converts, lengthens or spoils one array."""
    merged = path.suffix == ".safetensors"
    arrays = dict((files.read_safetensors if merged else files.read_npz)(path))
    name = rng.choice(sorted(arrays))
    array = np.array(arrays.pop(name))
    rows = np.atleast_1d(array)
    others = [array[None], array.T, array.ravel(), rows[:0], np.r_[rows, rows[:1]]]
    if array.dtype.kind in "biuf":
        others += [array.astype(dtype) for dtype in ("f2", "f8", "i1", "u8", "?")]
        spot = rng.permutation(rows.size).reshape(rows.shape) == 0
        others += [np.where(spot, value, rows) for value in (np.nan, np.inf, 1e38, -1, 2**62)]
    index = rng.integers(-2, len(others))
    if index == -1:
        arrays[f"{name}1"] = array
    elif index >= 0:
        arrays[name] = np.asarray(others[index], order="C")
    (files.write_safetensors if merged else files.write_npz)(path, arrays)


def run(base, name):
    opened = use(base / "run")
    return [opened.config, opened.results, opened.read_records(), opened.predictions]


@functools.cache
def encoders(base):
    return open_run(base / "run").encoders


def exported(base, name):
    opened = open_run(base / "out")
    opened.encoders = encoders(base)
    scores = [score(opened.calibrator(name)) for name in opened.calibrators]
    return [opened.config, opened.results, scores, opened.encoder(opened.num_tasks)]


def score(calibrator):
    views = [np.ones((2, width), np.float32) for width in calibrator.widths]
    return calibrator.score(*views).task_scores


def checkpoints(base, name):
    lines, log = [], logging.getLogger("fdc_jax.machine.checkpoint")
    log.filters = [lambda record: lines.append(record.getMessage())]
    kept = Checkpoints(base / "run/checkpoints", read_only=True)
    point = resume.newest(encoders(base), 1, kept)
    if lines:  # of a checkpoint that is passed over
        raise InputError(lines[0])
    scores = [score(calibrator) for calibrator in point.calibrators.values()]
    return [point.cursor.task, point.cursor.phase, point.state, scores]


def forged(mutate):
    """Returns a mutation after which manifests are written anew, as a forger would."""

    def mutate_and_sign(rng, path):
        mutate(rng, path)
        for manifest in manifests(path):
            files.write_manifest(manifest.parent)

    return mutate_and_sign


def manifests(path):
    paths = [folder / files.MANIFEST for folder in path.parents]
    return [manifest for manifest in paths if manifest.exists()]


# Kind: the files, how they are mutated, what reads them, and whether anything in them tells an
# altered value from an honest one, so that no other answer is accepted.
KINDS = {
    "configuration": ("run/config.json", altered_json, run, False),
    "records": ("run/**/[rlt]*[sy01].json", altered_json, run, False),
    "bytes of JSON": ("run/**/[crlt]*[stgy01].json", damaged, run, False),
    "predictions": ("run/predictions.npz", altered_arrays, run, False),
    "bytes of predictions": ("run/predictions.npz", damaged, run, True),
    "cursors": ("run/checkpoints/*/cursor/metadata", forged(altered_json), checkpoints, False),
    "bytes of checkpoints": ("run/checkpoints/**/*", damaged, checkpoints, True),
    "manifest": ("out/manifest.json", altered_json, exported, True),
    "bytes of exports": ("out/**/[!R]*", damaged, exported, True),
    "forged encoder": ("out/merged.safetensors", forged(altered_arrays), exported, False),
    "calibrators": ("out/calibrators/*", forged(altered_arrays), exported, True),
    "bytes of calibrators": ("out/calibrators/*", forged(damaged), exported, True),
}


@contextlib.contextmanager
def restored(path):
    before = {file: file.read_bytes() for file in (path, *manifests(path))}
    path.unlink()  # Its arrays may still be mapped.
    path.write_bytes(before[path])
    try:
        yield
    finally:
        path.unlink()
        for file, content in before.items():
            file.write_bytes(content)


@pytest.fixture(scope="module")
def base(tmp_path_factory, finished_run):
    """Folders of a run with a latency, and of its export."""
    base = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(finished_run, base / "run", ignore=shutil.ignore_patterns("features", ".lock"))
    latency = {"contenders": {"baseline": {"milliseconds": [1.0], "peak_bytes": None}}}
    files.write_json(base / "run/latency.json", latency)
    export.write(finished_run, base / "out")
    return base


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_give_the_same_answer_or_one_line(base, kind, count):
    pattern, mutate, read, exact = KINDS[kind]
    paths = sorted(path for path in base.glob(pattern) if path.is_file())
    top = pattern.partition("/")[0]
    expected = jax.tree.map(np.asarray, read(base, top))
    for number in range(count):
        rng = np.random.default_rng([number, *kind.encode()])
        path = paths[rng.integers(len(paths))]
        with restored(path), warnings.catch_warnings():
            with np.errstate(all="ignore"):
                mutate(rng, path)
            warnings.simplefilter("error")
            try:
                answer = jax.tree.map(np.asarray, read(base, top))
            except InputError as error:
                named = {*re.split("[/: ]", str(error))}
                assert named & {*path.relative_to(base).parts}, (number, error)
                assert escaped(str(error)) == str(error)
            else:
                if exact:
                    np.testing.assert_equal(answer, expected, f"{number}: {path.name}")
