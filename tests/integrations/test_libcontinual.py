"""Methods in a checkout of LibContinual, which `LIBCONTINUAL` names, on scanned digits."""

import copy
import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from fdc_jax import calibration, heads

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
def trainer(checkout, digits, tmp_path, monkeypatch):
    """Trains a method, named with its settings, and returns it with copies of it."""
    from PIL import Image

    found = checkout("LIBCONTINUAL", "LibContinual")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    import core.model as methods
    from core import trainer as trainers

    for mode, images, labels in (("train", *digits[::2]), ("test", *digits[1::2])):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = tmp_path / "data" / mode / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (image * 255).astype(np.uint8).reshape(8, 8)
            Image.fromarray(pixels).save(folder / f"{number}.png")

    class OnHost(trainers.Trainer):
        def _init_logger(self, config, mode="train"):
            return SimpleNamespace(file=io.StringIO())  # Its own takes the place of stdout.

        def _init_device(self, config):
            torch.manual_seed(config["seed"])
            return torch.device("cpu")

    monkeypatch.setattr(trainers, "compute_fps", lambda *_: {"avg_fps": 0, "best_fps": 0})
    monkeypatch.setattr(methods, "Body", Body, raising=False)

    def train(base, **changed):
        class Watched(base):
            def before_task(self, task_idx, *rest):
                self.before = [*getattr(self, "before", []), copy.deepcopy(self).eval()]
                super().before_task(task_idx, *rest)
                if not task_idx:  # Where a method makes a head only now.
                    self.before = [copy.deepcopy(self).eval()]

            def after_task(self, *given):
                super().after_task(*given)
                self.after = [*getattr(self, "after", []), copy.deepcopy(self).eval()]

        monkeypatch.setattr(methods, "Watched", Watched, raising=False)
        made = {"save_path": str(tmp_path), "data_root": str(tmp_path / "data")}
        worked = OnHost(0, CONFIG | made | changed)
        worked.train_loop()
        return worked

    return found, train


def arrays(loader):
    """All images of a loader, in order, and their labels."""
    rows = [loader.dataset[n] for n in range(len(loader.dataset))]
    return torch.stack([each["image"] for each in rows]), np.array([each["label"] for each in rows])


def fitted_again(name, worked, features, head_of):
    """Fits from arrays of copies of the model, with no part of the adapter."""
    again, model = calibration.make(name), worked.model
    for task in range(5):
        images, labels = arrays(worked.train_loader.get_loader(task))
        classes = np.array([2 * task, 2 * task + 1])
        own = np.isin(labels, classes)  # The rest is of the buffer.
        models = model.after[task], model.before[0], model.before[task]
        adapted, frozen, before = (features(each, images[torch.tensor(own)]) for each in models)
        head = head_of(model.after[task], task, classes)
        again.fit_task(adapted, labels[own], head, frozen, classes, before)
    again.finalize()
    return again


def check(name, worked, features, head_of):
    """Compares with what LibContinual's own evaluation counts; returns images and labels."""
    again, model = fitted_again(name, worked, features, head_of), worked.model
    parts = [arrays(each) for each in worked.test_loader.get_loader(4)]
    images, labels = torch.cat([each for each, _ in parts]), np.concatenate([y for _, y in parts])
    expected = again.class_scores(features(model.eval(), images), features(model.before[0], images))
    with torch.no_grad():
        found = model._calibrated[0].eval()(images).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3 * abs(expected).max())
    right = found.argmax(axis=1) == labels
    assert worked._validate(4)["avg_acc"] == pytest.approx(100 * right.mean(), abs=0.5)
    model._calibrated = []
    raw = worked._validate(4)["avg_acc"]
    print({"raw": raw / 100, name: right.mean().item()})
    return images, 100 * right.mean(), raw


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_finetune_with_a_buffer(trainer, name):
    found, train = trainer

    class Named(found["Finetune"]):
        CALIBRATOR = name

    settings = {"num_class": 10, "feat_dim": 48}
    worked = train(
        Named,
        classifier={"name": "Watched", "kwargs": settings},
        backbone={"name": "Body", "kwargs": {}},
    )

    def features(model, images):
        with torch.no_grad():
            return model.backbone(images)["features"].numpy()

    def head_of(model, task, classes):
        last = model.classifier
        return heads.LinearHead(*(each.detach().numpy()[classes] for each in last.parameters()))

    # What was copied after three tasks goes on with equal scores.
    model = worked.model
    read = copy.deepcopy(model.after[2])
    stored = pickle.dumps(read._calibrated[0].calibrator)
    read._calibrated[0].calibrator = pickle.loads(stored)
    for task in (3, 4):
        loaders = worked.train_loader.get_loader(task), worked.test_loader.get_loader(task)
        own = copy.copy(loaders[0].dataset)
        rows = [n for n, label in enumerate(own.labels) if label // 2 == task]
        own.images, own.labels = ([each[n] for n in rows] for each in (own.images, own.labels))
        loader = torch.utils.data.DataLoader(own, 32)
        read.before_task(task, worked.buffer, loader, loaders[1])
        read.load_state_dict(model.after[task].state_dict())
        read.after_task(task, worked.buffer, loader, loaders[1])
    expected = model._calibrated[0].eval()
    images, calibrated, raw = check(name, worked, features, head_of)
    assert torch.equal(read._calibrated[0].eval()(images), expected(images))
    assert calibrated > raw + 20 * (name == "gaussians")


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_inflora(trainer, monkeypatch, name):
    found, train = trainer
    import core.model as methods
    from core.model.backbone.transformer import VisionTransformer

    class Small(methods.InfLoRA_opt.ViTZoo):
        """InfLoRA asks for this kind, whose own is ViT-B/16 with weights that are fetched."""

        def __init__(self, **size):
            torch.nn.Module.__init__(self)
            self.feat, self.prompt, self.prompt_flag = VisionTransformer(**size), None, ""

    class Named(found["InfLoRA_OPT"]):
        CALIBRATOR = name

    monkeypatch.setattr(methods, "Small", Small, raising=False)
    size = {"img_size": 8, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4}
    lora = {"attn_layer": "MultiHeadAttention_LoRA", "lora_rank": 4}
    tasks = {"init_cls_num": 2, "inc_cls_num": 2, "task_num": 5, "dataset": "digits"}
    settings = {"use_ca": False, "lame": 1.0, "lamb": 0.95, "embd_dim": 64}
    worked = train(
        Named,
        classifier={"name": "Watched", "kwargs": tasks | settings},
        backbone={"name": "Small", "kwargs": size | lora},
        buffer=CONFIG["buffer"] | {"kwargs": CONFIG["buffer"]["kwargs"] | {"buffer_size": 0}},
        optimizer={"name": "Adam", "kwargs": {"lr": 0.002}},
    )

    def features(model, images):
        with torch.no_grad():
            return model._network.backbone(images).numpy()

    def head_of(model, task, classes):
        own = model._network.classifier_pool[task].parameters()
        return heads.LinearHead(*(each.detach().numpy() for each in own))

    _, calibrated, raw = check(name, worked, features, head_of)
    assert calibrated > raw + 20 * (name == "gaussians")
