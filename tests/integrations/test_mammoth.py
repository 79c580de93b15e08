"""The model in a checkout of Mammoth, which `MAMMOTH` names, on scanned digits in five tasks."""

import copy
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.integrations.conftest import Refitted, surpasses

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore")


def write_digits(folder, digits):
    """Writes digits in uint8, scaled to 28 pixels, as the files of MNIST that Mammoth reads."""
    for kind in ("MyMNIST", "MNIST"):
        (folder / "MNIST" / kind / "raw").mkdir(parents=True)
        for name, images, labels in (("train", *digits[::2]), ("t10k", *digits[1::2])):
            large = np.pad(np.kron(images, np.ones((1, 3, 3), np.uint8)), [(0, 0), (2, 2), (2, 2)])
            start = folder / "MNIST" / kind / "raw" / name
            head = struct.pack(">iiii", 2051, *large.shape)
            start.with_name(f"{name}-images-idx3-ubyte").write_bytes(head + large.tobytes())
            head = struct.pack(">ii", 2049, len(labels))
            rest = labels.astype(np.uint8).tobytes()
            start.with_name(f"{name}-labels-idx1-ubyte").write_bytes(head + rest)


def initialized(monkeypatch, folder, options):
    """Returns a model, images and arguments as Mammoth's command does."""
    options = f"{options} --model=sgd --batch_size=32 --seed=1 --num_workers=0"
    options = [*options.split(), "--non_verbose=1", f"--base_path={folder}"]
    monkeypatch.setattr(sys, "argv", ["main.py", *options])
    import main

    return main.initialize()


class Images(torch.utils.data.Dataset):
    """Three images; the transform of training adds noise."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return self.transform(torch.full((2,), float(row))), row


def test_statistics_are_of_images_with_the_test_transform():
    from fdc_mammoth import FDCModel

    def noisy(image):
        return image + torch.rand(2)

    training = torch.utils.data.DataLoader(Images(noisy), 2)
    test = torch.utils.data.DataLoader(Images(lambda image: 2 * image), 2)
    dataset = SimpleNamespace(train_loader=training, test_loaders=[test])
    images = torch.cat([images for images, _ in FDCModel._walk(None, dataset)])
    assert images.tolist() == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]
    assert training.dataset.transform is noisy


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_model_and_its_copies_score_as_refitted(
    checkout, digit_images, tmp_path, monkeypatch, name
):
    model_type = checkout("MAMMOTH", "Mammoth")["SgdFDC"]
    write_digits(tmp_path, digit_images)
    plain, dataset, args = initialized(
        monkeypatch, tmp_path, "--dataset=seq-mnist --lr=0.05 --n_epochs=4"
    )
    from utils.training import train

    networks, parts, copies, lines = [], [], [], []
    # Mammoth takes other handlers off the root logger.
    monkeypatch.setattr("fdc_mammoth.logging", SimpleNamespace(info=lines.append))

    def made():
        network = copy.deepcopy(plain.net)
        model = Watched(network, plain.loss, args, dataset.get_transform(), dataset)
        return model.to(plain.device)

    class Watched(model_type):
        CALIBRATOR = name

        def begin_task(self, dataset):
            if not networks:
                networks.append(copy.deepcopy(self.net).eval())
            super().begin_task(dataset)
            for model in copies:
                model._current_task = self.current_task
                model_type.begin_task(model, dataset)

        def end_task(self, dataset):
            images = dataset.train_loader.dataset
            parts.append((images.data.clone(), np.array(images.targets)))
            super().end_task(dataset)
            networks.append(copy.deepcopy(self.net).eval())
            for model in copies:
                model.net.load_state_dict(self.net.state_dict())
                model_type.end_task(model, dataset)
            if self.current_task == 2:  # What a checkpoint or copy has after three tasks goes on.
                torch.save(self.state_dict(), tmp_path / "third.pt")
                copies.extend([made(), copy.deepcopy(self)])
                stored = torch.load(tmp_path / "third.pt", weights_only=True)
                copies[0].load_state_dict(stored)

    model = made()
    train(model, dataset, args)

    def features(network, images):
        with torch.no_grad():
            return network(images.float()[:, None] / 255, returnt="features").numpy()

    def layer_of(network, classes):
        return network.classifier, classes

    images = torch.cat([part for part, _ in parts])
    labels = np.concatenate([y for _, y in parts])
    tasks = [[2 * task, 2 * task + 1] for task in range(5)]
    refitted = Refitted(name, networks, images, labels, tasks, features, layer_of)
    images = torch.cat([loader.dataset.data for loader in dataset.test_loaders])
    labels = np.concatenate([loader.dataset.targets for loader in dataset.test_loaders])
    pixels = images.float()[:, None] / 255
    with torch.no_grad():
        raw = model.net.eval()(pixels).argmax(dim=1).numpy() == labels
        scores = model(pixels)
        for other in copies:
            other.net.eval()
            assert torch.equal(other(pixels), scores)
    refitted.assert_scores(scores.numpy(), images)
    tasks = [raw[np.isin(labels, task)].mean() for task in tasks]  # Mammoth's mean over tasks
    assert lines[-1] == f"[Class-IL] without calibration: {100 * np.mean(tasks):.2f} %"
    right = scores.argmax(dim=1).numpy() == labels
    print({"raw": raw.mean().item(), name: right.mean().item()})
    assert surpasses(right, raw)


def test_gaussians_surpass_raw_logits_on_real_images(checkout, real_images, tmp_path, monkeypatch):
    model_type = checkout("MAMMOTH", "Mammoth")["SgdFDC"]
    from torchvision import datasets, transforms

    splits, vit = real_images

    def read(self, root, train=True, transform=None, *_, **__):
        self.data, self.targets = splits[not train], splits[2 + (not train)]
        self.transform, self.target_transform, self.classes = transform, None, [*range(20)]

    monkeypatch.setattr(datasets.CIFAR100, "__init__", read)
    monkeypatch.setattr(datasets.CIFAR100, "_check_integrity", lambda _: True)
    plain, dataset, args = initialized(
        monkeypatch, tmp_path, "--dataset=seq-cifar100 --lr=0.01 --n_epochs=5"
    )
    from utils.training import train

    normalise = transforms.Normalize(0.5, 0.5)
    vars(dataset).update(
        N_TASKS=5,
        N_CLASSES_PER_TASK=4,
        N_CLASSES=20,
        TRANSFORM=transforms.Compose([transforms.ToTensor(), normalise]),
        get_normalization_transform=lambda: normalise,
    )
    lines, accuracies = [], []
    monkeypatch.setattr("fdc_mammoth.logging", SimpleNamespace(info=lines.append))

    class Watched(model_type):
        LAYER = "head"

        def end_eval(self, dataset, of_tasks):
            super().end_eval(dataset, of_tasks)
            accuracies.append(np.mean(of_tasks[0]))

    torch.manual_seed(1)
    model = Watched(vit(20), plain.loss, args, dataset.get_transform(), dataset)
    train(model.to(plain.device), dataset, args)
    raw = float(lines[-1].removeprefix("[Class-IL] without calibration: ").removesuffix(" %"))
    print({"raw": raw / 100, "gaussians": float(accuracies[-1]) / 100})
    assert accuracies[-1] > raw + 10
