"""The model in a checkout of Mammoth, which `MAMMOTH` names, on scanned digits in five tasks."""

import copy
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fdc_jax import calibration, heads

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore")


def write_digits(folder, digits):
    """Writes digits, scaled to 28 pixels, as the files of MNIST that Mammoth reads."""
    for kind in ("MyMNIST", "MNIST"):
        (folder / "MNIST" / kind / "raw").mkdir(parents=True)
        for name, images, labels in (("train", *digits[::2]), ("t10k", *digits[1::2])):
            small = (images * 255).astype(np.uint8).reshape(-1, 8, 8)
            large = np.pad(np.kron(small, np.ones((1, 3, 3), np.uint8)), [(0, 0), (2, 2), (2, 2)])
            start = folder / "MNIST" / kind / "raw" / name
            head = struct.pack(">iiii", 2051, *large.shape)
            start.with_name(f"{name}-images-idx3-ubyte").write_bytes(head + large.tobytes())
            head = struct.pack(">ii", 2049, len(labels))
            rest = labels.astype(np.uint8).tobytes()
            start.with_name(f"{name}-labels-idx1-ubyte").write_bytes(head + rest)


class Images(torch.utils.data.Dataset):
    """Three images; the transform of training adds noise."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return self.transform(torch.full((2,), float(row))), row


def test_statistics_are_of_images_in_the_preprocessing_of_the_test():
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
def test_model(checkout, digits, tmp_path, monkeypatch, name):
    model_type = checkout("MAMMOTH", "Mammoth")["SgdFDC"]
    write_digits(tmp_path, digits)
    options = "--model=sgd --dataset=seq-mnist --lr=0.05 --n_epochs=4 --batch_size=32 --seed=1"
    options = [*options.split(), "--num_workers=0", "--non_verbose=1", f"--base_path={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["main.py", *options])
    from utils.training import train

    import main

    plain, dataset, args = main.initialize()
    networks, seen, others = [], [], []

    def made():
        return Watched(
            copy.deepcopy(plain.net), plain.loss, args, dataset.get_transform(), dataset
        ).to(plain.device)

    class Watched(model_type):
        CALIBRATOR = name

        def begin_task(self, dataset):
            networks.append(copy.deepcopy(self.net).eval())
            super().begin_task(dataset)
            for each in others:
                each._current_task = self.current_task
                model_type.begin_task(each, dataset)

        def end_task(self, dataset):
            images = dataset.train_loader.dataset
            seen.append((images.data.clone(), np.array(images.targets)))
            super().end_task(dataset)
            for each in others:
                each.net.load_state_dict(self.net.state_dict())
                model_type.end_task(each, dataset)
            if self.current_task == 2:  # What a checkpoint or copy has after three tasks goes on.
                torch.save(self.state_dict(), tmp_path / "third.pt")
                others.extend([made(), copy.deepcopy(self)])
                stored = torch.load(tmp_path / "third.pt", weights_only=True)
                others[0].load_state_dict(stored)

    model = made()
    train(model, dataset, args)
    networks.append(copy.deepcopy(model.net).eval())

    def features(network, images):
        with torch.no_grad():
            return network(images.float()[:, None] / 255, returnt="features").numpy()

    again = calibration.make(name)
    for task, (images, labels) in enumerate(seen):
        classes, last = np.array([2 * task, 2 * task + 1]), networks[task + 1].classifier
        rows = (each.detach().numpy()[classes] for each in (last.weight, last.bias))
        adapted, frozen = (features(each, images) for each in (networks[task + 1], networks[0]))
        before = features(networks[task], images)
        again.fit_task(adapted, labels, heads.LinearHead(*rows), frozen, classes, before)
    again.finalize()
    images = torch.cat([each.dataset.data for each in dataset.test_loaders])
    labels = np.concatenate([each.dataset.targets for each in dataset.test_loaders])
    expected = again.class_scores(*(features(networks[i], images) for i in (-1, 0)))
    model.net.eval()
    with torch.no_grad():
        found = model(images.float()[:, None] / 255).numpy()
        raw = model.net(images.float()[:, None] / 255).numpy().argmax(axis=1)
        for each in others:
            each.net.eval()
            assert torch.equal(each(images.float()[:, None] / 255), torch.from_numpy(found))
    np.testing.assert_allclose(found, expected, atol=1e-3 * abs(expected).max())
    right, before = found.argmax(axis=1) == labels, raw == labels
    print({"raw": before.mean().item(), name: right.mean().item()})
    # More than three standard errors of a paired difference.
    assert np.sum(right) - np.sum(before) > 3 * np.sqrt(np.sum(right != before))
