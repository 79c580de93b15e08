"""The layouts of weight files of AugReg, timm and Hugging Face, in one table.

The arrays get AugReg's names, and their shapes give the architecture. Heads, activation and other
facts that shapes do not show are in the library's `config.json` beside the file.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flax import traverse_util

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_object
from fdc_jax.model import operations, vit

POSITIONS = "Transformer/posembed_input/pos_embedding"

_TO = r"Transformer/encoderblock_\1"
_TO_ATTENTION = f"{_TO}/MultiHeadDotProductAttention_1"
_TO_POOLING = "Transformer/MAPHead_0"
_TO_POOLED = f"{_TO_POOLING}/MultiHeadDotProductAttention_0"
_BLOCK = r"(?:blocks|layer|encoder\.layers?)\.(\d+)\."
_ATTENTION = rf"{_BLOCK}(?:attn|self_attn|attention|attention\.attention)"

# The libraries' names of layers, and AugReg's. A sum of names is one matrix for several layers; a
# star marks factors on the outputs of a layer.
_LAYERS = (
    (r"cls_token|embeddings\.(?:cls_token|class_embedding)", "cls"),
    (r"dist_token|embeddings\.distillation_token", "distillation"),
    (r"reg_token|embeddings\.register_tokens", "Transformer/registers"),
    (r"pos_embed|embeddings\.position_embeddings?", POSITIONS),
    (r"patch_embed\.proj|embeddings\.patch_embeddings?(?:\.projection)?", "embedding"),
    (r"norm_pre|pre_layrnorm", "Transformer/pre_norm"),
    (rf"{_BLOCK}(?:norm1|layernorm_before|layer_norm1)", f"{_TO}/LayerNorm_0"),
    (rf"{_BLOCK}(?:norm2|layernorm_after|layer_norm2)", f"{_TO}/LayerNorm_2"),
    (rf"{_ATTENTION}\.qkv", f"{_TO_ATTENTION}/query+key+value"),
    (rf"{_ATTENTION}\.(?:query|q_proj|q)", f"{_TO_ATTENTION}/query"),
    (rf"{_ATTENTION}\.(?:key|k_proj)", f"{_TO_ATTENTION}/key"),
    (rf"{_ATTENTION}\.(?:value|v_proj|v)", f"{_TO_ATTENTION}/value"),
    (rf"{_ATTENTION}\.(?:proj|out_proj|o_proj|output\.dense)", f"{_TO_ATTENTION}/out"),
    (rf"{_BLOCK}(?:ls1\.gamma|gamma_1|layer_scale1\.lambda1)", f"{_TO_ATTENTION}/out*"),
    (rf"{_BLOCK}mlp\.(?:fc1|up_proj|fc1_x|weights_in)", f"{_TO}/MlpBlock_3/Dense_0"),
    (rf"{_BLOCK}intermediate\.dense", f"{_TO}/MlpBlock_3/Dense_0"),
    (rf"{_BLOCK}mlp\.(?:gate_proj|fc1_g)", f"{_TO}/MlpBlock_3/gate"),
    (rf"{_BLOCK}(?:mlp\.(?:fc2|down_proj|weights_out)|output\.dense)", f"{_TO}/MlpBlock_3/Dense_1"),
    (rf"{_BLOCK}(?:ls2\.gamma|gamma_2|layer_scale2\.lambda1)", f"{_TO}/MlpBlock_3/Dense_1*"),
    (r"norm|layernorm|post_layernorm", "Transformer/encoder_norm"),
    (r"fc_norm", "Transformer/fc_norm"),
    (r"attn_pool\.latent|head\.probe", f"{_TO_POOLING}/probe"),
    (r"attn_pool\.q", f"{_TO_POOLED}/query"),
    (r"attn_pool\.kv", f"{_TO_POOLED}/key+value"),
    (r"head\.attention\.in_proj", f"{_TO_POOLED}/query+key+value"),
    (r"attn_pool\.proj|head\.attention\.out_proj", f"{_TO_POOLED}/out"),
    (r"attn_pool\.norm|head\.layernorm", f"{_TO_POOLING}/LayerNorm_0"),
    (r"(?:attn_pool|head)\.mlp\.fc1", f"{_TO_POOLING}/MlpBlock_0/Dense_0"),
    (r"(?:attn_pool|head)\.mlp\.fc2", f"{_TO_POOLING}/MlpBlock_0/Dense_1"),
)

# Prefixes that Hugging Face gives to a model within another.
_PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers|dinov3_vit|vision_model)\.")

# Prefixes that PyTorch's wrappers and training loops give to all names.
_WRAPPER = re.compile(r"(module|model|backbone)\.")

# Arrays without influence on features: classifiers, projections, text towers, decoders, masks.
_SKIPPED = re.compile(
    r"(head|pre_logits)/.*|(head|head_dist|pre_logits|\w*classifier|pooler|decoder|text_model)\..*"
    r"|(text_projection|visual_projection)\.\w+|logit_(scale|bias)"
    r"|(embeddings\.)?(mask_token|position_ids)"
)

# timm writes neither heads nor activation: both follow from the name of the architecture.
_UNSUPPORTED = "_rpn_|_rope_|_pe_|_radio_|base_patch16_gap_"
_TIMM_NAMES = re.compile(rf"(?!.*({_UNSUPPORTED}))((flexi)?vit|deit3?)_")
_TIMM_HEADS = {width: width // 64 for width in (192, 256, 320, 384, 512, 640, 768, 832, 896, 1024)}
_TIMM_HEADS |= {1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
_TIMM_TANH = r"giantopt|so400m_patch16_siglip|base_patch32_siglip|large_patch16_siglip_(gap_)?512"

_ACTIVATIONS = {name: name for name in operations.ACTIVATIONS} | {
    "gelu_pytorch_tanh": "gelu_tanh",
    "quickgelu": "quick_gelu",
    "silu": "swiglu",
}

# Hugging Face's defaults, which its configurations omit.
_OF_VIT = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
_MODEL_TYPES: dict[str, dict[str, Any]] = {
    "vit": _OF_VIT,
    "deit": _OF_VIT,
    "vit_mae": _OF_VIT,
    "dinov2": _OF_VIT | {"layer_norm_eps": 1e-6},
    "dinov2_with_registers": _OF_VIT | {"layer_norm_eps": 1e-6},
    "dinov3_vit": _OF_VIT
    | {"num_attention_heads": 6, "layer_norm_eps": 1e-5, "rope_theta": 100.0, "image_size": 224},
    "clip": _OF_VIT | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip": _OF_VIT | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}


# Arrays -------------------------------------------------------------------------------------------


def rename(arrays: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file that determine features, under AugReg's names.

    Unknown names stay. Only AugReg's files divide kernels and biases of attention into heads.
    Layer scale is multiplied into the layer before it; missing biases of projections, and
    missing positions of learned tokens, become zero.

    Raises:
        InputError: the shape of an array does not fit its name.
    """
    relevant = used(arrays)
    if "embedding/kernel" in arrays:
        return relevant
    renamed: dict[str, np.ndarray] = {}
    for name, array in relevant.items():
        try:
            renamed |= _decode(name, array)
        except (ValueError, IndexError) as error:
            raise InputError(f"{path}: {name} has the unexpected shape {array.shape}") from error
    return _complete(renamed)


def without_wrapper(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    """Returns the arrays without the prefix of a wrapper in their names, and the prefix or "".

    A prefix is removed if all arrays that determine features have it.
    """
    names, prefix = [name for name in arrays if not _is_skipped(name)], ""
    while match := _WRAPPER.match(names[0], len(prefix)) if names else None:
        if not all(name.startswith(prefix + match[0]) for name in names):
            break
        prefix += match[0]
    return {name.removeprefix(prefix): array for name, array in arrays.items()}, prefix


def used(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays that determine features, under their own names."""
    return {name: array for name, array in arrays.items() if not _is_skipped(name)}


def skipped(arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Returns the names of arrays without influence on features; a text tower is one name."""
    towers = {name: name.split(".")[0] for name in arrays if _is_skipped(name)}
    sizes = collections.Counter(towers.values())
    return tuple(sorted({f"{top}.*" if sizes[top] > 4 else name for name, top in towers.items()}))


def _is_skipped(name: str) -> bool:
    name = _PREFIX.sub("", name)
    return _target(name)[0] is None and _SKIPPED.fullmatch(name) is not None


def _target(name: str) -> tuple[str | None, str]:
    """Returns AugReg's name of a layer, and "weight" or "bias"; "" if the layer is one array."""
    name = re.sub(r"\.(q|v|in_proj)_(weight|bias)$", r".\1.\2", _PREFIX.sub("", name))
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, ""
    matches = ((re.fullmatch(pattern, stem), target) for pattern, target in _LAYERS)
    return next((match.expand(target) for match, target in matches if match), None), kind


def _decode(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays of AugReg's layout in an array of another library."""
    target, kind = _target(name)
    if target is None:
        return {name: array}
    before, _, last = target.rpartition("/")
    if last in ("cls", "distillation", "registers", "probe", "pos_embedding"):
        return {target: array.reshape(1, -1, array.shape[-1])}
    if not kind:
        return {target: array}
    if kind == "weight":
        kind = "scale" if "norm" in last.lower() else "kernel"
    names = last.split("+")
    parts = [array] if len(names) == 1 else np.split(array, len(names))
    before = f"{before}/" if before else ""
    return {
        f"{before}{layer}/{kind}": part.transpose(2, 3, 1, 0) if part.ndim == 4 else part.T
        for layer, part in zip(names, parts, strict=True)
    }


def _complete(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns renamed arrays in the encoder's form: gates, layer scale, biases and positions."""
    arrays = {name: array for name, array in arrays.items() if array.size}
    for name in list(arrays):
        layer, _, kind = name.rpartition("/")
        values = name.replace("/gate/", "/Dense_0/")
        if layer.endswith("/gate") and values in arrays:
            arrays[values] = np.concatenate([arrays.pop(name), arrays[values]], axis=-1)
        scaled = {f"{name[:-1]}/kernel", f"{name[:-1]}/bias"} & arrays.keys()
        if name.endswith("*") and scaled:
            factors = arrays.pop(name).astype(np.float32)
            arrays |= {array: arrays[array] * factors for array in scaled}
        if kind == "kernel" and layer.split("/")[-1] in ("embedding", "query", "key", "value"):
            arrays.setdefault(f"{layer}/bias", np.zeros(arrays[name].shape[-1], np.float32))
    if {"cls", "distillation"} <= arrays.keys():
        arrays["cls"] = np.concatenate([arrays["cls"], arrays.pop("distillation")], axis=1)
    if POSITIONS in arrays:
        arrays |= _align_positions(arrays)
    return arrays


def _align_positions(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns positions of class tokens and patches, and registers plus their positions."""
    positions, registers = arrays[POSITIONS], arrays.get("Transformer/registers")
    _, length, width = positions.shape
    tokens = arrays["cls"].shape[1] if "cls" in arrays else 0
    if _is_square(length - tokens):
        return {}
    if _is_square(length):
        return {POSITIONS: np.concatenate([np.zeros((1, tokens, width)), positions], axis=1)}
    if registers is not None and _is_square(length - tokens - registers.shape[1]):
        first, middle, patches = np.split(positions, [tokens, tokens + registers.shape[1]], axis=1)
        return {
            POSITIONS: np.concatenate([first, patches], axis=1),
            "Transformer/registers": registers.astype(np.float32) + middle,
        }
    return {}


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


# The architecture ---------------------------------------------------------------------------------


def encoder_of(
    arrays: Mapping[str, np.ndarray], path: Path, heads: int = 0
) -> tuple[str, vit.Variant]:
    """Returns the name and the architecture of the encoder with arrays of a file.

    `heads` are those of a plain Vision Transformer in timm's layout without a configuration beside
    the file; 0: not known.

    Raises:
        InputError: the arrays are not those of a supported encoder, or their configuration is
            missing, belongs to another file, or is not supported.
    """
    named = rename(arrays, path)
    try:
        return _describe(arrays, named, path, heads)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: expected arrays of a supported encoder and a config.json beside it that "
            f"describes them, found otherwise ({error})"
        ) from error


def _describe(
    arrays: Mapping[str, np.ndarray], named: Mapping[str, np.ndarray], path: Path, heads: int
) -> tuple[str, vit.Variant]:
    """Returns the result of `describe`; raises errors of any type. `named` has AugReg's names."""
    block = "Transformer/encoderblock_0"
    mlp = [f"{block}/MlpBlock_3/{layer}/kernel" for layer in ("Dense_0", "Dense_1")]
    needed = ["embedding/kernel", *mlp]
    odd = sorted(name for name in named if "/" not in name.removesuffix("*") and name != "cls")
    if odd := odd or [name for name in needed if name not in named]:
        raise InputError(
            f"{path}: expected a Vision Transformer, found {len(odd)} unknown or missing arrays, "
            f"first {', '.join(odd[:3])}"
        )
    patch, width = named["embedding/kernel"].shape[0], named["embedding/kernel"].shape[-1]
    units, hidden = (named[name].shape for name in mlp)
    blocks = re.findall(r"encoderblock_(\d+)/", " ".join(named))
    tokens = named["cls"].shape[1] if "cls" in named else 0
    grid = math.isqrt(named[POSITIONS].shape[1] - tokens) if POSITIONS in named else 0
    image_size = patch * grid
    registers = named.get("Transformer/registers", np.zeros((1, 0)))
    pooling = "token" if tokens else "mean"
    if f"{_TO_POOLING}/probe" in named:
        pooling = "attention"
    usual = hidden[0] == 4 * width
    depth = 1 + max(map(int, blocks))
    pre_norm = "Transformer/pre_norm/scale" in named
    variant = vit.Variant(
        width=width,
        depth=depth,
        heads=1,
        patch=patch,
        hidden=0 if usual else hidden[0],
        tokens=tokens,
        registers=registers.shape[1],
        pre_norm=pre_norm,
        pooling=pooling,
        image_size=image_size,
    )
    gated = units[-1] == 2 * hidden[0]
    if "embedding/kernel" in arrays:
        query = f"{block}/MultiHeadDotProductAttention_1/query/kernel"
        family, facts = "augreg", {"heads": named[query].shape[1] if query in named else 1}
    elif any(name.startswith("patch_embed.") for name in arrays):
        family, facts = _of_timm(named, variant, path, heads, gated)
    else:
        family, facts = _of_hugging_face(named, variant, path)
    facts["activation"] = "swiglu" if gated else facts.get("activation", "gelu")
    if facts["activation"] == "swiglu" and not gated:
        raise InputError(f"{path}: expected twice as many gates as hidden units, found {units}")
    if grid and facts.get("image_size", 0) // patch != grid:
        facts["image_size"] = patch * grid
    variant = dataclasses.replace(variant, **facts)
    if variant.heads < 1 or width % variant.heads or isinstance(variant.heads, float):
        raise InputError(f"{path}: {variant.heads} heads do not divide its width {width}")
    name = _name(family, variant)
    if family == "augreg" and name in vit.VARIANTS:
        known = vit.VARIANTS[name]
        variant = dataclasses.replace(variant, mean=known.mean, std=known.std)
    return name, variant


def _of_timm(
    named: Mapping[str, np.ndarray], variant: vit.Variant, path: Path, given_heads: int, gated: bool
) -> tuple[str, dict[str, Any]]:
    """Returns the name and the facts of a file of timm that shapes do not show."""
    file = path.with_name("config.json")
    config = read_object(file)
    arguments, pixels = config.get("model_args") or {}, config.get("pretrained_cfg") or config
    name = config.get("architecture", "")
    if config and not _TIMM_NAMES.match(name):
        _refuse(file, "architecture", "a supported Vision Transformer", name)
    plain = POSITIONS in named and variant.pooling == "token" and not (variant.pre_norm or gated)
    facts: dict[str, Any] = {"mean": _triple(pixels.get("mean")), "std": _triple(pixels.get("std"))}
    heads = 16 if "giantopt" in name else _TIMM_HEADS.get(variant.width)
    if POSITIONS not in named:
        if config and "dinov3" not in name:
            _refuse(file, "architecture", "one with rotary positions of DINOv3", name)
        facts["rotary"] = float(arguments.get("rope_temperature", 100.0))
        heads = 32 if variant.width == 4096 else variant.width // 64
    if not config and not (plain and given_heads):
        option = ", or, for a plain Vision Transformer, its number of heads as encoder.heads"
        raise InputError(
            f"{path}: expected timm's config.json beside it{option if plain else ''}; found none"
        )
    facts["heads"] = arguments.get("num_heads", heads) if config else given_heads
    if not facts["heads"]:
        _refuse(file, "model_args.num_heads", "the number of heads", None)
    tanh, quick = re.search(_TIMM_TANH, name), "quickgelu" in name
    activation = "gelu_tanh" if tanh else "quick_gelu" if quick else "gelu"
    facts["activation"] = _activation(arguments.get("act_layer", activation), file, "act_layer")
    if variant.pre_norm or "rotary" in facts:
        facts["epsilon"] = 1e-5
    pool = arguments.get("global_pool", config.get("global_pool", "token"))
    averaged = "mean_then_norm" if "Transformer/fc_norm/scale" in named else "mean"
    poolings = {"token": "token", "avg": averaged, "map": "attention"}
    if pool not in poolings:
        _refuse(file, "global_pool", " or ".join(poolings), pool)
    facts["pooling"] = "prefix" if variant.tokens == 2 else poolings[pool]
    facts["image_size"] = _side(arguments.get("img_size", pixels.get("input_size", 0)))
    return name or "timm", facts


def _of_hugging_face(
    named: Mapping[str, np.ndarray], variant: vit.Variant, path: Path
) -> tuple[str, dict[str, Any]]:
    """Returns the name and the facts of a file of Hugging Face that shapes do not show."""
    file = path.with_name("config.json")
    config = read_object(file)
    if not config:
        raise InputError(f"{path}: expected the config.json of the model beside it, found none")
    family = str(config.get("model_type", "")).removesuffix("_vision_model")
    config = config.get("vision_config", config)
    if family not in _MODEL_TYPES:
        _refuse(file, "model_type", f"one of {', '.join(_MODEL_TYPES)}", family)
    fields = ("hidden_size", "num_hidden_layers", "patch_size")
    for field, size in zip(fields, (variant.width, variant.depth, variant.patch), strict=True):
        if _side(config.get(field, size)) != size:
            _refuse(file, field, f"{size} as in {path.name}", config[field])
    config = _MODEL_TYPES[family] | config
    if variant.pooling == "mean":
        raise InputError(f"{path}: expected a class token or attention pooling, found neither")
    rotary = 0.0
    if POSITIONS not in named:
        rotary = float(config.get("rope_theta", 100.0))
    facts = {
        "heads": config["num_attention_heads"],
        "activation": _activation(config["hidden_act"], file, "hidden_act"),
        "epsilon": config["layer_norm_eps"],
        "rotary": rotary,
        "image_size": _side(config.get("image_size", 0)),
    }
    images = read_object(path.with_name("preprocessor_config.json"))
    facts |= {name: _triple(images.get(f"image_{name}")) for name in ("mean", "std")}
    return family, facts


def _name(family: str, variant: vit.Variant) -> str:
    """Returns the AugReg name of an architecture, or else a name from its family and sizes."""
    size = f"{variant.width}x{variant.depth}"
    for name, known in vit.VARIANTS.items():
        images = {"image_size": known.image_size, "mean": known.mean, "std": known.std}
        if dataclasses.replace(variant, **images) == known:
            return name
        if (known.width, known.depth, known.heads) == (variant.width, variant.depth, variant.heads):
            size = name.split("/")[0]
    return family if "patch" in family else f"{family} {size}/{variant.patch}"


def _activation(name: Any, file: Path, field: str) -> str:
    if name not in _ACTIVATIONS:
        _refuse(file, field, f"one of {', '.join(_ACTIVATIONS)}", name)
    return _ACTIVATIONS[name]


def _triple(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))


def _side(size: Any) -> int:
    return int(size[-1] if isinstance(size, list) else size)


def _refuse(file: Path, field: str, expected: str, value: Any) -> NoReturn:
    raise InputError(f"{file}: {field}: expected {expected}, found {value!r}")


# Encoding in timm's layout ------------------------------------------------------------------------


def as_timm(
    params: Any, variant: vit.Variant, replaced: vit.Replaced, image_size: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns an encoder's arrays and configuration in timm's layout, without a classifier.

    `rename` and `describe` are the inverse. `replaced` parameters stand in for those of `params`;
    the variant has mean and deviation of the pixels that the encoder gets.

    Raises:
        InputError: the encoder does not end in the class token of a plain block, or has an adapter.
    """
    plain = (variant.pooling, variant.tokens, variant.registers, variant.rotary)
    gated = variant.activation == "swiglu"
    if plain != ("token", 1, 0, 0) or gated or "adapter" in replaced:
        raise InputError("timm's layout: expected a plain Vision Transformer with a class token")
    params = replaced.get("parameters", params)
    flat = traverse_util.flatten_dict(params, sep="/")
    by_name = {name: np.asarray(array) for name, array in flat.items()}
    for part in replaced.keys() & {"key", "value"}:
        for block, kernel in enumerate(np.asarray(replaced[part])):
            attention = f"Transformer/encoderblock_{block}/MultiHeadDotProductAttention_1"
            by_name[f"{attention}/{part}/kernel"] = kernel
    layers = ["patch_embed.proj", "norm", *(["norm_pre"] if variant.pre_norm else [])]
    sublayers = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    layers += [f"blocks.{block}.{layer}" for block in range(variant.depth) for layer in sublayers]
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    arrays = {name: _encode(by_name, variant.width, name) for name in names}
    arrays |= {"cls_token": by_name["cls"], "pos_embed": by_name[POSITIONS]}
    if variant.pre_norm:
        del arrays["patch_embed.proj.bias"]
    ratio = variant.mlp_width / variant.width
    if int(variant.width * ratio) != variant.mlp_width:  # timm rounds the product down.
        ratio = (variant.mlp_width + 0.5) / variant.width
    ending = {"num_classes": 0, "global_pool": "token"}
    model_arguments = ending | {
        "img_size": image_size,
        "patch_size": variant.patch,
        "embed_dim": variant.width,
        "depth": variant.depth,
        "num_heads": variant.heads,
        "mlp_ratio": ratio,
        "act_layer": variant.activation,
    }
    pixels = {"mean": variant.mean, "std": variant.std, "input_size": [3, image_size, image_size]}
    preprocessing = {"crop_pct": 0.875, "fixed_input_size": True, "interpolation": "bicubic"}
    ends = {"num_classes": 0, "first_conv": "patch_embed.proj", "classifier": "head"}
    return arrays, ending | {
        "architecture": f"vit_base_patch16_{'clip_' if variant.pre_norm else ''}224",
        "num_features": variant.width,
        "model_args": model_arguments,
        "pretrained_cfg": pixels | preprocessing | ends,
    }


def _encode(arrays: Mapping[str, np.ndarray], width: int, name: str) -> np.ndarray:
    """Returns the array under timm's name, the inverse of `_decode`."""
    target, kind = _target(name)
    before, _, last = f"/{target}".rpartition("/")
    kind = "bias" if kind == "bias" else "scale" if "norm" in last.lower() else "kernel"
    parts = [arrays[f"{before}/{layer}/{kind}"[1:]] for layer in last.split("+")]
    if kind != "kernel":
        return np.concatenate([part.reshape(-1) for part in parts])
    if last == "embedding":
        return parts[0].transpose(3, 2, 0, 1)
    # Heads divide the outputs of query, key and value kernels, and the inputs of `out`.
    rows = (-1, width) if last == "out" else (len(parts[0]), -1)
    return np.concatenate([part.reshape(rows).T for part in parts])
