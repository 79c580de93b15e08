"""Reading, writing, resizing and downloading weights: strict, and bit for bit where possible."""

import base64
import hashlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from safetensors.numpy import load_file, save_file

from fdc_jax.machine.files import sha256
from fdc_jax.model import weights
from tests.errors import input_error
from tests.model.test_golden import GOLDEN, SIDE


@pytest.fixture
def arrays():
    """AugReg keys to float32 arrays, with a classification head of seven classes."""
    return dict(np.load(GOLDEN / "augreg.npz"))


def load(path, side=SIDE):
    return weights.load(path, "golden", side)


def without_head(arrays):
    return {name: array for name, array in arrays.items() if not name.startswith("head/")}


def assert_same(params, arrays):
    actual = traverse_util.flatten_dict(params, sep="/")
    assert actual.keys() == arrays.keys()
    for name, array in arrays.items():
        assert actual[name].dtype == jnp.float32
        assert_array_equal(actual[name], array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_parameters_are_the_arrays_of_a_file_bit_for_bit(tmp_path, arrays, dtype):
    """Short numbers are widened.

    Training checkpoints have a prefix, those of ImageNet-21k a layer before the head.
    """
    path = tmp_path / "upper.NPZ"
    layer = {f"pre_logits/{name}": np.ones(24) for name in ("bias", "kernel")}
    short = {name: array.astype(dtype) for name, array in (arrays | layer).items()}
    with path.open("wb") as file:
        np.savez(file, **{f"opt/target/{name}": array for name, array in short.items()})
    loaded = load(path)
    assert_same(loaded.params, {n: short[n].astype(np.float32) for n in without_head(arrays)})
    assert (loaded.path, loaded.sha256, loaded.resized_positions) == (path, sha256(path), False)
    names = ("head/bias", "head/kernel", "pre_logits/bias", "pre_logits/kernel")
    assert loaded.skipped == names


def test_common_prefix_of_names_is_removed_and_logged(tmp_path, caplog, arrays):
    path = tmp_path / "wrapped.SafeTensors"
    unwrapped = load_file(GOLDEN / "timm.safetensors")
    head = {"head.weight": unwrapped.pop("head.weight")}
    del unwrapped["head.bias"]
    wrapped = {f"model.backbone.{name}": array for name, array in unwrapped.items()}
    save_file(wrapped | head, path)
    loaded = load(path)
    assert_same(loaded.params, without_head(arrays))
    assert loaded.skipped == (*head,) and "ignored 'model.backbone.'" in caplog.text
    save_file(wrapped | {"projector": head["head.weight"]}, path)
    with input_error("unknown .first: model.backbone."):
        load(path)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("cls", None, r"1 arrays missing \(first: cls\), 0 unknown"),
        ("embedding/bias", np.zeros(13), r"embedding/bias of shape \(13,\), expected \(24,\)"),
        ("embedding/bias", np.full(24, np.inf), "embedding/bias: expected finite numbers"),
    ],
)
def test_every_array_is_checked(tmp_path, arrays, name, value, message):
    path = tmp_path / "changed.npz"
    arrays |= {name: value}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with input_error(f"{path}.*{message}"):
        load(path)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: weights.locate(f"{p}/absent.npz", "Ti/16", p), "weights: .*no file .*absent"),
        (lambda p: weights.locate("augreg", "digits", p), "one of Ti.* found 'digits'"),
        (lambda p: weights.recognise("augreg", "X/16"), "variant: expected one of .*found 'X/16'"),
        (lambda p: load(p / "weights.pth"), r"load\('weights\.pth', weights_only=True\)"),
        (lambda p: load(p / "absent.npz"), "absent.npz: no such file"),
    ],
)
def test_wrong_files_and_names_of_weights_are_refused(tmp_path, call, message):
    with input_error(message):
        call(tmp_path)


@pytest.mark.parametrize("old, new, tokens", [(4, 7, 1), (14, 9, 2)])
def test_positions_resize_as_pillow_does(old, new, tokens):
    rng = np.random.default_rng(3)
    embedding = rng.normal(size=(1, tokens + old * old, 5)).astype(np.float32)
    actual = weights.resize_positions(embedding, tokens + new * new, "file", tokens)
    assert actual.dtype == np.float32
    channels = embedding[0, tokens:].T.reshape(5, old, old)
    grids = [Image.fromarray(grid).resize((new, new), resample=3) for grid in channels]
    patches = np.stack(grids, axis=-1).reshape(1, new * new, 5)
    expected = np.concatenate([embedding[:, :tokens], patches], axis=1)
    assert_allclose(actual, expected, atol=2e-5)


@pytest.fixture
def bucket(served, monkeypatch):
    """The server of AugReg's weights, with the checksum headers of a storage bucket."""
    content = b"the weights" * 1000
    (served.folder / weights.AUGREG_FILES["Ti/16"]).write_bytes(content)
    md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
    served.hashes = ["crc32c=AAAAAA==", f"md5={md5}"]
    monkeypatch.setattr(weights, "AUGREG_BUCKET", f"{served.address}/")
    return served


def test_download_is_checked_kept_and_not_repeated(bucket, tmp_path):
    for show_progress in (True, False):
        path = weights.locate("augreg", "Ti/16", tmp_path / "cache", show_progress)
        assert path.read_bytes() == b"the weights" * 1000
        assert bucket.requests == ["HEAD", "GET"]
        assert list((tmp_path / "cache").iterdir()) == [path]


@pytest.mark.parametrize(
    "hashes, message", [(["md5=abcd"], "cannot download weights"), ([], "sends no MD5")]
)
def test_download_without_a_valid_checksum_leaves_no_file(bucket, tmp_path, hashes, message):
    bucket.hashes = hashes
    with input_error(message):
        weights.locate("augreg", "Ti/16", tmp_path, show_progress=False)
    assert list(tmp_path.iterdir()) == []
