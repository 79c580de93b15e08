"""Compares FDC with what PILOT offers: `python compare_pilot.py PILOT WEIGHTS DATA 1 2 3`.

PILOT is its repository, WEIGHTS the AugReg file of ViT-Ti/16, DATA a folder of TFDS with CIFAR-100.
A seed draws 20 of its classes, their order, weights and batches; accuracies follow the last of five
tasks. Needs timm; takes some minutes a seed.
"""

import importlib
import sys
import tempfile
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
import timm
import timm.layers.weight_init
import torch
from fdc_pilot import FDCLearner, dump
from torch import nn
from torchvision import transforms

from fdc_jax import calibration
from fdc_jax.features import feature_files

SIZE, CLASSES, COUNTS = 48, 20, {"train": 30, "test": 20}
SGD = {"init_weight_decay": 5e-4, "weight_decay": 2e-4, "init_milestones": [60], "milestones": [60]}
SGD |= {"init_lr_decay": 0.1, "lrate_decay": 0.1, "init_epoch": 3, "epochs": 3, "batch_size": 16}
ARGS = SGD | {"memory_size": 0, "memory_per_class": 0, "fixed_memory": False, "init_cls": 4}
ARGS |= {"increment": 4, "backbone_type": "vit", "device": [torch.device("cpu")], "nb_tasks": 5}
ARGS |= {"nb_classes": CLASSES, "tuned_epoch": 3, "optimizer": "sgd", "min_lr": 0, "M": 1000}
ARGS |= {"use_RP": True, "use_simplecil": False, "dataset": "cifar", "shuffle": True}
# Learning rates of `finetune` for what it trains, and of RanPAC and FeCAM in the first task.
RATES, TUNED = {"all": 3e-4, "low rank": 0.005}, 0.002


class Increment(nn.Module):
    """A frozen linear layer and a trained increment of low rank, which starts as zero."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output and the increment's."""
        return self.layer(x) + self.up(self.down(x))


def images(folder: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images and labels of both splits."""
    found = {}
    for split in COUNTS:
        records = list(tfds.data_source("cifar100", split=split, data_dir=folder))
        parts = ([each[name] for each in records] for name in ("image", "label"))
        found[split] = tuple(map(np.array, parts))
    return found


def setting(seed: int, stored: dict[str, Any], weights: str) -> Any:
    """Puts ViT-Ti/16 and a seed's classes in the place of PILOT's; returns its data manager."""
    from utils import data, data_manager, inc_net

    def backbone(args: Any, pretrained: bool = False) -> nn.Module:
        made = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=0)
        made.load_pretrained(weights)
        made.out_dim = made.embed_dim
        if args["trains"] == "low rank":
            made.requires_grad_(False)
            for block in made.blocks:
                block.attn.qkv = Increment(block.attn.qkv)
        return made.eval()

    class Few(data.iData):
        use_path = False
        # As PILOT's for CIFAR-100, at another size.
        train_trsf = [transforms.RandomResizedCrop(SIZE, (0.05, 1.0))]  # noqa: RUF012
        train_trsf += [transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        test_trsf = [transforms.Resize(SIZE * 256 // 224, interpolation=3)]  # noqa: RUF012
        test_trsf += [transforms.CenterCrop(SIZE), transforms.ToTensor()]

        def download_data(self) -> None:
            classes = np.random.default_rng(seed).permutation(100)[:CLASSES]
            for split, (pixels, labels) in stored.items():
                rows = [np.flatnonzero(labels == each)[: COUNTS[split]] for each in classes]
                setattr(self, f"{split}_data", pixels[np.concatenate(rows)])
                setattr(self, f"{split}_targets", np.repeat(np.arange(CLASSES), COUNTS[split]))

    inc_net.get_backbone, data_manager._get_idata = backbone, lambda *_: Few()
    return data_manager.DataManager("cifar", True, seed, 4, 4, ARGS)


def learned(name: str, seed: int, manager: Any, trains: str = "all", folder: str = "") -> Any:
    """Returns a learner of PILOT after all tasks, and its last accuracy; `finetune` has FDC."""
    module = importlib.import_module(f"models.{name}")
    module.num_workers = 0
    bases = (FDCLearner, module.Learner) if name == "finetune" else (module.Learner,)
    rate = RATES[trains] if name == "finetune" else TUNED
    args = {"model_name": name, "seed": seed, "init_lr": rate, "lrate": rate, "trains": trains}
    torch.manual_seed(seed)
    learner: Any = type("Learner", bases, {})(ARGS | args)
    learner.topk = 2
    for _ in range(manager.nb_tasks):
        learner.incremental_train(manager)
        accuracy = learner.eval_task()[0]["top1"]
        if folder:
            learner.save_checkpoint(f"{folder}/own")
        learner.after_task()
    return learner, float(accuracy)


def compare(seed: int, manager: Any) -> dict[str, float]:
    """Returns the accuracy of each method, in percent."""
    found = {}
    for trains in RATES:
        with tempfile.TemporaryDirectory() as folder:
            learner, in_pilot = learned("finetune", seed, manager, trains, folder)
            paths = [f"{folder}/own_{task}.pkl" for task in range(manager.nb_tasks)]
            dump(f"{folder}/file", type(learner)(learner.args), manager, paths)
            file = feature_files.load(f"{folder}/file")
            for method in ("raw", "fdc", "gaussians"):
                fitted = file.fit(calibration.make(method))
                labels = fitted.score(file.test_adapted, file.test_pretrained).label
                found[f"{trains}: {method}"] = 100 * float(np.mean(labels == file.test_labels))
        found[f"{trains}: fdc, in PILOT"] = in_pilot
    others = ("simplecil", "ranpac", "fecam")
    return found | {name: learned(name, seed, manager)[1] for name in others}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, weights, data_dir, *seeds = sys.argv[1:]
    sys.path.insert(0, folder)
    # Newer versions of timm have moved it.
    sys.modules["timm.models.layers.weight_init"] = timm.layers.weight_init
    stored = images(data_dir)
    columns = []
    for seed in map(int, seeds):
        columns.append(compare(seed, setting(seed, stored, weights)))
        print(f"seed {seed}:", columns[-1], flush=True)
    for method in columns[0]:
        row = [each[method] for each in columns]
        print("|", method, "|", *(f"{v:.2f} |" for v in row), f"{np.mean(row):.2f} |")
