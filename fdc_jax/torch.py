"""Calibrators for PyTorch: features of a model as arrays, and a model with calibrated scores.

PyTorch, an optional dependency, computes the features; a calibrator (`fdc_jax.calibration`) fits
and scores them with JAX. Models of timm, transformers and PEFT are recognised by their methods.
"""

# pyright: reportAttributeAccessIssue=false
# Without PyTorch, pyright resolves `torch` to this file.
from __future__ import annotations

import copy
import functools
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from fdc_jax import calibration, heads
from fdc_jax.calibration.inputs import label_array, same_length
from fdc_jax.errors import InputError, did_you_mean

# A function from a model and its inputs to the adapted features [n, d], or to a pair with the
# pretrained features [n, e].
Views = Callable[[Any, Any], Any]

_EXPECTED = "loader: expected batches (images, labels, ...) or dictionaries"
_LOGGER = logging.getLogger(__name__)
_warn_once = functools.cache(_LOGGER.warning)
# Change of features, as a share of their length, that statistics must follow.
DRIFT = 0.05
# JAX reports devices that it does not find to logs of level INFO, which toolboxes show.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


def pooled(model: Any, inputs: Any, layer: str = "") -> Any:
    """Returns the features that enter a model's classifier, [n, d], or a pair of views.

    By default they are the input of the linear layer whose output is the model's, and a warning
    names the layer once; for a model of timm they are the output of `forward_head` before the
    classifier. A model of PEFT has a pair, with its active adapter and without
    (`disable_adapter`), and so does an `nn.ModuleList` (adapted encoder, pretrained encoder).

    Args:
        model: the model.
        inputs: images, or a mapping of the model's keyword arguments.
        layer: name of the layer with the features as input, or of an `nn.ModuleList` of heads.

    Raises:
        InputError: the model has no such layer, or does not use it.
    """
    if isinstance(model, nn.ModuleList):
        return tuple(pooled(encoder, inputs, layer) for encoder in model)
    adapted = _features(model, inputs, layer)
    if not hasattr(model, "disable_adapter"):
        return adapted
    # PEFT makes the parameters of an adapter trainable when it activates the adapter again.
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with model.disable_adapter():
        pretrained = _features(model, inputs, layer)
    for parameter, is_trained in trained:
        parameter.requires_grad_(is_trained)
    return adapted, pretrained


def _features(model: Any, inputs: Any, layer: str) -> Any:
    """Returns the features of one view."""
    base, calls = _base(model), []
    if not layer and hasattr(base, "forward_head"):  # timm
        return base.forward_head(base.forward_features(inputs), pre_logits=True)
    modules = _linear_layers(base)
    if layer:
        named: Any = _named_layer(base, layer)
        several = isinstance(named, nn.ModuleList)  # a head per task
        modules = dict(named.named_children()) if several else {layer: named}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, args, output: calls.append((name, args[0], output))

    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    output = getattr(output, "logits", output)  # a result of transformers
    parts = output if isinstance(output, list | tuple) else ()
    if not layer and any(call[2] is part for call in calls for part in parts):
        raise InputError(
            f"{type(base).__name__}: expected features or logits of one head, found those of "
            f"{len(parts)} linear layers; name the nn.ModuleList of heads by heads="
        )
    calls = [call for call in calls if layer or call[2] is output]
    if layer and not calls:
        raise InputError(f"layer: expected one that the model uses for its output, found {layer}")
    if not layer and modules:
        source = f"the input of its layer {calls[-1][0]}" if calls else "its output"
        _warn_once(f"{type(base).__name__}: features are {source}; layer= names another layer")
    return calls[-1][1] if calls else output


def _named_layer(base: Any, name: str) -> Any:
    if name not in (modules := dict(base.named_modules())):
        raise InputError(did_you_mean("layer", name, [*_linear_layers(base)][-8:]))
    return modules[name]


def _linear_layers(module: Any) -> dict[str, Any]:
    return {name: sub for name, sub in module.named_modules() if hasattr(sub, "in_features")}


def _base(model: Any) -> Any:
    """Returns the model within a model of PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "disable_adapter") else model


def _unwrapped(layer: Any) -> Any:
    """Returns the layer that PEFT uses in place of a layer of `modules_to_save`."""
    saved: Any = getattr(layer, "modules_to_save", None)
    return saved[layer.active_adapters[0]] if isinstance(saved, nn.ModuleDict) else layer


# Features and heads ------------------------------------------------------------------------------


@torch.no_grad()
def collect(
    model: nn.Module, loader: Iterable[Any], views: Views = pooled
) -> tuple[Float[Any, "n d"], Float[Any, "n e"] | None, Int[np.ndarray, " n"]]:
    """Returns adapted features, pretrained features or None, and labels of a loader's images.

    The model computes in evaluation mode. Features stay on its device if JAX has the device.

    Args:
        model: the model; its training mode is restored.
        loader: batches (images, labels, ...), or dictionaries of the model's keyword arguments with
            `labels` or `label`; it may shuffle, since features and labels are read together.
        views: from model and images to the adapted features, or to a pair with pretrained features.

    Raises:
        InputError: there is no batch, a batch has no integer labels, or features are not rows.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    columns: list[list[Any]] = []
    try:
        for batch in loader:
            inputs, batch_labels = _parts(batch, device)
            if batch_labels is None:
                raise InputError(f"{_EXPECTED} with labels, found none")
            features = _rows(views(model, inputs))
            labels = label_array(torch.as_tensor(batch_labels).cpu(), "loader: labels")
            same_length(labels, features[0], "loader: labels")
            columns.append([*map(as_array, features), labels])
    finally:
        for module, mode in modes:
            module.training = mode
    if not columns:
        raise InputError("loader: expected at least one batch, found none")
    joined = jnp.concatenate if isinstance(columns[0][0], jax.Array) else np.concatenate
    *features, labels = zip(*columns, strict=True)
    adapted, pretrained = [*map(joined, features), None][:2]
    return adapted, pretrained, np.concatenate(labels)


def as_array(tensor: Any) -> Float[Any, ...]:
    """Returns a float32 array, on the tensor's device if JAX computes there, else on the host."""
    tensor = tensor.detach().float()
    if tensor.device.type == {"gpu": "cuda"}.get(jax.default_backend()):
        return jnp.from_dlpack(tensor.contiguous())
    return tensor.cpu().numpy()


def _parts(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """Returns the model's inputs, on its device, and the labels of a batch, None without labels."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device), None
    if isinstance(batch, Mapping):
        labels = [batch[name] for name in ("labels", "label") if name in batch]
        inputs = {
            name: value.to(device)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and name not in ("labels", "label")
        }
        # A single tensor is a positional argument, since models name it differently.
        images = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        return images, labels[0] if labels else None
    if not isinstance(batch, list | tuple) or not batch or not isinstance(batch[0], torch.Tensor):
        raise InputError(f"{_EXPECTED} of tensors")
    return batch[0].to(device), batch[1] if len(batch) > 1 else None


@torch.no_grad()
def head_of(layer: Any, rows: Any = slice(None), name: str = "") -> heads.LinearHead:
    """Returns rows of a linear layer, such as those of a task's classes, as a head for `fit_task`.

    Args:
        layer: the layer, with or without a bias, or a model that ends in it.
        rows: a slice or an array of indices.
        name: name of the layer within the model; by default the last linear one of its classifier.

    Raises:
        InputError: the layer is not linear.
    """
    base = _base(layer)
    if name:
        layer = _named_layer(base, name)
        if isinstance(layer, nn.ModuleList):
            raise InputError(f"layer: {name} has a head per task; name one, such as {name}.0")
    elif isinstance(layer, nn.Module):
        top = base.get_classifier() if hasattr(base, "get_classifier") else base
        top = _unwrapped(getattr(top, "classifier", top))
        linear = [top] if hasattr(top, "in_features") else [*_linear_layers(top).values()]
        layer = linear[-1] if linear else layer
    layer = _unwrapped(layer)
    weight = getattr(layer, "weight", None)
    is_linear = hasattr(layer, "in_features") and not hasattr(layer, "base_layer")
    if weight is None or weight.ndim != 2 or not is_linear:
        kind = type(layer).__name__
        if hasattr(layer, "base_layer"):
            kind += " that PEFT adapts (put it into modules_to_save)"
        raise InputError(
            "layer: expected a linear layer, with a weight [classes, d], or a model and the name "
            f"of one, found {kind}"
        )
    bias = getattr(layer, "bias", None)
    bias = torch.zeros(len(weight)) if bias is None else bias
    arrays = [part.detach().float().cpu().numpy() for part in (weight, bias)]
    try:
        return heads.LinearHead(*(array[rows].copy() for array in arrays))  # Training may go on.
    except IndexError as error:
        raise InputError(
            f"layer: expected a row for each class, found {len(weight)} rows ({error}); if the "
            "model has a head per task, name their nn.ModuleList by heads="
        ) from error


def _unequal_share(*batches: Any) -> float:
    """Returns the share of values that differ between the images of two batches."""
    images = [_parts(batch, torch.device("cpu"))[0] for batch in batches]
    empty = torch.zeros(0)
    one, other = (next(iter(x.values()), empty) if isinstance(x, Mapping) else x for x in images)
    return float((one != other).float().mean()) if one.shape == other.shape else 1.0


def _rows(features: Any) -> tuple[torch.Tensor, ...]:
    """Returns the features of one or two views; raises InputError if they are not rows."""
    views = tuple(features) if isinstance(features, list | tuple) else (features,)
    if len(views) not in (1, 2):
        raise InputError(f"features: expected one or two views, found {len(views)}")
    for view in views:
        if getattr(view, "ndim", 0) != 2:
            shape = list(view.shape) if isinstance(view, torch.Tensor) else type(view).__name__
            raise InputError(
                f"features: expected one row per image, [n, d], found {shape}; name the last layer "
                "by layer=, or give a function of model and images by views="
            )
    return views


class Calibrated(nn.Module):
    """A model whose forward returns calibrated scores of all classes, [n, classes].

    `before_task` and `after_task` fit the calibrator, which may have earlier tasks. The class with
    the largest score is the prediction. Scores have no gradient.

    The module can be copied, pickled and moved to a device. Its `state_dict` holds the calibrator
    and, between `before_task` and `after_task`, the features before the task, so that fitting
    resumes bit for bit.

    Args:
        module: the model, or an `nn.ModuleList` of it and its pretrained state.
        calibrator: from `calibration.make` or `calibration.load`.
        views: see `collect`; by default `pooled`. A module with a lambda cannot be pickled.
        layer: name of the layer whose input are the features, if `pooled` misses it.
        heads: the heads of the tasks: an `nn.ModuleList` with one per task, or its name in the
            model, whose input are then the features; one linear layer for all tasks, which may
            grow, or its name; or a function from the number of a task, from 0, to its head. By
            default the layer `layer`, or the model's last linear layer.

    Attributes:
        classes: label of every column, ascending, [classes].
        previous: adapted features of a task's images before it is learned, None outside of a task.

    Raises:
        InputError: `calibrator` is no calibrator; in `forward`, no task was fitted, or the width of
            features differs from that of the fitted ones.
    """

    classes: torch.Tensor

    def __init__(
        self,
        module: nn.Module,
        calibrator: calibration.Calibrator,
        views: Views | None = None,
        layer: str = "",
        heads: str | nn.Module | Callable[[int], Any] | None = None,
    ):
        super().__init__()
        if not isinstance(calibrator, calibration.Calibrator):
            kind = type(calibrator).__name__
            raise InputError(f"calibrator: expected one of calibration.make or load, found {kind}")
        self.module, self.calibrator = module, calibrator
        if isinstance(heads, nn.Module):  # by name within the model, so that copies have their own
            names = {layer: name for name, layer in _base(self._model).named_modules()}
            heads = names.get(heads, heads)
        self.layer = heads if isinstance(heads, str) and not layer else layer
        self.heads = heads
        self.views = views or functools.partial(pooled, layer=self.layer)
        self.previous: Float[Any, "n d"] | None = None
        self._first: Any = None  # first batch of the task's loader
        self._named = -1  # the last task with a warning of its loader
        self._last: Any = None  # first batch of the last fitted task, and its adapted features
        self.register_buffer("classes", torch.zeros(0, dtype=torch.int64), persistent=False)
        self._sort_classes()

    def _sort_classes(self) -> None:
        """Updates the order of the columns after the calibrator has changed."""
        labels = np.concatenate([np.zeros(0, np.int64), *self.calibrator.classes])
        self.columns = np.argsort(labels)
        self.classes = torch.tensor(labels[self.columns], device=self.classes.device)

    def before_task(self, loader: Iterable[Any]) -> None:
        """Computes features of a task's images before it is learned, if the calibrator reads them.

        Reads the first batch again, and warns if its images have changed.

        Args:
            loader: see `collect`; images must come in the same order here and in `after_task`.
        """
        self._first = None
        reads = self.calibrator.num_tasks and self.calibrator.reads_previous
        if not isinstance(loader, Iterator):
            with torch.random.fork_rng(devices=[]):  # Training draws as it would.
                torch.seed()
                for _ in range(1 if reads else 2):
                    next(self._compared(loader), None)
        if reads:
            self.previous = collect(self.module, self._compared(loader), self.views)[0]

    def after_task(self, loader: Iterable[Any], classes: Any = None, head: Any = None) -> None:
        """Fits the task that the model has just learned.

        Args:
            loader: see `collect`; the task's images in evaluation preprocessing.
            classes: labels of the task; by default those of the loader.
            head: head of the task; by default the rows `classes` of the model's last layer, if the
                calibrator needs heads.

        Raises:
            InputError: see `collect`, `head_of` and `Calibrator.fit_task`.
        """
        adapted, pretrained, labels = collect(self.module, self._compared(loader), self.views)
        if self._last is not None and self.calibrator.reads_previous:
            self._warn_of_drift(adapted)
        classes = np.unique(labels) if classes is None else np.asarray(classes)
        if head is None and self.calibrator.needs_heads:
            head = self._head(classes)
        self.calibrator.fit_task(adapted, labels, head, pretrained, classes, self.previous)
        self.calibrator.finalize()
        _, of_batch = _parts(self._first, torch.device("cpu"))
        self._last = self._first, adapted[: len(of_batch)]
        self.previous = self._first = None
        self._sort_classes()

    def _compared(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields a loader's batches; warns once a task if the first one has other images."""
        task = self.calibrator.num_tasks
        for number, batch in enumerate(loader):
            if number == 0:
                share = 0.0 if self._first is None else _unequal_share(self._first, batch)
                if share and self._named < task:
                    self._named = task
                    _LOGGER.warning(
                        f"loader of task {task} (from 0): {share:.0%} of the values of its first "
                        "batch are others when it is read again; expected the same images in the "
                        "same order, in evaluation preprocessing"
                    )
                self._first = copy.deepcopy(batch)
            yield batch

    def _warn_of_drift(self, adapted: Float[Any, "n d"]) -> None:
        """Warns if the encoder has moved since the last task, and nothing tells from where."""
        batch, before = self._last
        rows = slice(len(before))
        if self.previous is not None and not np.array_equal(self.previous[rows], adapted[rows]):
            return
        after = collect(self.module, [batch], self.views)[0]
        drift = float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))
        if drift > DRIFT:
            _LOGGER.warning(
                f"task {self.calibrator.num_tasks} (from 0): features of images of the task before "
                f"have changed by {drift:.0%} of their length, and their statistics stay as they "
                "were; call before_task before the training"
            )

    @property
    def _model(self) -> nn.Module:
        """The model that is trained."""
        return self.module[0] if isinstance(self.module, nn.ModuleList) else self.module

    def _head(self, classes: np.ndarray) -> Any:
        """Returns the rows of the task's classes, or the task's own head of several."""
        task = self.calibrator.num_tasks
        layer: Any = self.heads
        if layer is None or isinstance(layer, str):
            name = layer or self.layer
            layer = _named_layer(_base(self._model), name) if name else self._model
        if not isinstance(layer, nn.Module):
            return layer(task)
        if not isinstance(layer, nn.ModuleList):
            return head_of(layer, classes)
        if task >= len(layer):
            raise InputError(f"heads: expected a head for task {task} (from 0), found {len(layer)}")
        return head_of(layer[task])

    def forward(self, inputs: Any) -> torch.Tensor:
        """Returns scores of all classes, [n, classes], for images or a batch of a loader."""
        inputs, _ = _parts(inputs, self.classes.device)
        features = _rows(self.views(self.module, inputs))
        scores = self.calibrator.class_scores(*map(as_array, features))[:, self.columns]
        return torch.from_numpy(scores).to(features[0].device, torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, without images."""
        return self.__dict__ | {"_first": None, "_last": None}

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Returns the calibrator's file, and the features before a task that is not fitted yet."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "calibrator.npz")
            self.calibrator.save(path)
            content = bytearray(path.read_bytes())
        state = {"calibrator": torch.frombuffer(content, dtype=torch.uint8)}
        if self.previous is not None:
            state["previous"] = torch.from_numpy(np.array(self.previous))
        return state

    def set_extra_state(self, state: Any) -> None:
        """Reads the result of `get_extra_state`; InputError if it is damaged."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "calibrator.npz")
            path.write_bytes(state["calibrator"].cpu().numpy().tobytes())
            self.calibrator = calibration.load(path)
        previous = state.get("previous")
        self.previous = None if previous is None else previous.cpu().numpy()
        self._sort_classes()
