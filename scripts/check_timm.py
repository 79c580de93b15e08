"""Compares encoders in timm's layout with timm: of every family, and of an export.

python -m scripts.check_timm [OUT ...] [architectures]

Needs torch and timm beside the package. Of each family in `tests/model/golden/encoders` an
increment is merged, the state dict loaded strictly into timm's model, and features are compared
with those that timm or transformers computed in double precision. OUT is a folder that
`python -m fdc_jax.export WORKDIR OUT` wrote; images of noise go through both encoders.

The word `architectures` walks all Vision Transformers that timm can build, a block of each with
random weights, with and without the configuration that timm saves beside them: features are timm's,
or the file is refused.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fdc_jax
from fdc_jax.errors import InputError
from fdc_jax.machine.files import write_json, write_safetensors
from fdc_jax.model import increments, layouts, vit, weights
from tests.model import encoders

LARGEST = 2e-4


def timm_features(folder: Path, images: np.ndarray) -> np.ndarray:
    """Returns timm's features of uint8 images, [n, d], with the model of a folder."""
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
        found = model.forward_head(model.forward_features(inputs), pre_logits=True)
        np.testing.assert_array_equal(found, model(inputs))
    return found.numpy()


def family_difference(family: str) -> float:
    """Returns the largest difference of features in one family."""
    path = encoders.FOLDER / family / "model.safetensors"
    _, variant = weights.recognise(str(path), "")
    params = weights.load(path, variant, encoders.SIDE).params
    added: Any = encoders.increment()
    kernels = increments.merge(vit.pretrained_kernels(params), added)
    arrays, config = layouts.as_timm(params, variant, kernels, encoders.SIDE)
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(Path(folder) / "model.safetensors", arrays)
        write_json(Path(folder) / "config.json", config)
        found = timm_features(Path(folder), encoders.images())
    with np.load(encoders.FEATURES) as golden:
        return np.abs(found - golden[f"{family} with an increment"]).max()


def walk() -> dict[str, float]:
    """Returns, by architecture of timm, how far features differ in parts of their largest one."""
    import timm  # pyright: ignore[reportMissingImports]

    families = ("vision_transformer", "deit", "eva", "beit", "vision_transformer_relpos")
    found = {}
    for name in (name for family in families for name in timm.list_models(module=family)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            images, expected = _random_model(name, path.parent)
            for with_configuration in (True, False):
                kind = name if with_configuration else f"{name}, without config.json"
                try:
                    _, variant = weights.recognise(str(path), "")
                    side = variant.image_size
                    model = vit.build(variant, side, "model" if with_configuration else "augreg")
                    params = weights.load(path, variant, side).params
                    ours = np.asarray(jax.jit(model.apply)({"params": params}, images))
                    found[kind] = float(np.abs(ours - expected).max() / np.abs(expected).max())
                    print(f"{kind:64} {found[kind]:.1e}", flush=True)
                except InputError as error:
                    said = str(error).removeprefix(folder)
                    print(f"{kind:64} refused: {said}", flush=True)
                path.with_name("config.json").unlink(missing_ok=True)
    return found


def _random_model(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Saves a model of timm with its configuration; returns images and their features."""
    import timm  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from timm.models._hub import save_for_hf  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    try:
        model = timm.create_model(name, depth=1, num_classes=3).eval()
    except AssertionError:  # Something is given for each of its blocks.
        model = timm.create_model(name, num_classes=3).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.05)
    save_for_hf(model, folder, safe_serialization=True)
    pixels = model.pretrained_cfg
    images = encoders.images(pixels["input_size"][-1])[:1]
    scaled = torch.tensor((images / 255.0 - pixels["mean"]) / pixels["std"]).float()
    with torch.no_grad():
        features = model.forward_features(scaled.permute(0, 3, 1, 2))
        return images, model.forward_head(features, pre_logits=True).numpy()


def export_difference(folder: Path) -> float:
    """Returns the largest difference of features between an export and its timm model."""
    run = fdc_jax.open_run(folder)
    images = encoders.images(run.config["encoder.image_size"])
    ours = run.features(images, run.num_tasks)
    return np.abs(timm_features(folder / "timm", images) - ours).max()


def main(arguments: list[str]) -> int:
    """Prints a line an encoder; returns 1 where one differs by more than 2e-4."""
    folders = [each for each in arguments if each != "architectures"]
    checks: list[Any] = [(family_difference, family) for family in encoders.FAMILIES]
    checks += [(export_difference, Path(folder)) for folder in folders]
    found: dict[str, float] = {}
    for difference, of in checks:
        try:
            found[str(of)] = difference(of)
            print(f"{of!s:24} {found[str(of)]:.1e}", flush=True)
        except InputError as error:
            print(f"{of!s:24} {error}")
    if "architectures" in arguments:
        found |= walk()
    return int(max(found.values()) > LARGEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
