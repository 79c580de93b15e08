"""FDC on top of any class-incremental model of Mammoth; see docs/integrations.md.

A file in Mammoth's folder `models`, such as `sgd_fdc.py`, adds a model:

    from fdc_mammoth import FDCModel
    from models.sgd import Sgd

    class SgdFDC(FDCModel, Sgd):
        NAME = "sgd-fdc"
"""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fdc_jax import calibration
from fdc_jax import torch as fdc_torch


class FDCModel:
    """A base class before a `ContinualModel`.

    Mammoth's checkpoints carry the calibrator, and training resumes from them.

    Attributes:
        CALIBRATOR: a name of `calibration.METHODS`; `gaussians` compensates for drift.
        SETTINGS: settings of the calibrator.
        LAYER: name of the last layer in the backbone, linear with a row for every class; `head` for
            the vision transformers.
        PRETRAINED: whether the second view is the backbone before the first task.
    """

    CALIBRATOR = "fdc"
    SETTINGS: dict[str, Any] = {}  # noqa: RUF012
    LAYER = "classifier"
    PRETRAINED = True

    def begin_task(self: Any, dataset: Any) -> None:
        """Keeps the first backbone, and features by the backbone before every further task."""
        if self.current_task == 0:
            self._start()
        self._calibrated[0].to(self.device).before_task(self._walk(dataset))
        super().begin_task(dataset)

    def end_task(self: Any, dataset: Any) -> None:
        """Fits the task with the current rows of the head.

        Later tasks lower the logits of classes without images.
        """
        super().end_task(dataset)
        classes = np.arange(*dataset.get_offsets(self.current_task))
        self._calibrated[0].after_task(self._walk(dataset), classes)
        self._answers = []

    def end_eval(self: Any, dataset: Any, accs: Any) -> None:
        """Logs the accuracy without calibration of the images that were just evaluated."""
        super().end_eval(dataset, accs)
        answers = iter(torch.cat(self._answers).cpu().numpy())
        tasks = [loader.dataset.targets for loader in dataset.test_loaders]
        own = [np.mean([next(answers, -1) == label for label in labels]) for labels in tasks]
        logging.info(f"[Class-IL] without calibration: {100 * np.mean(own):.2f} %")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns calibrated scores in evaluation; classes of later tasks are below all others."""
        (calibrated,) = getattr(self, "_calibrated", None) or [None]
        if self.net.training or calibrated is None or not len(calibrated.classes):
            return super().forward(x)

        def keep(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            self._seen = given[:1]

        with self.net.get_submodule(self.LAYER).register_forward_pre_hook(keep):
            own = super().forward(x)[:, : len(calibrated.classes)]
        self._answers.append(own.argmax(dim=1))
        scores = calibrated.eval()(x)
        self._seen = ()
        columns = scores.new_full((len(scores), self.num_classes), float(scores.min()) - 1.0)
        columns[:, calibrated.classes] = scores
        return columns

    def get_extra_state(self: Any) -> dict[str, Any]:
        """Returns the state for a checkpoint, without the backbone."""
        (calibrated,) = getattr(self, "_calibrated", None) or [nn.Module()]
        return {k: v for k, v in calibrated.state_dict().items() if not k.startswith("module.0.")}

    def set_extra_state(self: Any, state: dict[str, Any]) -> None:
        """Reads the state of a checkpoint."""
        if state:
            self._start()
            self._calibrated[0].load_state_dict(state, strict=False)

    def _start(self: Any) -> None:
        pair = nn.ModuleList([self.net, *[copy.deepcopy(self.net)] * self.PRETRAINED])
        calibrator = calibration.make(self.CALIBRATOR, **self.SETTINGS)
        # A list hides the module from `parameters()`.
        self._calibrated = [fdc_torch.Calibrated(pair, calibrator, self._views)]
        self._seen, self._answers = (), []

    def _views(self: Any, models: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the input of the last layer of every backbone; in evaluation it was just seen."""
        views = [fdc_torch.pooled(model, x, self.LAYER) for model in models[len(self._seen) :]]
        return (*self._seen, *views)

    def _walk(self: Any, dataset: Any) -> Iterator[Any]:
        images = dataset.train_loader.dataset
        training = images.transform
        images.transform = dataset.test_loaders[-1].dataset.transform  # without random crops
        try:
            # A separate generator leaves the random numbers of training as they are.
            batch, own = dataset.train_loader.batch_size, torch.Generator()
            yield from DataLoader(images, batch, generator=own)
        finally:
            images.transform = training
