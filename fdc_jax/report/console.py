"""The table on the screen at the end of a run."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fdc_jax import evaluation
from fdc_jax.errors import counted
from fdc_jax.evaluation import BEYOND
from fdc_jax.learners import title
from fdc_jax.report.words import spread

_ROWS = {
    "accuracy": "final accuracy",
    "routing_accuracy": "right task chosen",
    "average_incremental_accuracy": "average over tasks",
}


def show(per_seed: Sequence[dict[str, Any]]) -> None:
    """Prints accuracies in percent and gains in percentage points; mean ± std over several seeds.

    Args:
        per_seed: `results.json` of every seed of one configuration.
    """
    first = per_seed[0]
    seeds = ", ".join(str(each["seed"]) for each in per_seed)
    heading = (
        f"{first['benchmark']}, {title(first['learner'])}, "
        f"{'seed' if len(per_seed) == 1 else 'seeds'} {seeds}: "
        f"{counted(first['num_tasks'], 'task')}, {counted(first['num_classes'], 'class')}, "
        f"{counted(first['num_test_images'], 'test image')}"
    )
    table = Table(title=heading, box=box.SIMPLE, title_justify="left", title_style="bold")
    table.add_column("percent", no_wrap=True)
    for name in ("raw", "FDC", "gain", "task given"):
        table.add_column(name, justify="right", no_wrap=True)
    for section, name in _ROWS.items():
        found = [each[section] for each in per_seed]
        if found[0]["raw"] is None:
            continue
        raw, fdc = ([each[kind] for each in found] for kind in ("raw", "fdc"))
        given = [each["oracle"] for each in found if "oracle" in each]
        cells = spread(raw), spread(fdc), _gain(raw, fdc), spread(given) if given else ""
        table.add_row(name, *cells)
    chosen = first["selected"]["components"]
    if chosen != "full":
        raw, own = ([each["components"][name] for each in per_seed] for name in ("raw", chosen))
        table.add_row("the paper's choice for it", "", spread(own), _gain(raw, own), "")
    for entry in BEYOND:
        if entry in first:
            own = [each[entry]["accuracy"] for each in per_seed]
            raw = [each["accuracy"]["raw"] for each in per_seed]
            table.add_row(f"{entry} affinity", "", spread(own), _gain(raw, own), "")
    # Plain where it is not a terminal; numbers are never cut.
    console = Console(highlight=False, soft_wrap=True, width=120)
    console.print(table)
    if len(per_seed) > 1:
        raw, fdc = ([each["accuracy"][kind] for each in per_seed] for kind in ("raw", "fdc"))
        gain = evaluation.paired_gain(raw, fdc)
        console.print(f"gain: 95 % t interval over seeds {gain.low:+.2f} to {gain.high:+.2f}")


def _gain(before: Sequence[float], after: Sequence[float]) -> str:
    """Gains within each seed."""
    return spread([b - a for a, b in zip(before, after, strict=True)], signed=True)
