"""Comparison of encoders in timm's layout with timm, for every family and for exports.

python -m scripts.check_timm [OUT ...]

The script needs torch and timm. It merges an increment into an encoder of each family in
`tests/model/golden/encoders`, loads the state dict strictly into timm's model, and compares its
features with those that timm or transformers computed in double precision. OUT is a folder written
by `python -m fdc_jax export WORKDIR OUT`; both of its encoders get images of noise.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fdc_jax
from fdc_jax.errors import InputError
from fdc_jax.machine.files import write_json, write_safetensors
from fdc_jax.model import increments, layouts, vit, weights
from tests.model import encoders

LARGEST = 2e-4


def timm_features(folder: Path, images: np.ndarray) -> np.ndarray:
    """Returns the features of uint8 images by a folder's timm model, [n, d]."""
    import safetensors.torch
    import timm  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    config = json.loads((folder / "config.json").read_text())
    model = timm.create_model(config["architecture"], **config["model_args"]).eval()
    state = safetensors.torch.load_file(folder / "model.safetensors")
    model.load_state_dict(state, strict=True)
    pixels = config["pretrained_cfg"]
    scaled = (images / 255.0 - pixels["mean"]) / pixels["std"]
    inputs = torch.from_numpy(scaled.astype(np.float32)).permute(0, 3, 1, 2)
    with torch.no_grad():
        features = model.forward_head(model.forward_features(inputs), pre_logits=True)
        np.testing.assert_array_equal(features, model(inputs))
    return features.numpy()


def family_difference(family: str) -> float:
    """Returns the largest difference of features for an encoder family."""
    path = encoders.FOLDER / family / "model.safetensors"
    _, variant = weights.recognise(str(path), "")
    params = weights.load(path, variant, encoders.SIDE).params
    added: Any = encoders.increment()
    kernels = increments.merge(vit.pretrained_kernels(params), added)
    arrays, config = layouts.as_timm(params, variant, kernels, encoders.SIDE)
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(Path(folder) / "model.safetensors", arrays)
        write_json(Path(folder) / "config.json", config)
        features = timm_features(Path(folder), encoders.images())
    with np.load(encoders.FEATURES) as golden:
        return np.abs(features - golden[f"{family} with an increment"]).max()


def export_difference(folder: Path) -> float:
    """Returns the largest difference of features between an export and its timm model."""
    run = fdc_jax.open_run(folder)
    images = encoders.images(run.config.encoder.image_size)
    ours = run.features(images, run.num_tasks)
    return np.abs(timm_features(folder / "timm", images) - ours).max()


def main(arguments: list[str]) -> int:
    """Prints a line per encoder; returns 1 if a difference exceeds 2e-4."""
    checks: list[Any] = [(family_difference, family) for family in encoders.FAMILIES]
    checks += [(export_difference, Path(folder)) for folder in arguments]
    differences: list[float] = []
    for difference, encoder in checks:
        try:
            differences.append(difference(encoder))
            print(f"{encoder!s:24} {differences[-1]:.1e}", flush=True)
        except InputError as error:
            print(f"{encoder!s:24} {error}")
    return int(max(differences) > LARGEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
