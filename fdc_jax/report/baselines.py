"""What no training at all comes to: comparators on the features of the pretrained encoder alone."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from fdc_jax import calibration, evaluation
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.report.kept import kept

# With fewer random features than in the RanPAC paper (10,000), which take minutes and gigabytes.
_SETTINGS: dict[str, dict[str, Any]] = {
    "ncm-pretrained": {},
    "ranpac-pretrained": {"projections": 2_000},
}
NAMES = tuple(_SETTINGS)


def labels(run: Any) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns columns of labels such as `ncm-pretrained_label`, a row per test image.

    Empty if the run has no saved features of E_0, or if they are not of its predictions.

    Args:
        run: one seed, as `fdc_jax.open_run` returns it.
    """
    test = run.folder / "features" / "test_pretrained.npy"
    if not (test.exists() and run.predictions_file.exists()):
        return {}
    true, found = _labels(test.parent)
    return found if np.array_equal(true, run.predictions["label"]) else {}


@kept
def _labels(folder: Path) -> tuple[Any, dict[str, Int[np.ndarray, " n"]]]:
    found = {}
    try:
        features = feature_files.load(folder)
        for name, settings in _SETTINGS.items():
            fitted = features.fit(calibration.make(name, **settings))
            scores = fitted.score(features.test_adapted, features.test_pretrained)
            found[f"{name}_label"] = scores.label
    except InputError:
        return None, {}
    return features.test_labels, found


def accuracies(run: Any) -> dict[str, float]:
    """Returns accuracies in percent by `NAMES`; see `labels`."""
    return {
        column.removesuffix("_label"): evaluation.accuracy(run.predictions["label"], found)
        for column, found in labels(run).items()
    }
