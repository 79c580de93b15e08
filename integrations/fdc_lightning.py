"""A calibrator that Lightning fits after every task, as a callback; see docs/integrations.md.

    callback = FDCCallback(calibration.make("gaussians"))
    for loader in loaders_of_tasks:
        Trainer(callbacks=[callback], ...).fit(module, loader)

One `fit` is a task. Lightning's checkpoints carry the calibrator and the features before the task
in progress, so that training resumes from any checkpoint.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from fdc_jax import torch as fdc_torch
from fdc_jax.calibration import Calibrator


def in_order(trainer: Trainer) -> Iterable[Any]:
    """Returns batches of the training loader's images in their order, with its transform."""
    own: Any = trainer.train_dataloader
    # A separate generator leaves the random numbers of training as they are.
    options = {"collate_fn": own.collate_fn, "generator": torch.Generator()}
    return DataLoader(own.dataset, own.batch_size, **options)


class FDCCallback(Callback):
    """Fits a calibrator at the end of every `fit`.

    Args:
        calibrator: from `calibration.make`.
        network: name of the network within the module; its last layer has a row for every class.
        layer: name of the last layer, if `fdc_jax.torch.pooled` does not find it.
        pretrained: whether the second view is the network before the first task; models of PEFT
            always have two views.
        walk: a function from the trainer to batches of the task's images in evaluation
            preprocessing, in the same order whenever it is called; a warning tells of others.

    Attributes:
        calibrated: after the first `fit`, the network with calibrated scores.
    """

    def __init__(
        self,
        calibrator: Calibrator,
        network: str = "model",
        layer: str = "",
        pretrained: bool = True,
        walk: Callable[[Trainer], Iterable[Any]] = in_order,
    ) -> None:
        self.calibrator, self.network, self.layer = calibrator, network, layer
        self.pretrained, self.walk = pretrained, walk
        self.calibrated: fdc_torch.Calibrated | None = None
        self.in_task = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the network before a checkpoint is read, and keeps a copy of the first network."""
        model = pl_module.get_submodule(self.network)
        if self.calibrated is None:
            if self.pretrained and not hasattr(model, "disable_adapter"):
                model = nn.ModuleList([model, copy.deepcopy(model)])
            self.calibrated = fdc_torch.Calibrated(model, self.calibrator, layer=self.layer)
        elif isinstance(self.calibrated.module, nn.ModuleList):
            self.calibrated.module[0] = model  # An unpickled callback has a copy.
        else:
            self.calibrated.module = model

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Computes features by the network before the task, for checkpoints within it, too."""
        if not self.in_task:
            self.calibrated.to(pl_module.device).before_task(self.walk(trainer))
        self.in_task = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fits the task."""
        self.calibrated.after_task(self.walk(trainer))
        self.in_task = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the calibrator and the first network."""
        state = {"in_task": self.in_task, **self.calibrated.get_extra_state()}
        if isinstance(self.calibrated.module, nn.ModuleList):
            state["pretrained"] = self.calibrated.module[1].state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads the state of a checkpoint."""
        self.in_task = state_dict["in_task"]
        self.calibrated.set_extra_state(state_dict)
        if "pretrained" in state_dict:
            self.calibrated.module[1].load_state_dict(state_dict["pretrained"])
