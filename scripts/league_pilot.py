"""Runs a method of LAMDA-PILOT in the protocol of the league and dumps what it predicted.

python scripts/league_pilot.py CLONE METHOD SEED IMAGES WEIGHTS OUTPUT.npz [NAME=VALUE ...]

CLONE is a checkout of LAMDA-CL/LAMDA-PILOT, in which widths and sizes were changed by hand:

    sed -i 's/768/192/g; s/num_heads=12/num_heads=3/g; s/img_size=224/img_size=128/g' */*.py
    sed -i 's/input_size = 224/input_size = 128/; s/(224)/(128)/g' utils/data.py

METHOD names a file of its `exps/`, whose values NAME=VALUE replace. IMAGES is what
`fdc bench --images` wrote; or the folder `features` of a run, for methods that train no encoder:
frozen features then take the place of images. WEIGHTS is AugReg's file with positions of 128
pixels,

    import numpy as np
    from fdc_jax.model import weights
    file = weights.load("Ti_16-augreg-i21k-ft-i1k.npz", "Ti/16", 128)
    weights.save(file.params | {"head": {"bias": np.zeros(1)}}, "ti16_128.npz")

with a bias of a head, which MOS looks for. timm 0.6.12 resizes positions without antialiasing:
SimpleCIL has 90.0 % after the first task then, and 93.0 % with these. Needs torch, timm 0.6.12 and
what PILOT needs; one CPU thread. The processor seconds are printed at the end.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import timm  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import torch.utils.data  # pyright: ignore[reportMissingImports]
from PIL import Image
from timm.models import vision_transformer  # pyright: ignore[reportMissingImports]

CLASSES, TASKS = 100, 20


class Loader(torch.utils.data.DataLoader):
    """A loader without processes of its own, whatever a method asks for."""

    def __init__(self, *arguments, num_workers=0, **named):
        super().__init__(*arguments, **named)


def read(folder: Path) -> dict[str, np.ndarray]:
    """Returns images or features of both splits, and their labels."""
    found = {}
    for split in ("train", "test"):
        files = sorted(folder.glob(f"{split}/*/*.png"))
        found[f"{split}_data"] = np.array([np.asarray(Image.open(file)) for file in files])
        labels = np.array([int(file.parent.name[:3]) for file in files])
        if not files and split == "train":
            names = ("train_pretrained", "train_labels")
            parts = [[np.load(folder / f"{n}_{t}.npy") for t in range(TASKS)] for n in names]
            found["train_data"], labels = map(np.concatenate, parts)
        elif not files:
            found["test_data"] = np.load(folder / "test_pretrained.npy")
            labels = np.load(folder / "test_labels.npy")
        found[f"{split}_targets"] = labels.astype(int)
    return found


def main() -> None:
    """Runs the command line."""
    clone, method, seed, folder, weights, output, *changes = sys.argv[1:]
    data, weights, output = read(Path(folder)), os.path.abspath(weights), os.path.abspath(output)
    frozen = data["test_data"].ndim == 2
    torch.set_num_threads(1)
    torch.utils.data.DataLoader = Loader
    create = timm.create_model

    def with_weights(name, pretrained=False, **named):
        if name == "vit_base_patch16_224":
            model = create("vit_tiny_patch16_224", img_size=128, **named)
            vision_transformer._load_weights(model, weights)
            return model
        # Some take 224 pixels from timm's table of files otherwise.
        model = create(name, **({"img_size": 128} if pretrained else {}), **named)
        if pretrained:
            model.load_pretrained(weights)
        return model

    timm.create_model = with_weights
    sys.path.insert(0, os.path.abspath(clone))
    os.chdir(clone)
    import trainer  # pyright: ignore[reportMissingImports]
    from utils import data as datasets  # pyright: ignore[reportMissingImports]
    from utils import data_manager, factory  # pyright: ignore[reportMissingImports]

    datasets.iCIFAR224.download_data = lambda self: vars(self).update(data)
    if frozen:
        data_manager.DummyDataset.__getitem__ = lambda self, at: (
            *(at, torch.from_numpy(np.array(self.images[at])), self.labels[at]),
        )
    given = json.loads(Path(f"exps/{method}.json").read_text())
    given |= {"init_cls": CLASSES // TASKS, "increment": CLASSES // TASKS, "seed": int(seed)}
    given |= {"device": [torch.device("cpu")], "nb_classes": CLASSES, "nb_tasks": TASKS}
    given |= {name: json.loads(value) for name, value in (each.split("=") for each in changes)}
    # Labels are places in the class order already.
    stream = data_manager.DataManager(given["dataset"], False, 0, *[CLASSES // TASKS] * 2, given)
    np.random.seed(int(seed))  # noqa: NPY002 (what PILOT draws from)
    trainer._set_random(int(seed))
    model = factory.get_model(given["model_name"], given)
    model.save_checkpoint = lambda *_: None
    if frozen:
        model._network.backbone.forward = lambda features: features
        model._init_train = lambda *_: None
    found = {}
    for task in range(TASKS):
        model.incremental_train(stream)
        model.topk = model._total_classes
        ranking, labels = (np.asarray(each) for each in model._eval_cnn(model.test_loader))
        assert np.array_equal(labels, data["test_targets"][: len(labels)])
        found[f"label_{task}"] = ranking[:, 0]
        model.after_task()
        print(task + 1, np.mean(ranking[:, 0] == labels), flush=True)
    places = np.argsort(ranking, axis=1).reshape(len(labels), TASKS, -1)
    found["task_scores"] = -places.min(axis=2)
    np.savez_compressed(output, **found)
    print(f"{time.process_time():.1f} processor seconds")


if __name__ == "__main__":
    main()
