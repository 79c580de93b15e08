"""Encoders of every family against what timm and transformers make of them."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from fdc_jax.model import increments, layouts, vit, weights
from tests.errors import input_error
from tests.model import encoders
from tests.model.encoders import DEPTH, FOLDER, HIDDEN, PATCH, SIDE, WIDTH

# The name, and the differences from a small AugReg encoder.
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
PIXELS_OF_CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
GATED, REGISTERS, NO_TOKEN = {"activation": "swiglu"}, {"registers": 4}, {"tokens": 0}
SIGLIP = NO_TOKEN | HALF | {"pooling": "attention", "activation": "gelu_tanh"}
CLIP = PIXELS_OF_CLIP | {"pre_norm": True, "activation": "quick_gelu", "epsilon": 1e-5}
DINOV2 = PIXELS_OF_CLIP | {"hidden": 24}
DINOV3 = IMAGENET | {"rotary": 100.0, "epsilon": 1e-5}
PATCHES = DINOV3 | REGISTERS | {"pooling": "mean"}
HF_VIT = HALF | {"epsilon": 1e-12}
EXPECTED = {
    "timm_vit": ("vit_small_patch16_224", IMAGENET),
    "timm_deit": ("deit_tiny_distilled_patch16_224", IMAGENET | {"tokens": 2, "pooling": "prefix"}),
    "timm_dinov2": ("vit_small_patch14_dinov2", IMAGENET),
    "timm_dinov2_gated": ("vit_giant_patch14_dinov2", IMAGENET | GATED | {"hidden": 10}),
    "timm_dinov2_registers": ("vit_small_patch14_reg4_dinov2", IMAGENET | REGISTERS),
    "timm_clip": ("vit_base_patch32_clip_quickgelu_224", CLIP),
    "timm_siglip": ("vit_base_patch32_siglip_256", SIGLIP),
    "timm_positions": (
        "vit_so150m_patch16_reg4_map_256",
        HALF | NO_TOKEN | REGISTERS | {"pooling": "attention"},
    ),
    "timm_gap": (
        "vit_medium_patch16_reg4_gap_256",
        HALF | NO_TOKEN | REGISTERS | {"pooling": "mean_then_norm"},
    ),
    "timm_dinov3": ("vit_small_patch16_dinov3_qkvb", PATCHES),
    "timm_dinov3_gated": ("vit_small_plus_patch16_dinov3", PATCHES | GATED | {"hidden": 24}),
    "hf_vit": ("vit 24x2/4", HF_VIT),
    "hf_deit": ("deit 24x2/4", HF_VIT | {"tokens": 2}),
    "hf_mae": ("vit_mae 24x2/4", HF_VIT),
    "hf_dinov2": ("dinov2 24x2/4", DINOV2),
    "hf_dinov2_gated": ("dinov2 24x2/4", DINOV2 | GATED | {"hidden": 16}),
    "hf_dinov2_registers": ("dinov2_with_registers 24x2/4", DINOV2 | REGISTERS),
    "hf_clip": ("clip 24x2/4", CLIP),
    "hf_siglip": ("siglip 24x2/4", SIGLIP),
    "hf_dinov3": ("dinov3_vit 24x2/4", DINOV3 | REGISTERS),
    "hf_dinov3_gated": ("dinov3_vit 24x2/4", DINOV3 | GATED),
}


@functools.cache
def golden():
    return dict(np.load(encoders.FEATURES))


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


# Other files of their layout hold the same keys.
SLOW = dict.fromkeys(
    ("timm_dinov2_gated", "timm_gap", "hf_mae", "hf_dinov3_gated"), pytest.mark.slow
)
# Files whose features differ from others of their layout in one part.
CI = ("timm_deit", "timm_dinov2_registers", "timm_positions", "timm_dinov3_gated", "hf_deit")
CI += ("hf_dinov2_gated", "hf_dinov2_registers")
MARKS = SLOW | dict.fromkeys(CI, pytest.mark.ci)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=MARKS.get(family, ())) for family in EXPECTED]
)
def test_features_equal_the_library(family):
    name = f"{family} with an increment"
    actual = encode(*encoder(family), encoders.increment())
    assert_allclose(encode(*encoder(family)), golden()[family], rtol=0, atol=2e-5)
    assert_allclose(actual, golden()[name], rtol=0, atol=2e-5)
    assert np.abs(golden()[name] - golden()[family]).max() > 0.3


@pytest.mark.parametrize("family", EXPECTED)
def test_layout_of_a_file_is_recognised(family):
    name, differences = EXPECTED[family]
    usual = vit.Variant(WIDTH, DEPTH, heads=2, patch=PATCH, hidden=HIDDEN, image_size=SIDE)
    expected = dataclasses.replace(usual, **differences)
    assert recognise(weights_of(family)) == (name, expected)
    mean_and_std = golden()[f"{family} mean and std"]
    assert_allclose([expected.mean, expected.std], mean_and_std)


def test_skipped_arrays_are_named_in_groups():
    names = ("logit_scale", "text_model.*", "text_projection.weight", "visual_projection.weight")
    assert layouts.skipped(load_file(weights_of("hf_clip"))) == names
    assert layouts.skipped(load_file(weights_of("hf_mae"))) == ("decoder.*",)


@pytest.mark.parametrize(
    "family",
    ["timm_vit", "timm_dinov2", "timm_clip", "hf_vit", "hf_dinov2", "hf_clip"],
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
    expected = golden()[f"{family} with an increment"]
    assert_allclose(features, expected, rtol=0, atol=2e-5)
    if family.startswith("timm"):
        given = layouts.used(load_file(weights_of(family)))
        assert {*arrays} == {name for name in given if not name.endswith(".gamma")}


@pytest.mark.parametrize("family", ["timm_dinov3", "timm_siglip", "timm_deit", "timm_gap"])
def test_encoder_with_another_final_layer_is_not_written(family):
    with input_error("expected a plain Vision Transformer"):
        layouts.as_timm({}, encoder(family)[0], {}, SIDE)


def plain_timm(width, depth=1):
    """Returns arrays under timm's names that say as little as those of AugReg's encoders."""
    variant = vit.Variant(width, depth, 3)
    shapes = vit.parameter_shapes(vit.VisionTransformer(variant), 32)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    arrays, _ = layouts.as_timm(zeros, variant, vit.pretrained_kernels(zeros), 32)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


TIMM = ("cls_token", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
TIMM += ("blocks.0.mlp.fc2.weight", "pos_embed")
HUGGING_FACE = ("embeddings.cls_token", "embeddings.patch_embeddings.projection.weight")
HUGGING_FACE += ("encoder.layer.0.mlp.fc1.weight", "encoder.layer.0.mlp.fc2.weight")
HUGGING_FACE += ("embeddings.position_embeddings",)


@pytest.mark.parametrize(
    "name, width, expected",
    [
        # As in timm's own models, whose configurations do not have the number of heads.
        ("vit_so400m_patch14_siglip_224", 1152, (16,)),
        ("vit_huge_patch14_224", 1280, (16,)),
        ("vit_giant_patch14_224", 1408, (16,)),
        ("vit_giant_patch14_dinov2", 1536, (24,)),
        ("vit_giantopt_patch16_siglip_256", 1536, (16,)),
        ("vit_gigantic_patch14_224", 1664, (16,)),
        ("vit_huge_plus_patch16_dinov3", 1280, (20,)),
        ("vit_7b_patch16_dinov3", 4096, (32,)),
        # Defaults of transformers 5.23.
        ("vit", 24, (12, "gelu", 1e-12)),
        ("dinov2", 24, (12, "gelu", 1e-6)),
        ("clip_vision_model", 24, (12, "quick_gelu", 1e-5)),
        ("siglip_vision_model", 24, (12, "gelu_tanh", 1e-6)),
    ],
)
def test_omitted_fields_have_the_values_of_the_library(tmp_path, name, width, expected):
    """From the shapes by which an encoder is recognised, without memory."""
    kind, names = ("architecture", TIMM) if "patch" in name else ("model_type", HUGGING_FACE)
    (tmp_path / "config.json").write_text(json.dumps({kind: name}))
    shapes = [(1, 1, width), (width, 3, 16, 16), (4 * width, width), (width, 4 * width)]
    if "dinov3" not in name:
        shapes.append((1, 17, width))
    zero = np.float32(0)
    arrays = {key: np.broadcast_to(zero, s) for key, s in zip(names, shapes, strict=False)}
    _, variant = layouts.encoder_of(arrays, tmp_path / "model.safetensors")
    actual = variant.heads, variant.activation, variant.epsilon
    assert actual[: len(expected)] == expected


def test_number_of_heads_is_required_without_configuration(tmp_path):
    """Arrays of a plain encoder are also those of one with rotary positions, or other heads."""
    path = tmp_path / "plain.safetensors"
    arrays = plain_timm(192)
    save_file(arrays, path)
    with input_error(r"its number of heads as encoder.heads; found none$"):
        recognise(path)
    unknown = {"image_size": 32, "mean": None, "std": None}
    for heads in (3, 2):
        expected = ("timm 192x1/16", vit.Variant(192, 1, heads, **unknown))
        assert recognise(path, heads) == expected
    with input_error("5 heads do not divide its width 192"):
        recognise(path, 5)
    gated = {name.replace("fc1", "fc1_g"): array for name, array in arrays.items()}
    save_file(arrays | gated, path)
    with input_error(r"expected timm's config.json beside it; found none"):
        recognise(path, 3)
    save_file(plain_timm(192, depth=12), path)
    name, variant = recognise(path, 3)
    assert name == "Ti/16" and variant == dataclasses.replace(vit.VARIANTS["Ti/16"], **unknown)
    with input_error(r"data\.input_range: model expects .*mean and deviation"):
        vit.build(variant, 32, "model")


def test_pretraining_side_may_not_be_a_multiple_of_the_patch():
    """What is left over goes, as in the libraries' convolutions."""
    variant, params = encoder("hf_siglip")
    variant = dataclasses.replace(variant, image_size=SIDE + 2)
    model = vit.build(variant, SIDE + 2, "model")
    images = np.pad(encoders.images(), ((0, 0), (0, 2), (0, 2), (0, 0)))
    assert_allclose(
        jax.jit(model.apply)({"params": params}, images), golden()["hf_siglip"], atol=2e-5
    )
    with input_error(f"multiple of the patch size {PATCH}, found {SIDE + 1}"):
        vit.build(variant, SIDE + 1)


def test_positions_of_patches_are_resized_and_others_stay():
    path = weights_of("timm_deit")
    loaded = weights.load(path, encoder("timm_deit")[0], 2 * SIDE)
    positions = loaded.params["Transformer"]["posembed_input"]["pos_embedding"]
    assert loaded.resized_positions and positions.shape == (1, 2 + (2 * SIDE // PATCH) ** 2, WIDTH)
    assert_array_equal(positions[:, :2], load_file(path)["pos_embed"][:, :2])


def changed(tmp_path, family, arrays=(), config=()):
    """Copies a family; None removes an array or a field, `config=None` the configuration."""
    folder = tmp_path / family
    shutil.copytree(FOLDER / family, folder)
    path = folder / "model.safetensors"
    config_file = folder / "config.json"
    kept = {name: a for name, a in (load_file(path) | dict(arrays)).items() if a is not None}
    save_file(kept, path)
    fields = json.loads(config_file.read_text())
    config_file.unlink()
    if config is not None:
        for name, value in dict(config).items():
            *parents, last = name.split("/")
            functools.reduce(dict.__getitem__, parents, fields)[last] = value
        config_file.write_text(json.dumps(fields))
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
        ("hf_vit", (), None, "expected the config.json of the model beside it, found none"),
        ("timm_dinov3", (), None, "expected timm's config.json beside it; found none"),
        ("hf_vit", (), {"model_type": "swin"}, "model_type: expected .*, found 'swin'"),
        ("hf_vit", (), {"hidden_size": 32}, "hidden_size: expected 24 as in .*, found 32"),
        ("hf_vit", (), {"hidden_act": "relu"}, "hidden_act: expected one of .*, found 'relu'"),
        ("hf_vit", (), {"hidden_act": "silu"}, "expected twice as many gates as hidden units"),
        ("hf_vit", (), {"num_attention_heads": "two"}, "expected arrays of a supported encoder"),
        ("hf_vit", (), {"num_attention_heads": 5}, "5 heads do not divide its width 24"),
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


def test_arrays_of_other_shapes_are_refused(tmp_path):
    path = changed(tmp_path, "timm_siglip", {"attn_pool.kv.weight": ARRAY})
    with input_error(r"kv\.weight has the unexpected shape"):
        weights.load(path, recognise(weights_of("timm_siglip"))[1], SIDE)


@pytest.mark.parametrize("name", vit.VARIANTS)
def test_augreg_files_of_every_size_are_recognised(name):
    variant = vit.VARIANTS[name]
    model = vit.build(variant, variant.image_size)
    shapes = traverse_util.flatten_dict(vit.parameter_shapes(model, variant.image_size), sep="/")
    zero = np.float32(0)
    arrays = {key: np.broadcast_to(zero, leaf.shape) for key, leaf in shapes.items()}
    assert layouts.encoder_of(arrays, FOLDER / "augreg.npz") == (name, variant)
