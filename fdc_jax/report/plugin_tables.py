"""Tables of FDC plugged into learners: the paper's configurations, and the rule behind them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fdc_jax.report import blocks, cells, paper, selection
from fdc_jax.report.accuracy_tables import learners
from fdc_jax.report.blocks import Block, Row
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.runs import Group
from fdc_jax.report.selection import COMBINATIONS, HALVES, STANDALONE, Selection

Analyses = Mapping[str, Mapping[str, Any]]

_SWITCHES = {combination: switches for switches, combination in COMBINATIONS.items()}
_LABELS = ["baseline", *STANDALONE]


def plugin(groups: Sequence[Group]) -> Table:
    """Gains with the paper's selection and with everything enabled (Table plugin)."""
    names, letter, found = blocks.columns(groups), blocks.letters(groups), []
    for learner in learners(groups):
        of = [each for each in groups if each.learner == learner]
        selected = paper.plugin(learner, "selected")
        switches = [selected.switches if selected else (1, 1, 1)]
        if switches != [(1, 1, 1)]:
            switches.append((1, 1, 1))
        for kind, on in zip(("selected", "full"), switches, strict=False):
            published = paper.plugin(learner, kind)
            combination = COMBINATIONS[on]

            def values(each: Group, combination: str = combination) -> list[float]:
                return each.gains(combination)

            labels = _labels(learner, on)
            gains = None if published is None else published.gains
            each = blocks.block(labels, of, letter, values, gains, names, signed=True)
            found.append(_with_average(each, names, published))
    note = (
        "Gains over Raw in points, paired within each seed. Switches: TSF filters; E_0 and E_T "
        "calibrate with RLC and PAC in the pretrained and in the adapted view. First the "
        "components that the paper selects, then all where it leaves some out. Avg. is the mean "
        "over the paper's five benchmarks and a gap unless all are there."
    )
    title = "Plug-and-play: gains with selected and with all components"
    return blocks.table("plugin", title, note, _LABELS, groups, found, extra=["Avg."])


def _labels(learner: str, switches: Sequence[int] | None) -> dict[str, str]:
    shown = ["?"] * 3 if switches is None else [str(on) for on in switches]
    return {"baseline": paper.learner_title(learner)} | dict(zip(STANDALONE, shown, strict=True))


def _with_average(
    each: Block, names: Sequence[str], published: paper.PublishedGain | None
) -> Block:
    """Adds the mean over the five benchmarks to every row of means."""
    places = [names.index(name) for name in paper.benchmarks()]
    in_paper = None if published is None else published.average
    rows, records = [], list(each.records)
    for row in each.rows:
        means = [row.cells[place].mean for place in places]
        known = [mean for mean in means if mean is not None]
        average = sum(known) / len(known) if len(known) == len(means) else None
        if row.rank == "paper":
            cell = cells.number(in_paper, signed=True)
        elif row.rank is None:
            cell = cells.words("")
        else:
            cell = cells.number(average, signed=True)
            if average is not None:
                settings = row.rank or blocks.PROTOCOL
                of = next(each for each in records if each["settings"] == settings)
                unknown = dict.fromkeys(("std", "paper_std", "difference"))
                records.append(
                    of | {"benchmark": "average", "mean": average, "paper_mean": in_paper} | unknown
                )
        rows.append(row._replace(cells=[*row.cells, cell]))
    return Block(rows, records)


# The rule itself ----------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """A line of the table: what is switched on, and its gains by benchmark."""

    text: str
    switches: tuple[int, int, int] | None
    gains: dict[str, list[float]]


def selected_by_rule(groups: Sequence[Group], analyses: Analyses) -> Table:
    """The rule of the paper applied to our runs, and evaluated on images that it did not see."""
    names, letter = blocks.columns(groups), blocks.letters(groups)
    found = []
    for learner in dict.fromkeys(each.learner for each in groups):
        of = [each for each in groups if each.learner == learner]
        for title in dict.fromkeys(each.title for each in of):
            alike = [each for each in of if each.title == title]
            for index, choice in enumerate(_choices(learner, alike, analyses)):
                found.append(_block(learner, alike, choice, letter, names, index == 0))
    note = (
        "Gains over Raw in points, paired within each seed. The rule enables every component whose "
        "standalone gain, averaged over seeds, is positive on all benchmarks that there are runs "
        "of at the same settings. The paper applies it to the test images on which it reports the "
        "gain; the last two lines choose on the first, third, ... test image of each class and "
        "report the gain on the others, and the other way round. A gap: a run has no such "
        "combination in its results, or no saved features."
    )
    title = "The selection rule applied to these runs"
    labels = [*_LABELS, "what"]
    return blocks.table("selection", title, note, labels, groups, found, compared=False)


def _choices(learner: str, alike: Sequence[Group], analyses: Analyses) -> list[_Choice]:
    dual = all(run.dual for each in alike for run in each.runs)
    choices = []

    def all_images(each: Group, name: str) -> list[float]:
        return _all_images(each, analyses, name)

    for component, name in STANDALONE.items():
        if dual or component != "E_0":
            text = f"{component} alone"
            gains = {each.benchmark: all_images(each, name) for each in alike}
            choices.append(_Choice(text, _SWITCHES[name], gains))
    in_paper = paper.plugin(learner, "selected")
    if in_paper is not None:
        chosen = Selection(in_paper.switches, COMBINATIONS[in_paper.switches])
        choices.append(_chosen("the paper's selection", chosen, alike, all_images))
    by_benchmark = [
        {name: all_images(each, name) for name in STANDALONE.values()} for each in alike
    ]
    chosen = selection.select(by_benchmark, dual)
    choices.append(_chosen("by the rule, on all test images", chosen, alike, all_images))
    for chosen_on, reported_on in (HALVES, HALVES[::-1]):
        halves = [
            {name: _half(each, analyses, chosen_on, name) for name in STANDALONE.values()}
            for each in alike
        ]
        chosen = selection.select(halves, dual)
        choices.append(
            _chosen(
                f"by the rule, on the {chosen_on} half",
                chosen,
                alike,
                lambda each, name, half=reported_on: _half(each, analyses, half, name),
            )
        )
    return choices


def _all_images(each: Group, analyses: Analyses, name: str) -> list[float]:
    """Gains of a combination; of runs whose results lack it, from both halves together."""
    found = []
    for run in each.runs:
        raw, value = run.value("accuracy", "raw"), run.component(name)
        halves = analyses.get(str(run.path), {}).get("selection")
        if raw is not None and value is not None:
            found.append(value - raw)
        elif halves and all(name in halves[half] for half in HALVES):
            gains = [halves[half][name] - halves[half]["raw"] for half in HALVES]
            found.append(float(np.average(gains, weights=halves["num_images"])))
    return found if len(found) == len(each.runs) else []


def _half(each: Group, analyses: Analyses, half: str, name: str) -> list[float]:
    """Gains of a combination on one half of the test images, of the runs with saved features."""
    found = []
    for run in each.runs:
        halves = analyses.get(str(run.path), {}).get("selection")
        if halves and name in halves[half]:
            found.append(halves[half][name] - halves[half]["raw"])
    return found if len(found) == len(each.runs) else []


def _chosen(
    text: str,
    chosen: Selection | None,
    alike: Sequence[Group],
    gains: Callable[[Group, str], list[float]],
) -> _Choice:
    if chosen is None:
        return _Choice(text, None, {})
    found = {each.benchmark: gains(each, chosen.combination) for each in alike}
    return _Choice(text, chosen.switches, found)


def _block(
    learner: str,
    alike: Sequence[Group],
    choice: _Choice,
    letter: Mapping[str, str],
    names: Sequence[str],
    first: bool,
) -> Block:
    title = alike[0].title
    labels = _labels(learner, choice.switches) | {"what": choice.text}
    row: list[Cell] = [cells.ours(choice.gains.get(name, []), signed=True) for name in names]
    records = [
        labels
        | {
            "settings": title or blocks.PROTOCOL,
            "benchmark": name,
            "mean": cell.mean,
            "std": cell.std,
            "n": cell.count or 0,
        }
        for name, cell in zip(names, row, strict=True)
        if any(each.benchmark == name for each in alike)
    ]
    shown = [label if first or place else "" for place, label in enumerate(labels.values())]
    return Block([Row([*shown, blocks.own_label(title, dict(letter))], row, title)], records)


# Logit standardisation ----------------------------------------------------------------------------


def logit_standardisation(groups: Sequence[Group], analyses: Analyses) -> Table:
    """What standardising each head's logits alone changes (Table logit_standardization)."""
    names, letter, found = blocks.columns(groups), blocks.letters(groups), []

    def values(each: Group) -> list[float]:
        of_runs = (
            analyses.get(str(run.path), {}).get("logit_standardisation") for run in each.runs
        )
        return [entry["change"] for entry in of_runs if entry]

    for learner in learners(groups):
        of = [each for each in groups if each.learner == learner]
        in_paper = learner == "cumulative_lora"
        if of or in_paper:
            published = paper.logit_standardisation() if in_paper else None
            labels = {"learner": paper.learner_title(learner)}
            found.append(blocks.block(labels, of, letter, values, published, names, signed=True))
    note = (
        "Change of final accuracy in points when the largest logit of each head is centred and "
        "scaled by its moments on the head's own training images. From the saved features of a "
        "run; a gap where there are none."
    )
    title = "Logit standardisation alone"
    return blocks.table("logit_standardisation", title, note, ["learner"], groups, found)
