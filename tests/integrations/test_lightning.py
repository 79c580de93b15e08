"""The callback in the real Lightning, on scanned digits in five tasks."""

import copy
import pickle

import numpy as np
import pytest

from fdc_jax import calibration, heads

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
        own = batch[1].unique().tolist()
        first, logits = min(own), self.model(batch[0])
        return torch.nn.functional.cross_entropy(logits[:, first : first + 2], batch[1] - first)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, callback, loader, folder, epochs=2, **more):
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=[callback], logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader, **more)
    return trainer


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_callback_and_checkpoints_within_a_task(digits, tmp_path, name):
    from fdc_lightning import FDCCallback

    train, test, labels, test_labels = (torch.tensor(each) for each in digits)
    loaders = []
    for classes in TASKS:
        rows = torch.isin(labels, torch.tensor(classes))
        data = torch.utils.data.TensorDataset(train[rows], labels[rows])
        own = torch.Generator().manual_seed(1)
        loaders.append(torch.utils.data.DataLoader(data, 32, shuffle=True, generator=own))
    module, callback = Module(), FDCCallback(calibration.make(name), layer="2")
    again, first = calibration.make(name), Module().model[:2]
    for task, loader in enumerate(loaders):
        images, given = loader.dataset.tensors
        with torch.no_grad():
            previous = module.model[:2](images).numpy() if task else None
        trainer = fit(module, callback, loader, tmp_path)
        rows = (each.detach().numpy()[TASKS[task]] for each in module.model[2].parameters())
        with torch.no_grad():
            adapted, frozen = (body(images).numpy() for body in (module.model[:2], first))
        head = heads.LinearHead(*rows)
        again.fit_task(adapted, given.numpy(), head, frozen, previous=previous)
        if task == 2:
            trainer.save_checkpoint(tmp_path / "third.ckpt")
            others = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]
    again.finalize()
    with torch.no_grad():
        expected = again.class_scores(*(body(test).numpy() for body in (module.model[:2], first)))
        scores, raw = callback.calibrated.eval()(test), module.model(test)
    np.testing.assert_allclose(scores, expected, atol=1e-3 * abs(expected).max())
    right, before = (each.argmax(dim=1) == test_labels for each in (scores, raw))
    # More than three standard errors of a paired difference.
    assert sum(right) - sum(before) > 3 * np.sqrt(sum(right != before))

    # Another process: the checkpoint after three tasks, then the last two as before.
    torch.manual_seed(7)
    other, resumed = Module(), FDCCallback(calibration.make(name), layer="2")
    other.model[0].weight.data.zero_()
    stored = torch.load(tmp_path / "third.ckpt", weights_only=True)
    resumed.setup(None, other, "fit")
    other.load_state_dict(stored["state_dict"])
    (state,) = (v for k, v in stored["callbacks"].items() if "FDCCallback" in k)
    resumed.load_state_dict(state)
    callback.load_state_dict(state)
    for each in (callback, resumed, *others):  # What goes on without a stop, and the others.
        module.load_state_dict(stored["state_dict"])
        for loader in loaders[3:]:
            loader.generator.manual_seed(5)
            fit(other if each is resumed else module, each, loader, tmp_path)
        scores = each.calibrated.eval()(test)
        assert each is callback or torch.equal(scores, expected)
        expected = scores


def test_a_checkpoint_within_a_task_keeps_the_features_of_before(digits, tmp_path):
    from fdc_lightning import FDCCallback

    train, labels = torch.tensor(digits[0]), torch.tensor(digits[2])
    loaders = []
    for classes in TASKS[:2]:
        rows = torch.isin(labels, torch.tensor(classes))
        data = torch.utils.data.TensorDataset(train[rows], labels[rows])
        loaders.append(torch.utils.data.DataLoader(data, 32))

    class Save(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0 and callback.calibrator.num_tasks == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    module, callback = Module(), FDCCallback(calibration.make("gaussians"), layer="2")
    for loader in loaders:
        trainer = lightning.Trainer(
            max_epochs=3, callbacks=[callback, Save()], logger=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader)
    other, resumed = Module(), FDCCallback(calibration.make("gaussians"), layer="2")
    fit(other, resumed, loaders[1], tmp_path, epochs=3, ckpt_path=tmp_path / "within.ckpt")
    assert torch.equal(other.model[2].weight, module.model[2].weight)
    assert torch.equal(resumed.calibrated.eval()(train), callback.calibrated.eval()(train))


def test_program_of_the_page(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = program("Lightning")
    raw, calibrated = (
        each == found["labels"][found["test"]] for each in found["predicted"].values()
    )
    assert sum(calibrated) - sum(raw) > 3 * np.sqrt(sum(raw != calibrated))
