"""Writes a small AugReg checkpoint and what PyTorch and timm make of it.

python -m tests.model.make_golden

Needs torch and timm, which the tests do not. timm reads the checkpoint by its own loader, encodes
noise in both input ranges, at the checkpoint's image size and at another, and saves its own form of
the parameters.
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden"
WIDTH, DEPTH, HEADS, PATCH, SIDE, OTHER_SIDE = 24, 2, 3, 8, 32, 48


def augreg_arrays() -> dict[str, np.ndarray]:
    """Returns random parameters under the keys and in the shapes of an AugReg file, with a head."""
    rng = np.random.default_rng(0)
    deep = WIDTH // HEADS

    def noise(*shape, around=0.0, scale=0.4):
        return (around + rng.normal(0, scale, shape)).astype(np.float32)

    arrays = {
        "cls": noise(1, 1, WIDTH),
        "embedding/kernel": noise(PATCH, PATCH, 3, WIDTH, scale=0.1),
        "embedding/bias": noise(WIDTH),
        "head/kernel": noise(WIDTH, 7),
        "head/bias": noise(7),
        "Transformer/posembed_input/pos_embedding": noise(1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "Transformer/encoder_norm/scale": noise(WIDTH, around=1.0),
        "Transformer/encoder_norm/bias": noise(WIDTH),
    }
    for number in range(DEPTH):
        block = f"Transformer/encoderblock_{number}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            arrays[f"{block}/{norm}/scale"] = noise(WIDTH, around=1.0)
            arrays[f"{block}/{norm}/bias"] = noise(WIDTH)
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            arrays[f"{attention}/{part}/kernel"] = noise(WIDTH, HEADS, deep)
            arrays[f"{attention}/{part}/bias"] = noise(HEADS, deep)
        arrays[f"{attention}/out/kernel"] = noise(HEADS, deep, WIDTH)
        arrays[f"{attention}/out/bias"] = noise(WIDTH)
        for layer, inputs, outputs in (
            ("Dense_0", WIDTH, 4 * WIDTH),
            ("Dense_1", 4 * WIDTH, WIDTH),
        ):
            arrays[f"{block}/MlpBlock_3/{layer}/kernel"] = noise(inputs, outputs)
            arrays[f"{block}/MlpBlock_3/{layer}/bias"] = noise(outputs)
    return arrays


def main() -> None:
    """Writes the three files."""
    import timm
    import torch
    from safetensors.torch import save_file

    FOLDER.mkdir(exist_ok=True)
    np.savez(FOLDER / "augreg.npz", **augreg_arrays())
    rng = np.random.default_rng(1)
    found = {"versions": np.array([f"torch {torch.__version__}", f"timm {timm.__version__}"])}
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=SIDE,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        num_classes=7,
    ).eval()
    model.load_pretrained(str(FOLDER / "augreg.npz"))
    save_file(model.state_dict(), FOLDER / "timm.safetensors")
    for side in (SIDE, OTHER_SIDE):
        model.float().set_input_size(side)
        model.double()
        images = rng.integers(0, 256, (3, side, side, 3), np.uint8)
        found[f"images_{side}"] = images
        for name, offset, divisor in (("pilot01", 0.0, 1.0), ("augreg", 0.5, 0.5)):
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255
            with torch.no_grad():
                tokens = model.forward_features((pixels - offset) / divisor)
            found[f"{name}_{side}"] = tokens[:, 0].numpy()
    np.savez(FOLDER / "features.npz", **found)


if __name__ == "__main__":
    main()
