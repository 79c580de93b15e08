"""Tables of accuracies and gains: benchmark, ablation, average incremental accuracy."""

from collections.abc import Sequence

from fdc_jax.report import blocks, paper
from fdc_jax.report.blocks import Block
from fdc_jax.report.cells import Table
from fdc_jax.report.runs import Group


def learners(groups: Sequence[Group]) -> list[str]:
    """Returns the paper's learners, and after them others that there are runs of."""
    return list(dict.fromkeys([*paper.LEARNER_TITLES, *(each.learner for each in groups)]))


def _of(groups: Sequence[Group], learner: str) -> list[Group]:
    return [each for each in groups if each.learner == learner]


def selected_accuracies(each: Group) -> list[float]:
    """Final accuracy with the components that the paper selects, one number per seed."""
    return each.components(each.runs[0].selected)


def benchmark(groups: Sequence[Group]) -> Table:
    """Final accuracy before and after FDC (Table current-benchmark)."""
    names, letter, found = blocks.columns(groups), blocks.letters(groups), []
    for learner in learners(groups):
        of = _of(groups, learner)
        for label, kind, values in (
            ("", "raw", lambda each: each.values("accuracy", "raw")),
            (" + FDC", "fdc", selected_accuracies),
        ):
            published = paper.accuracy(learner, kind) or None
            text = {"method": paper.learner_title(learner) + label}
            found.append(blocks.block(text, of, letter, values, published, names))
    note = (
        "Percent of test images. FDC has the components that the paper selects for the learner. "
        "Bold: the best of ours at equal settings, and the best of the paper's."
    )
    title = "Final accuracy before and after FDC"
    return blocks.table("benchmark", title, note, ["method"], groups, found, mark_best=True)


def ablation(groups: Sequence[Group]) -> Table:
    """Raw accuracy and gains of component and view combinations (Table current-ablation)."""
    names, letter, found = blocks.columns(groups), blocks.letters(groups), []
    for learner in learners(groups):
        of = _of(groups, learner)
        in_paper = learner == "cumulative_lora"
        if not of and not in_paper:
            continue
        for key, text in paper.COMPONENT_TITLES.items():
            # None also for the two combinations that are of Table plugin.
            published = (paper.ablation(key) if in_paper else None) or None
            labels = {"learner": paper.learner_title(learner), "components": text}
            found.append(_components(labels, of, letter, key, published, names))
    note = (
        "Raw: final accuracy in percent; all others: gain over Raw in points, paired within each "
        "seed. The paper has this table for Cumulative-LoRA."
    )
    title = "Components and views: Raw accuracy and gains"
    return blocks.table("ablation", title, note, ["learner", "components"], groups, found)


def _components(labels, groups, letter, key, published, names) -> Block:
    def values(each: Group) -> list[float]:
        return each.values("accuracy", "raw") if key == "raw" else each.gains(key)

    signed = key != "raw"
    return blocks.block(labels, groups, letter, values, published, names, signed)


def average_incremental_accuracy(groups: Sequence[Group]) -> Table:
    """Mean over tasks of the accuracy on all classes so far (Table current-aia)."""
    names, letter, found = blocks.columns(groups), blocks.letters(groups), []
    for learner in learners(groups):
        of = _of(groups, learner)
        for label, with_fdc in (("", False), (" + FDC", True)):
            published = paper.average_incremental_accuracy(learner) or None
            text = {"method": paper.learner_title(learner) + label}

            def values(each: Group, with_fdc: bool = with_fdc) -> list[float]:
                runs = (run.incremental(run.selected if with_fdc else "raw") for run in each.runs)
                return [value for value in runs if value is not None]

            published = None if with_fdc else published
            found.append(blocks.block(text, of, letter, values, published, names))
    note = (
        "Percent. The paper reports it without FDC; ours with FDC has the components that the "
        "paper selects for the learner and calibrates after every task."
    )
    title = "Average incremental accuracy"
    return blocks.table("average_incremental_accuracy", title, note, ["method"], groups, found)
