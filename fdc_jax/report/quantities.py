"""What a `results.json` says, as numbers with one name each.

A name stands for a final accuracy in percent: of a calibrator (`raw`, `fdc`, `gaussians`, ...), of
the task given (`oracle`), of a combination of FDC's components (`tsf+rlc`), or of the one that the
paper selects for the learner (`selected`). With something in front:

    gain:NAME      the same minus `raw`, in points
    routing:NAME   share of test images that get the right task, in percent
    aia:NAME       average incremental accuracy
    storage:NAME   bytes

and for the paper's Table app-cost `training_minutes`, `fdc_minutes`, `peak_memory_gib`,
`fdc_peak_memory_gib` and `storage_mib`.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fdc_jax import learners
from fdc_jax.calibration import METHODS
from fdc_jax.report import paper

# Sections of results that have a number for each calibrator.
_SECTIONS = {
    "aia": "average_incremental_accuracy",
    "routing": "routing_accuracy",
    "storage": "storage_bytes",
}
_NAMES = (*METHODS, "oracle", *paper.COMPONENT_TITLES, "selected")
# Names of quantities that any run may have.
KNOWN = frozenset(_NAMES) | {f"{kind}:{name}" for kind in ("gain", *_SECTIONS) for name in _NAMES}


def methods(results: Mapping[str, Any]) -> list[str]:
    """Returns the calibrators of a run by name, `raw` and `fdc` first."""
    first = [name for name in ("raw", "fdc") if name in results["accuracy"]]
    return first + [name for name in results["accuracy"] if name not in (*first, "oracle")]


def notes(results: Mapping[str, Any]) -> list[str]:
    """Returns what a user should know of calibrators, such as which kind of Gaussians they are."""
    found = [f"{note[:1].upper()}{note[1:]}." for note in (results.get("notes") or {}).values()]
    if sure := results.get("calibration_error"):
        said = ", ".join(f"{value:.1f} for {METHODS[name].title}" for name, value in sure.items())
        if chance := results.get("chance_calibration_error"):
            said += f"; by chance alone {', '.join(f'{chance[name]:.1f}' for name in sure)}"
        what = "The Gaussians' probability of the answer is off on the mean, in points"
        found.append(f"{what}: {said}.")
    if (share := results.get("unlike_learned")) is not None:
        what = (
            "are taken for unlike anything learned, where 5 % of images like those of training are"
        )
        found.append(f"Of the test images, {share:.1f} % {what}.")
    return found


def measured(
    results: Mapping[str, Any], untrained: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns the numbers of a `results.json` by name; what it lacks is left out.

    Args:
        results: of a run.
        untrained: accuracies of `baselines`, for calibrators that the run did not have.
    """
    found = dict(untrained or {}) | _accuracies(results, results["learner"])
    found |= {f"gain:{name}": value - found["raw"] for name, value in found.items()}
    averages = results.get("average_incremental_accuracy") or {}
    if averages.get("raw") is not None:  # Else not every task was evaluated.
        curve = [_accuracies(point, results["learner"]) for point in results["curve"]]
        means = pd.DataFrame(curve).mean(skipna=False).dropna()
        found |= means.add_prefix("aia:").to_dict()
    for kind, section in _SECTIONS.items():
        found |= {f"{kind}:{name}": each for name, each in (results.get(section) or {}).items()}
    found |= _costs(results)
    return {name: float(value) for name, value in found.items() if value is not None}


def _accuracies(of: Mapping[str, Any], learner: str) -> dict[str, float]:
    """Returns final accuracies by name, from results or from a point of the curve.

    Without a pretrained view, what is called the adapted view of a combination is all of it.
    """
    found = dict(of.get("components") or {})
    if found and "pretrained_view" not in found:
        found |= {"adapted_view": found["full"], "pac+rlc_adapted_view": found["pac+rlc"]}
    selected = learners.selected(learner)
    return found | ({"selected": found[selected]} if selected in found else {}) | of["accuracy"]


def _costs(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what training and FDC took; None where it is not known."""
    timing, memory = results.get("timing") or {}, results.get("peak_memory_bytes") or {}
    parts = ("adapted_extraction_seconds", "pretrained_extraction_seconds", "fit_seconds")
    # With pretrained features out of the cache, FDC took less than it takes.
    whole = timing.get("pretrained_from_cache") == 0 and all(name in timing for name in parts)
    of = {
        "training_minutes": (timing.get("training_seconds"), 60),
        "fdc_minutes": (sum(timing[name] for name in parts) if whole else None, 60),
        "peak_memory_gib": (memory.get("training"), 2**30),
        "fdc_peak_memory_gib": (memory.get("fdc_and_evaluation"), 2**30),
        "storage_mib": (results.get("fdc_storage_bytes"), 2**20),
    }
    return {name: value and value / unit for name, (value, unit) in of.items()}
