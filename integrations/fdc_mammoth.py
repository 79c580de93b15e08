"""FDC on top of any class-incremental model of Mammoth; see docs/integrations.md.

In Mammoth's folder `models`, a file such as `sgd_fdc.py` makes a model of its own of it:

    from fdc_mammoth import FDCModel
    from models.sgd import Sgd

    class SgdFDC(FDCModel, Sgd):
        NAME = "sgd-fdc"
"""

import copy
import functools
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fdc_jax import calibration
from fdc_jax import torch as fdc_torch


class FDCModel:
    """Comes before a `ContinualModel` among the bases of a class.

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
        self._previous = None
        if self.current_task == 0:
            self._calibrator = calibration.make(self.CALIBRATOR, **self.SETTINGS)
            # Within lists, which hide modules from those who look for parameters.
            self._frozen, self._calibrated = [copy.deepcopy(self.net)] * self.PRETRAINED, []
        elif self._calibrator.reads_previous:
            self._previous = self._collect(dataset)[0]
        super().begin_task(dataset)

    def end_task(self: Any, dataset: Any) -> None:
        """Collects the statistics of the task."""
        super().end_task(dataset)
        adapted, frozen, labels = self._collect(dataset)
        classes = np.arange(*dataset.get_offsets(self.current_task))
        # Of this time: later tasks push the logits of classes without images down.
        head = fdc_torch.head_of(self.net.get_submodule(self.LAYER), classes)
        self._calibrator.fit_task(adapted, labels, head, frozen, classes, self._previous)
        self._calibrator.finalize()
        fitted = fdc_torch.Calibrated(self._encoders(), self._calibrator, self._views())
        self._calibrated = [fitted.to(self.device)]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """In evaluation, gives scores of all classes; those not seen yet are below all others."""
        if self.net.training or not getattr(self, "_calibrated", None):
            return super().forward(x)
        (calibrated,) = self._calibrated
        return fdc_torch.by_label(calibrated.eval()(x), calibrated.classes, self.num_classes)

    def _views(self) -> fdc_torch.Views:
        return functools.partial(fdc_torch.pooled, layer=self.LAYER)

    def _encoders(self: Any) -> torch.nn.ModuleList:
        return torch.nn.ModuleList([self.net, *self._frozen])

    def _collect(self: Any, dataset: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        images = dataset.train_loader.dataset
        training = images.transform
        images.transform = getattr(dataset, "TEST_TRANSFORM", training)
        try:
            # A generator of its own, so that training draws what it would without.
            batch, own = dataset.train_loader.batch_size, torch.Generator()
            loader = DataLoader(images, batch, generator=own)
            return fdc_torch.collect(self._encoders(), loader, self._views())
        finally:
            images.transform = training
