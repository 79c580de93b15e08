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
        encoder: a function from inputs to features [n, d]; None to fit and predict features.
        head: the classifier, with a row for every class.
        tasks: labels of every task. By default all classes are one task; FDC has foreign residuals
            only if there are more.
        calibrator: a name of `calibration.METHODS`.
        settings: settings of the calibrator.
    """

    requires_fit = True

    def __init__(
        self,
        encoder: Callable[[Tensor], Tensor] | None,
        head: nn.Linear,
        tasks: Sequence[Sequence[int]] | None = None,
        calibrator: str = "fdc",
        **settings: Any,
    ) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.calibrator, self.settings = calibrator, settings
        self.tasks = tasks or [range(head.out_features)]
        self.calibrated: fdc_torch.Calibrated | None = None

    def fit(self, data_loader: Any) -> "FDCDetector":
        """Fits on batches (inputs, labels)."""
        if self.encoder is None:
            raise ModelNotSetException
        return self.fit_features(*extract_features(data_loader, self.encoder, self.device))

    def fit_features(self, x: Tensor, y: Tensor) -> "FDCDetector":
        """Fits on features [n, d] and labels [n]; unknown labels, below zero, are ignored."""
        features, labels = x.detach().cpu().numpy(), y.cpu().numpy()
        calibrator = calibration.make(self.calibrator, **self.settings)
        for task in map(np.array, self.tasks):
            rows = np.isin(labels, task)
            head = fdc_torch.head_of(self.head, task)
            own = features[rows]  # The encoder does not move between tasks.
            calibrator.fit_task(own, labels[rows], head, classes=task, previous=own)
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
