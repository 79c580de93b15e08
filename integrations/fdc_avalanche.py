"""FDC on top of any class-incremental strategy of Avalanche, as a plugin; see docs/integrations.md.

    FDCPlugin("gaussians", layer="classifier")

goes into a strategy's `plugins`. Statistics are taken after each experience; in evaluation the
model's output is replaced by calibrated scores before loss and metrics are computed. The accuracy
without calibration is the metric `RAW`.
"""

import copy
from typing import Any

import torch
from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.plugins import SupervisedPlugin
from torch import nn

from fdc_jax import calibration
from fdc_jax import torch as fdc_torch
from fdc_jax.calibration import Calibrator
from fdc_jax.errors import InputError

RAW = "Top1_Acc_Stream/without_calibration"


class FDCPlugin(SupervisedPlugin):
    """Calibrates a model whose last layer is linear and has a row for each class.

    Classes may come in any order, every class in one experience. Copies and pickles of the plugin
    can fit further experiences, also with another strategy.

    Args:
        calibrator: a name of `calibration.METHODS`, or what `calibration.make` returns.
        layer: name of the last layer within the model; `classifier.classifier` if `classifier` is
            Avalanche's `IncrementalClassifier`.
        pretrained: whether the second view is the model before the first experience; for models
            that start from pretrained weights.
        batch_size: size of the batches in which features are computed.
        settings: settings of a calibrator that is given by its name.

    Attributes:
        calibrated: from the first experience on, the model with calibrated scores, a module whose
            `state_dict` holds everything that the plugin keeps.

    Raises:
        InputError: no calibrator or setting has such a name.
    """

    def __init__(
        self,
        calibrator: str | Calibrator,
        layer: str,
        pretrained: bool = True,
        batch_size: int = 64,
        **settings: Any,
    ) -> None:
        super().__init__()
        if isinstance(calibrator, str):
            calibrator = calibration.make(calibrator, **settings)
        elif settings:
            names = ", ".join(settings)
            raise InputError(f"settings: expected none beside a calibrator, found {names}")
        self.calibrator, self.layer = calibrator, layer
        self.pretrained, self.batch_size = pretrained, batch_size
        self.calibrated: fdc_torch.Calibrated | None = None
        self.own: list[torch.Tensor] = []

    def start(self, model: nn.Module) -> None:
        """Makes `calibrated`, from the model before its first experience.

        The plugin calls it; call it yourself to read a `state_dict` into `calibrated`.
        """
        pair = nn.ModuleList([model, *[copy.deepcopy(model)] * self.pretrained])
        self.calibrated = fdc_torch.Calibrated(pair, self.calibrator, layer=self.layer)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Computes features by the model before the experience, if the calibrator reads them."""
        fdc_torch.head_of(strategy.model, name=self.layer)  # A wrong name shows before training.
        if self.calibrated is None:
            self.start(strategy.model)
        self.calibrated.module[0] = strategy.model  # An unpickled plugin has a copy.
        self.calibrated.to(strategy.device).before_task(self._walk(strategy))

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Fits the experience with the current rows of the last layer.

        Later experiences lower the logits of classes without images.
        """
        self.calibrated.after_task(self._walk(strategy))

    def before_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Starts to count correct predictions of the model itself."""
        self.own = []

    def after_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Adds the accuracy of the model itself to the metrics."""
        value = torch.cat(self.own).float().mean().item()
        metric = MetricValue(self, RAW, value, strategy.clock.train_iterations)
        strategy.evaluator.publish_metric_value(metric)
        for logger in strategy.evaluator.loggers:
            logger.log_metrics([metric])

    def after_eval_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Replaces the output; classes of later experiences are below all others."""
        self.own.append(strategy.mb_output.argmax(dim=1) == strategy.mb_y)
        if self.calibrated is None or not len(self.calibrated.classes):
            return
        self.calibrated.eval()
        scores, classes = self.calibrated(strategy.mb_x), self.calibrated.classes
        width = max(strategy.mb_output.shape[1], int(classes.max()) + 1)
        strategy.mb_output = scores.new_full((len(scores), width), float(scores.min()) - 1.0)
        strategy.mb_output[:, classes] = scores

    def _walk(self, strategy: Any) -> torch.utils.data.DataLoader:
        dataset = strategy.experience.dataset.eval()
        # A separate generator leaves the random numbers of training as they are.
        return torch.utils.data.DataLoader(dataset, self.batch_size, generator=torch.Generator())
