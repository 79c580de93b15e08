"""Writes small random encoders of every family, and what timm and transformers make of them.

python -m tests.model.make_encoders

Needs torch, torchvision, timm and transformers, which the tests do not. The libraries build the
models by their own classes and save weights, in half precision, and configurations; features are
computed in double precision, also with an increment added to the key and value projections.
"""

import copy
import functools
import re
import shutil
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden" / "encoders"
FEATURES = FOLDER / "features.npz"
WIDTH, DEPTH, HEADS, HIDDEN, PATCH, SIDE, RANK = 24, 2, 2, 20, 4, 12, 2

# Families by folder: timm's names, and classes of transformers with what they are given.
TIMM = {
    "timm_vit": "vit_small_patch16_224.dino",
    "timm_deit": "deit_tiny_distilled_patch16_224.fb_in1k",
    "timm_dinov2": "vit_small_patch14_dinov2.lvd142m",
    "timm_dinov2_gated": "vit_giant_patch14_dinov2.lvd142m",
    "timm_dinov2_registers": "vit_small_patch14_reg4_dinov2.lvd142m",
    "timm_clip": "vit_base_patch32_clip_quickgelu_224.openai",
    "timm_siglip": "vit_base_patch32_siglip_256.v2_webli",
    "timm_positions": "vit_so150m_patch16_reg4_map_256",
    "timm_gap": "vit_medium_patch16_reg4_gap_256.sbb_in12k",
    "timm_dinov3": "vit_small_patch16_dinov3_qkvb.lvd1689m",
    "timm_dinov3_gated": "vit_small_plus_patch16_dinov3.lvd1689m",
}
HUGGING_FACE = {
    "hf_vit": ("ViTModel", "ViT", {}),
    "hf_deit": ("DeiTForImageClassificationWithTeacher", "DeiT", {}),
    "hf_mae": ("ViTMAEForPreTraining", "ViTMAE", {"decoder_num_hidden_layers": 1}),
    "hf_dinov2": ("Dinov2Model", "Dinov2", {"mlp_ratio": 1}),
    "hf_dinov2_gated": ("Dinov2Model", "Dinov2", {"mlp_ratio": 1, "use_swiglu_ffn": True}),
    "hf_dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegisters", {"mlp_ratio": 1}),
    "hf_clip": ("CLIPModel", "CLIP", {"projection_dim": 8}),
    "hf_siglip": ("SiglipModel", "Siglip", {}),
    "hf_dinov3": ("DINOv3ViTModel", "DINOv3ViT", {"num_register_tokens": 4}),
    "hf_dinov3_gated": (
        "DINOv3ViTModel",
        "DINOv3ViT",
        {"num_register_tokens": 0, "use_gated_mlp": True, "hidden_act": "silu"},
    ),
}
PROCESSORS = {
    "hf_mae": "ViTImageProcessor",
    "hf_vit": "ViTImageProcessor",
    "hf_deit": "DeiTImageProcessor",
    "hf_clip": "CLIPImageProcessor",
    "hf_siglip": "SiglipImageProcessor",
    "hf_dinov3": "DINOv3ViTImageProcessor",
    "hf_dinov3_gated": "DINOv3ViTImageProcessor",
}


def images(side: int = SIDE) -> np.ndarray:
    """Returns images of noise."""
    return np.random.default_rng(side).integers(0, 256, (3, side, side, 3), np.uint8)


def increment() -> dict[str, dict[str, np.ndarray]]:
    """Returns factors for the key and value kernels of all blocks."""
    rng = np.random.default_rng(5)
    shapes = {"A": (DEPTH, WIDTH, RANK), "B": (DEPTH, RANK, WIDTH)}
    return {
        part: {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
        for part in ("key", "value")
    }


def main() -> None:
    """Writes a folder a family, and all features."""
    import timm
    import torch
    import transformers

    shutil.rmtree(FOLDER, ignore_errors=True)
    versions = (f"{each.__name__} {each.__version__}" for each in (torch, timm, transformers))
    found = {"versions": np.array(list(versions))}
    for make, families in ((_timm, TIMM), (_hugging_face, HUGGING_FACE)):
        for family, what in families.items():
            torch.manual_seed(0)
            found |= make(family, what)
            print(family, sum(each.stat().st_size for each in (FOLDER / family).iterdir()))
    np.savez_compressed(FEATURES, **found)


def _timm(family: str, name: str) -> dict[str, np.ndarray]:
    import timm
    from timm.models._hub import save_for_hf

    sizes = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "mlp_ratio": HIDDEN / WIDTH}
    sizes |= {"img_size": SIDE, "patch_size": PATCH, "num_classes": 3}
    model = timm.create_model(name, **sizes).eval()
    _randomise(model)
    save_for_hf(copy.deepcopy(model).half(), FOLDER / family, safe_serialization=True)
    config = model.pretrained_cfg
    model = model.double()

    def encode(pixels):
        return model.forward_head(model.forward_features(pixels), pre_logits=True)

    return _features(family, model, encode, config["mean"], config["std"])


def _hugging_face(family: str, what: tuple) -> dict[str, np.ndarray]:
    import torch
    import transformers

    kind, config, options = what
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    if "dinov2" not in family:
        sizes["intermediate_size"] = HIDDEN
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    small["intermediate_size"] = 8
    if family in ("hf_clip", "hf_siglip"):
        text = small | {"vocab_size": 8, "max_position_embeddings": 4}
        text |= {"bos_token_id": 1, "eos_token_id": 2}
        options = options | {"vision_config": sizes, "text_config": text}
    elif family == "hf_mae":
        options = options | sizes | {f"decoder_{name}": value for name, value in small.items()}
    else:
        options = options | sizes
    made = getattr(transformers, f"{config}Config")(**options)
    model = getattr(transformers, kind)(made).eval()
    _randomise(model)
    copy.deepcopy(model).half().save_pretrained(FOLDER / family)
    processor = getattr(transformers, PROCESSORS.get(family, "BitImageProcessor"))()
    processor.save_pretrained(FOLDER / family)
    model = model.double()
    tower = model
    for name in ("vit", "deit", "vision_model"):
        tower = getattr(tower, name, tower)
    if family == "hf_mae":  # It hides patches, but for none.
        model.config.mask_ratio = tower.config.mask_ratio = 0.0
        order = torch.arange((SIDE // PATCH) ** 2).double().repeat(len(images()), 1)
        tower = functools.partial(tower, noise=order)

    def encode(pixels):
        output = tower(pixels)
        documented = family.startswith(("hf_dino", "hf_clip", "hf_siglip"))
        return output.pooler_output if documented else output.last_hidden_state[:, 0]

    return _features(family, model, encode, processor.image_mean, processor.image_std)


def _randomise(model) -> None:
    """Gives every parameter values that matter, which half precision holds exactly."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last, kind = name.split(".")[-2:] if "." in name else ("", name)
            around = "norm" in last and kind == "weight"
            around = around or re.search(r"gamma|lambda", kind) is not None
            noise = torch.randn_like(parameter) * (0.3 if around or "bias" in kind else 0.25)
            parameter.copy_((float(around) + noise).half().float())


def _features(family: str, model, encode, mean, std) -> dict[str, np.ndarray]:
    import torch

    pixels = (images() / 255.0 - np.array(mean)) / np.array(std)
    pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    with torch.no_grad():
        found = {family: encode(pixels).numpy()}
        _add(model, increment())
        found[f"{family} with an increment"] = encode(pixels).numpy()
    return found | {f"{family} mean and std": np.array([mean, std])}


def _add(model, factors) -> None:
    """Adds the transposed products to the projections of the image tower."""
    import torch

    changed = 0
    for name, parameter in model.named_parameters():
        match = re.search(
            r"(?:blocks|layer|layers)\.(\d+)\.(?:\w+\.)*(qkv|key|value|[kv]_proj)\.weight", name
        )
        if match is None or name.startswith(("text_model", "decoder")):
            continue
        block, layer = int(match[1]), match[2]
        rows = {"qkv": ("query", "key", "value"), "key": ("key",), "k_proj": ("key",)}
        for number, part in enumerate(rows.get(layer, ("value",))):
            if part in factors:
                product = factors[part]["A"][block] @ factors[part]["B"][block]
                where = slice(number * WIDTH, (number + 1) * WIDTH)
                parameter[where] += torch.from_numpy(product.T).double()
                changed += 1
    assert changed == 2 * DEPTH, changed


if __name__ == "__main__":
    main()
