"""FDC for PyTorch: features of a model as arrays, and a model that scores with a fitted calibrator.

Imported only by those who have PyTorch. JAX fits (`fdc_jax.calibration`); `Calibrated` holds what a
calibrator stores as buffers and computes the same scores with PyTorch alone.
"""

# pyright: reportAttributeAccessIssue=false
# Where PyTorch is not installed, pyright takes this file for it.
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fdc_jax import heads
from fdc_jax.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from fdc_jax.calibration import FDC

# As in `calibration.fdc`, which scoring does not import.
SCALE_FLOOR, ENERGY_FLOOR = 1e-6, 1e-12
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
        Adapted features, pretrained ones or None, and labels, as `FDC.fit_task` takes them.

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
            arrays = [each.float().cpu().numpy() for each in found if each is not None]
            columns.append([*arrays, np.asarray(torch.as_tensor(batch[1]).cpu(), np.int64)])
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


def _pair(features: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    pair = tuple(features) if isinstance(features, list | tuple) else (features, None)
    for each in pair:
        if each is not None and getattr(each, "ndim", 0) != 2:
            found = list(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
            raise InputError(f"features: expected one row per image, [n, d], found {found}")
    return pair


class Calibrated(nn.Module):
    """A model whose forward returns calibrated scores of all classes, [n, classes].

    The largest score is at the class that the calibrator predicts, and is the score of its task.
    What scoring needs of the calibrator are buffers, so that the module can be saved, moved to a
    device and traced. Where the model is to compute in half precision, cast `module` alone.

    Attributes:
        classes: the label of each column, ascending, [classes].
    """

    classes: torch.Tensor
    columns: torch.Tensor

    def __init__(self, module: nn.Module, calibrator: FDC, views: Views = pooled):
        """Takes what scoring needs of a calibrator.

        Args:
            module: the model.
            calibrator: finalized, from `calibration.from_settings` or `calibration.load`.
            views: as of `collect`; a function with a name, if the whole module is to be saved.

        Raises:
            InputError: not finalized, another kind of calibrator, or one that needs the logits of
                heads that are functions; in `forward`, features of another form than when fitted.
        """
        super().__init__()
        from fdc_jax.calibration import FDC

        if not isinstance(calibrator, FDC):
            raise InputError(f"calibrator: expected FDC, found {type(calibrator).__name__}")
        calibrator.require_finalized()
        plain: Any = calibrator.to_numpy()
        self.module, self.views = module, views
        self.widths = plain.widths if plain.settings.pretrained_view_weight else plain.widths[:1]
        transport = getattr(plain.settings, "transport", False)
        self.scorer = (_Gaussians if transport else _Fused)(plain, len(self.widths))
        labels, padded = np.concatenate(plain.classes), plain.arrays.views[0].offsets.shape[1]
        places = [t * padded + np.arange(len(each)) for t, each in enumerate(plain.classes)]
        order = np.argsort(labels)
        self.register_buffer("classes", torch.tensor(labels[order]))
        self.register_buffer("columns", torch.tensor(np.concatenate(places)[order]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all classes."""
        found = _pair(self.views(self.module, images))[: len(self.widths)]
        if not torch.jit.is_tracing():
            shape = [None if each is None else each.shape[1] for each in found]
            if shape != self.widths:
                raise InputError(f"features: expected views of widths {self.widths}, found {shape}")
        scores = self.scorer([each.to(torch.float32) for each in found if each is not None])
        return scores.flatten(1)[:, self.columns]


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


class _Arrays(nn.Module):
    """Arrays by name, as buffers."""

    def __init__(self, **arrays: Any):
        super().__init__()
        for name, array in arrays.items():
            self.register_buffer(name, torch.tensor(np.asarray(array, np.float32)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> torch.Tensor: ...


class _Fused(nn.Module):
    """Eq. score-fusion and Eq. dual-main for every class, and those of `calibration.whitened`."""

    def __init__(self, calibrator: Any, count: int):
        from fdc_jax.calibration.whitened import LEAST_UNIT, PAPER_AFFINITY

        super().__init__()
        arrays, settings = calibrator.arrays, calibrator.settings
        if arrays.heads is None:
            raise InputError("heads: expected built-in ones, found functions")
        paper = PAPER_AFFINITY._replace(reference=settings.affinity_reference)
        self.metric, self.evidence, self.reference, self.scope = getattr(
            settings, "affinity", paper
        )
        self.weights = (settings.adapted_view_weight, settings.pretrained_view_weight)
        self.rlc, self.pac = settings.rlc_weight, settings.pac_weight
        self.kept, self.neighbours = (1.0 - settings.attenuation) ** 2, settings.neighbours
        self.normalised = calibrator.normalised
        # Class by class, scores are in units of the score scale; see `WhitenedTerms`.
        scale = np.array([task.filtered_scale for task in calibrator.tasks], np.float32)
        unit, gain = np.ones_like(scale), scale
        if self.scope == "class":
            unit, gain = np.maximum(scale, LEAST_UNIT * scale.mean()), unit
        own = {"rows": arrays.heads.folded, "bias": arrays.heads.bias}
        self.heads = _Arrays(**own, scale=scale, unit=unit, gain=gain)
        self.known = nn.ModuleList()
        for index, view in enumerate(arrays.views[:count]):
            parts = view._asdict() | {"coefficients": arrays.coefficients[index]}
            if self.metric == "whitened":
                own = np.array([each[index][1:] for each in calibrator.affinities])
                if self.reference == "pooled":
                    own[:] = own.mean(axis=0)
                parts |= calibrator._prototypes[index]._asdict()
                parts |= {"cosine_mean": own[:, 0], "cosine_std": own[:, 1]}
            self.known.append(_Arrays(**parts))

    def forward(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        own, scores = self.heads, torch.zeros(())
        for index, features in enumerate(views):
            known: Any = self.known[index]
            centred = features[:, None] - known.mean
            coordinates = torch.einsum("ntd,trd->ntr", centred, known.basis)
            if index == 0:
                scores = self._logits(features, coordinates, known) / own.unit[:, None]
            total = _energy(centred)
            outside = (total - _energy(coordinates)).clamp_min(0.0)
            u = outside / total.clamp_min(ENERGY_FLOOR) - known.residual_mean
            u, (a, b, c) = u / known.residual_std, known.coefficients.unbind()
            rlc = self.weights[index] * self.rlc * torch.tanh((a * u + b) * u + c)
            scores = scores - (own.scale / own.unit * rlc)[..., None]
            if weight := self.weights[index] * self.pac:
                scores = scores + weight * own.gain[:, None] * self._closeness(features, known)
        return scores

    def _logits(
        self, features: torch.Tensor, coordinates: torch.Tensor, known: Any
    ) -> torch.Tensor:
        """Returns filtered logits, [n, tasks, c]; padded classes have minus infinity."""
        logits = torch.einsum("nd,tcd->ntc", features, self.heads.rows)
        if self.normalised:
            inside = _energy(coordinates + torch.einsum("td,trd->tr", known.mean, known.basis))
            filtered = self.kept * _energy(features)[:, None] + (1.0 - self.kept) * inside
            logits = logits / filtered.sqrt().clamp_min(heads.NORM_FLOOR)[..., None]
        return logits + self.heads.bias

    def _closeness(self, features: torch.Tensor, known: Any) -> torch.Tensor:
        """Returns the evidence of the affinity, [n, tasks, 1] or class by class [n, tasks, c]."""
        if self.metric == "whitened":
            near = _unit((features - known.origin) @ known.whitener.T)
            found = torch.einsum("nd,tcd->ntc", near, known.directions)
            found = found.masked_fill(known.present == 0, -torch.inf)
            found = found if self.scope == "class" else found.amax(2, keepdim=True)
            q = (found - known.cosine_mean[:, None]) / known.cosine_std[:, None]
        else:
            units = _unit(features)
            centred = units[:, None] - known.centre
            near = torch.einsum("ntd,tcd->ntc", centred, known.offsets)
            found = 0.5 * _energy(centred)[..., None] + known.constants - near
            directed = (_energy(units) > 0.5)[:, None, None] | known.constants.isinf()
            found = torch.where(directed, found, torch.ones_like(found))
            found = found.sort(2).values[..., : self.neighbours].mean(2, keepdim=True)
            mean, std = known.distance_mean[:, None], known.distance_std[:, None]
            if self.reference == "nearest":
                mean = found.mean(1, keepdim=True)
                std = (found - mean).square().mean(1, keepdim=True).sqrt().clamp_min(SCALE_FLOOR)
            q = (mean - found) / std
        return torch.tanh(q) if self.evidence == "tanh" else q


class _Gaussians(nn.Module):
    """The scores of `calibration.transported`, half squared distances to class Gaussians."""

    def __init__(self, calibrator: Any, count: int):
        from fdc_jax.calibration.transported import PRETRAINED_SHARE

        super().__init__()
        settings = calibrator.settings
        pretrained = PRETRAINED_SHARE * settings.pretrained_view_weight
        self.weights = (settings.adapted_view_weight, pretrained)
        calibrator.arrays  # noqa: B018  makes the metrics
        metrics = calibrator._metrics[:count]
        self.known = nn.ModuleList(_Arrays(**each._asdict()) for each in metrics)

    def forward(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for index, features in enumerate(views):
            known: Any = self.known[index]
            near = (features - known.origin) @ known.whitener.T
            linear = torch.einsum("nd,tcd->ntc", near, known.means) - _energy(known.means) / 2
            own = torch.einsum("nd,tcrd->ntcr", near, known.factors)
            centre = torch.einsum("tcrd,tcd->tcr", known.factors, known.means)
            total = total + self.weights[index] * (linear + _energy(own - centre) / 2)
        return total.masked_fill(self.known[0].present == 0, -torch.inf)


def _energy(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.square().sum(-1)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(
        heads.NORM_FLOOR
    )
