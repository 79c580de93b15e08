"""The table on the screen at the end of a run."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from fdc_jax import evaluation
from fdc_jax.errors import counted
from fdc_jax.evaluation import BEYOND
from fdc_jax.learners import title
from fdc_jax.report.words import METHODS, spread

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
    first, several = per_seed[0], len(per_seed) > 1
    seeds = ", ".join(str(each["seed"]) for each in per_seed)
    sizes = (("num_tasks", "task"), ("num_classes", "class"), ("num_test_images", "test image"))
    heading = (
        f"{first['benchmark']}, {title(first['learner'])}, seed{'s' * several} {seeds}: "
        f"{', '.join(counted(first[name], noun) for name, noun in sizes)}"
    )
    rows: list[tuple[str, ...]] = []

    def add(
        name: str, raw: Sequence[float], fdc: Sequence[float], before: str = "", given: str = ""
    ) -> None:
        gains = [after - before for before, after in zip(raw, fdc, strict=True)]
        rows.append((name, before, spread(fdc), spread(gains, signed=True), given))

    for section, name in _ROWS.items():
        found = [each[section] for each in per_seed]
        if found[0]["raw"] is not None:
            raw, fdc = ([each[kind] for each in found] for kind in ("raw", "fdc"))
            given = [each["oracle"] for each in found if "oracle" in each]
            add(name, raw, fdc, spread(raw), spread(given) if given else "")
    raw, fdc = ([each["accuracy"][kind] for each in per_seed] for kind in ("raw", "fdc"))
    if (chosen := first["selected"]["components"]) != "full":
        add("the paper's choice for it", raw, [each["components"][chosen] for each in per_seed])
    for entry in (name for name in BEYOND if name in first):
        name = METHODS.get(entry, f"{entry} affinity")
        add(name, raw, [each[entry]["accuracy"] for each in per_seed])
    header = ("percent", "raw", "FDC", "gain", "task given")
    align = ("left", *["right"] * 4)
    print(f"{heading}\n\n{tabulate(rows, header, disable_numparse=True, colalign=align)}\n")
    if several:
        gain = evaluation.paired_gain(raw, fdc)
        print(f"gain: 95 % t interval over seeds {gain.low:+.2f} to {gain.high:+.2f}")
