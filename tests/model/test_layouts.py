"""Encoders of every family against what timm and transformers make of them."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util
from numpy.testing import assert_allclose
from safetensors.numpy import load_file, save_file

from fdc_jax.model import increments, layouts, vit, weights
from tests.errors import input_error
from tests.model import encoders
from tests.model.encoders import FOLDER, PATCH, SIDE

# The name, and the term in every norm, which features hardly show.
DESCRIBED = {
    "timm_vit": ("vit_small_patch16_224", 1e-6),
    "timm_clip": ("vit_base_patch32_clip_quickgelu_224", 1e-5),
    "timm_dinov3": ("vit_small_patch16_dinov3_qkvb", 1e-5),
    "hf_vit": ("vit 24x2/4", 1e-12),
    "hf_dinov2_registers": ("dinov2_with_registers 24x2/4", 1e-6),
    "hf_clip": ("clip 24x2/4", 1e-5),
    "hf_dinov3": ("dinov3_vit 24x2/4", 1e-5),
}


GOLDEN = dict(np.load(encoders.FEATURES))


def weights_of(family):
    return FOLDER / family / "model.safetensors"


def recognise(path, heads=0):
    return weights.recognise(str(path), "ignored", heads)


@functools.cache
def encoder(family):
    """Returns the variant and the parameters that a file of weights holds."""
    _, variant = recognise(weights_of(family))
    return variant, weights.load(weights_of(family), variant, SIDE).params


@functools.partial(jax.jit, static_argnums=0)
def _encode(model, params, images, added):
    return model.apply({"params": params}, images, vit.pretrained_kernels(params), added)


NO_INCREMENT = jax.tree.map(np.zeros_like, encoders.increment())


def encode(variant, params, added=NO_INCREMENT):
    """Returns features of the images, under an increment; encoders alike are compiled once."""
    return np.asarray(_encode(vit.build(variant, SIDE, "model"), params, encoders.images(), added))


# Families whose features differ from each other in most parts.
QUICK = ("timm_vit", "timm_dinov2", "timm_clip", "timm_siglip", "timm_dinov3", "hf_vit")
QUICK += ("hf_dinov2", "hf_clip", "hf_siglip", "hf_dinov3")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.ci)
        for family in encoders.FAMILIES
    ],
)
def test_features_equal_the_library(family):
    changed = GOLDEN[f"{family} with an increment"]
    assert_allclose(encode(*encoder(family)), GOLDEN[family], rtol=0, atol=2e-5)
    assert_allclose(encode(*encoder(family), encoders.increment()), changed, rtol=0, atol=2e-5)
    assert np.abs(changed - GOLDEN[family]).max() > 0.3


def test_names_pixels_and_terms_equal_the_library():
    for family in encoders.FAMILIES:
        name, variant = recognise(weights_of(family))
        assert_allclose([variant.mean, variant.std], GOLDEN[f"{family} mean and std"])
        assert variant.image_size == SIDE
        assert (name, variant.epsilon) == DESCRIBED.get(family, (name, variant.epsilon))


def test_skipped_arrays_are_named_in_groups():
    names = ("logit_scale", "text_model.*", "text_projection.weight", "visual_projection.weight")
    assert layouts.skipped(load_file(weights_of("hf_clip"))) == names
    assert layouts.skipped(load_file(weights_of("hf_mae"))) == ("decoder.*",)


@pytest.mark.parametrize(
    "family",
    ["timm_vit", "timm_dinov2", "timm_clip", "hf_clip"],
)
def test_encoder_in_timms_layout_gives_equal_features(tmp_path, family):
    """With its increment merged; names are those of timm's own file, but for layer scale."""
    variant, params = encoder(family)
    kernels = increments.merge(vit.pretrained_kernels(params), encoders.increment())
    arrays, config = layouts.as_timm(params, variant, kernels, SIDE)
    path = tmp_path / "model.safetensors"
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    path.with_name("config.json").write_text(json.dumps(config))
    _, actual = recognise(path)
    assert (actual.mean, actual.std, actual.image_size) == (variant.mean, variant.std, SIDE)
    features = encode(actual, weights.load(path, actual, SIDE).params)
    expected = GOLDEN[f"{family} with an increment"]
    assert_allclose(features, expected, rtol=0, atol=2e-5)
    if family.startswith("timm"):
        given = layouts.used(load_file(weights_of(family)))
        assert {*arrays} == {name for name in given if not name.endswith(".gamma")}


def test_mlp_ratio_for_timm_gives_the_exact_width():
    """Timm rounds 88 * (15 / 88) down to 14."""
    variant = dataclasses.replace(encoder("timm_vit")[0], width=88, hidden=15)
    shapes = vit.parameter_shapes(vit.build(variant, SIDE, "model"), SIDE)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    _, config = layouts.as_timm(params, variant, {}, SIDE)
    assert int(88 * config["model_args"]["mlp_ratio"]) == 15


@pytest.mark.parametrize("family", ["timm_dinov3", "timm_siglip", "timm_deit", "timm_gap"])
def test_encoder_with_another_final_layer_is_not_written(family):
    with input_error("expected a plain Vision Transformer"):
        layouts.as_timm({}, encoder(family)[0], {}, SIDE)


@pytest.mark.parametrize(
    "name, width, heads",
    [
        # As in timm's own models, whose configurations do not have the number of heads.
        ("vit_so400m_patch14_siglip_224", 1152, 16),
        ("vit_huge_patch14_224", 1280, 16),
        ("vit_giant_patch14_224", 1408, 16),
        ("vit_giant_patch14_dinov2", 1536, 24),
        ("vit_giantopt_patch16_siglip_256", 1536, 16),
        ("vit_gigantic_patch14_224", 1664, 16),
        ("vit_huge_plus_patch16_dinov3", 1280, 20),
        ("vit_7b_patch16_dinov3", 4096, 32),
    ],
)
def test_heads_follow_from_width_and_name(tmp_path, name, width, heads):
    """From the shapes by which an encoder is recognised, without memory."""
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    shapes = {"cls_token": (1, 1, width), "patch_embed.proj.weight": (width, 3, 16, 16)}
    shapes |= {"blocks.0.mlp.fc1.weight": (4 * width, width)}
    shapes |= {"blocks.0.mlp.fc2.weight": (width, 4 * width)}
    if "dinov3" not in name:
        shapes["pos_embed"] = (1, 17, width)
    arrays = {key: np.broadcast_to(np.float32(0), shape) for key, shape in shapes.items()}
    _, variant = layouts.encoder_of(arrays, tmp_path / "model.safetensors")
    assert variant.heads == heads


@pytest.mark.parametrize(
    "name, activation, epsilon",
    [
        ("vit", "gelu", 1e-12),
        ("dinov2", "gelu", 1e-6),
        ("dinov2_with_registers", "gelu", 1e-6),
        ("clip_vision_model", "quick_gelu", 1e-5),
        ("siglip_vision_model", "gelu_tanh", 1e-6),
    ],
)
def test_omitted_fields_have_the_defaults_of_transformers(tmp_path, name, activation, epsilon):
    """Of version 5.23."""
    path = changed(tmp_path, "hf_vit")
    path.with_name("config.json").write_text(json.dumps({"model_type": name}))
    _, variant = recognise(path)
    assert (variant.heads, variant.activation, variant.epsilon) == (12, activation, epsilon)


def test_number_of_heads_is_required_without_configuration(tmp_path):
    """Arrays of a plain encoder are also those of one with rotary positions, or other heads."""
    path = changed(tmp_path, "timm_vit")
    path.with_name("config.json").unlink()
    with input_error(r"its number of heads as encoder.heads; found none$"):
        recognise(path)
    with input_error("5 heads do not divide its width 24"):
        recognise(path, 5)
    name, variant = recognise(path, 2)
    expected = dataclasses.replace(encoder("timm_vit")[0], mean=None, std=None)
    assert (name, variant) == ("timm 24x2/4", expected)
    with input_error(r"data\.input_range: model expects .*mean and deviation"):
        vit.build(variant, SIDE, "model")
    gated = changed(tmp_path, "timm_dinov2_gated")
    gated.with_name("config.json").unlink()
    with input_error(r"expected timm's config.json beside it; found none"):
        recognise(gated, 2)


def test_pretraining_side_may_not_be_a_multiple_of_the_patch():
    """What is left over goes, as in the libraries' convolutions."""
    variant, params = encoder("hf_siglip")
    model = vit.build(dataclasses.replace(variant, image_size=SIDE + 2), SIDE + 2, "model")
    images = np.pad(encoders.images(), ((0, 0), (0, 2), (0, 2), (0, 0)))
    actual = jax.jit(model.apply)({"params": params}, images)
    assert_allclose(actual, GOLDEN["hf_siglip"], atol=2e-5)
    with input_error(f"multiple of the patch size {PATCH}, found {SIDE + 1}"):
        vit.build(variant, SIDE + 1)


def changed(tmp_path, family, arrays=(), fields=()):
    """Copies a family with some arrays, without those that are None, and with fields changed."""
    folder = tmp_path / family
    shutil.copytree(FOLDER / family, folder)
    path, file = folder / "model.safetensors", folder / "config.json"
    given = load_file(path) | dict(arrays)
    save_file({name: array for name, array in given.items() if array is not None}, path)
    config = json.loads(file.read_text())
    for name, value in dict(fields).items():
        *parents, last = name.split("/")
        functools.reduce(dict.__getitem__, parents, config)[last] = value
    file.write_text(json.dumps(config))
    return path


ARRAY = np.zeros((3, 3), np.float32)
WITHOUT_POOLING = {name: None for name in load_file(weights_of("hf_siglip")) if ".head." in name}


@pytest.mark.parametrize(
    "family, arrays, config, message",
    [
        (
            "hf_vit",
            {"x.weight": ARRAY, "yak": ARRAY},
            (),
            "found 2 unknown .*, first x.weight, yak",
        ),
        ("timm_vit", {"patch_embed.proj.weight": None}, (), "expected a Vision Transformer"),
        ("hf_vit", (), {"model_type": "swin"}, "model_type: expected .*, found 'swin'"),
        ("hf_vit", (), {"hidden_size": 32}, "hidden_size: expected 24 as in .*, found 32"),
        ("hf_vit", (), {"hidden_act": "relu"}, "hidden_act: expected one of .*, found 'relu'"),
        ("hf_vit", (), {"hidden_act": "silu"}, "expected twice as many gates as hidden units"),
        ("hf_vit", (), {"num_attention_heads": 2.0}, "2.0 heads do not divide its width 24"),
        ("timm_vit", (), {"architecture": "swin_tiny"}, "architecture: expected .*'swin_tiny'"),
        ("timm_dinov3", (), {"architecture": "vit_small_patch16_lingbot"}, "expected .* DINOv3"),
        ("timm_vit", (), {"model_args": {}}, "model_args.num_heads: expected the number of heads"),
        ("timm_vit", (), {"model_args/global_pool": "max"}, "global_pool: expected token or avg"),
        ("hf_siglip", WITHOUT_POOLING, (), "class token or attention pooling, found neither"),
    ],
)
def test_unsupported_encoders_are_refused(tmp_path, family, arrays, config, message):
    path = changed(tmp_path, family, arrays, config)
    with input_error(rf"^{tmp_path}/.*{message}"):
        recognise(path)


def test_configuration_of_hugging_face_is_required(tmp_path):
    path = changed(tmp_path, "hf_vit")
    path.with_name("config.json").unlink()
    with input_error("expected the config.json of the model beside it, found none"):
        recognise(path)


def test_arrays_of_other_shapes_are_refused(tmp_path):
    path = changed(tmp_path, "timm_siglip", {"attn_pool.kv.weight": ARRAY})
    with input_error(r"kv\.weight has the unexpected shape"):
        weights.load(path, recognise(weights_of("timm_siglip"))[1], SIDE)


@pytest.mark.parametrize("name", vit.VARIANTS)
def test_augreg_files_of_every_size_are_recognised(name):
    variant = vit.VARIANTS[name]
    model = vit.build(dataclasses.replace(variant, depth=1), variant.image_size)
    shapes = traverse_util.flatten_dict(vit.parameter_shapes(model, variant.image_size), sep="/")
    arrays = {}
    for key, leaf in shapes.items():
        for block in range(variant.depth):
            of_block = key.replace("block_0", f"block_{block}")
            arrays[of_block] = np.broadcast_to(np.float32(0), leaf.shape)
    assert layouts.encoder_of(arrays, FOLDER / "augreg.npz") == (name, variant)
