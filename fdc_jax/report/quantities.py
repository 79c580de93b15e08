"""What a `results.json` says, as numbers with one name each.

A calibrator's name (`raw`, `fdc`, `gaussians`, ...) and `oracle` stand for final accuracies in
percent, and so does a combination of FDC's components (`tsf+rlc`) and `selected`, the one that the
paper selects for the learner. With something in front:

    gain:NAME      the same minus `raw`, in points; `gain` is that of FDC, `selected_gain` that of
                   `selected`
    routing_NAME   share of test images that get the right task, in percent
    aia_NAME       average incremental accuracy; `aia` is that of `raw`
    aia:NAME       the same of a combination of FDC's components
    storage_NAME   bytes

and for the paper's Table app-cost `training_minutes`, `fdc_minutes`, `peak_memory_gib`,
`fdc_peak_memory_gib` and `storage_mib`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fdc_jax import learners
from fdc_jax.calibration import METHODS
from fdc_jax.report import paper, words

# Sections of results that have a number for each calibrator.
_SECTIONS = {
    "routing": "routing_accuracy",
    "aia": "average_incremental_accuracy",
    "storage": "storage_bytes",
}
_METHODS = (*METHODS, "oracle")
_ACCURACIES = (*_METHODS, *paper.COMPONENT_TITLES, "selected")
# Names of quantities that any run may have.
KNOWN = frozenset(
    {"gain", "selected_gain", "aia", *_ACCURACIES}
    | {f"gain:{name}" for name in _ACCURACIES}
    | {f"{prefix}_{name}" for prefix in _SECTIONS for name in _METHODS}
)


def methods(results: Mapping[str, Any]) -> list[str]:
    """Returns the calibrators of a run by name, `raw` and `fdc` first."""
    first = [name for name in ("raw", "fdc") if name in results["accuracy"]]
    return first + [name for name in results["accuracy"] if name not in (*first, "oracle")]


def notes(results: Mapping[str, Any]) -> list[str]:
    """Returns what a user should know of calibrators, such as which kind of Gaussians they are."""
    return [f"{note[:1].upper()}{note[1:]}." for note in (results.get("notes") or {}).values()]


def headline(names: Sequence[str]) -> str:
    """Returns the calibrator whose number stands at the head of a page: FDC where it is there."""
    return "fdc" if "fdc" in names else names[-1]


def measured(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a `results.json` by name; what it lacks is left out."""
    raw, selected = results["accuracy"]["raw"], learners.selected(results["learner"])
    found = components(results)
    found |= {"selected": found.get(selected)} | results["accuracy"]
    gains = {f"gain:{name}": value - raw for name, value in found.items() if _is_number(value)}
    found |= gains | {"gain": gains.get("gain:fdc"), "selected_gain": gains.get("gain:selected")}
    for prefix, section in _SECTIONS.items():
        found |= {f"{prefix}_{name}": each for name, each in (results.get(section) or {}).items()}
    found.setdefault("storage_fdc", results.get("fdc_storage_bytes"))
    found["aia"] = found.get("aia_raw")
    if found["aia"] is not None:  # Else not every task was evaluated.
        curve = [components(point) for point in results.get("curve") or ()]
        curve = [point | {"selected": point.get(selected)} for point in curve]
        for name in curve[0] if curve else ():
            values: list[Any] = [point.get(name) for point in curve]
            found[f"aia:{name}"] = None if None in values else float(np.mean(values))
    found |= _costs(results) | {"storage_mib": found["storage_fdc"]}
    known = {name: float(value) for name, value in found.items() if _is_number(value)}
    return {name: value / _UNITS.get(name, 1) for name, value in known.items()}


_UNITS = {"training_minutes": 60, "fdc_minutes": 60, "storage_mib": 2**20}
_UNITS |= {"peak_memory_gib": 2**30, "fdc_peak_memory_gib": 2**30}
_FDC_TIMES = ("adapted_extraction_seconds", "pretrained_extraction_seconds", "fit_seconds")


def _costs(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what training and FDC took, in seconds and bytes."""
    timing, memory = results.get("timing") or {}, results.get("peak_memory_bytes") or {}
    # With pretrained features out of the cache, FDC took less than it takes.
    whole = timing.get("pretrained_from_cache") == 0 and all(name in timing for name in _FDC_TIMES)
    return {
        "training_minutes": timing.get("training_seconds"),
        "fdc_minutes": sum(timing[name] for name in _FDC_TIMES) if whole else None,
        "peak_memory_gib": memory.get("training"),
        "fdc_peak_memory_gib": memory.get("fdc_and_evaluation"),
    }


def components(of: Mapping[str, Any]) -> dict[str, Any]:
    """Returns accuracies of combinations of FDC's components, from results or a point of the curve.

    Without a pretrained view, what is called the adapted view of a combination is all of it.
    """
    found = dict(of.get("components") or {})
    if found and "pretrained_view" not in found:
        found |= {"adapted_view": found.get("full"), "pac+rlc_adapted_view": found.get("pac+rlc")}
    return found


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and bool(np.isfinite(value))


class Line(NamedTuple):
    """What a calibrator came to, as it reads: means and sample standard deviations over seeds."""

    name: str
    title: str
    accuracy: Any
    gain: Any  # over raw
    routing: Any  # right task chosen
    average: Any  # average incremental accuracy
    storage: Any  # MiB


def summary(
    names: Sequence[str], values: Callable[[str], Sequence[float]], digits: int = 2
) -> list[Line]:
    """Returns a line per calibrator, and one of the task given.

    Args:
        names: of `methods`.
        values: numbers of `measured` by name, one per seed.
        digits: after the point.
    """
    lines = []
    for name in (*names, "oracle"):
        own = [values(each) for each in (name, f"routing_{name}", f"aia_{name}")]
        accuracy, routing, average = (words.spread(each, digits) for each in own)
        gain = values(f"gain:{name}") if name not in ("raw", "oracle") else ()
        storage = words.spread(np.array(values(f"storage_{name}")) / 2**20)
        gained = words.spread(gain, digits, signed=True)
        lines.append(
            Line(name, words.method_title(name), accuracy, gained, routing, average, storage)
        )
    return lines
