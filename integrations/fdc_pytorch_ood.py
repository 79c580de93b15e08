"""FDC as a detector of pytorch-ood; see docs/integrations.md.

The outlier score of a feature is minus the largest calibrated score of any class.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pytorch_ood.api import FeaturesDetector, ModelNotSetException, RequiresFittingException
from pytorch_ood.utils import extract_features
from torch import Tensor, nn, no_grad

from fdc_jax import calibration
from fdc_jax import torch as fdc_torch


class FDCDetector(FeaturesDetector):
    """Scores features by a calibrator over the tasks of a classifier.

    Args:
        encoder: gives the features of inputs, [n, d]; None where features are given.
        head: the classifier, with a row for each class.
        tasks: labels of each task. By default all classes are one; more give FDC its residuals of
            foreign tasks.
        settings: of the calibrator, as of `calibration.from_settings`; the paper's by default.
    """

    requires_fit = True

    def __init__(
        self,
        encoder: Callable[[Tensor], Tensor] | None,
        head: nn.Linear,
        tasks: Sequence[Sequence[int]] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.settings = encoder, head, settings or {}
        self.tasks = tasks or [range(head.out_features)]
        self.calibrated: fdc_torch.Calibrated | None = None

    def fit(self, data_loader: Any) -> "FDCDetector":
        """Fits on batches (inputs, labels)."""
        if self.encoder is None:
            raise ModelNotSetException
        return self.fit_features(*extract_features(data_loader, self.encoder, self.device))

    def fit_features(self, x: Tensor, y: Tensor) -> "FDCDetector":
        """Fits on features [n, d] and labels [n]; unknown labels, below zero, are left out."""
        features, labels = x.detach().cpu().numpy(), y.cpu().numpy()
        calibrator = calibration.from_settings(self.settings).to_numpy()
        for task in map(np.array, self.tasks):
            rows = np.isin(labels, task)
            head = fdc_torch.head_of(self.head, task)
            calibrator.fit_task(features[rows], labels[rows], head, classes=task)
        calibrator.finalize()
        self.calibrated = fdc_torch.Calibrated(nn.Identity(), calibrator).to(self.device)
        return self

    @no_grad()
    def predict_features(self, x: Tensor) -> Tensor:
        """Returns outlier scores [n] of features [n, d]."""
        if self.calibrated is None:
            raise RequiresFittingException
        return -self.calibrated(x).max(dim=1).values

    @no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Returns outlier scores [n] of inputs."""
        if self.encoder is None:
            raise ModelNotSetException
        return self.predict_features(self.encoder(x))
