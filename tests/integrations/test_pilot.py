"""The learner in a checkout of PILOT, which `PILOT` names, on scanned digits in five tasks."""

import copy
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax import calibration
from fdc_jax.features import feature_files
from tests.integrations.conftest import Refitted, surpasses

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
pytestmark = pytest.mark.filterwarnings("ignore")

SGD = {"init_lr": 0.02, "lrate": 0.02, "init_weight_decay": 0.0, "weight_decay": 0.0}
STEPS = {"init_milestones": [60], "milestones": [60], "init_lr_decay": 1.0, "lrate_decay": 1.0}
MEMORY = {"memory_size": 0, "memory_per_class": 0, "fixed_memory": False}
ARGS = SGD | STEPS | MEMORY | {"model_name": "finetune", "backbone_type": "vit", "seed": 1}
ARGS |= {"dataset": "digits", "init_cls": 2, "increment": 2, "init_epoch": 3, "epochs": 3}
ARGS |= {"batch_size": 32, "shuffle": True, "device": [torch.device("cpu")]}


def data_manager(splits, backbone, **settings):
    """PILOT's own, with images in uint8 and a backbone in place of its own."""
    from models import finetune
    from torchvision import transforms
    from utils import data, data_manager, inc_net

    class Images(data.iData):
        use_path, class_order = False, [*np.unique(splits[2])]
        train_trsf, test_trsf, common_trsf = [], [], [transforms.ToTensor()]

        def download_data(self):
            self.train_data, self.test_data, self.train_targets, self.test_targets = splits

    data_manager._get_idata = lambda *_: Images()
    inc_net.get_backbone, finetune.num_workers = backbone, 0
    args = ARGS | settings
    manager = data_manager.DataManager("", True, 1, args["init_cls"], args["increment"], args)
    return manager, args | {"nb_classes": manager.nb_classes, "nb_tasks": manager.nb_tasks}


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_learner_and_dump_score_as_refitted(checkout, digit_images, tmp_path, name):
    pytest.importorskip("timm.layers.weight_init", reason="needs timm, as PILOT does")
    learner_type = checkout("PILOT", "PILOT")["Learner"]
    from fdc_pilot import dump
    from models import finetune

    def backbone(args, pretrained=False):
        torch.manual_seed(0)
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 48), torch.nn.ReLU()]
        network = torch.nn.Sequential(*layers)
        network.out_dim = 48
        return network

    manager, args = data_manager(digit_images, backbone, calibrator=name)
    learner = learner_type(args)
    learner.topk = 2
    networks, learners = [copy.deepcopy(learner._network)], [learner]
    for task in range(5):
        if task == 3:  # What was copied, or pickled, after three tasks goes on.
            learner.data_manager = None  # A class of this test, which no other process knows.
            learners.append(copy.deepcopy(learner))
            learners[1].calibrator = pickle.loads(pickle.dumps(learner.calibrator))
        for other in learners:
            torch.manual_seed(task)
            other.incremental_train(manager)
        accuracy = learner.eval_task()[0]["top1"]
        learner.save_checkpoint(str(tmp_path / "run"))
        for other in learners:
            other.after_task()
        networks.append(copy.deepcopy(learner._network))

    def arrays(source):
        images, labels, _ = manager.get_dataset(
            np.arange(10), source=source, mode="test", ret_data=True
        )
        return images, labels

    def features(network, images):
        with torch.no_grad():
            return network.backbone(torch.tensor(images / 255).float()).numpy()

    def layer_of(network, classes):
        return networks[-1].fc, classes

    tasks = [[2 * task, 2 * task + 1] for task in range(5)]
    refitted = Refitted(name, networks, *arrays("train"), tasks, features, layer_of)
    images, labels = arrays("test")
    views = refitted.views(images)
    scores = learner.calibrator.class_scores(*views)
    refitted.assert_scores(scores, images)
    right = refitted.calibrator.score(*views).label == labels
    assert accuracy == pytest.approx(100 * np.mean(right), abs=0.3)
    for read in (learners[1].calibrator, calibration.load(tmp_path / "run_4.npz")):
        assert_array_equal(read.class_scores(*views), scores)

    logits = networks[-1].fc(torch.tensor(views[0]))["logits"].detach().numpy()
    raw = logits.argmax(axis=1) == labels
    assert len(learner.raw_curve) == 5
    assert learner.raw_curve[-1] == pytest.approx(100 * raw.mean(), abs=0.3)
    print({"raw": raw.mean().item(), name: float(accuracy / 100)})
    if name == "gaussians":
        assert surpasses(right, raw)

    fresh = finetune.Learner(args)
    dump(str(tmp_path / "file"), fresh, manager, [tmp_path / f"run_{t}.pkl" for t in range(5)])
    file = feature_files.load(str(tmp_path / "file"))
    fitted = file.fit(calibration.make(name))
    right = fitted.score(file.test_adapted, file.test_pretrained).label == file.test_labels
    assert 100 * np.mean(right) == pytest.approx(accuracy, abs=0.3)


def test_gaussians_surpass_raw_logits_on_real_images(checkout, real_images):
    learner_type = checkout("PILOT", "PILOT")["Learner"]
    from torchvision.transforms import Normalize

    splits, vit = real_images

    def backbone(args, pretrained=False):
        network = torch.nn.Sequential(Normalize(0.5, 0.5), vit())
        network.out_dim = 192
        return network

    torch.manual_seed(0)
    rates = {"init_lr": 0.001, "lrate": 0.001}
    sizes = {"init_cls": 4, "increment": 4, "init_epoch": 5, "epochs": 5}
    manager, args = data_manager(splits, backbone, calibrator="gaussians", **rates, **sizes)
    learner = learner_type(args)
    learner.topk = 2
    for _ in range(5):
        learner.incremental_train(manager)
        accuracy = learner.eval_task()[0]["top1"] / 100
        learner.after_task()
    raw = learner.raw_curve[-1] / 100
    print({"raw": float(raw), "gaussians": float(accuracy)})
    assert accuracy > raw + 0.1
