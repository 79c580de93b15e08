"""FDC with the whitened affinity beside the paper's (docs/beyond.md), refitted from features.

The results of a run know one affinity beyond the paper at most, and most runs none, while the
tables compare two and their ingredients: one fit of all tasks gives them all.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fdc_jax import calibration, evaluation
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.calibration.settings import Affinity, Settings
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.report.runs import RunFolder

# Of all tables, whatever a run was set to.
SHRINKAGE = Settings._field_defaults["affinity_shrinkage"]
# By name, what `Terms.fuse` is told.
AFFINITIES = {
    "whitened": calibration.FDC(**WHITENED).settings.affinity,
    "whitened_classes": calibration.FDC(**WHITENED_CLASSES).settings.affinity,
}
_WHITENED = AFFINITIES["whitened"]
INGREDIENTS: dict[str, dict[str, Any]] = {
    "metric": {"affinity": _WHITENED._replace(evidence="tanh")},
    "evidence": {"affinity": Affinity(evidence=_WHITENED.evidence)},
    "whitened": {"affinity": _WHITENED},
    "without_tsf": {"affinity": _WHITENED, "tsf": False},
    "without_rlc": {"affinity": _WHITENED, "rlc": False},
    "adapted_view": {"affinity": _WHITENED, "pretrained_view": False},
    "pretrained_view": {"affinity": _WHITENED, "adapted_view": False},
}


class Outcome(NamedTuple):
    """What one way to score gives.

    Attributes:
        accuracy: in percent.
        gain: over FDC of the same fit, in points.
        oracle: accuracy in percent when the task is given.
        storage_bytes: of its statistics.
    """

    accuracy: float
    gain: float
    oracle: float | None
    storage_bytes: float | None


def accuracies(features: FeatureSet, settings: Settings) -> dict[str, Any]:
    """Returns what FDC and its variants give on the test images, all from one fit.

    Args:
        features: of a whole stream.
        settings: of FDC.

    Returns:
        `methods`: of `raw`, `fdc` and each of `AFFINITIES`, `accuracy` and `oracle` in percent and
        `storage_bytes`; `ingredients`: accuracy of each of `INGREDIENTS`, those of one view only
        where there are two.

    Raises:
        InputError: no test labels, or settings that the whitened metric does not allow.
    """
    labels, tasks = features.test_labels, features.test_tasks
    if labels is None:
        raise InputError("test_labels: absent, so there is nothing to compare with")
    chosen = settings._replace(**WHITENED, affinity_shrinkage=SHRINKAGE)
    calibrator = features.fit(calibration.FDC(**chosen._asdict()))
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    scores = {"raw": terms.raw(), "fdc": terms.fuse(affinity=terms.paper_affinity)}
    storage = {"raw": 0, "fdc": calibrator.paper_storage_bytes}
    for name, affinity in AFFINITIES.items():
        scores[name], storage[name] = terms.fuse(affinity=affinity), calibrator.storage_bytes
    return {
        "methods": {
            name: {
                "accuracy": evaluation.accuracy(labels, each.label),
                "oracle": evaluation.accuracy(labels, each.label_in_task(tasks)),
                "storage_bytes": storage[name],
            }
            for name, each in scores.items()
        },
        "ingredients": {
            name: evaluation.accuracy(labels, terms.fuse(**switches).label)
            for name, switches in INGREDIENTS.items()
            if terms.pretrained is not None or not name.endswith("_view")
        },
    }


def outcomes(run: RunFolder, analyses: Mapping[str, Mapping[str, Any]]) -> dict[str, Outcome]:
    """Returns what is known of a run: from its features, else from its results.

    Results know the affinity alone that the run was set to; of another shrinkage than `SHRINKAGE`
    they do not count.

    Args:
        run: a finished run.
        analyses: by path of the run, then by name of the analysis.
    """
    analysis = analyses.get(str(run.path), {}).get("beyond")
    methods = analysis["methods"] if analysis else _of_results(run)
    return {
        name: Outcome(
            each["accuracy"],
            each["accuracy"] - methods["fdc"]["accuracy"],
            each["oracle"],
            each["storage_bytes"],
        )
        for name, each in methods.items()
    }


def _of_results(run: RunFolder) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "raw": {
            "accuracy": run.value("accuracy", "raw"),
            "oracle": run.value("accuracy", "oracle"),
            "storage_bytes": 0,
        },
        "fdc": {
            "accuracy": run.value("accuracy", "fdc"),
            "oracle": run.value("decomposition", "fdc", "oracle_accuracy"),
            "storage_bytes": run.value("fdc_storage_bytes"),
        },
    }
    shrinkage = run.results.get("config", {}).get("fdc.affinity_shrinkage", SHRINKAGE)
    for name, affinity in AFFINITIES.items() if shrinkage == SHRINKAGE else ():
        if run.results.get("whitened", {}).get("affinity") == affinity._asdict():
            numbers = {each: run.value("whitened", each) for each in Outcome._fields}
            if numbers["accuracy"] is not None:
                found[name] = numbers
    return found
