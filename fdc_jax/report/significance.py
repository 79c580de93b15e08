"""Table of gains with intervals and p-values."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fdc_jax import evaluation
from fdc_jax.evaluation import Gain
from fdc_jax.report import blocks, cells, paper
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.runs import Group

LEVEL = 0.05


class RunTest(NamedTuple):
    """One run: gain over test images with its bootstrap interval, and McNemar's p-value."""

    seed: int
    gain: Gain
    p_value: float


class GroupTest(NamedTuple):
    """All seeds of a learner on a benchmark.

    Attributes:
        gain: paired within each seed, with the Student t interval over seeds.
        runs: those with saved predictions.
        p_value: the largest of the runs' p-values, None unless every run has one.
        adjusted: the same after Holm's correction over all groups that have one.
    """

    group: Group
    gain: Gain
    runs: list[RunTest]
    p_value: float | None
    adjusted: float | None


def tests(groups: Sequence[Group]) -> list[GroupTest]:
    """Tests the gain of full FDC over raw in every group.

    A group's p-value is the largest of its runs': below a level only when each seed's own p-value
    is, which bounds the chance of a false claim that every seed gains.
    """
    found = [_test(each) for each in groups]
    p_values = [each.p_value for each in found if each.p_value is not None]
    corrected = iter(evaluation.holm(p_values))
    return [
        each if each.p_value is None else each._replace(adjusted=float(next(corrected)))
        for each in found
    ]


def _test(group: Group) -> GroupTest:
    gain = evaluation.paired_gain(
        [run.results["accuracy"]["raw"] for run in group.runs],
        [run.results["accuracy"]["fdc"] for run in group.runs],
    )
    runs = []
    for run in group.runs:
        columns = run.predictions()
        if columns:
            truth, before, after = (columns[name] for name in ("label", "raw_label", "fdc_label"))
            runs.append(
                RunTest(
                    run.seed,
                    evaluation.bootstrap_gain(truth, before, after),
                    evaluation.mcnemar(truth, before, after),
                )
            )
    complete = len(runs) == len(group.runs)
    p_value = max(each.p_value for each in runs) if complete else None
    return GroupTest(group, gain, runs, p_value, None)


def table(groups: Sequence[Group]) -> Table:
    """Gains of full FDC: one row per run, and one for all seeds of a group."""
    letter = blocks.letters(groups)
    rows: list[list[Cell]] = []
    records: list[dict[str, Any]] = []
    for test in tests(groups):
        group = test.group
        names = (
            paper.learner_title(group.learner),
            paper.benchmark_title(group.benchmark),
            blocks.own_label(group.title, letter),
        )
        base = {
            "learner": names[0],
            "benchmark": group.benchmark,
            "settings": group.title or blocks.PROTOCOL,
        }
        seeds = f"all {len(group.runs)}" if len(group.runs) > 1 else "all 1"
        rows.append(
            [
                *(cells.words(name) for name in (*names, seeds)),
                cells.ours(group.gains("full"), signed=True),
                interval(test.gain),
                _p(test.p_value),
                _p(test.adjusted),
            ]
        )
        records.append(base | {"seed": "all"} | _record(test.gain, test.p_value, test.adjusted))
        for each in test.runs:
            rows.append(
                [
                    *(cells.words(text) for text in ("", "", "", f"seed {each.seed}")),
                    cells.number(each.gain.mean, signed=True),
                    interval(each.gain),
                    _p(each.p_value),
                    cells.words(""),
                ]
            )
            records.append(base | {"seed": each.seed} | _record(each.gain, each.p_value, None))
    note = (
        "Gain of FDC with all components over Raw in points. One seed: percentile bootstrap over "
        "test images, paired by image, 9,999 resamples; p of the exact two-sided McNemar test. All "
        "seeds: mean ± sample standard deviation of the gains within each seed, Student t interval "
        "(two seeds or more); p is the largest of the seeds', so that it is small only when every "
        "seed's is. Holm: corrected over all rows of this kind, the learner and benchmark pairs of "
        "this report. Intervals cover 95 %; they are not corrected." + blocks.legend(groups)
    )
    columns = ["learner", "benchmark", "numbers", "seeds", "gain", "95 % interval", "p", "p, Holm"]
    title = "Gains with intervals and p-values"
    return Table("significance", title, note, columns, rows, 4, records)


def _record(gain: Gain, p_value: float | None, adjusted: float | None) -> dict[str, Any]:
    return known(gain) | {"p": p_value, "p_holm": adjusted}


def known(gain: Gain) -> dict[str, float | None]:
    """Returns the numbers of a gain, None for those that one seed does not have."""
    numbers = {name: getattr(gain, name) for name in ("mean", "std", "low", "high")}
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


def interval(gain: Gain) -> Cell:
    """Returns the interval of a gain as a cell, a gap for one seed."""
    if math.isnan(gain.low):
        return cells.gap()
    return cells.words(f"{gain.low:+.2f} to {gain.high:+.2f}")


def _p(value: float | None) -> Cell:
    if value is None:
        return cells.gap()
    return Cell("< 0.0001" if value < 1e-4 else f"{value:.4f}", value)
