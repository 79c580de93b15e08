"""Calibrators for PyTorch: features of a model as arrays, and a model whose scores are calibrated.

Imported only by those who have PyTorch, which computes features; a calibrator fits and scores them
on the host (`fdc_jax.calibration`), so that its formulas stand in one place. Models of timm,
transformers and PEFT are known by their methods; none of the three is imported.
"""

# pyright: reportAttributeAccessIssue=false
# Where PyTorch is not installed, pyright takes this file for it.
from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fdc_jax import calibration, heads
from fdc_jax.calibration.inputs import label_array, same_length
from fdc_jax.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from fdc_jax.calibration import Calibrator

# From a model and its inputs to one or two views, [n, d] and [n, e].
Views = Callable[[Any, Any], Any]

_LABELS = ("labels", "label")  # of batches that are dictionaries


def pooled(model: Any, inputs: Any, layer: str = "") -> Any:
    """Returns the features that a model's classifier sees, [n, d], or a pair of them.

    Of a timm model what its `forward_head` gives before the classifier; of an image classifier of
    transformers what its `classifier` is given; of any other model what it returns. A model of PEFT
    gives a pair, with its active adapter and without (`disable_adapter`), and so does an
    `nn.ModuleList` (adapted encoder, pretrained encoder).

    Args:
        model: the model.
        inputs: images, or a mapping of what the model takes by keyword.
        layer: name of the last layer, whose input is taken, where the model has another one.

    Raises:
        InputError: the model has no such layer, or is one of transformers without a linear one.
    """
    if isinstance(model, nn.ModuleList):
        return tuple(pooled(each, inputs, layer) for each in model)
    found = _features(model, inputs, layer)
    if not _is_peft(model):
        return found
    # PEFT has what it activates again be trained.
    trained = [(each, each.requires_grad) for each in model.parameters()]
    with model.disable_adapter():
        pretrained = _features(model, inputs, layer)
    for each, grad in trained:
        each.requires_grad_(grad)
    return found, pretrained


def _features(model: Any, inputs: Any, layer: str) -> Any:
    base = model.get_base_model() if _is_peft(model) else model
    if not layer and hasattr(base, "forward_head"):
        return base.forward_head(base.forward_features(inputs), pre_logits=True)
    if not layer and not hasattr(base, "main_input_name"):  # which is of transformers
        return _called(model, inputs)
    seen: list[torch.Tensor] = []
    last = _last(model, layer)
    hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        _called(model, inputs)
    finally:
        hook.remove()
    if not seen:
        raise InputError(f"layer: expected one that the model uses for its output, found {layer}")
    return seen[0]


def _called(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _last(model: Any, layer: str) -> Any:
    """Returns the layer of this name, or what timm and transformers call the classifier."""
    base = model.get_base_model() if _is_peft(model) else model
    known = dict(base.named_modules())
    if layer:
        if layer not in known:
            linear = [name for name, each in known.items() if hasattr(each, "in_features")]
            raise InputError(did_you_mean("layer", layer, linear[-8:]))
        return known[layer]
    last = base.get_classifier() if hasattr(base, "get_classifier") else known.get("classifier")
    if last is None or getattr(_unwrapped(last), "in_features", None) is None:
        found = "no classifier" if last is None else f"a classifier of type {type(last).__name__}"
        raise InputError(
            f"{type(base).__name__}: expected a model whose last layer, `classifier`, is linear, "
            f"such as ViTForImageClassification, found {found}; name the last layer by layer=, or "
            "give a function of model and images by views="
        )
    return last


def _is_peft(model: Any) -> bool:
    return hasattr(model, "disable_adapter") and hasattr(model, "get_base_model")


def _unwrapped(layer: Any) -> Any:
    """Returns the layer that PEFT uses in the place of one of `modules_to_save`."""
    saved: Any = getattr(layer, "modules_to_save", None)
    if not isinstance(saved, nn.ModuleDict):
        return layer
    return saved[layer.active_adapters[0]]


# Features and heads -------------------------------------------------------------------------------


@torch.no_grad()
def collect(
    model: nn.Module, loader: Iterable[Any], views: Views = pooled
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n e"] | None, Int[np.ndarray, " n"]]:
    """Runs a model over a loader once, in evaluation mode and where its parameters are.

    Args:
        model: left in the mode in which it came.
        loader: gives batches (images, labels, ...), or dictionaries of what the model takes by
            keyword, with `labels` or `label`; it may shuffle, since labels come along.
        views: from model and images to the adapted features, or a pair with the pretrained ones.

    Returns:
        Adapted features, pretrained ones or None, and labels, as `fit_task` takes them.

    Raises:
        InputError: no batch, batches without integer labels, or features that are not rows.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    modes = [(each, each.training) for each in model.modules()]
    model.eval()
    columns: list[list[np.ndarray]] = []
    try:
        for batch in loader:
            inputs, given = _parts(batch, device)
            if given is None:
                raise InputError(
                    "loader: expected batches (images, labels, ...) or dictionaries with labels, "
                    "found none"
                )
            found = _pair(views(model, inputs))
            labels = label_array(torch.as_tensor(given).cpu(), "loader: labels")
            same_length(labels, found[0], "loader: labels")
            columns.append([*_on_host(found), labels])
    finally:
        for each, mode in modes:
            each.training = mode
    if not columns:
        raise InputError("loader: expected at least one batch, found none")
    adapted, *pretrained, labels = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return adapted, pretrained[0] if pretrained else None, labels


def _parts(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """Returns what the model takes, on its device, and labels; None where there are none."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device), None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in _LABELS if name in batch), None)
        inputs = {
            name: value.to(device)
            for name, value in batch.items()
            if name not in _LABELS and isinstance(value, torch.Tensor)
        }
        # A single tensor goes by its place, since models name it differently.
        return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), labels
    if not isinstance(batch, list | tuple) or not batch or not isinstance(batch[0], torch.Tensor):
        raise InputError(
            "loader: expected batches (images, labels, ...) or dictionaries of tensors"
        )
    return batch[0].to(device), batch[1] if len(batch) > 1 else None


@torch.no_grad()
def head_of(layer: Any, rows: Any = slice(None), name: str = "") -> heads.LinearHead:
    """Returns rows of a linear layer, such as those of a task's classes, as a head for `fit_task`.

    Args:
        layer: the layer, with or without a bias, or a model whose last layer it is.
        rows: a slice or an array of indices.
        name: of the layer within the model, as `layer` of `pooled`.

    Raises:
        InputError: it is no linear layer.
    """
    models = ("get_classifier", "main_input_name", "get_base_model")
    if name or any(hasattr(layer, each) for each in models):
        layer = _last(layer, name)
    layer = _unwrapped(layer)
    weight = getattr(layer, "weight", None)
    known = hasattr(layer, "in_features") and not hasattr(layer, "base_layer")
    if weight is None or weight.ndim != 2 or not known:
        found = type(layer).__name__
        found += " that PEFT adapts (put it into modules_to_save)" * hasattr(layer, "base_layer")
        raise InputError(
            "layer: expected a linear layer, with a weight [classes, d], or a model and the name "
            f"of one, found {found}"
        )
    bias = torch.zeros(len(weight)) if (own := getattr(layer, "bias", None)) is None else own
    arrays = (each.detach().float().cpu().numpy() for each in (weight, bias))
    return heads.LinearHead(*(each[rows].copy() for each in arrays))  # Training goes on.


def _pair(features: Any) -> tuple[torch.Tensor, ...]:
    pair = tuple(features) if isinstance(features, list | tuple) else (features,)
    for each in pair:
        if getattr(each, "ndim", 0) != 2:
            found = list(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
            raise InputError(
                f"features: expected one row per image, [n, d], found {found}; name the last layer "
                "by layer=, or give a function of model and images by views="
            )
    return pair


def _on_host(features: tuple[torch.Tensor, ...]) -> list[Float[np.ndarray, "n _"]]:
    return [each.detach().float().cpu().numpy() for each in features]


def checked(calibrator: Any) -> Calibrator:
    """Returns a calibrator; InputError where it is none."""
    if isinstance(calibrator, calibration.Calibrator):
        return calibrator
    found = type(calibrator).__name__
    raise InputError(f"calibrator: expected one of calibration.make or load, found {found}")


class Calibrated(nn.Module):
    """A model whose forward returns calibrated scores of all classes, [n, classes].

    `before_task` and `after_task` fit its calibrator, which may also have been fitted before. The
    largest score is at the class that the calibrator predicts. Features go to the host, where the
    calibrator scores them, and scores come back without a gradient.

    The module can be copied, pickled and moved to a device. Its `state_dict` has the calibrator
    and, between the two calls, the features of before; one that reads it goes on as this one would.

    Attributes:
        classes: the label of each column, ascending, [classes].
    """

    classes: torch.Tensor

    def __init__(
        self, module: nn.Module, calibrator: Calibrator, views: Views | None = None, layer: str = ""
    ):
        """Holds a model and a calibrator.

        Args:
            module: the model, or an `nn.ModuleList` of it and its pretrained state.
            calibrator: from `calibration.make` or `calibration.load`.
            views: as of `collect`; a function with a name, if the whole module is to be pickled.
                By default `pooled`.
            layer: name of the last layer, for `pooled` and `head_of`, where they do not find it.

        Raises:
            InputError: the calibrator is none; in `forward`, no task was fitted, or features of
                another form than then.
        """
        super().__init__()
        self.module, self.calibrator, self.layer = module, checked(calibrator), layer
        self.views = views or functools.partial(pooled, layer=layer)
        self.previous: Float[np.ndarray, "n d"] | None = None
        self.register_buffer("classes", torch.zeros(0, dtype=torch.int64), persistent=False)
        self._arrange()

    def _arrange(self) -> None:
        labels = np.concatenate([np.zeros(0, np.int64), *self.calibrator.classes])
        self.columns = np.argsort(labels)
        self.classes = torch.tensor(labels[self.columns], device=self.classes.device)

    def before_task(self, loader: Iterable[Any]) -> None:
        """Keeps the features of a task's images before it is learned, where they are of use.

        Args:
            loader: as of `collect`, in one and the same order here and in `after_task`.
        """
        if self.calibrator.num_tasks and self.calibrator.reads_previous:
            self.previous = collect(self.module, loader, self.views)[0]

    def after_task(self, loader: Iterable[Any], classes: Any = None, head: Any = None) -> None:
        """Fits the task that the model has just learned.

        Args:
            loader: as of `collect`: the task's images, in evaluation preprocessing.
            classes: the labels of the task; by default those of the loader.
            head: of the task; by default the rows `classes` of the model's last layer, if the
                calibrator needs heads.

        Raises:
            InputError: as of `collect`, `head_of` and `Calibrator.fit_task`.
        """
        adapted, pretrained, labels = collect(self.module, loader, self.views)
        classes = np.unique(labels) if classes is None else np.asarray(classes)
        if head is None and self.calibrator.needs_heads:
            model = self.module[0] if isinstance(self.module, nn.ModuleList) else self.module
            head = head_of(model, classes, self.layer)
        self.calibrator.fit_task(adapted, labels, head, pretrained, classes, self.previous)
        self.calibrator.finalize()
        self.previous = None
        self._arrange()

    def forward(self, inputs: Any) -> torch.Tensor:
        """Returns the scores of all classes, of images or of a batch as `collect` takes."""
        inputs, _ = _parts(inputs, self.classes.device)
        found = _pair(self.views(self.module, inputs))
        scores = self.calibrator.class_scores(*_on_host(found))[:, self.columns]
        return torch.from_numpy(scores).to(found[0].device, torch.float32)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Returns the calibrator's file, and the features of before a task that is not fitted."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "calibrator.npz")
            self.calibrator.save(path)
            state = {
                "calibrator": torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            }
        if self.previous is not None:
            state["previous"] = torch.from_numpy(self.previous)
        return state

    def set_extra_state(self, state: Any) -> None:
        """Reads what `get_extra_state` gave; InputError where it is damaged."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "calibrator.npz")
            path.write_bytes(state["calibrator"].cpu().numpy().tobytes())
            self.calibrator = calibration.load(path)
        previous = state.get("previous")
        self.previous = None if previous is None else previous.cpu().numpy()
        self._arrange()


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
