"""Numbers of a `results.json` by the name of the quantity.

A name alone is a final accuracy in percent: of a calibrator (`raw`, `fdc`, `gaussians`, ...), of
raw logits with the task given (`oracle`), of a combination of FDC's components (`tsf+rlc`), or of
the combination that the paper selects for the learner (`selected`). Names with a prefix:

    gain:NAME      accuracy minus that of `raw`, in points
    routing:NAME   share of test images that get the right task, in percent
    given:NAME     accuracy with the task given, in percent
    aia:NAME       average incremental accuracy
    storage:NAME   bytes

`corrected` is the share of raw errors that the task identity corrects, in percent. Accuracies of a
refitted FDC (`analysis`) are `attenuation=0.25`, `retained_energy=0.5`, `neighbours=2`, and
`nearest=2` with affinities standardised over the candidate tasks. Costs are
`training_minutes`, `fdc_minutes`, `peak_memory_gib`, `fdc_peak_memory_gib` and `storage_mib` (Table
app-cost), and, of `baseline`, `single` and `dual`, `latency_ms:`, `added_latency_percent:`,
`inference_mib:` and `added_mib:` (Table app-latency).
"""

import math
from collections.abc import Mapping

import numpy as np

from fdc_jax import learners
from fdc_jax.calibration import FDC, METHODS
from fdc_jax.calibration.fdc import COMPONENTS
from fdc_jax.run.records import Latency, Point, Results, Timing

# Sections of results with a number per calibrator, by prefix.
_SECTIONS = {
    "aia": "average_incremental_accuracy",
    "routing": "routing_accuracy",
    "storage": "storage_bytes",
}
_NAMES = (*METHODS, "oracle", *COMPONENTS, "selected")
SWEPT = ("attenuation", "retained_energy", "neighbours", "nearest")
COSTS = (
    *("training_minutes", "fdc_minutes", "peak_memory_gib", "fdc_peak_memory_gib"),
    "storage_mib",
)
_KNOWN = frozenset((*_NAMES, *COSTS, "corrected"))
_KNOWN |= {f"{kind}:{name}" for kind in ("gain", "given", *_SECTIONS) for name in _NAMES}
# Kinds of quantities between 0 and 100.
_PERCENT = ("accuracy", "routing", "given", "aia", "corrected", *SWEPT)


def is_known(name: str) -> bool:
    """Returns True if `name` is the name of a quantity."""
    swept = name.partition("=")[0] in SWEPT
    return name in _KNOWN or swept or split(name)[0] in ("baseline", "single", "dual")


def bounds(name: str) -> tuple[float, float]:
    """Returns the range of a quantity."""
    percent = split(name)[1].partition("=")[0] in _PERCENT
    return (0.0, 100.0) if percent else (-math.inf, math.inf)


def split(name: str) -> tuple[str, str]:
    """Splits the name of a quantity into a calibrator, which may be empty, and its kind."""
    if "=" in name:
        return FDC.name, name
    kind, colon, calibrator = name.partition(":")
    if colon:
        return calibrator, kind
    return (name, "accuracy") if name in _NAMES else ("", name)


def measured(
    results: Results,
    untrained: Mapping[str, float] | None = None,
    latency: Latency | None = None,
) -> dict[str, float]:
    """Returns the known numbers of a run by name.

    Args:
        results: content of its `results.json`.
        untrained: accuracies of calibrators of `analysis.untrained`.
        latency: content of its `latency.json`.
    """
    numbers = dict(untrained or {}) | _accuracies(results, results.learner)
    if "raw" in numbers:  # Features without heads have no raw logits.
        raw = numbers["raw"]
        numbers |= {f"gain:{name}": value - raw for name, value in numbers.items()}
        if "oracle" in numbers and raw < 100:  # The oracle is right wherever raw logits are.
            numbers["corrected"] = 100 * (numbers["oracle"] - raw) / (100 - raw)
    averages = results.average_incremental_accuracy
    if "raw" in averages and averages["raw"] is not None:  # if every task was evaluated
        curve = [_accuracies(point, results.learner) for point in results.curve]
        for name in curve[0]:
            values = [point[name] for point in curve if name in point]
            if len(values) == len(curve):
                numbers[f"aia:{name}"] = float(np.mean(values))
    known: dict[str, float | None] = dict(numbers)
    for kind, section in _SECTIONS.items():
        values = getattr(results, section).items()
        known |= {f"{kind}:{name}": value for name, value in values}
    parts = results.decomposition.items()
    known |= {f"given:{name}": part.oracle_accuracy for name, part in parts}
    known |= _costs(results) | _inference(latency or Latency())
    return {name: float(value) for name, value in known.items() if value is not None}


def _accuracies(point: Results | Point, learner: str) -> dict[str, float]:
    """Returns accuracies by name, from results or from a point of the curve.

    Without a pretrained view, all components are those of the adapted view.
    """
    parts = dict(point.components)
    if parts and "pretrained_view" not in parts:
        parts |= {"adapted_view": parts["full"], "pac+rlc_adapted_view": parts["pac+rlc"]}
    if (selected := learners.selected(learner)) in parts:
        parts["selected"] = parts[selected]
    return parts | point.accuracy


def _costs(results: Results) -> dict[str, float | None]:
    """Returns the costs of training and of FDC, None if they are not known.

    FDC's minutes count the loading of images, both views and the fit. Features of E_0 from the
    cache count with the seconds that they took when they were computed.
    """
    timing, memory = results.timing or Timing(), results.peak_memory_bytes
    parts = [timing.adapted_extraction_seconds, timing.pretrained_extraction_seconds]
    parts.append(timing.fit_seconds.get(FDC.name))
    totals = {
        "training_minutes": (timing.training_seconds, 60),
        "fdc_minutes": (None if None in parts else sum(filter(None, parts)), 60),
        "peak_memory_gib": (memory.get("training"), 2**30),
        "fdc_peak_memory_gib": (memory.get(FDC.name), 2**30),
        "storage_mib": (results.fdc_storage_bytes, 2**20),
    }
    return {name: value and value / unit for name, (value, unit) in totals.items()}


def _inference(latency: Latency) -> dict[str, float | None]:
    """Returns the numbers of `fdc_jax.latency`: milliseconds per batch, and MiB."""
    numbers, base = {}, None
    for name, timing in latency.contenders.items():
        mean, peak = float(np.mean(timing.milliseconds)), timing.peak_bytes
        numbers[f"latency_ms:{name}"] = mean
        if base is None:  # the baseline comes first
            base = mean, peak
            numbers[f"inference_mib:{name}"] = peak and peak / 2**20
        else:
            numbers[f"added_latency_percent:{name}"] = 100 * (mean / base[0] - 1)
            numbers[f"added_mib:{name}"] = peak and (peak - (base[1] or 0)) / 2**20
    return numbers
