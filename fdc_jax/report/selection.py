"""Which components to enable: the paper's rule, and the same rule kept apart from evaluation.

The rule enables every component whose standalone gain, averaged over seeds, is positive on all
benchmarks (paper, "Plug-and-Play Calibration"). There are three: TSF, and RLC with PAC in either
view. The paper applies the rule to the test images that it then reports; here it is also applied to
one half of them and evaluated on the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from fdc_jax import calibration, evaluation
from fdc_jax.calibration.components import fuse_all
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet

# The combination that each component alone makes, in the order of the switches.
STANDALONE = {
    "TSF": "tsf",
    "E_0": "pac+rlc_pretrained_view",
    "E_T": "pac+rlc_adapted_view",
}

# By the switches TSF, E_0 and E_T.
COMBINATIONS = {
    (0, 0, 0): "raw",
    (1, 0, 0): "tsf",
    (0, 1, 0): "pac+rlc_pretrained_view",
    (0, 0, 1): "pac+rlc_adapted_view",
    (0, 1, 1): "pac+rlc",
    (1, 1, 0): "pretrained_view",
    (1, 0, 1): "adapted_view",
    (1, 1, 1): "full",
}

HALVES = ("first", "second")


class Selection(NamedTuple):
    """What the rule enables: switches TSF, E_0, E_T, and the combination that they make."""

    switches: tuple[int, int, int]
    combination: str


def select(gains: Sequence[Mapping[str, Sequence[float]]], dual: bool = True) -> Selection | None:
    """Applies the paper's rule.

    Args:
        gains: for each benchmark, the gains of combinations over raw, one number per seed.
        dual: whether there is a pretrained view; if not, E_0 stays off.

    Returns:
        The selection; None where a standalone gain is not known.
    """
    switches = []
    for component, name in STANDALONE.items():
        if component == "E_0" and not dual:
            switches.append(0)
        elif not gains or not all(each.get(name) for each in gains):
            return None
        else:
            switches.append(int(all(np.mean(each[name]) > 0 for each in gains)))
    tsf, pretrained, adapted = switches
    return Selection((tsf, pretrained, adapted), COMBINATIONS[(tsf, pretrained, adapted)])


def first_half(labels: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Returns which samples are the first, third, ... of their class in the order of the file."""
    order = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, counts)
    return place % 2 == 0


def fdc_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of FDC from the configuration of a run."""
    return {
        field.removeprefix("fdc."): value
        for field, value in config.items()
        if field.startswith("fdc.")
    }


def component_predictions(
    features: FeatureSet, settings: Mapping[str, Any]
) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns the label that every component combination gives each test image.

    Args:
        features: of a whole stream.
        settings: arguments of `calibration.FDC`.
    """
    calibrator = features.fit(calibration.FDC(**settings))
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    return {name: scores.label for name, scores in fuse_all(terms).items()}


def half_accuracies(features: FeatureSet, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the accuracy in percent of every component combination on either half.

    Returns:
        `first` and `second`, each from combinations to accuracies, and `num_images` of each half.
        A combination of one view has the name that it has where there are two.

    Raises:
        InputError: no test labels, or no class with two test images.
    """
    labels = features.test_labels
    if labels is None:
        raise InputError("test_labels: absent, so halves cannot be compared")
    chosen = first_half(labels)
    if chosen.all():
        raise InputError("test_labels: expected a class with two test images, found none")
    predictions = component_predictions(features, settings)
    if features.test_pretrained is None:
        predictions["pac+rlc_adapted_view"] = predictions["pac+rlc"]
        predictions["adapted_view"] = predictions["full"]
    found: dict[str, Any] = {
        half: {
            name: evaluation.accuracy(labels[mask], predicted[mask])
            for name, predicted in predictions.items()
        }
        for half, mask in zip(HALVES, (chosen, ~chosen), strict=True)
    }
    return found | {"num_images": [int(chosen.sum()), int((~chosen).sum())]}
