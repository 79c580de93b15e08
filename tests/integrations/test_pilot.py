"""The learner in a checkout of PILOT, which `PILOT` names, on scanned digits in five tasks."""

import copy
import pickle

import numpy as np
import pytest

from fdc_jax import calibration, heads
from fdc_jax.features import feature_files

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore")

SGD = {"init_lr": 0.02, "lrate": 0.02, "init_weight_decay": 0.0, "weight_decay": 0.0}
STEPS = {"init_milestones": [60], "milestones": [60], "init_lr_decay": 1.0, "lrate_decay": 1.0}
MEMORY = {"memory_size": 0, "memory_per_class": 0, "fixed_memory": False}
ARGS = SGD | STEPS | MEMORY | {"model_name": "finetune", "backbone_type": "vit", "seed": 1}
ARGS |= {"dataset": "digits", "init_cls": 2, "increment": 2, "init_epoch": 3, "epochs": 3}
ARGS |= {"batch_size": 32, "shuffle": True, "device": [torch.device("cpu")]}


def data_manager(digits):
    """PILOT's own, with digits in place of its images."""
    from torchvision import transforms
    from utils import data, data_manager

    class Digits(data.iData):
        use_path, class_order = False, list(range(10))
        train_trsf, test_trsf, common_trsf = [], [], [transforms.ToTensor()]

        def download_data(self):
            images = [(each * 255).astype(np.uint8).reshape(-1, 8, 8) for each in digits[:2]]
            self.train_data, self.test_data = images
            self.train_targets, self.test_targets = digits[2:]

    data_manager._get_idata = lambda *_: Digits()
    found = data_manager.DataManager("digits", True, 1, 2, 2, ARGS)
    ARGS.update(nb_classes=found.nb_classes, nb_tasks=found.nb_tasks)
    return found


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_learner_and_dump(checkout, digits, tmp_path, name):
    pytest.importorskip("timm.layers.weight_init", reason="needs timm, as PILOT does")
    learner_type = checkout("PILOT", "PILOT")["Learner"]
    from fdc_pilot import dump
    from models import finetune
    from utils import inc_net

    def backbone(args, pretrained=False):
        torch.manual_seed(0)
        body = [torch.nn.Flatten(), torch.nn.Linear(64, 48), torch.nn.ReLU()]
        found = torch.nn.Sequential(*body)
        found.out_dim = 48
        return found

    inc_net.get_backbone, finetune.num_workers = backbone, 0
    manager = data_manager(digits)
    learner = learner_type(ARGS | {"calibrator": name})
    learner.topk = 2
    networks = [copy.deepcopy(learner._network)]
    others = []
    for task in range(5):
        if task == 3:  # What was copied, or pickled, after three tasks goes on.
            learner.data_manager = None  # A class of this test, which no other process knows.
            others = [copy.deepcopy(learner)]
            others[0].calibrator = pickle.loads(pickle.dumps(learner.calibrator))
        for other in [learner, *others]:
            torch.manual_seed(task)
            other.incremental_train(manager)
        found = learner.eval_task()[0]["top1"]
        learner.save_checkpoint(str(tmp_path / "own"))
        for other in [learner, *others]:
            other.after_task()
        networks.append(copy.deepcopy(learner._network))

    def features(network, first, end, source="train"):
        images, labels, _ = manager.get_dataset(
            np.arange(first, end), source=source, mode="test", ret_data=True
        )
        with torch.no_grad():
            return network.backbone(torch.tensor(images / 255).float()).numpy(), labels

    again, final = calibration.make(name), networks[-1].fc
    for task in range(5):
        first, end = 2 * task, 2 * task + 2
        adapted, labels = features(networks[task + 1], first, end)
        frozen = features(networks[0], first, end)[0]
        before = features(networks[task], first, end)[0]
        rows = (each.detach().numpy()[first:end] for each in (final.weight, final.bias))
        again.fit_task(adapted, labels, heads.LinearHead(*rows), frozen, previous=before)
    again.finalize()
    (test, labels), start = features(networks[-1], 0, 10, "test"), features(
        networks[0], 0, 10, "test"
    )[0]  # fmt: skip
    expected = again.class_scores(test, start)
    scale = abs(expected).max()
    np.testing.assert_allclose(
        learner.calibrator.class_scores(test, start), expected, atol=1e-3 * scale
    )
    assert found == pytest.approx(100 * np.mean(again.score(test, start).label == labels), abs=0.3)

    scores = learner.calibrator.class_scores(test, start)
    np.testing.assert_array_equal(others[0].calibrator.class_scores(test, start), scores)
    stored = calibration.load(tmp_path / "own_4.npz")
    np.testing.assert_array_equal(stored.class_scores(test, start), scores)

    logits = networks[-1].fc(torch.tensor(test))["logits"].detach().numpy()
    raw = np.mean(logits.argmax(axis=1) == labels).item()
    print({"raw": raw, name: float(found / 100)})
    if name == "gaussians":
        assert found / 100 > raw + 0.2

    fresh = finetune.Learner(ARGS)
    dump(str(tmp_path / "file"), fresh, manager, [tmp_path / f"own_{t}.pkl" for t in range(5)])
    file = feature_files.load(str(tmp_path / "file"))
    fitted = file.fit(calibration.make(name))
    scored = fitted.score(file.test_adapted, file.test_pretrained).label
    assert 100 * np.mean(scored == file.test_labels) == pytest.approx(found, abs=0.3)
