"""Tables of what is beyond the paper: the whitened affinity beside FDC, and its ingredients."""

from collections.abc import Mapping, Sequence
from typing import Any

from fdc_jax import evaluation
from fdc_jax.report import beyond, blocks, cells, paper, significance
from fdc_jax.report.beyond import SHRINKAGE, Outcome
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.runs import Group

Analyses = Mapping[str, Mapping[str, Any]]

METHODS = {
    "raw": "Raw",
    "fdc": "FDC",
    "whitened": "whitened affinity",
    "whitened_classes": "whitened affinity, class by class",
}
_INGREDIENTS = {
    "metric": "whitened metric, tanh evidence",
    "evidence": "cosine, linear evidence",
    "whitened": "whitened affinity: both",
    "without_tsf": "both, without TSF",
    "without_rlc": "both, without RLC",
    "adapted_view": "both, adapted view only",
    "pretrained_view": "both, pretrained view only",
}
_NOT_THE_PAPER = "Nothing here is in the paper, and nothing of it is in the other tables."


def methods(groups: Sequence[Group], analyses: Analyses) -> Table:
    """Accuracy, gain over FDC, accuracy given the task, and storage, one row per method."""
    letter = blocks.letters(groups)
    rows: list[list[Cell]] = []
    records: list[dict[str, Any]] = []
    for group in groups:
        of_runs = [beyond.outcomes(run, analyses) for run in group.runs]
        names = (
            paper.learner_title(group.learner),
            paper.benchmark_title(group.benchmark),
            blocks.own_label(group.title, letter),
        )
        for index, (name, title) in enumerate(METHODS.items()):
            found = [each[name] for each in of_runs if name in each]
            pairs = [(each[name], each["fdc"]) for each in of_runs if name in each]
            labels = [*(names if not index else ("", "", "")), title]
            row, numbers = _row(found, pairs, name == "fdc")
            rows.append([*(cells.words(text) for text in labels), *row])
            records.append(
                {
                    "learner": names[0],
                    "benchmark": group.benchmark,
                    "settings": group.title or blocks.PROTOCOL,
                    "method": title,
                    **numbers,
                }
            )
    note = (
        f"{_NOT_THE_PAPER} The whitened affinity replaces PAC's (docs/beyond.md), with lambda "
        f"{SHRINKAGE:g}; FDC has all "
        "components, as these variants have. Percent of test images; gains over FDC in points, "
        "paired within each seed, with Student's t interval over seeds (95 %, two seeds or more). "
        "Task given: among the classes of the true task. Storage of the statistics as the paper "
        "counts it, and how many times FDC's. Mean ± sample standard deviation over seeds, in "
        "brackets how many. From the saved features of a run or, where there are none, from its "
        "results, which have the variant alone that the run was set to." + blocks.legend(groups)
    )
    columns = ["learner", "benchmark", "numbers", "method", "accuracy", "gain over FDC"]
    columns += ["95 % interval", "task given", "storage, MiB", "times FDC's"]
    title = "Beyond the paper: the whitened affinity"
    return Table("beyond", title, note, columns, rows, 4, records)


def _row(
    found: Sequence[Outcome], pairs: Sequence[tuple[Outcome, Outcome]], is_fdc: bool
) -> tuple[list[Cell], dict[str, Any]]:
    """Returns the numbers of a method as cells and for other programs."""
    accuracy = cells.ours([each.accuracy for each in found])
    gains = [cells.words("")] * 2 if is_fdc else [cells.gap()] * 2
    gain: dict[str, float | None] = dict.fromkeys(("mean", "std", "low", "high"))
    if found and not is_fdc:
        over = [each.gain for each in found]
        test = evaluation.paired_gain([0.0] * len(over), over)
        gain = significance.known(test)
        gains = [cells.ours(over, signed=True), significance.interval(test)]
    oracle = cells.ours([each.oracle for each in found if each.oracle is not None])
    storage = [each.storage_bytes for each in found if each.storage_bytes is not None]
    ratios = [
        own.storage_bytes / fdc.storage_bytes
        for own, fdc in pairs
        if own.storage_bytes is not None and fdc.storage_bytes
    ]
    row = [
        accuracy,
        *gains,
        oracle,
        cells.ours([each / 2**20 for each in storage], 3),
        cells.ours(ratios),
    ]
    numbers = {
        "mean": accuracy.mean,
        "std": accuracy.std,
        "n": accuracy.count or 0,
        **{f"gain_{name}": value for name, value in gain.items()},
        "oracle": oracle.mean,
        "storage_bytes": sum(storage) / len(storage) if storage else None,
        "storage_ratio": row[-1].mean,
    }
    return row, numbers


def ingredients(groups: Sequence[Group], analyses: Analyses) -> Table:
    """Gains over FDC of the whitened affinity's ingredients apart, and without components."""
    names, letter, found = blocks.columns(groups), blocks.letters(groups), []
    for learner in dict.fromkeys(each.learner for each in groups):
        of = [each for each in groups if each.learner == learner]
        for name, title in _INGREDIENTS.items():

            def values(each: Group, name: str = name) -> list[float]:
                of_runs = (analyses.get(str(run.path), {}).get("beyond") for run in each.runs)
                return [
                    entry["ingredients"][name] - entry["methods"]["fdc"]["accuracy"]
                    for entry in of_runs
                    if entry and name in entry["ingredients"]
                ]

            labels = {"learner": paper.learner_title(learner), "affinity": title}
            found.append(blocks.block(labels, of, letter, values, None, names, signed=True))
    note = (
        f"{_NOT_THE_PAPER} Gains over FDC, all components and both views, in points, paired "
        "within each seed. From the saved features of a run; a gap where there are none."
    )
    title = "Beyond the paper: ingredients of the whitened affinity"
    labels = ["learner", "affinity"]
    return blocks.table("beyond_ablation", title, note, labels, groups, found, compared=False)
