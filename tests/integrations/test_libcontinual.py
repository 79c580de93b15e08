"""Methods in a checkout of LibContinual, which `LIBCONTINUAL` names, on scanned digits."""

import copy
import io
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from tests.integrations.conftest import Refitted

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    **{"n_gpu": 1, "device_ids": [0], "seed": 1, "deterministic": True, "epoch": 3},
    **{"dataset": "digits", "image_size": 8, "num_workers": 0, "pin_memory": False},
    **{"init_cls_num": 2, "inc_cls_num": 2, "task_num": 5, "class_order": [*range(10)]},
    **{"batch_size": 32, "val_per_epoch": 3, "testing_times": 1, "testing_per_task": True},
    **{"setting": "task-agnostic", "train_trfms": [{"ToTensor": {}}]},
    **{"test_trfms": [{"ToTensor": {}}], "lr_scheduler": {"name": "Constant"}},
    "optimizer": {"name": "SGD", "kwargs": {"lr": 0.05}},
    "buffer": {
        "name": "LinearBuffer",
        "kwargs": {"buffer_size": 20, "batch_size": 32, "strategy": "random"},
    },
}


class Body(torch.nn.Module):
    """A backbone as LibContinual's own return features."""

    def __init__(self, **_):
        super().__init__()
        self.linear = torch.nn.Linear(192, 48)

    def forward(self, images):
        return {"features": torch.relu(self.linear(images.flatten(1)))}


@pytest.fixture
def trainer(checkout, tmp_path, monkeypatch):
    """Trains a method with its settings on images in uint8, and returns it with copies of it."""
    from PIL import Image

    defined = checkout("LIBCONTINUAL", "LibContinual")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    import core.model as methods
    from core import trainer as trainers

    class OnHost(trainers.Trainer):
        def _init_logger(self, config, mode="train"):
            return SimpleNamespace(file=io.StringIO())  # Its own takes the place of stdout.

        def _init_device(self, config):
            torch.manual_seed(config["seed"])
            return torch.device("cpu")

    monkeypatch.setattr(trainers, "compute_fps", lambda *_: {"avg_fps": 0, "best_fps": 0})
    monkeypatch.setattr(methods, "Body", Body, raising=False)

    def train(splits, base, **changed):
        for mode, images, labels in (("train", *splits[::2]), ("test", *splits[1::2])):
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                folder = tmp_path / "data" / mode / f"{label:02}"
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / f"{number:04}.png")

        class Watched(base):
            def before_task(self, task_idx, *rest):
                super().before_task(task_idx, *rest)
                if not task_idx:  # Some methods make a head only now.
                    self.networks = [copy.deepcopy(self).eval()]

            def after_task(self, *given):
                super().after_task(*given)
                self.networks.append(copy.deepcopy(self).eval())

        monkeypatch.setattr(methods, "Watched", Watched, raising=False)
        folders = {"save_path": str(tmp_path), "data_root": str(tmp_path / "data")}
        run = OnHost(0, CONFIG | folders | changed)
        run.train_loop()
        return run

    return defined, train


TASKS = [[2 * task, 2 * task + 1] for task in range(5)]


def arrays(loaders):
    """All images of the tasks' loaders, in order, and their labels, without those of a buffer."""
    images, labels = [], []
    for classes, loader in zip(TASKS, loaders, strict=True):
        for number in range(len(loader.dataset)):
            row = loader.dataset[number]
            if row["label"] in classes:
                images.append(row["image"])
                labels.append(row["label"])
    return torch.stack(images), np.array(labels)


def check(name, run, features, layer_of):
    """Compares with what LibContinual's own evaluation counts; returns images and a line."""
    model = run.model
    train = arrays([run.train_loader.get_loader(task) for task in range(5)])
    refitted = Refitted(name, model.networks, *train, TASKS, features, layer_of)
    images, labels = arrays(run.test_loader.get_loader(4))
    with torch.no_grad():
        scores = model._calibrated[0].eval()(images).numpy()
    refitted.assert_scores(scores, images)
    right = scores.argmax(axis=1) == labels
    assert run._validate(4)["avg_acc"] == pytest.approx(100 * right.mean(), abs=0.5)
    model._calibrated = []
    raw = run._validate(4)["avg_acc"]
    print({"raw": raw / 100, name: right.mean().item()})
    assert 100 * right.mean() > raw + 20 * (name == "gaussians")
    return images, f" * Task 4 without calibration: {raw:.2f} %"


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_finetune_with_a_buffer_scores_as_refitted(trainer, digit_images, name, capsys):
    defined, train = trainer

    class Named(defined["Finetune"]):
        CALIBRATOR = name

    settings = {"num_class": 10, "feat_dim": 48}
    run = train(
        digit_images,
        Named,
        classifier={"name": "Watched", "kwargs": settings},
        backbone={"name": "Body", "kwargs": {}},
    )

    def features(model, images):
        with torch.no_grad():
            return model.backbone(images)["features"].numpy()

    def layer_of(model, classes):
        return model.classifier, classes

    # What was copied after three tasks goes on with equal scores.
    model = run.model
    read = copy.deepcopy(model.networks[3])
    calibrator = read._calibrated[0].calibrator
    read._calibrated[0].calibrator = pickle.loads(pickle.dumps(calibrator))
    for task in (3, 4):
        train_loader, test_loader = (
            loaders.get_loader(task) for loaders in (run.train_loader, run.test_loader)
        )
        dataset = copy.copy(train_loader.dataset)
        rows = [row for row, label in enumerate(dataset.labels) if label in TASKS[task]]
        dataset.images = [dataset.images[row] for row in rows]
        dataset.labels = [dataset.labels[row] for row in rows]
        loader = torch.utils.data.DataLoader(dataset, 32)
        read.before_task(task, run.buffer, loader, test_loader)
        read.load_state_dict(model.networks[task + 1].state_dict())
        read.after_task(task, run.buffer, loader, test_loader)
    expected = model._calibrated[0].eval()
    images, line = check(name, run, features, layer_of)
    assert line in capsys.readouterr().out
    assert torch.equal(read._calibrated[0].eval()(images), expected(images))


def small(weights=None):
    """InfLoRA asks for this kind, whose own is ViT-B/16 with weights that are fetched."""
    from core.model.backbone.transformer import VisionTransformer
    from core.model.InfLoRA_opt import ViTZoo

    class Small(ViTZoo):
        def __init__(self, **kwargs):
            torch.nn.Module.__init__(self)
            self.feat, self.prompt, self.prompt_flag = VisionTransformer(**kwargs), None, ""
            if weights:
                self.feat.load_state_dict(weights, strict=False)  # without LoRA

    return Small


def train_inflora(train, splits, base, small, classes, size, **changed):
    import core.model as methods

    methods.Small = small
    lora = {"attn_layer": "MultiHeadAttention_LoRA", "lora_rank": 4}
    tasks = {"init_cls_num": classes, "inc_cls_num": classes, "task_num": 5}
    settings = {"use_ca": False, "lame": 1.0, "lamb": 0.95, "embd_dim": size["embed_dim"]}
    return train(
        splits,
        base,
        classifier={"name": "Watched", "kwargs": tasks | settings | {"dataset": "digits"}},
        backbone={"name": "Small", "kwargs": size | lora},
        buffer=CONFIG["buffer"] | {"kwargs": CONFIG["buffer"]["kwargs"] | {"buffer_size": 0}},
        optimizer={"name": "Adam", "kwargs": {"lr": 0.002}},
        **tasks | changed,
    )


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_inflora_scores_as_refitted(trainer, digit_images, name):
    defined, train = trainer

    class Named(defined["InfLoRA_OPT"]):
        CALIBRATOR = name

    size = {"img_size": 8, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4}
    run = train_inflora(train, digit_images, Named, small(), 2, size)

    def features(model, images):
        with torch.no_grad():
            return model._network.backbone(images).numpy()

    def layer_of(model, classes):
        return model._network.classifier_pool[classes[0] // 2], slice(None)

    check(name, run, features, layer_of)


def test_gaussians_surpass_raw_logits_on_real_images(trainer, real_images, capsys):
    defined, train = trainer
    splits, vit = real_images
    weights = vit().state_dict()
    for name, other in ((".norm", ".ln_"), ("blocks.", "transformer.blocks.")):
        weights = {key.replace(name, other): value for key, value in weights.items()}
    size = {"img_size": 96, "patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    plain = [{"ToTensor": {}}, {"Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}}]
    changed = {"train_trfms": plain, "test_trfms": plain, "class_order": [*range(20)]}
    base = defined["InfLoRA_OPT"]
    run = train_inflora(train, splits, base, small(weights), 4, size, image_size=96, **changed)
    calibrated = run._validate(4)["avg_acc"] / 100
    (raw,) = re.findall(r"Task 4 without calibration: ([\d.]+)", capsys.readouterr().out)
    print({"raw": float(raw) / 100, "gaussians": calibrated})
    assert calibrated > float(raw) / 100 + 0.1
