"""Figures with a row per learner: accuracies and gains, side by side for each benchmark.

Every function draws the groups it is given and returns None where they have nothing to draw.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fdc_jax import evaluation
from fdc_jax.learners import title as learner_title
from fdc_jax.report import drawing, paper
from fdc_jax.report.analysis import Analyses
from fdc_jax.report.runs import Group

# Inches: a learner in a list; title, axis and legend around it; names at its left.
_ROW, _FRAME, _NAMES = 0.19, 1.2, 1.15


_DASHED = (0, (2, 1.5))
_INTERVALS: tuple[tuple[str, Any, str], ...] = (
    ("seeds", "-", "95 % over seeds"),
    ("images", _DASHED, "95 % over images"),
)


# Lists of learners --------------------------------------------------------------------------------


def _by_benchmark(groups: Sequence[Group]) -> dict[tuple[str, str], list[Group]]:
    """Groups of one benchmark and one deviation from the paper's protocol belong side by side."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((group.benchmark, group.title), []).append(group)
    return found


def _lists(groups: Sequence[Group], label: str) -> tuple[Figure, list[tuple[Axes, list[Group]]]]:
    """Returns one panel per benchmark with a row per learner, the first on top."""
    lists = _by_benchmark(groups)
    columns = 1 if len(lists) == 1 else 2
    most = max(len(members) for members in lists.values())
    width = drawing.width_of(columns)
    height = _FRAME + _ROW * most
    figure, axes = drawing.panels(len(lists), width, height, columns)
    for panel, ((benchmark, title), members) in zip(axes, lists.items(), strict=True):
        inches = width / columns - _NAMES
        drawing.title(panel, paper.benchmark_title(benchmark), title, inches)
        names = [drawing.shortened(learner_title(group.learner), _NAMES) for group in members]
        panel.set_yticks(range(len(members)), names)
        panel.set_ylim(most - 0.4, -0.6)
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
        panel.set_xlabel(label)
    return figure, list(zip(axes, lists.values(), strict=True))


def task_identity(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Final accuracy in percent: raw, FDC, and raw given the true task (Figure motivation-gap).

    Means over seeds with the sample standard deviation; empty markers are the paper's numbers,
    where a group follows its protocol.
    """
    if not groups:
        return None
    with drawing.style():
        figure, lists = _lists(groups, "Final accuracy (%)")
        published = False
        for axes, members in lists:
            for row, group in enumerate(members):
                spans = {
                    name: evaluation.mean_and_std(group.values("accuracy", name)) for name in _KINDS
                }
                means = [mean for mean, _ in spans.values()]
                axes.plot([min(means), max(means)], [row, row], color=drawing.GRID, linewidth=0.9)
                for name, (mean, std) in spans.items():
                    _point(axes, mean, row, std, name)
                published |= _published_accuracies(axes, group, row)
        handles = [drawing.key(name) for name in _KINDS]
        drawing.legend(figure, handles + _paper_key(published))
    return figure


_KINDS = ("raw", "fdc", "oracle")


def _point(axes: Axes, value: float, row: float, std: float, name: str) -> None:
    colour = drawing.COLOURS[name]
    if math.isfinite(std):
        axes.plot([value - std, value + std], [row, row], color=colour, linewidth=2.2, alpha=0.45)
    axes.plot([value], [row], color=colour, marker=drawing.MARKERS[name], gid=f"{name}-{row}")


def _published_accuracies(axes: Axes, group: Group, row: int) -> bool:
    found = False
    for name in ("raw", "fdc"):
        value = paper.accuracy(group.learner, name).get(group.benchmark)
        if group.follows_protocol and value is not None:
            look = drawing.hollow(drawing.MARKERS[name], drawing.COLOURS[name])
            axes.plot([value.mean], [row], **look)
            found = True
    return found


def _paper_key(published: bool) -> list[Line2D]:
    return [Line2D([], [], **drawing.hollow("o", drawing.INK, "Paper"))] if published else []


def gains(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Gain of FDC over raw in percentage points with its 95 % interval.

    Several seeds: mean over seeds and Student's t interval, gains paired within each seed. One
    seed: percentile bootstrap over test images, drawn dashed. A cross is the gain of the
    components that the paper selects for a learner, where those are not all.
    """
    measured = [group for group in groups if group.gains("full")]
    if not measured:
        return None
    with drawing.style():
        figure, lists = _lists(measured, "Gain of FDC over raw (percentage points)")
        kinds: set[str] = set()
        for axes, members in lists:
            axes.axvline(0, color=drawing.INK, linewidth=0.8)
            for row, group in enumerate(members):
                kinds |= _gain_row(axes, group, row)
            low, high = axes.get_xlim()
            axes.set_xlim(min(low, -0.5), max(high, 0.5))
        colour = drawing.FDC
        handles = [
            Line2D([], [], color=colour, marker="s", linestyle="none", label="FDC"),
            *(
                Line2D([], [], color=colour, linestyle=style, linewidth=1.1, label=label)
                for kind, style, label in _INTERVALS
                if kind in kinds
            ),
        ]
        if "selected" in kinds:
            handles.append(Line2D([], [], **_SELECTED, label="Selected components"))
        drawing.legend(figure, handles + _paper_key("paper" in kinds))
    return figure


_SELECTED = {"color": drawing.FDC, "marker": "x", "linestyle": "none", "markeredgewidth": 1.1}


def _gain_row(axes: Axes, group: Group, row: int) -> set[str]:
    """Draws a learner and returns what is to be explained."""
    values = group.gains("full")
    kinds = set()
    low, high, kind = gain_interval(group)
    if kind:
        kinds.add(kind)
        style = "-" if kind == "seeds" else _DASHED
        axes.plot([low, high], [row, row], color=drawing.FDC, linewidth=1.1, linestyle=style)
    mean = float(np.mean(values))
    axes.plot([mean], [row], color=drawing.FDC, marker="s", gid=f"gain-{row}")
    axes.annotate(
        drawing.number(mean, 1, signed=True),
        (1, row),
        (3, 0),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        fontsize=7,
        verticalalignment="center",
        annotation_clip=False,
    )
    chosen = group.runs[0].selected
    selected = group.gains(chosen) if chosen != "full" else []
    if selected:
        kinds.add("selected")
        axes.plot([float(np.mean(selected))], [row], **_SELECTED)
    published = paper.plugin(group.learner, "full") or paper.plugin(group.learner, "selected")
    if group.follows_protocol and published and group.benchmark in published.gains:
        kinds.add("paper")
        reference = published.gains[group.benchmark].mean
        axes.plot([reference], [row], **drawing.hollow("s", drawing.FDC))
    return kinds


def gain_interval(group: Group) -> tuple[float, float, str]:
    """Returns low and high in percentage points, and "seeds", "images", or "" for no interval."""
    pairs = [(run.value("accuracy", "raw"), run.value("accuracy", "fdc")) for run in group.runs]
    known = [(raw, fdc) for raw, fdc in pairs if raw is not None and fdc is not None]
    if len(known) > 1:
        gain = evaluation.paired_gain([raw for raw, _ in known], [fdc for _, fdc in known])
        return gain.low, gain.high, "seeds"
    columns = group.runs[0].predictions()
    if not columns:
        return math.nan, math.nan, ""
    gain = evaluation.bootstrap_gain(columns["label"], columns["raw_label"], columns["fdc_label"])
    return gain.low, gain.high, "images"
