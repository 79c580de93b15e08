"""FDC on top of any class-incremental strategy of Avalanche, as a plugin; see docs/integrations.md.

    FDCPlugin(calibration.make("gaussians"), layer="classifier")

goes into a strategy's `plugins`. Statistics are taken after each experience; in evaluation the
model's output is replaced by calibrated scores before loss and metrics are computed.
"""

import copy
import functools
from typing import Any

import numpy as np
import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import nn

from fdc_jax import torch as fdc_torch
from fdc_jax.calibration import Calibrator


class FDCPlugin(SupervisedPlugin):
    """Calibrates a model whose last layer is linear and has a row for each class.

    Classes may come in any order, each in one experience.

    Args:
        calibrator: one without tasks, from `calibration.make`.
        layer: name of the last layer within the model; `classifier.classifier` where `classifier`
            is Avalanche's `IncrementalClassifier`.
        pretrained: whether the model as it is before the first experience is the second view; for
            models that start from pretrained weights.
        batch_size: of the walks over an experience.
    """

    def __init__(
        self, calibrator: Calibrator, layer: str, pretrained: bool = True, batch_size: int = 64
    ) -> None:
        super().__init__()
        self.calibrator, self.layer = fdc_torch.checked(calibrator), layer
        self.pretrained, self.batch_size = pretrained, batch_size
        self.views = functools.partial(fdc_torch.pooled, layer=layer)
        self.frozen: list[nn.Module] = []
        self.previous: np.ndarray | None = None
        self.calibrated: fdc_torch.Calibrated | None = None

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Keeps the model before the first experience, and features by that before each other."""
        fdc_torch.head_of(strategy.model, name=self.layer)  # A wrong name shows before training.
        if not self.calibrator.num_tasks:
            self.frozen = [copy.deepcopy(strategy.model)] * self.pretrained
        elif self.calibrator.reads_previous:
            self.previous = self._collect(strategy)[0]

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Collects the statistics of the experience."""
        adapted, frozen, labels = self._collect(strategy)
        classes = np.unique(labels)
        # Of this time: later experiences push the logits of classes without images down.
        head = fdc_torch.head_of(strategy.model, classes, self.layer)
        self.calibrator.fit_task(adapted, labels, head, frozen, classes, self.previous)
        self.calibrator.finalize()
        encoders = self._encoders(strategy)
        self.calibrated = fdc_torch.Calibrated(encoders, self.calibrator, self.views)
        self.calibrated.to(strategy.device)

    def after_eval_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Replaces the output; classes that were not seen yet are below all others."""
        if self.calibrated is None:
            return
        self.calibrated.eval()
        scores, classes = self.calibrated(strategy.mb_x), self.calibrated.classes
        width = max(strategy.mb_output.shape[1], int(classes.max()) + 1)
        strategy.mb_output = fdc_torch.by_label(scores, classes, width)

    def _encoders(self, strategy: Any) -> nn.ModuleList:
        return nn.ModuleList([strategy.model, *self.frozen])

    def _collect(self, strategy: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        dataset = strategy.experience.dataset.eval()
        # A generator of its own, so that training draws what it would without.
        own = torch.Generator()
        loader = torch.utils.data.DataLoader(dataset, self.batch_size, generator=own)
        return fdc_torch.collect(self._encoders(strategy), loader, self.views)
