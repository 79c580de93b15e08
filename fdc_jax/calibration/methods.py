"""All calibrators by name: what runs fit, commands offer and files hold."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fdc_jax import heads
from fdc_jax.calibration import fdc, gaussians, storage
from fdc_jax.calibration.calibrator import Calibrator
from fdc_jax.calibration.comparators import distances, logits, random_features
from fdc_jax.calibration.confidence import Confidence
from fdc_jax.calibration.familiarity import Familiarity
from fdc_jax.errors import InputError, did_you_mean


class Method(NamedTuple):
    """A calibrator by its properties.

    Attributes:
        title: its name in tables.
        make: makes a fresh one from settings.
        settings: names of the settings that it takes.
        has_components: `components` gives the scores of parts of the method, raw heads included.
        gives_confidence: `assess` gives probabilities and typicality.
    """

    title: str
    make: Callable[..., Calibrator]
    settings: tuple[str, ...] = ()
    has_components: bool = False
    gives_confidence: bool = False


_FDC = tuple(inspect.signature(fdc.Settings).parameters)
_RANDOM = ("projections", "seed")

# In the order of tables. A suffix names the view; see each class for formulas.
METHODS: dict[str, Method] = {
    "raw": Method("Raw", logits.Raw),
    "fdc": Method("FDC", fdc.FDC, _FDC, has_components=True),
    "gaussians": Method("class Gaussians", gaussians.Gaussians, gives_confidence=True),
    "ls": Method("logit standardisation", logits.LogitStandardisation),
    "energy": Method("Energy", logits.Energy),
    "msp": Method("maximum softmax", logits.MaximumSoftmax),
    "entropy": Method("entropy", logits.NegativeEntropy),
    "wa": Method("weight aligning", logits.WeightAligning),
    "vim": Method("ViM", logits.VirtualLogitMatching),
    "ncm": Method("nearest class mean", distances.NearestClassMean),
    "mahalanobis": Method("Mahalanobis", distances.Mahalanobis),
    "fecam": Method("FeCAM", distances.FeCAM),
    "ridge": Method("ridge", random_features.Ridge),
    "ranpac": Method("RanPAC", random_features.RanPAC, _RANDOM),
    "anacp": Method("AnaCP", random_features.AnaCP, _RANDOM),
}
# The types in files of calibrators, by name.
_KINDS = [method.make for method in METHODS.values()]
_KINDS += [fdc.Settings, fdc.Task, fdc.View, fdc.Foreign, gaussians.ViewClasses]
_KINDS += [Confidence, Familiarity]
TYPES: dict[str, Any] = {kind.__name__: kind for kind in (*_KINDS, *heads.KINDS)}

for _name in ("ncm", "mahalanobis", "fecam", "ridge", "ranpac", "anacp"):
    _title, _make, _settings, *_ = METHODS[_name]
    _make = partial(_make, view="pretrained")
    METHODS[f"{_name}-pretrained"] = Method(f"{_title}, frozen features", _make, _settings)


def find(name: str) -> Method:
    """Returns the method of a name; InputError if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(did_you_mean("calibrator", name, METHODS))
    return METHODS[name]


def make(name: str, **settings: Any) -> Calibrator:
    """Returns a fresh calibrator; of the settings it takes those that are its own.

    Raises:
        InputError: no calibrator has this name, none at all such a setting, or one is outside its
            range.
    """
    method = find(name)
    known = dict.fromkeys(key for other in METHODS.values() for key in other.settings)
    for key in settings:
        if key not in known:
            raise InputError(did_you_mean("setting of a calibrator", key, known))
    return method.make(**{key: settings[key] for key in method.settings if key in settings})


def load(path: str | os.PathLike[str]) -> Calibrator:
    """Reads a calibrator that `save` wrote; it scores as it did, and further tasks may follow.

    Raises:
        InputError: the file is missing, damaged, or of another kind or version.
    """
    stored = storage.read(path, TYPES)
    if not isinstance(stored, Calibrator):
        raise InputError(f"{path}: expected a calibrator, found {type(stored).__name__}")
    if vars(stored).keys() != vars(type(stored)()).keys():
        raise InputError(f"{path}: not as this version writes it: other attributes")
    return stored
