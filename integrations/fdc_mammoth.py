"""FDC on top of any class-incremental model of Mammoth; see docs/integrations.md.

In Mammoth's folder `models`, a file such as `sgd_fdc.py` makes a model of its own of it:

    from fdc_mammoth import FDCModel
    from models.sgd import Sgd

    class SgdFDC(FDCModel, Sgd):
        NAME = "sgd-fdc"
"""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fdc_jax import calibration
from fdc_jax import torch as fdc_torch


class FDCModel:
    """Comes before a `ContinualModel` among the bases of a class.

    Mammoth's checkpoints carry the calibrator, and training goes on from them.

    Attributes:
        CALIBRATOR: a name of `calibration.METHODS`; `gaussians` follows the backbone.
        SETTINGS: of the calibrator.
        LAYER: name of the last layer in the backbone, linear with a row for each class; `head` for
            the vision transformers.
        PRETRAINED: whether the backbone before the first task is the second view.
    """

    CALIBRATOR = "fdc"
    SETTINGS: dict[str, Any] = {}  # noqa: RUF012
    LAYER = "classifier"
    PRETRAINED = True

    def begin_task(self: Any, dataset: Any) -> None:
        """Keeps the first backbone, and features by that before each further task."""
        if self.current_task == 0:
            self._start()
        self._calibrated[0].to(self.device).before_task(self._walk(dataset))
        super().begin_task(dataset)

    def end_task(self: Any, dataset: Any) -> None:
        """Collects the statistics of the task, with the head of this time.

        Later tasks push the logits of classes without images down.
        """
        super().end_task(dataset)
        classes = np.arange(*dataset.get_offsets(self.current_task))
        self._calibrated[0].after_task(self._walk(dataset), classes)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """In evaluation, gives scores of all classes; those not seen yet are below all others."""
        (calibrated,) = getattr(self, "_calibrated", None) or [None]
        if self.net.training or calibrated is None or not len(calibrated.classes):
            return super().forward(x)
        return fdc_torch.by_label(calibrated.eval()(x), calibrated.classes, self.num_classes)

    def get_extra_state(self: Any) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the backbone."""
        (calibrated,) = getattr(self, "_calibrated", None) or [nn.Module()]
        return {k: v for k, v in calibrated.state_dict().items() if not k.startswith("module.0.")}

    def set_extra_state(self: Any, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        if state:
            self._start()
            self._calibrated[0].load_state_dict(state, strict=False)

    def _start(self: Any) -> None:
        pair = nn.ModuleList([self.net, *[copy.deepcopy(self.net)] * self.PRETRAINED])
        calibrator = calibration.make(self.CALIBRATOR, **self.SETTINGS)
        # Within a list, which hides modules from those who look for parameters.
        self._calibrated = [fdc_torch.Calibrated(pair, calibrator, layer=self.LAYER)]

    def _walk(self: Any, dataset: Any) -> Iterator[Any]:
        images = dataset.train_loader.dataset
        training = images.transform
        images.transform = getattr(dataset, "TEST_TRANSFORM", training)
        try:
            # A generator of its own, so that training draws what it would without.
            batch, own = dataset.train_loader.batch_size, torch.Generator()
            yield from DataLoader(images, batch, generator=own)
        finally:
            images.transform = training
