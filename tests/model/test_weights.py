"""Reading, writing, resizing and downloading weights: strict, and bit for bit where possible."""

import base64
import hashlib
import http.server
import threading
import urllib.error

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from PIL import Image
from safetensors.numpy import save_file

from fdc_jax.errors import InputError
from fdc_jax.files import sha256
from fdc_jax.model import vit, weights

TINY = vit.Variant(width=12, depth=2, heads=3, patch=4)
SIDE = 8
POSITIONS = "Transformer/posembed_input/pos_embedding"


@pytest.fixture(autouse=True)
def tiny_variant(monkeypatch):
    monkeypatch.setitem(vit.VARIANTS, "tiny", TINY)


def random_arrays(seed=0, side=SIDE):
    """AugReg keys to float32 arrays, for the tiny variant."""
    shapes = traverse_util.flatten_dict(
        vit.parameter_shapes(vit.VisionTransformer(TINY), side), sep="/"
    )
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 1, spec.shape).astype(np.float32) for name, spec in shapes.items()}


def write(path, arrays, prefix=""):
    np.savez(path, **{prefix + name: array for name, array in arrays.items()})
    return path


def flat(params):
    return traverse_util.flatten_dict(params, sep="/")


def assert_same(params, arrays):
    found = flat(params)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == jnp.float32
        np.testing.assert_array_equal(found[name], array)


def test_save_and_load_are_inverse_bit_for_bit(tmp_path):
    arrays = random_arrays()
    path = tmp_path / "weights.npz"
    weights.save(traverse_util.unflatten_dict(arrays, sep="/"), path)
    loaded = weights.load(path, "tiny", SIDE)
    assert_same(loaded.params, arrays)
    assert loaded.path == path
    assert loaded.sha256 == sha256(path)
    assert loaded.skipped == ()
    assert loaded.resized_positions is False
    assert list(tmp_path.iterdir()) == [path]


def test_prefix_of_training_checkpoints_is_dropped(tmp_path):
    arrays = random_arrays()
    path = write(tmp_path / "prefixed.npz", arrays, prefix="opt/target/")
    assert_same(weights.load(path, "tiny", SIDE).params, arrays)


def test_classification_head_is_skipped_by_name(tmp_path):
    arrays = random_arrays()
    head = {"head/kernel": np.ones((12, 7), np.float32), "head/bias": np.ones(7, np.float32)}
    loaded = weights.load(write(tmp_path / "headed.npz", arrays | head), "tiny", SIDE)
    assert loaded.skipped == ("head/bias", "head/kernel")
    assert_same(loaded.params, arrays)


def test_half_precision_is_widened(tmp_path):
    halves = {name: array.astype(np.float16) for name, array in random_arrays().items()}
    loaded = weights.load(write(tmp_path / "half.npz", halves), "tiny", SIDE)
    assert_same(loaded.params, {name: half.astype(np.float32) for name, half in halves.items()})


def timm_arrays(arrays):
    """timm's names and layouts, entry by entry: torch layers hold [out, in], convolutions OIHW."""
    width, heads, size = TINY.width, TINY.heads, TINY.patch
    deep = width // heads
    timm = {
        "cls_token": arrays["cls"],
        "pos_embed": arrays[POSITIONS],
        "patch_embed.proj.bias": arrays["embedding/bias"],
        "norm.weight": arrays["Transformer/encoder_norm/scale"],
        "norm.bias": arrays["Transformer/encoder_norm/bias"],
    }
    convolution = np.empty((width, 3, size, size), np.float32)
    for out, channel, row, column in np.ndindex(convolution.shape):
        convolution[out, channel, row, column] = arrays["embedding/kernel"][
            row, column, channel, out
        ]
    timm["patch_embed.proj.weight"] = convolution
    for number in range(TINY.depth):
        source, target = f"Transformer/encoderblock_{number}/", f"blocks.{number}."
        for old, new in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            timm[f"{target}{new}.weight"] = arrays[f"{source}{old}/scale"]
            timm[f"{target}{new}.bias"] = arrays[f"{source}{old}/bias"]
        for old, new in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
            kernel = arrays[f"{source}MlpBlock_3/{old}/kernel"]
            timm[f"{target}mlp.{new}.weight"] = np.ascontiguousarray(kernel.T)
            timm[f"{target}mlp.{new}.bias"] = arrays[f"{source}MlpBlock_3/{old}/bias"]
        attention = f"{source}MultiHeadDotProductAttention_1/"
        joint_weight = np.empty((3 * width, width), np.float32)
        joint_bias = np.empty(3 * width, np.float32)
        # timm reads rows as [query | key | value][head][dimension of the head].
        for part, name in enumerate(("query", "key", "value")):
            for head in range(heads):
                for dimension in range(deep):
                    row = part * width + head * deep + dimension
                    joint_weight[row] = arrays[f"{attention}{name}/kernel"][:, head, dimension]
                    joint_bias[row] = arrays[f"{attention}{name}/bias"][head, dimension]
        timm[f"{target}attn.qkv.weight"] = joint_weight
        timm[f"{target}attn.qkv.bias"] = joint_bias
        out = np.empty((width, width), np.float32)
        for head in range(heads):
            for dimension in range(deep):
                out[:, head * deep + dimension] = arrays[f"{attention}out/kernel"][head, dimension]
        timm[f"{target}attn.proj.weight"] = out
        timm[f"{target}attn.proj.bias"] = arrays[f"{attention}out/bias"]
    return timm


def test_timm_safetensors_hold_the_same_parameters(tmp_path):
    arrays = random_arrays()
    timm = timm_arrays(arrays)
    timm["head.weight"] = np.ones((7, 12), np.float32)
    timm["head.bias"] = np.ones(7, np.float32)
    path = tmp_path / "timm.safetensors"
    save_file(timm, path)
    loaded = weights.load(path, "tiny", SIDE)
    assert loaded.skipped == ("head/bias", "head/kernel")
    assert_same(loaded.params, arrays)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("blocks.0.attn.qkv.weight", (35, 12), "unexpected shape"),
        (
            "blocks.1.attn.proj.weight",
            (12, 10),
            r"out/kernel has shape \(3, 4, 10\)",
        ),
        ("blocks.0.mlp.fc1.weight", (48, 13), r"Dense_0/kernel has shape \(13, 48\)"),
        ("blocks.0.mlp.fc3.weight", (48, 12), r"1 unknown \(first: blocks.0.mlp.fc3.weight\)"),
        ("blocks.0.ls1.gamma", (12,), r"1 unknown \(first: blocks.0.ls1.gamma\)"),
        ("blocks.2.norm1.weight", (12,), r"1 unknown \(first: Transformer/encoderblock_2/"),
    ],
)
def test_foreign_safetensors_are_refused(tmp_path, name, wrong, message):
    timm = timm_arrays(random_arrays())
    timm[name] = np.zeros(wrong, np.float32)
    path = tmp_path / "foreign.safetensors"
    save_file(timm, path)
    with pytest.raises(InputError, match=message) as caught:
        weights.load(path, "tiny", SIDE)
    assert str(path) in str(caught.value)


def remove(arrays):
    del arrays["cls"]


def add(arrays):
    arrays["Transformer/extra"] = np.zeros(3, np.float32)


def reshape(arrays):
    arrays["embedding/bias"] = np.zeros(13, np.float32)


def spoil(arrays):
    arrays["embedding/bias"][3] = np.inf


def spell(arrays):
    arrays["embedding/bias"] = np.full(12, "zero")


def flatten_positions(arrays):
    arrays[POSITIONS] = arrays[POSITIONS][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, r"1 arrays missing \(first: cls\), 0 unknown"),
        (add, r"0 arrays missing, 1 unknown \(first: Transformer/extra\)"),
        (reshape, r"embedding/bias has shape \(13,\), expected \(12,\)"),
        (spoil, "embedding/bias holds values that are not finite"),
        (spell, "embedding/bias holds .*, expected floating-point numbers"),
        (flatten_positions, r"pos_embedding has shape \(5, 12\), expected \(1, 5, 12\)"),
    ],
)
def test_every_array_is_checked(tmp_path, change, message):
    arrays = random_arrays()
    change(arrays)
    path = write(tmp_path / "changed.npz", arrays)
    with pytest.raises(InputError, match=message) as caught:
        weights.load(path, "tiny", SIDE)
    assert str(path) in str(caught.value)


def test_weights_of_another_variant_are_refused(tmp_path):
    path = write(tmp_path / "tiny.npz", random_arrays())
    with pytest.raises(InputError, match=r"not the weights of encoder\.variant Ti/16"):
        weights.load(path, "Ti/16", 224)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.98])
def test_truncated_files_are_refused(tmp_path, suffix, keep):
    path = tmp_path / f"whole{suffix}"
    if suffix == ".npz":
        write(path, random_arrays())
    else:
        save_file(timm_arrays(random_arrays()), path)
    content = path.read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(InputError, match="unreadable weights") as caught:
        weights.load(path, "tiny", SIDE)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"<!DOCTYPE html>\n<html><head>", b"\x93NUMPY\x01no archive"])
def test_a_file_of_another_type_is_no_weights_file(tmp_path, suffix, content):
    path = tmp_path / f"page{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"no weights file: expected .*web page") as caught:
        weights.load(path, "tiny", SIDE)
    assert str(path) in str(caught.value) and "unsafe" not in str(caught.value)


@pytest.mark.parametrize("compress", [np.savez, np.savez_compressed])
def test_damaged_npz_is_refused(tmp_path, compress):
    path = tmp_path / "damaged.npz"
    compress(path, **random_arrays())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match="unreadable weights"):
        weights.load(path, "tiny", SIDE)


def test_other_file_types_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"anything")
    with pytest.raises(InputError, match=r"weights\.pth: expected a \.npz or \.safetensors"):
        weights.load(path, "tiny", SIDE)
    with pytest.raises(InputError, match=r"no file .*absent\.npz"):
        weights.load(tmp_path / "absent.npz", "tiny", SIDE)


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    weights.save({"a": np.zeros(2)}, path)
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(InputError, match="disk full"):
        weights.save({"a": np.ones(2)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("old", "new"), [(4, 7), (4, 8), (7, 4), (14, 9)])
def test_positions_resize_as_pillow_does(old, new):
    rng = np.random.default_rng(3)
    embedding = rng.normal(size=(1, 1 + old * old, 5)).astype(np.float32)
    resized = weights.resize_positions(embedding, 1 + new * new, "file")
    assert resized.shape == (1, 1 + new * new, 5) and resized.dtype == np.float32
    np.testing.assert_array_equal(resized[:, 0], embedding[:, 0])
    for channel in range(5):
        grid = Image.fromarray(embedding[0, 1:, channel].reshape(old, old))
        expected = np.asarray(grid.resize((new, new), Image.Resampling.BICUBIC))
        np.testing.assert_allclose(resized[0, 1:, channel].reshape(new, new), expected, atol=2e-5)


def test_loading_at_another_image_size_resizes_positions_alone(tmp_path):
    arrays = random_arrays()
    path = write(tmp_path / "small.npz", arrays)
    loaded = weights.load(path, "tiny", 2 * SIDE)
    assert loaded.resized_positions is True
    found = flat(loaded.params)
    expected = weights.resize_positions(arrays[POSITIONS], 17, path)
    np.testing.assert_array_equal(found[POSITIONS], expected)
    assert_same(
        {name: array for name, array in found.items() if name != POSITIONS},
        {name: array for name, array in arrays.items() if name != POSITIONS},
    )


@pytest.mark.parametrize("positions", [0, 1, 7, 11])
def test_positions_that_form_no_square_are_refused(positions):
    embedding = np.zeros((1, positions, 3), np.float32)
    with pytest.raises(InputError, match=f"file: .*has {positions} positions, expected one plus"):
        weights.resize_positions(embedding, 5, "file")


def test_the_real_checkpoint_loads_whole(shared_asset):
    path = shared_asset("Ti_16-augreg-i21k-ft-i1k.npz")
    loaded = weights.load(path, "Ti/16", 224)
    assert loaded.skipped == ("head/bias", "head/kernel")
    assert loaded.resized_positions is False
    count = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    # 5,717,416 in the file, less the head of 1000 classes.
    assert count == 5_717_416 - 193 * 1000


def test_the_embedded_encoder_loads_strictly_and_is_small():
    path = weights.locate("digits", "digits", "unused")
    loaded = weights.load(path, "digits", 32)
    assert loaded.skipped == () and loaded.resized_positions is False
    assert path.stat().st_size <= 2 * 1000**2


class _Bucket(http.server.BaseHTTPRequestHandler):
    """Serves one file with the checksum headers of a storage bucket."""

    def _head(self):
        server = self.server
        server.requests.append(self.command)
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.content)))
        if server.md5 is not None:
            self.send_header("x-goog-hash", "crc32c=AAAAAA==")
            self.send_header("x-goog-hash", f"md5={base64.b64encode(server.md5).decode()}")
        self.end_headers()

    do_HEAD = _head

    def do_GET(self):
        self._head()
        self.wfile.write(self.server.content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def bucket(monkeypatch):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Bucket)
    server.content = b"the weights" * 1000
    server.md5 = hashlib.md5(server.content).digest()
    server.requests = []
    monkeypatch.setattr(weights, "AUGREG_BUCKET", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("show_progress", [False, True])
def test_download_is_checked_kept_and_not_repeated(bucket, tmp_path, show_progress):
    path = weights.locate("augreg", "Ti/16", tmp_path / "cache", show_progress)
    assert path == tmp_path / "cache" / weights.AUGREG_FILES["Ti/16"]
    assert path.read_bytes() == bucket.content
    assert bucket.requests == ["HEAD", "GET"]
    assert weights.locate("augreg", "Ti/16", tmp_path / "cache", show_progress) == path
    assert bucket.requests == ["HEAD", "GET"]
    assert list(path.parent.iterdir()) == [path]


def test_a_download_with_the_wrong_checksum_leaves_nothing_behind(bucket, tmp_path):
    bucket.md5 = hashlib.md5(b"other").digest()
    with pytest.raises(InputError, match="cannot download weights"):
        weights.locate("augreg", "Ti/16", tmp_path / "cache", show_progress=False)
    assert "GET" in bucket.requests
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_download_without_a_checksum_is_refused(bucket, tmp_path):
    bucket.md5 = None
    with pytest.raises(InputError, match="sends no MD5"):
        weights.locate("augreg", "Ti/16", tmp_path / "cache", show_progress=False)
    assert bucket.requests == ["HEAD"]


def test_without_a_connection_the_message_says_which_file_to_put_where(monkeypatch, tmp_path):
    def unreachable(*arguments, **keywords):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(weights.urllib.request, "urlopen", unreachable)
    with pytest.raises(InputError, match="no route to host") as caught:
        weights.locate("augreg", "B/16", tmp_path)
    name = weights.AUGREG_FILES["B/16"]
    assert weights.AUGREG_BUCKET + name in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_locate_takes_a_file_as_it_is(tmp_path):
    path = tmp_path / "mine.npz"
    path.write_bytes(b"")
    assert weights.locate(str(path), "Ti/16", tmp_path) == path
    with pytest.raises(InputError, match=r"encoder\.weights: .*no file .*absent\.npz"):
        weights.locate(str(tmp_path / "absent.npz"), "Ti/16", tmp_path)


def test_locate_has_no_public_checkpoint_of_other_variants(tmp_path):
    with pytest.raises(InputError, match=r"'augreg' has no file for encoder\.variant 'digits'"):
        weights.locate("augreg", "digits", tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FDC_JAX_CACHE", str(tmp_path / "a"))
    assert weights.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("FDC_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert weights.cache_folder() == tmp_path / "b" / "fdc_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert weights.cache_folder() == tmp_path / ".cache" / "fdc_jax"
