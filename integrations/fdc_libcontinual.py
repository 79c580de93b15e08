"""FDC on top of methods of LibContinual; see docs/integrations.md.

At the end of its `core/model/__init__.py`, a method is replaced by one of the same name:

    from fdc_libcontinual import FDCModel

    class Finetune(FDCModel, Finetune):
        CALIBRATOR = "gaussians"
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fdc_jax import calibration
from fdc_jax import torch as fdc_torch


class FDCModel:
    """A base class before a method of LibContinual; copies and pickles carry the calibrator.

    Attributes:
        CALIBRATOR: a name of `calibration.METHODS`; `gaussians` compensates for drift.
        SETTINGS: settings of the calibrator.
        LAYER: name of the last layer, linear with a row for every class, or of a list with a layer
            for every task, such as InfLoRA's `_network.classifier_pool`.
        PRETRAINED: whether the second view is the network before the first task.
    """

    CALIBRATOR = "fdc"
    SETTINGS: dict[str, Any] = {}  # noqa: RUF012
    LAYER = "classifier"
    PRETRAINED = True

    def before_task(self: Any, task_idx: int, buffer: Any, train: Any, test: Any) -> None:
        """Keeps the first network, and features by the network before every further task."""
        images = copy.copy(train.dataset)
        # Images of a buffer are added to the same lists later.
        images.images, images.labels = images.images[:], images.labels[:]
        images.trfms = test[0].dataset.trfms
        self._images, self._batch = images, train.batch_size
        if task_idx:
            self._calibrated[0].before_task(self._walk())
        super().before_task(task_idx, buffer, train, test)
        if not task_idx:  # The network has a head only now.
            pair = nn.ModuleList([self, *[copy.deepcopy(self)] * self.PRETRAINED])
            calibrator = calibration.make(self.CALIBRATOR, **self.SETTINGS)
            # A list hides the module from `parameters()`.
            self._calibrated = [fdc_torch.Calibrated(pair, calibrator, _views)]

    def after_task(self: Any, task_idx: int, buffer: Any, train: Any, test: Any) -> None:
        """Fits the task with its current head."""
        super().after_task(task_idx, buffer, train, test)
        classes, layer = np.unique(self._images.labels), self.get_submodule(self.LAYER)
        one = isinstance(layer, nn.ModuleList)
        head = fdc_torch.head_of(layer[task_idx] if one else layer, slice(None) if one else classes)
        (calibrated,) = self._calibrated
        calibrated.to(self.device).after_task(self._walk(), classes, head)
        self._task = task_idx
        self._num_images = sum(len(loader.dataset) for loader in test)
        self._own_right = []

    def _walk(self: Any) -> DataLoader:
        # A separate generator leaves the random numbers of training as they are.
        return DataLoader(self._images, self._batch, generator=torch.Generator())

    def inference(self: Any, data: dict[str, Any], **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Returns calibrated predictions and their accuracy.

        Prints the accuracy without calibration as soon as all test images were seen.
        """
        (calibrated,) = getattr(self, "_calibrated", None) or [None]
        if calibrated is None or not len(calibrated.classes):
            return super().inference(data, **kwargs)
        scores = calibrated(data["image"].to(self.device))
        labels = calibrated.classes[scores.argmax(dim=1)]
        true = data["label"].to(labels)
        self._own_right += (self._own.to(labels) == true).tolist()
        if len(self._own_right) == self._num_images:
            own = 100 * np.mean(self._own_right)
            print(f" * Task {self._task} without calibration: {own:.2f} %")
        return labels, (labels == true).double().mean().item()


def _views(models: nn.ModuleList, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the input of the last layer in the inference of every model."""
    seen: list[torch.Tensor] = []
    for model in models:
        layer: Any = model.get_submodule(model.LAYER)
        # All layers of a list have the same input.
        layer = layer[0] if isinstance(layer, nn.ModuleList) else layer
        labels = torch.zeros(len(images), dtype=torch.int64)
        with layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            model._own, _ = super(FDCModel, model).inference({"image": images, "label": labels})
    return tuple(seen)
