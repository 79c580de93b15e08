"""FDC on top of any learner of PILOT, and feature files from checkpoints of PILOT and InfLoRA.

`class Learner(FDCLearner, finetune.Learner)` is such a learner; see docs/integrations.md.
Labels are positions in PILOT's class order.
"""

import contextlib
import copy
import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fdc_jax import calibration, heads
from fdc_jax import torch as fdc_torch
from fdc_jax.features import feature_files

# PILOT imports this module by its name in timm before 0.9.
with contextlib.suppress(ModuleNotFoundError):
    import timm.layers.weight_init

    sys.modules.setdefault("timm.models.layers.weight_init", timm.layers.weight_init)


class FDCLearner:
    """A base class before a learner of PILOT.

    `args["calibrator"]` names one of `calibration.METHODS`, by default `fdc`; `gaussians`
    compensates for drift. `args["calibrator_settings"]` holds its settings.

    Attributes:
        raw_curve: accuracy of the network's own predictions after each task, in percent.
    """

    def __init__(self: Any, args: dict[str, Any]) -> None:
        super().__init__(args)  # pyright: ignore[reportCallIssue]
        settings = args.get("calibrator_settings", {})
        self.calibrator = calibration.make(args.get("calibrator", "fdc"), **settings)
        self.frozen = copy.deepcopy(self._network)
        self.raw_curve: list[float] = []

    def incremental_train(self: Any, data_manager: Any) -> None:
        """Trains the task, then fits it."""
        task, previous = self._cur_task + 1, None
        total = self._known_classes + data_manager.get_task_size(task)
        loader = _loader(data_manager, self._known_classes, total)
        if task and self.calibrator.reads_previous:
            previous = self._extract_vectors(loader)[0]
        super().incremental_train(data_manager)  # pyright: ignore
        adapted, frozen, labels = _views(self, self.frozen, loader)
        head = _head(self._network, task, np.unique(labels))
        self.calibrator.fit_task(adapted, labels, head, frozen, None, previous)
        self.calibrator.finalize()
        # Training changes the rows of earlier classes, too.
        known = enumerate(self.calibrator.classes)
        self.calibrator.replace_heads([_head(self._network, t, c) for t, c in known])

    def save_checkpoint(self: Any, filename: str) -> None:
        """Writes the calibrator beside PILOT's own file; `calibration.load` reads it."""
        super().save_checkpoint(filename)  # pyright: ignore[reportAttributeAccessIssue]
        self.calibrator.save(f"{filename}_{self._cur_task}.npz")

    def eval_task(self: Any) -> Any:
        """Logs the accuracy of the network's own predictions; returns that of calibrated ones."""
        accuracies = super().eval_task()  # pyright: ignore
        logging.info(f"CNN top1 curve without calibration: {self.raw_curve}")
        return accuracies

    def _eval_cnn(self: Any, loader: Any) -> tuple[np.ndarray, np.ndarray]:
        seen: list[torch.Tensor] = []
        layers = getattr(self._network, "classifier_pool", None) or [self._network.fc]
        with layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            own, labels = super()._eval_cnn(loader)  # pyright: ignore
        self.raw_curve.append(self._evaluate(own, labels)["top1"])
        adapted = torch.cat(seen).cpu().numpy() if seen else np.zeros(0)
        if len(adapted) != len(labels):  # A learner may answer without this layer.
            adapted, _ = self._extract_vectors(loader)
        scores = self.calibrator.class_scores(adapted, _frozen(self, self.frozen, loader))
        return np.argsort(-scores, axis=1)[:, : self.topk], labels


@torch.no_grad()
def dump(folder: str, learner: Any, data_manager: Any, checkpoints: Sequence[str]) -> None:
    """Writes a folder that `python -m fdc_jax posthoc` reads, from checkpoints of every task.

    `learner` is a new one, with `args` and `data_manager` of the training; checkpoints are files of
    PILOT's `save_checkpoint` (`NAME_0.pkl`, ...) or of InfLoRA's trainer (`task_0.pth`, ...).
    """
    network = learner._network.to(learner._device)
    initial, classes, known = copy.deepcopy(network), [], 0
    for task, path in enumerate(checkpoints):
        total = known + data_manager.get_task_size(task)
        loader = _loader(data_manager, known, total)
        previous = learner._extract_vectors(loader)[0] if task else None
        network.update_fc(total)
        stored = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(stored.get("model_state_dict", stored))
        adapted, frozen, labels = _views(learner, initial, loader)
        classes, known = [*classes, np.unique(labels)], total
        head = _head(network, task, classes[-1])
        feature_files.write_task(folder, task, adapted, labels, head, frozen, None, previous)
    final = [_head(network, t, c) for t, c in enumerate(classes)]
    feature_files.write_final_heads(folder, final)
    feature_files.write_test(
        folder, *_views(learner, initial, _loader(data_manager, 0, known, "test"))
    )


def _loader(data_manager: Any, first: int, end: int, source: str = "train") -> DataLoader:
    images = data_manager.get_dataset(np.arange(first, end), source=source, mode="test")
    # A separate generator leaves the random numbers of training as they are.
    return DataLoader(images, 64, generator=torch.Generator())


def _views(learner: Any, frozen: nn.Module, loader: Any) -> tuple[np.ndarray, ...]:
    """Returns features by the network and by the frozen network, and labels."""
    adapted, labels = learner._extract_vectors(loader)
    return adapted, _frozen(learner, frozen, loader), labels


def _frozen(learner: Any, frozen: nn.Module, loader: Any) -> np.ndarray:
    """Returns features by the frozen network."""
    current, learner._network = learner._network, frozen.to(learner._device)
    vectors, _ = learner._extract_vectors(loader)
    learner._network = current
    return vectors


def _head(network: Any, task: int, classes: np.ndarray) -> Any:
    """Returns the head of a task from a classifier, or from a list of one per task."""
    pool = getattr(network, "classifier_pool", None) or getattr(network.fc, "heads", None)
    layer, rows = (pool[task], slice(None)) if pool else (network.fc, classes)
    layer = layer[-1] if isinstance(layer, nn.Sequential) else layer
    if getattr(layer, "sigma", None) is None:
        return fdc_torch.head_of(layer, rows)
    return heads.CosineHead(layer.weight.detach().cpu().numpy()[rows], float(layer.sigma))
