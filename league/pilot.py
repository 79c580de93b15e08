"""Runs a method of LAMDA-PILOT, or of a repository built like it, in the protocol of the league.

python league/pilot.py CLONE SETTINGS SEED IMAGES WEIGHTS OUT.npz [NAME=VALUE ...]
    [gaussians]

CLONE is a checkout of LAMDA-CL/LAMDA-PILOT, or of what the authors of TUNA, SSIAT, RSIAT, SD-LoRA,
InfLoRA or E2-LoRA (its folder class_incremental_learning) published. In all of them widths and
sizes are changed by hand, and what an installation of today refuses:

    sed -i 's/768/192/g; s/num_heads=12/num_heads=3/g; s/img_size=224/img_size=128/g' */*.py
    sed -i 's/input_size = 224/input_size = 128/; s/(224)/(128)/g' */data.py
    sed -i 's/num_workers=n8/num_workers=8/' models/SSITA_adapter.py  # SSIAT
    sed -i 's/: 0.01,/: self.init_lr,/' models/SSITA_adapter.py  # its rates, for a search
    sed -i 's|: 0.01,|: 0.01 * self.init_lr / 0.018461273665041644,|' models/RSIAT_adapter.py
    sed -i 's/3, 224, 224/3, 128, 128/' models/vit_inflora.py  # InfLoRA
    sed -i 's/deepcopy(module.cur_matrix)/module.cur_matrix.numpy().copy()/' methods/inflora.py
    sed -i 's/attn_mask=None/attn_mask=None, **_/' utils/inc_net.py  # E2-LoRA, timm 1.0

SETTINGS is a file of the clone, such as exps/slca.json, whose values NAME=VALUE replace, in JSON.
IMAGES is what `python -m league export` wrote, all or held-out ones; or the folder `features` of a
run, for methods that train no encoder: frozen features then take the place of images. WEIGHTS is
AugReg's file with positions of 128 pixels,

    import flax, numpy as np
    from fdc_jax.model import weights
    file = weights.load("Ti_16-augreg-i21k-ft-i1k.npz", "Ti/16", 128)
    params = file.params | {"head": {"bias": np.zeros(1)}}
    np.savez("ti16_128.npz", **flax.traverse_util.flatten_dict(params, sep="/"))

with a bias of a head, which MOS looks for. timm 0.6.12 resizes positions without antialiasing:
SimpleCIL has 90.0 % after the first task then, and 93.0 % with these. Needs torch, easydict, timm
0.6.12 (for Python 3.11 after `sed -i '/maxxvit/d' models/__init__.py` in its folder; E2-LoRA takes
1.0) and what the clone needs; one CPU thread. Test images are predicted after each task alone, not
after each epoch. The processor seconds are printed at the end.

With `gaussians` at the end, and this package installed beside torch, class Gaussians are fitted
after each task to features of the method's encoder, which they follow; so it must be one encoder,
unlike those of L2P, EASE, MOS and TUNA. The training is the same, the seconds hold those of both;
what they predict goes to OUT_gaussians.npz.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import torch.utils.data  # pyright: ignore[reportMissingImports]
from PIL import Image
from timm.models import helpers, vision_transformer  # pyright: ignore[reportMissingImports]


class Loader(torch.utils.data.DataLoader):
    """A loader without processes of its own, whatever a method asks for."""

    def __init__(self, *arguments, num_workers=0, **named):
        super().__init__(*arguments, **named)


def read(folder: Path) -> tuple[dict[str, np.ndarray], int]:
    """Returns images or features of both splits and their labels; and the number of tasks."""
    found = {}
    tasks = len(list(folder.glob("train_labels_*.npy")))
    if not tasks:
        tasks = len(json.loads((folder / "protocol.json").read_text())["classes_per_task"])
    for split in ("train", "test"):
        files = sorted(folder.glob(f"{split}/*/*.png"))
        images = np.empty(len(files), object)  # photographs differ in size
        images[:] = [np.asarray(Image.open(file)) for file in files]
        found[f"{split}_data"] = images
        labels = np.array([int(file.parent.name[:3]) for file in files])
        if not files and split == "train":
            names = ("train_pretrained", "train_labels")
            parts = [[np.load(folder / f"{n}_{t}.npy") for t in range(tasks)] for n in names]
            found["train_data"], labels = map(np.concatenate, parts)
        elif not files:
            found["test_data"] = np.load(folder / "test_pretrained.npy")
            labels = np.load(folder / "test_labels.npy")
        found[f"{split}_targets"] = labels.astype(int)
    return found, tasks


def module(*names: str) -> Any:
    """Returns the first module of the clone that exists."""
    found = next(name for name in names if Path(*name.split(".")).with_suffix(".py").exists())
    return importlib.import_module(found)


def extracted(model: Any, images: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns features by the encoder as it is, and labels; the training's draws stay the same."""
    loader = torch.utils.data.DataLoader(images, 64, generator=torch.Generator())
    return model._extract_vectors(loader)


def follow(model: Any, calibrator: Any) -> None:
    """Fits a calibrator to every task that a model learns."""
    assert hasattr(model._network, "extract_vector"), "expected a method of one encoder"
    learn = model.incremental_train

    def learned(manager: Any) -> None:
        task, first = model._cur_task + 1, model._known_classes
        classes = np.arange(first, first + manager.get_task_size(task))
        images = manager.get_dataset(classes, source="train", mode="test")
        previous = extracted(model, images)[0] if task else None
        learn(manager)
        calibrator.fit_task(*extracted(model, images), previous=previous)
        calibrator.finalize()

    model.incremental_train = learned


def not_measured(*_: Any) -> float:
    """Stands for accuracies of log lines; draws what a loader of test images would have drawn."""
    torch.empty((), dtype=torch.int64).random_()
    return 0.0


def main() -> None:
    """Runs the command line."""
    clone, settings, seed, folder, weights, output, *changes = sys.argv[1:]
    calibrator: Any = None
    if changes[-1:] == ["gaussians"]:
        from fdc_jax import calibration  # beside torch for this alone

        changes.pop()
        calibrator = calibration.make("gaussians")
    data, tasks = read(Path(folder))
    weights, output = os.path.abspath(weights), os.path.abspath(output)
    classes = int(data["test_targets"].max()) + 1
    assert classes % tasks == 0, "expected tasks of as many classes each"
    order = {"class_order": list(range(classes))}
    frozen = data["test_data"].ndim == 2
    torch.set_num_threads(1)
    torch.utils.data.DataLoader = Loader
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self
    load, create = torch.load, timm.create_model
    torch.load = lambda file, **named: load(file, **{"weights_only": False} | named)

    def with_weights(name, pretrained=False, **named):
        if name in ("vit_base_patch16_224", "vit_base_patch16_224_in21k"):
            model = create("vit_tiny_patch16_224", img_size=128, **named)
            vision_transformer._load_weights(model, weights)
            return model
        # Some take 224 pixels from timm's table of files otherwise.
        model = create(name, **({"img_size": 128} if pretrained else {}), **named)
        if pretrained:
            model.load_pretrained(weights)
        return model

    timm.create_model = with_weights
    helpers.download_cached_file = lambda *_, **__: weights  # where InfLoRA makes its own encoder
    sys.path.insert(0, os.path.abspath(clone))
    os.chdir(clone)
    trainer: Any = importlib.import_module("trainer")
    datasets = module("utils.data", "data.data")
    data_manager = module("utils.data_manager", "data.data_manager")
    factory = module("utils.factory", "utils.model_factory")
    for each in vars(datasets).values():
        if hasattr(each, "download_data"):
            each.download_data = lambda self: vars(self).update(data | order)
    if frozen:
        data_manager.DummyDataset.__getitem__ = lambda self, at: (
            *(at, torch.from_numpy(np.array(self.images[at])), self.labels[at]),
        )
    make, found, by_gaussians = factory.get_model, {}, {}
    ranking: np.ndarray = np.zeros(0)

    def watched(*given):
        model = make(*given)
        model.save_checkpoint = lambda *_: None
        model._compute_accuracy = not_measured
        if frozen:
            model._network.backbone.forward = lambda features: features
            model._init_train = lambda *_: None
        evaluate = model._eval_cnn
        if calibrator:
            follow(model, calibrator)

        def predicted(loader):
            nonlocal ranking
            best, model.topk = model.topk, model._total_classes
            first, *rest = evaluate(loader)
            model.topk, images = best, len(loader.dataset)
            ranking = np.asarray(first).reshape(images, -1)
            rest = [each.reshape(images, -1)[:, 0] for each in rest]  # InfLoRA ranks tasks, too.
            task, labels = model._cur_task, data["test_targets"][: len(ranking)]
            assert any(np.array_equal(each, labels) for each in rest)  # images in this order
            found[f"label_{task}"] = ranking[:, 0]
            print(task + 1, np.mean(ranking[:, 0] == labels), flush=True)
            if calibrator:
                scores = calibrator.score(extracted(model, loader.dataset)[0])
                by_gaussians[f"label_{task}"] = scores.label
                by_gaussians["task_scores"] = scores.task_scores
                print(task + 1, np.mean(scores.label == labels), "by class Gaussians", flush=True)
            return ranking[:, :best] if best > 1 else ranking[:, 0], *rest

        model._eval_cnn = predicted
        return model

    factory.get_model = watched
    trainer._set_device = lambda given: given.update(device=[torch.device("cpu")])
    trainer._set_random = lambda *_: torch.manual_seed(int(seed))  # RSIAT and SSIAT: always 1
    given = json.loads(Path(settings).read_text())
    given |= {"init_cls": classes // tasks, "increment": classes // tasks, "seed": int(seed)}
    # Labels are places in the class order already.
    given |= {"shuffle": False, "nb_classes": classes, "nb_tasks": tasks, "config": settings}
    given |= {name: json.loads(value) for name, value in (each.split("=", 1) for each in changes)}
    np.random.seed(int(seed))  # noqa: NPY002 (what PILOT draws from)
    trainer._train(given)
    if ranking.shape[1] > 1:
        places = np.argsort(ranking, axis=1).reshape(len(ranking), tasks, -1)
        found["task_scores"] = -places.min(axis=2)
    np.savez_compressed(output, **found)
    if calibrator:
        np.savez_compressed(f"{output.removesuffix('.npz')}_gaussians.npz", **by_gaussians)
    print(f"{time.process_time():.1f} processor seconds")


if __name__ == "__main__":
    main()
