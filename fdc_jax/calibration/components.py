"""The component and view combinations that the paper compares, as arguments of `Terms.fuse`."""

from collections.abc import Callable
from typing import Any

from fdc_jax.calibration.fdc import Terms
from fdc_jax.calibration.scores import Scores

# Table current-ablation, and the two views of Table plugin without TSF.
COMPONENTS = {
    "raw": {"tsf": False, "rlc": False, "pac": False},
    "tsf": {"rlc": False, "pac": False},
    "pac": {"tsf": False, "rlc": False},
    "rlc": {"tsf": False, "pac": False},
    "tsf+pac": {"rlc": False},
    "tsf+rlc": {"pac": False},
    "pac+rlc": {"tsf": False},
    "full": {},
    "adapted_view": {"pretrained_view": False},
    "pretrained_view": {"adapted_view": False},
    "pac+rlc_adapted_view": {"tsf": False, "pretrained_view": False},
    "pac+rlc_pretrained_view": {"tsf": False, "adapted_view": False},
}

# Beyond the paper (docs/beyond.md), as arguments of `from_settings`: the whitened affinity, that
# affinity class by class, and class Gaussians that follow the encoder.
WHITENED: dict[str, Any] = {"affinity_metric": "whitened", "affinity_evidence": "linear"}
WHITENED_CLASSES: dict[str, Any] = {
    **WHITENED,
    "affinity_reference": "pooled",
    "affinity_scope": "class",
}
TRANSPORTED: dict[str, Any] = {"transport": True}

# FDC and what is beyond it by the names that users give, as arguments of `from_settings`.
CALIBRATORS: dict[str, dict[str, Any]] = {
    "fdc": {},
    "whitened": WHITENED,
    "whitened-classes": WHITENED_CLASSES,
    "transported": TRANSPORTED,
}


def fuse_all(terms: Terms, fuse: Callable[..., Scores] | None = None) -> dict[str, Scores]:
    """Returns the scores of every combination; those of one view only where there are two.

    Args:
        terms: of a batch.
        fuse: `terms.scores` for what the calibrator is set to; by default `terms.fuse`, the paper's
            scores.
    """
    dual, fuse = terms.pretrained is not None, fuse or terms.fuse
    return {
        name: fuse(**switches)
        for name, switches in COMPONENTS.items()
        if dual or not name.endswith("_view")
    }
