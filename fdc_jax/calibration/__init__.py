"""Post-hoc calibration of task heads from feature statistics: arrays in, arrays out.

`FDC` is the paper's method, `Gaussians` goes beyond it, and `comparators` are methods of others.
All have the interface of `Calibrator`. `make` returns one by its name in `METHODS`, and `load`
reads a file of `Calibrator.save`.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fdc_jax import heads
from fdc_jax.calibration import storage
from fdc_jax.calibration.calibrator import Calibrator, Scores
from fdc_jax.calibration.comparators import distances, logits, random_features
from fdc_jax.calibration.confidence import Confidence
from fdc_jax.calibration.familiarity import Familiarity
from fdc_jax.calibration.fdc import FDC, Settings
from fdc_jax.calibration.gaussians import Gaussians, ViewClasses
from fdc_jax.calibration.statistics import Foreign, Task, View
from fdc_jax.calibration.terms import Terms
from fdc_jax.errors import InputError, did_you_mean

__all__ = ["FDC", "METHODS", "Calibrator", "Gaussians", "Method", "Scores", "Settings", "Terms"]
__all__ += ["find", "load", "make"]


class Method(NamedTuple):
    """Properties of a calibrator."""

    title: str  # in tables
    make: Callable[..., Calibrator]  # from settings
    settings: tuple[str, ...] = ()  # names
    has_components: bool = False  # `components` has parts of the method, with the raw heads
    gives_confidence: bool = False  # `assess` returns probabilities and typicality


_FDC = Settings.__struct_fields__
_RANDOM = ("projections", "seed")

# In the order of tables; the classes have the formulas.
METHODS: dict[str, Method] = {
    "raw": Method("Raw", logits.Raw),
    "fdc": Method("FDC", FDC, _FDC, has_components=True),
    "gaussians": Method("class Gaussians", Gaussians, gives_confidence=True),
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
# Types in files of calibrators, by name.
_KINDS: list[Any] = [method.make for method in METHODS.values()]
_KINDS += [Settings, Task, View, Foreign, ViewClasses, Confidence, Familiarity, *heads.KINDS]
TYPES = {kind.__name__: kind for kind in _KINDS}

for _name in ("gaussians", "ncm", "mahalanobis", "fecam", "ridge", "ranpac", "anacp"):
    _title, _make, _settings, *_ = METHODS[_name]
    _make = partial(_make, view="pretrained")
    METHODS[f"{_name}-pretrained"] = Method(f"{_title}, frozen features", _make, _settings)


def find(name: str) -> Method:
    """Returns the method of a name; raises InputError if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(did_you_mean("calibrator", name, METHODS))
    return METHODS[name]


def make(name: str, **settings: Any) -> Calibrator:
    """Returns a new calibrator. Settings of other calibrators are ignored.

    Raises:
        InputError: no calibrator has this name or such a setting, or a setting is out of range.
    """
    method = find(name)
    for key in settings:
        if key not in _FDC + _RANDOM:
            raise InputError(did_you_mean("setting of a calibrator", key, _FDC + _RANDOM))
    return method.make(**{key: settings[key] for key in method.settings if key in settings})


def load(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray] | None = None
) -> Calibrator:
    """Returns a calibrator that `save` wrote, as it was then; further tasks may follow.

    Args:
        path: the file.
        arrays: the arrays of the file, if they were read already.

    Raises:
        InputError: the file is missing, damaged, or of another kind or version.
    """
    stored = storage.read(path, TYPES, arrays)
    if not isinstance(stored, Calibrator):
        raise InputError(f"{path}: expected a calibrator, found {type(stored).__name__}")
    if vars(stored).keys() != vars(type(stored)()).keys():
        raise InputError(f"{path}: not as this version writes it: other attributes")
    return stored
