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
    """Comes before a method among the bases of a class; copies and pickles carry the calibrator.

    Attributes:
        CALIBRATOR: a name of `calibration.METHODS`; `gaussians` follows the network.
        SETTINGS: of the calibrator.
        LAYER: name of the last layer, linear with a row for each class, or of a list of one for
            each task, such as InfLoRA's `_network.classifier_pool`.
        PRETRAINED: whether the network before the first task is the second view.
    """

    CALIBRATOR = "fdc"
    SETTINGS: dict[str, Any] = {}  # noqa: RUF012
    LAYER = "classifier"
    PRETRAINED = True

    def before_task(self: Any, task_idx: int, buffer: Any, train: Any, test: Any) -> None:
        """Keeps the first network, and features by that before each further task."""
        images = copy.copy(train.dataset)
        # Images of a buffer join those of the task later, in the same lists.
        images.images, images.labels = images.images[:], images.labels[:]
        images.trfms = test[0].dataset.trfms
        self._images, self._batch = images, train.batch_size
        if task_idx:
            self._calibrated[0].before_task(self._walk())
        super().before_task(task_idx, buffer, train, test)
        if not task_idx:  # Not before it has a head.
            pair = nn.ModuleList([self, *[copy.deepcopy(self)] * self.PRETRAINED])
            calibrator = calibration.make(self.CALIBRATOR, **self.SETTINGS)
            # Within a list, which hides modules from those who look for parameters.
            self._calibrated = [fdc_torch.Calibrated(pair, calibrator, _views)]

    def after_task(self: Any, task_idx: int, *args: Any) -> None:
        """Collects the statistics of the task, with the head of this time."""
        super().after_task(task_idx, *args)
        classes, layer = np.unique(self._images.labels), self.get_submodule(self.LAYER)
        one = isinstance(layer, nn.ModuleList)
        head = fdc_torch.head_of(layer[task_idx] if one else layer, slice(None) if one else classes)
        (calibrated,) = self._calibrated
        calibrated.to(self.device).after_task(self._walk(), classes, head)

    def _walk(self: Any) -> DataLoader:
        # A generator of its own, so that training draws what it would without.
        return DataLoader(self._images, self._batch, generator=torch.Generator())

    def inference(self: Any, data: dict[str, Any], **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Returns calibrated predictions, and the share of them that is right."""
        (calibrated,) = getattr(self, "_calibrated", None) or [None]
        if calibrated is None or not len(calibrated.classes):
            return super().inference(data, **kwargs)
        scores = calibrated(data["image"].to(self.device))
        found = calibrated.classes[scores.argmax(dim=1)]
        return found, (found == data["label"].to(found)).double().mean().item()


def _views(models: nn.ModuleList, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns what the last layer is given in each model's own inference."""
    seen: list[torch.Tensor] = []
    for model in models:
        layer = model.get_submodule(model.LAYER)
        layer = layer[0] if isinstance(layer, nn.ModuleList) else layer  # All are given the same.
        hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        labels = torch.zeros(len(images), dtype=torch.int64)
        try:
            super(FDCModel, model).inference({"image": images, "label": labels})
        finally:
            hook.remove()
    return tuple(seen)
