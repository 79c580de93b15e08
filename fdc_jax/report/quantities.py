"""Quantities with unit and range (`quantities.json`), and the numbers of a run.

A number is of a calibrator and a quantity. In files one name stands for both: `raw`, `fdc`,
`tsf+rlc` or `oracle` (the task given) is the final accuracy of a calibrator or of a combination of
FDC's components, `selected` that of the combination that the paper selects for the learner. Other
quantities of calibrators come first, as in `gain:fdc` or `aia:raw`; quantities of a run stand
alone, as `training_minutes`. Sweeps have their value, as `attenuation=0.25`.
"""

# The stubs of pandas take columns for arrays, scalars or series.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from fdc_jax import learners
from fdc_jax.calibration import FDC, METHODS
from fdc_jax.calibration.settings import COMPONENTS
from fdc_jax.run.records import Latency, Point, Results, Timing

NAMES = (*METHODS, "oracle", *COMPONENTS, "selected")


class Quantity(msgspec.Struct, frozen=True):
    """A row of the table of quantities."""

    title: str
    unit: str
    of: list[str] | str = ""  # `calibrators`, or the names in their place; "" if it is of the run
    low: float = -math.inf
    high: float = math.inf
    signed: bool = False  # numbers are shown with their sign
    swept: bool = False  # its name in files has the value of a setting


TABLE = msgspec.json.decode(
    Path(__file__).with_name("quantities.json").read_bytes(), type=dict[str, Quantity]
)
SWEPT = [name for name, quantity in TABLE.items() if quantity.swept]


def row_of(quantity: str) -> Quantity:
    """Returns the row of a quantity such as `gain` or `attenuation=0.25`."""
    return TABLE[quantity.partition("=")[0]]


def parse(name: str) -> tuple[str, str]:
    """Returns calibrator ("" if of the run) and quantity of a name; raises ValueError."""
    quantity, _, calibrator = name.rpartition(":")
    if name in NAMES:
        return name, "accuracy"
    if "=" in name and name.partition("=")[0] in SWEPT:
        return FDC.name, name
    if not quantity:
        calibrator, quantity = "", name
    if quantity in TABLE and not TABLE[quantity].swept:
        known = TABLE[quantity].of or ("",)
        if calibrator in (NAMES if known == "calibrators" else known):
            return calibrator, quantity
    raise ValueError(
        "quantity: expected one such as raw, fdc, oracle, tsf+rlc, gain:fdc, routing:fdc or aia:raw"
    )


def column_name(calibrator: str, quantity: str) -> str:
    """Returns the name in files, from which `parse` reads calibrator and quantity."""
    if quantity == "accuracy":
        return calibrator
    return f"{quantity}:{calibrator}" if row_of(quantity).of else quantity


def measured(
    results: Results,
    untrained: Mapping[str, float] | None = None,
    latency: Latency | None = None,
) -> pd.DataFrame:
    """Returns the known numbers of a run, with columns `calibrator`, `quantity` and `value`.

    Args:
        results: content of its `results.json`.
        untrained: accuracies of calibrators of `analysis.untrained_labels`.
        latency: content of its `latency.json`.
    """
    accuracies = dict(untrained or {}) | _accuracies(results, results.learner)
    inference = _inference(latency or Latency())
    validation = _named(results.validation, results.learner)
    averages = _averages(results) | results.average_incremental_accuracy
    given = {name: part.oracle_accuracy for name, part in results.decomposition.items()}
    tables: dict[str, Mapping[str, float | None]] = {
        "accuracy": accuracies,
        "validation": validation,
        "aia": averages,
        "routing": results.routing_accuracy,
        "given": given,
        "storage": results.storage_bytes,
        **_costs(results),
        **inference,
    }
    if "raw" in accuracies:  # Features without heads have no raw logits.
        raw = accuracies["raw"]
        tables["gain"] = {name: value - raw for name, value in accuracies.items()}
        if "oracle" in accuracies and raw < 100:  # The oracle is right wherever raw logits are.
            tables["corrected"] = {"": 100 * (accuracies["oracle"] - raw) / (100 - raw)}
    return frame(tables)


def frame(tables: Mapping[str, Mapping[str, float | None]]) -> pd.DataFrame:
    """Returns numbers by quantity and calibrator as rows; None and NaN have none."""
    rows: list[Any] = []
    for quantity, values in tables.items():
        rows += [(calibrator, quantity, value) for calibrator, value in values.items()]
    numbers = pd.DataFrame(rows, columns=["calibrator", "quantity", "value"])
    return numbers.astype({"value": float}).dropna()


def _accuracies(point: Results | Point, learner: str) -> dict[str, float]:
    """Returns accuracies by name, from results or from a point of the curve."""
    return _named(point.components, learner) | point.accuracy


def _named(components: Mapping[str, float], learner: str) -> dict[str, float]:
    """Adds `selected`. Without a pretrained view, all components are those of the adapted view."""
    parts = dict(components)
    if "full" in parts and "pretrained_view" not in parts:
        parts |= {"adapted_view": parts["full"], "pac+rlc_adapted_view": parts["pac+rlc"]}
    if (selected := learners.selected(learner)) in parts:
        parts["selected"] = parts[selected]
    return parts


def _averages(results: Results) -> dict[str, float | None]:
    """Returns averages over the curve, also of components; empty if a task was not evaluated."""
    stated = results.average_incremental_accuracy
    if "raw" not in stated or stated["raw"] is None:
        return {}
    curve = pd.DataFrame([_accuracies(point, results.learner) for point in results.curve])
    return curve.mean(skipna=False).to_dict()


def _costs(results: Results) -> dict[str, dict[str, float | None]]:
    """Returns the costs of training and of FDC, None if they are not known.

    FDC's minutes count the loading of images, both views and the fit. Features of E_0 from the
    cache count with the seconds that they took when they were computed.
    """
    timing, memory = results.timing or Timing(), results.peak_memory_bytes
    parts = [timing.adapted_extraction_seconds, timing.pretrained_extraction_seconds]
    parts.append(timing.fit_seconds.get(FDC.name))
    compiled = [timing.extraction_compile_seconds, timing.fit_compile_seconds.get(FDC.name)]
    totals = {
        "training_minutes": (timing.training_seconds, 60),
        "training_compile_minutes": (timing.compile_seconds, 60),
        "fdc_minutes": (None if None in parts else sum(filter(None, parts)), 60),
        "fdc_compile_minutes": (None if None in compiled else sum(filter(None, compiled)), 60),
        "peak_memory_gib": (memory.get("training"), 2**30),
        "fdc_peak_memory_gib": (memory.get(FDC.name), 2**30),
        "storage_mib": (results.fdc_storage_bytes, 2**20),
    }
    return {name: {"": value and value / unit} for name, (value, unit) in totals.items()}


def _inference(latency: Latency) -> dict[str, dict[str, float | None]]:
    """Returns milliseconds per batch and MiB of `fdc_jax.latency`, and what FDC adds."""
    if "baseline" not in latency.contenders:
        return {}
    times = {n: float(np.mean(timing.milliseconds)) for n, timing in latency.contenders.items()}
    # NaN if the peak is not known.
    peaks = {n: (timing.peak_bytes or math.nan) / 2**20 for n, timing in latency.contenders.items()}
    base = peaks.pop("baseline")
    added = {n: 100 * (times[n] / times["baseline"] - 1) for n in peaks}
    return {
        "latency_ms": times,
        "added_latency_percent": added,
        "inference_mib": {"baseline": base},
        "added_mib": {n: peak - np.nan_to_num(base) for n, peak in peaks.items()},
    }
