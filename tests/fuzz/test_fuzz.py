"""Whatever lies in a file: one line of the project's own error, or the same numbers as before.

The numbers of inputs are small by default. `FDC_JAX_FUZZ=5000 pytest -m ci tests/fuzz` tries more,
and a failure names the number by which `mutations` made its input.
"""

import contextlib
import io
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import fdc_jax
from fdc_jax import calibration, export
from fdc_jax.data import folder as image_folder
from fdc_jax.data import tfds_format
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.model import weights
from fdc_jax.report import runs
from fdc_jax.run import configuration
from tests.data.conftest import encode_fixture, photo  # noqa: F401
from tests.data.test_tfds_format import prepare  # noqa: F401
from tests.features.test_feature_files import example
from tests.fuzz import mutations

ROOT = Path(__file__).resolve().parents[2]
MANY = int(os.environ.get("FDC_JAX_FUZZ", "300"))
inputs = pytest.mark.parametrize("count", [12, pytest.param(MANY, marks=pytest.mark.ci)])
DAMAGED, ALTERED = mutations.damaged, mutations.altered_json


def fuzz(read, root, files, mutate, count, same=True):
    """Reads a file or folder after each of many changes to one of its files.

    Args:
        read: what is tried, a function of `root`, whose result can be compared.
        root: file or folder; whole again after each change.
        files: those to change.
        mutate: of a generator and the bytes of a file.
        count: of inputs.
        same: whether what is read must be what was read before.
    """
    whole, bad = {path: path.read_bytes() for path in files}, []
    expected = read(root)
    for number in range(count):
        rng = np.random.default_rng([number, len(files)])
        path = files[rng.integers(len(files))]
        content = mutate(rng, whole[path])
        path.unlink()  # of arrays that are still mapped
        path.write_bytes(content)
        try:
            found = read(root)
        except InputError as error:
            if "\n" in str(error) or not str(error):
                bad.append(f"{number}: {path.name}: not one line: {str(error)[:200]!r}")
        except Exception as error:
            bad.append(f"{number}: {path.name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            if same and content != whole[path] and not equal(found, expected):
                bad.append(f"{number}: {path.name}: other numbers without a word")
        path.unlink(missing_ok=True)
        path.write_bytes(whole[path])
    assert not bad, f"{len(bad)} of {count} inputs:\n" + "\n".join(bad[:20])


def equal(one, other):
    """Tells whether two trees of dictionaries, lists and arrays hold the same."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return np.array_equal(one, other)


# Features -----------------------------------------------------------------------------------------


def scored(path, names=("raw", "ncm")):
    """Labels and scores of the test features of a feature file by some calibrators."""
    features = feature_files.load(path)
    given = [features.test_adapted, features.test_pretrained]
    found = [features.fit(calibration.make(name)).score(*given).task_scores for name in names]
    return [*found, [] if features.test_labels is None else np.array(features.test_labels)]


@inputs
@pytest.mark.parametrize("kind", ["stored", "packed", "folder"])
def test_damaged_feature_files(tmp_path, kind, count):
    path = tmp_path / ("features" if kind == "folder" else "features.npz")
    {"stored": lambda p, a: np.savez(p, **a), "packed": lambda p, a: np.savez_compressed(p, **a),
     "folder": feature_files.write}[kind](path, example())  # fmt: skip
    fuzz(scored, path, sorted(path.iterdir()) if path.is_dir() else [path], DAMAGED, count)


@inputs
def test_feature_files_with_other_arrays(tmp_path, count):
    path = tmp_path / "features.npz"
    arrays = example() | {"head_kind": np.array("linear")}
    np.savez(path, **arrays)

    def altered(rng, content):
        file = io.BytesIO()
        np.savez(file, **mutations.altered_arrays(rng, arrays))
        return file.getvalue()

    def read(path):
        return scored(path, ("raw", "ncm", "gaussians"))

    fuzz(read, path, [path], altered, count, same=False)


# Calibrators and weights --------------------------------------------------------------------------


@inputs
@pytest.mark.parametrize("name", ["fdc", "gaussians", "ranpac"])
def test_damaged_calibrators(tmp_path, name, count):
    np.savez(tmp_path / "features.npz", **example())
    features = feature_files.load(tmp_path / "features.npz")
    path = tmp_path / "calibrator.npz"
    features.fit(calibration.make(name, projections=20)).save(path)

    def read(path):
        calibrator = calibration.load(path)
        scores = calibrator.score(features.test_adapted, features.test_pretrained)
        return [calibrator.classes, scores.task_scores]

    fuzz(read, path, [path], DAMAGED, count)


GOLDEN = ROOT / "tests" / "model" / "golden"
VIT = [GOLDEN / "encoders" / "timm_vit" / name for name in ("model.safetensors", "config.json")]


@inputs
@pytest.mark.parametrize(
    ("files", "damage", "same"),
    [
        ([GOLDEN / "augreg.npz"], DAMAGED, True),
        (VIT[:1], DAMAGED, False),  # The format has no checksum; runs compare that of the file.
        (VIT[1:], ALTERED, False),
    ],
    ids=["npz", "safetensors", "their configuration"],
)
def test_weights(tmp_path, files, damage, same, count):
    for path in (files[0], *VIT):
        shutil.copy(path, tmp_path)
    path = tmp_path / (files[0].name if files[0] not in VIT else VIT[0].name)

    def read(path):
        name, variant = weights.recognise(str(path), "")
        params = weights.load(path, variant, variant.image_size).params
        return [name, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]]

    fuzz(read, path, [tmp_path / file.name for file in files], damage, count, same)


# Runs ---------------------------------------------------------------------------------------------


def opened(folder):
    """What a run says of itself, without its encoder."""
    run = fdc_jax.open_run(folder)
    found = [run.config, run.results, run.num_tasks, run.class_names, run.records]
    for name in run.calibrators:
        calibrator = run.calibrator(name)
        views = [np.ones((3, width), np.float32) for width in calibrator.widths]
        found.append(calibrator.score(*views).task_scores)
    return [*found, run.predictions, [run.heads(1)] if run.exported else []]


@inputs
@pytest.mark.parametrize("damage", [DAMAGED, ALTERED], ids=["bytes", "manifest"])
def test_exports(tmp_path, whole, damage, count):
    out = tmp_path / "out"
    export.write(whole, out)
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix != ".md"]
    fuzz(opened, out, files if damage is DAMAGED else [out / "manifest.json"], damage, count)


@inputs
@pytest.mark.parametrize("damage", [DAMAGED, ALTERED], ids=["bytes", "json"])
def test_work_directories(tmp_path, whole, damage, count):
    """As a run left it; and one without a manifest, of which reports and encoders are made."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    files = sorted([*folder.glob("*.json"), *folder.glob("tasks/*.json")])
    if damage is ALTERED:
        files.remove(folder / "manifest.json")
        (folder / "manifest.json").unlink()

    def read(folder):
        found = opened(folder)
        if damage is ALTERED:
            runs.load([folder])
            found.append(fdc_jax.open_run(folder).encoders.pretrained.sha256)
        return found

    fuzz(read, folder, files, damage, count, same=damage is DAMAGED)


@inputs
@pytest.mark.parametrize("edit", ["lines", "bytes"])
def test_configurations(tmp_path, monkeypatch, edit, count):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    shutil.copy(ROOT / "configs" / "digits.py", path)

    def read(path):
        config = configuration.load(str(path))
        configuration.validate(config)
        return configuration.flatten(config)

    altered = mutations.altered_lines if edit == "lines" else DAMAGED
    fuzz(read, path, [path], altered, count, same=False)


@inputs
def test_fields_of_the_command_line(count):
    config = configuration.load("digits")
    fields = sorted(configuration.flatten(config))
    for number in range(count):
        rng = np.random.default_rng(number)
        field, changed = fields[rng.integers(len(fields))], config.copy_and_resolve_references()
        word = str(mutations.VALUES[rng.integers(len(mutations.VALUES))])
        with contextlib.suppress(ValueError, TypeError):  # of which argparse makes a line
            changed.update_from_flattened_dict({field: configuration.reader(config, field)(word)})
            configuration.validate(changed)


# Data ---------------------------------------------------------------------------------------------


@inputs
@pytest.mark.parametrize(
    ("what", "damage"),
    [("photos/*/*.png", DAMAGED), ("cache/*.json", DAMAGED), ("cache/*.json", ALTERED)],
    ids=["images", "cache", "cache of others"],
)
def test_folders_of_images(tmp_path, what, damage, count):
    rng = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (9, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")

    def read(folder):
        found = image_folder.open_folder(
            folder / "photos", "mine", folder / "cache", test_share=0.4, workers=1
        )
        return [[each.checksum, [np.asarray(each.image(i)) for i in range(len(each.labels))]]
                for each in found]  # fmt: skip

    read(tmp_path)
    fuzz(read, tmp_path, sorted(tmp_path.glob(what)), damage, count, same=what.startswith("cache"))


@inputs
@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
@pytest.mark.parametrize("damage", [DAMAGED, ALTERED], ids=["bytes", "json"])
def test_data_prepared_by_tfds(tmp_path, request, file_format, damage, count):
    folder, _ = request.getfixturevalue("prepare")(file_format=file_format)

    def read(folder):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        found = tfds_format.open_prepared(folder, "flowers", tmp_path / "cache", "given", True)
        return [[each.checksum, each.labels] for each in found]

    files = sorted(
        path for path in folder.iterdir() if (path.suffix == ".json") != (damage is DAMAGED)
    )
    fuzz(read, folder, files, damage, count, same=False)
