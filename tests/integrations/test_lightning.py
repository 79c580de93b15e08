"""The callback in the real Lightning, on scanned digits in five tasks."""

import copy
import pickle

import pytest

from fdc_jax import calibration
from tests.integrations.conftest import Refitted, run_program, surpasses

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
lightning = pytest.importorskip("lightning.pytorch", reason="needs Lightning", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

TASKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        self.model = torch.nn.Sequential(*layers)

    def training_step(self, batch, _):
        images, labels = batch
        first = labels.min()
        logits = self.model(images)
        return torch.nn.functional.cross_entropy(logits[:, first : first + 2], labels - first)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loaders_of(digits):
    """Returns the loaders of the tasks, which draw from generators of their own."""
    loaders, labels = [], torch.tensor(digits[2])
    for classes in TASKS:
        rows = torch.isin(labels, torch.tensor(classes))
        data = torch.utils.data.TensorDataset(torch.tensor(digits[0])[rows], labels[rows])
        generator = torch.Generator().manual_seed(1)
        loaders.append(torch.utils.data.DataLoader(data, 32, shuffle=True, generator=generator))
    return loaders


def fit(module, callbacks, loader, folder, epochs=2, **more):
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=callbacks, logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader, **more)
    return trainer


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_callback_and_its_checkpoints_score_as_refitted(digits, tmp_path, name):
    from fdc_lightning import FDCCallback

    loaders = loaders_of(digits)
    test = torch.tensor(digits[1])
    module = Module()
    callback = FDCCallback(calibration.make(name), layer="2")
    networks = [copy.deepcopy(module.model)]
    for task, loader in enumerate(loaders):
        trainer = fit(module, [callback], loader, tmp_path)
        networks.append(copy.deepcopy(module.model))
        if task == 2:
            trainer.save_checkpoint(tmp_path / "third.ckpt")
            copies = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]

    def features(network, images):
        with torch.no_grad():
            return network[:2](torch.tensor(images)).numpy()

    def layer_of(network, classes):
        return network[2], classes

    refitted = Refitted(name, networks, digits[0], digits[2], TASKS, features, layer_of)
    with torch.no_grad():
        scores = callback.calibrated.eval()(test)
        raw = module.model(test)
    refitted.assert_scores(scores, digits[1])
    right, before = (values.argmax(dim=1).numpy() == digits[3] for values in (scores, raw))
    assert surpasses(right, before)

    # Another process: the checkpoint after three tasks, then the last two as before.
    torch.manual_seed(7)
    other = Module()
    resumed = FDCCallback(calibration.make(name), layer="2")
    other.model[0].weight.data.zero_()
    stored = torch.load(tmp_path / "third.ckpt", weights_only=True)
    resumed.setup(None, other, "fit")
    other.load_state_dict(stored["state_dict"])
    (state,) = (value for name, value in stored["callbacks"].items() if "FDCCallback" in name)
    resumed.load_state_dict(state)
    callback.load_state_dict(state)
    scores = []
    for continued in (callback, resumed, *copies):
        module.load_state_dict(stored["state_dict"])
        for loader in loaders[3:]:
            loader.generator.manual_seed(5)
            fit(other if continued is resumed else module, [continued], loader, tmp_path)
        scores.append(continued.calibrated.eval()(test))
        assert torch.equal(scores[0], scores[-1])


def test_a_checkpoint_within_a_task_keeps_the_features_of_before(digits, tmp_path):
    from fdc_lightning import FDCCallback

    loaders = loaders_of(digits)[:2]
    train = torch.tensor(digits[0])

    class Save(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0 and callback.calibrator.num_tasks == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")
                state["generator"] = loaders[1].generator.get_state()

    state = {}
    module = Module()
    callback = FDCCallback(calibration.make("gaussians"), layer="2")
    for loader in loaders:
        fit(module, [callback, Save()], loader, tmp_path, epochs=3)
    other = Module()
    resumed = FDCCallback(calibration.make("gaussians"), layer="2")
    loaders[1].generator.set_state(state["generator"])
    fit(other, [resumed], loaders[1], tmp_path, epochs=3, ckpt_path=tmp_path / "within.ckpt")
    assert torch.equal(other.model[2].weight, module.model[2].weight)
    assert torch.equal(resumed.calibrated.eval()(train), callback.calibrated.eval()(train))


def test_program_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    defined = run_program("Lightning")
    truth = defined["labels"][defined["test"]]
    raw, calibrated = (labels == truth for labels in defined["predicted"].values())
    assert surpasses(calibrated, raw)
