"""Calibrators for PyTorch: features of a model as arrays, and a model whose scores are calibrated.

Imported only by those who have PyTorch, which computes features; a calibrator fits and scores them
on the host (`fdc_jax.calibration`), so that its formulas stand in one place.
"""

# pyright: reportAttributeAccessIssue=false
# Where PyTorch is not installed, pyright takes this file for it.
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fdc_jax import heads
from fdc_jax.calibration.inputs import label_array
from fdc_jax.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from fdc_jax.calibration import Calibrator

# From a model and images to one or two views, [n, d] and [n, e].
Views = Callable[[Any, torch.Tensor], Any]


def pooled(model: Any, images: torch.Tensor, layer: str = "") -> Any:
    """Returns the features that a model's classifier sees, [n, d].

    Of a timm model what its `forward_head` gives before the classifier; of an `nn.ModuleList`
    (adapted encoder, pretrained encoder) a pair; of any other model what it returns or, with
    `functools.partial(pooled, layer="classifier")`, what its layer of that name is given.
    """
    if isinstance(model, nn.ModuleList):
        return tuple(pooled(each, images, layer) for each in model)
    if layer:
        seen: list[torch.Tensor] = []
        hook = model.get_submodule(layer).register_forward_pre_hook(
            lambda _, given: seen.append(given[0])
        )
        try:
            model(images)
        finally:
            hook.remove()
        return seen[0]
    if hasattr(model, "forward_head"):
        return model.forward_head(model.forward_features(images), pre_logits=True)
    return model(images)


@torch.no_grad()
def collect(
    model: nn.Module, loader: Iterable[Any], views: Views = pooled
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n e"] | None, Int[np.ndarray, " n"]]:
    """Runs a model over a loader once, in evaluation mode and where its parameters are.

    Args:
        model: left in the mode in which it came.
        loader: gives batches (images, labels, ...); it may shuffle, since labels come along.
        views: from model and images to the adapted features, or a pair with the pretrained ones.

    Returns:
        Adapted features, pretrained ones or None, and labels, as `fit_task` takes them.

    Raises:
        InputError: no batch, batches without labels, or features that are not rows.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    modes = [(each, each.training) for each in model.modules()]
    model.eval()
    columns: list[list[np.ndarray]] = []
    try:
        for batch in loader:
            if not isinstance(batch, list | tuple) or len(batch) < 2:
                raise InputError("loader: expected batches (images, labels, ...)")
            found = _pair(views(model, batch[0].to(device)))
            labels = label_array(torch.as_tensor(batch[1]).cpu(), "loader: labels")
            columns.append([*_on_host(found), labels])
    finally:
        for each, mode in modes:
            each.training = mode
    if not columns:
        raise InputError("loader: expected at least one batch, found none")
    adapted, *pretrained, labels = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return adapted, pretrained[0] if pretrained else None, labels


def head_of(layer: Any, rows: Any = slice(None)) -> heads.LinearHead:
    """Returns rows of a linear layer, such as those of a task's classes, as a head for `fit_task`.

    With or without a bias; `rows` is a slice or an array of indices.
    """
    weight, bias = layer.weight.detach().float().cpu().numpy(), np.zeros(len(layer.weight))
    if layer.bias is not None:
        bias = layer.bias.detach().float().cpu().numpy()
    return heads.LinearHead(weight[rows], bias[rows].astype(np.float32))


def _pair(features: Any) -> tuple[torch.Tensor, ...]:
    pair = tuple(features) if isinstance(features, list | tuple) else (features,)
    for each in pair:
        if getattr(each, "ndim", 0) != 2:
            found = list(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
            raise InputError(f"features: expected one row per image, [n, d], found {found}")
    return pair


def _on_host(features: tuple[torch.Tensor, ...]) -> list[Float[np.ndarray, "n _"]]:
    return [each.detach().float().cpu().numpy() for each in features]


class Calibrated(nn.Module):
    """A model whose forward returns calibrated scores of all classes, [n, classes].

    The largest score is at the class that the calibrator predicts. Features go to the host, where
    the calibrator scores them, and scores come back without a gradient. The module can be copied,
    pickled and moved to a device; its `state_dict` has nothing of the calibrator.

    Attributes:
        classes: the label of each column, ascending, [classes].
    """

    classes: torch.Tensor

    def __init__(self, module: nn.Module, calibrator: Calibrator, views: Views = pooled):
        """Holds a model and a calibrator.

        Args:
            module: the model.
            calibrator: finalized, from `calibration.make` or `calibration.load`.
            views: as of `collect`; a function with a name, if the whole module is to be pickled.

        Raises:
            InputError: no task was fitted; in `forward`, also features of another form than when
                fitted.
        """
        super().__init__()
        if not calibrator.num_tasks:
            raise InputError("calibrator: expected fitted tasks, found none")
        self.module, self.calibrator, self.views = module, calibrator, views
        labels = np.concatenate(calibrator.classes)
        self.columns = np.argsort(labels)
        self.register_buffer("classes", torch.tensor(labels[self.columns]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all classes."""
        found = _pair(self.views(self.module, images))
        scores = self.calibrator.class_scores(*_on_host(found))[:, self.columns]
        return torch.from_numpy(scores).to(found[0].device, torch.float32)


def by_label(
    scores: torch.Tensor, classes: torch.Tensor, count: int
) -> Float[torch.Tensor, "n count"]:
    """Returns scores of classes in the columns of their labels; other columns are below them all.

    Args:
        scores: of `Calibrated`, [n, classes].
        classes: the label of each column.
        count: of the columns to return, more than the largest label.
    """
    found = scores.new_full((len(scores), count), float(scores.min()) - 1.0)
    found[:, classes] = scores
    return found
