"""The table on the screen at the end of a run."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from fdc_jax import evaluation
from fdc_jax.errors import counted
from fdc_jax.learners import title
from fdc_jax.report import quantities, words


def show(per_seed: Sequence[dict[str, Any]]) -> None:
    """Prints a line per calibrator: accuracies in percent, gains over raw in percentage points.

    Of several seeds, means ± sample standard deviations.

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
    numbers = [quantities.measured(each) for each in per_seed]

    def values(name: str) -> list[float]:
        return [each[name] for each in numbers if name in each]

    names = quantities.methods(first)
    rows = [
        [line.title, line.accuracy, line.gain, line.routing, line.average]
        for line in quantities.summary(names, values)
    ]
    chosen = (first.get("selected") or {}).get("components", "full")
    if chosen != "full":
        gain = words.spread(values("gain:selected"), signed=True)
        row = ["FDC, the paper's choice", words.spread(values("selected")), gain, "", ""]
        rows.insert(names.index("fdc") + 1, row)
    rows = [["" if cell != cell else cell for cell in row] for row in rows]  # NaN is not itself.
    header = ("percent", "accuracy", "gain", "right task", "average over tasks")
    align = ("left", *["right"] * 4)
    print(f"{heading}\n\n{tabulate(rows, header, disable_numparse=True, colalign=align)}\n")
    for note in quantities.notes(first):
        print(note)
    if several and len(names) > 1:
        best = quantities.headline(names)
        gain = evaluation.paired_gain(values("raw"), values(best))
        print(
            f"gain of {words.method_title(best)}: 95 % t interval over seeds {words.interval(gain)}"
        )
