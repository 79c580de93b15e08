"""All figures of the report: which are drawn for which groups, what they say, and their files.

Here are those of accuracies and of predictions; those of features are in `feature_figures`. Every
function draws the groups it is given and returns None where they have nothing to draw.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fdc_jax import evaluation
from fdc_jax.files import write_atomically
from fdc_jax.learners import title as learner_title
from fdc_jax.report import drawing, feature_figures, overview, paper, words
from fdc_jax.report.overview import KINDS
from fdc_jax.report.runs import Group

# Inches: a learner in a list; title, axis and legend around it; names at its left.
_ROW, _FRAME, _NAMES = 0.19, 1.2, 1.15
_DASHED = (0, (2, 1.5))
_FEW_TASKS = 10  # that fit a column of a paper
_MOST_NUMBERS = 20  # tasks up to which a confusion matrix has numbers in its cells
_SHARES = {
    "right_task_right_class": ("#3a7d5d", "", "right task, right class"),
    "right_task_wrong_class": ("#b9d5c5", "", "right task, wrong class"),
    "wrong_task_oracle_right": ("#e3b04b", "////", "wrong task, class right given the task"),
    "wrong_task_oracle_wrong": ("#8c4a3c", "", "wrong task, wrong given the task too"),
}


# One group ----------------------------------------------------------------------------------------


def accuracy_curve(groups: Sequence[Group]) -> Figure | None:
    """Accuracy as tasks are learned.

    Accuracy over all classes seen so far, after each task. Means over seeds, with one sample
    standard deviation shaded.
    """
    curves = [run.results.get("curve") or [] for run in groups[0].runs]
    if len(curves[0]) != groups[0].runs[0].results.get("num_tasks") or len(curves[0]) < 2:
        return None
    rows = [[[point["accuracy"][kind] for kind in KINDS] for point in curve] for curve in curves]
    values = np.array(rows, dtype=np.float64)
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    places = np.arange(1.0, values.shape[1] + 1)
    for of_kind, kind in zip(np.moveaxis(values, 2, 0), KINDS, strict=True):
        look = {"marker": drawing.MARKERS[kind], "markersize": 3, "gid": kind}
        drawing.band(axes, places, of_kind, drawing.COLOURS[kind], **look)
    axes.set_xlabel("Tasks learned")
    axes.set_ylabel("Accuracy (%)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    drawing.whole_numbers(axes.xaxis)
    drawing.legend(figure, [drawing.key_of(kind) for kind in KINDS])
    return figure


def decomposition(groups: Sequence[Group]) -> Figure | None:
    """Where the errors are.

    Test images of each task, and of all, by the two decisions of a prediction: the task and the
    class. Hatched is what the right task alone would put right.
    """
    shares = {kind: overview.shares(groups[0], kind) for kind in ("raw", "fdc")}
    if shares["raw"] is None:
        return None
    count = len(shares["raw"])
    few = count - 1 <= _FEW_TASKS
    figure, (axes,) = drawing.panels(1, 2.9, 1, None if few else drawing.PAGE)
    # All images stand apart from the tasks.
    places = np.arange(1, count + 1, dtype=float)
    places[-1] += 0.6
    for offset, (kind, values) in zip((-0.21, 0.21), shares.items(), strict=True):
        assert values is not None
        bottom = np.zeros(count)
        for height, (name, (colour, hatch, _)) in zip(values.T, _SHARES.items(), strict=True):
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": drawing.INK}
            bars = axes.bar(places + offset, height, 0.38, bottom, linewidth=0.25, **look)
            bars.set_label(f"_{kind} {name}")
            bottom += height
    axes.set_xticks(places, [*map(str, range(1, count)), "all"])
    axes.set_xlim(0.4, places[-1] + 0.6)
    axes.set_ylim(0, 100)
    drawing.lines_only(axes, "x")
    axes.set_xlabel("Task (left bar raw, right bar FDC)")
    axes.set_ylabel("Share of test images (%)")
    handles = [
        Patch(facecolor=colour, hatch=hatch, label=label, edgecolor=drawing.INK, linewidth=0.4)
        for colour, hatch, label in _SHARES.values()
    ]
    drawing.legend(figure, handles, columns=1 if few else 2)
    return figure


def task_confusion(groups: Sequence[Group]) -> Figure | None:
    """Where the images of each task are sent.

    Percent of the test images of a true task (row) that each task's head wins (column). The
    diagonal is right. Colours follow the square root, to show what lies off the diagonal.
    """
    found = {kind: overview.confusion(groups[0], kind) for kind in ("raw", "fdc")}
    if found["raw"] is None:
        return None
    few = len(found["raw"]) <= _FEW_TASKS
    figure, panels = drawing.panels(2, 2.6 if few else 3.3, 1 if few else 2)
    scale = PowerNorm(0.5, 0, 100)
    for axes, (kind, values) in zip(panels, found.items(), strict=True):
        assert values is not None
        _matrix(axes, values, scale)
        axes.set_xlabel(f"Task chosen by {'raw logits' if kind == 'raw' else 'FDC'}")
        axes.set_ylabel("True task")
    if len(found["raw"]) > _MOST_NUMBERS:
        colours, ticks = ScalarMappable(scale, "Blues"), (0, 1, 5, 20, 50, 100)
        label = "Images of the true task (%)"
        drawing.colour_bar(figure, colours, panels, label, shrink=0.8, ticks=ticks)
    return figure


def _matrix(axes: Axes, values: Float[np.ndarray, "tasks tasks"], scale: PowerNorm) -> None:
    count = len(values)
    extent = (0.5, count + 0.5, count + 0.5, 0.5)
    axes.imshow(values, cmap="Blues", norm=scale, extent=extent, aspect="auto")
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    if count > _MOST_NUMBERS:
        drawing.whole_numbers(axes.xaxis)
        drawing.whole_numbers(axes.yaxis)
        return
    axes.set_xticks(range(1, count + 1))
    axes.set_yticks(range(1, count + 1))
    few = count <= _FEW_TASKS
    axes.tick_params(length=0, labelsize=7 if few else 6)
    look: dict[str, Any] = {"fontsize": 7 if few else 5, "ha": "center", "va": "center"}
    for (row, column), value in np.ndenumerate(values):
        # Only what is exactly all or nothing reads as such.
        text = f"{value:.0f}" if value in (0, 100) else f"{np.clip(value, 1, 99):.0f}"
        look |= {"alpha": 1.0 if value else 0.35}
        look |= {"color": "#ffffff" if scale(value) > 0.55 else "#1d2126"}
        axes.text(column + 1, row + 1, "<1" if 0 < value < 1 else text, **look)


# Lists of learners --------------------------------------------------------------------------------


def _lists(groups: Sequence[Group], label: str) -> tuple[Figure, list[tuple[Axes, list[Group]]]]:
    """Returns a panel per benchmark and settings, with a row per learner, the first on top."""
    lists: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        lists.setdefault((group.benchmark, group.title), []).append(group)
    most = max(len(members) for members in lists.values())
    columns = min(len(lists), 2)
    figure, panels = drawing.panels(len(lists), _FRAME + _ROW * most, columns)
    width = figure.get_figwidth() / columns - _NAMES
    for axes, ((benchmark, settings), members) in zip(panels, lists.items(), strict=True):
        title = [paper.benchmark_title(benchmark), *[settings] * bool(settings)]
        drawing.title(axes, ", ".join(title), width)
        learners = [learner_title(group.learner) for group in members]
        ticks = [drawing.shortened(name, _NAMES) for name in learners]
        axes.set_yticks(range(len(members)), ticks)
        axes.set_ylim(most - 0.4, -0.6)
        drawing.lines_only(axes, "y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(label)
    return figure, list(zip(panels, lists.values(), strict=True))


# Figure motivation-gap of the paper.
def task_identity(groups: Sequence[Group]) -> Figure | None:
    """Final accuracy with and without task identity.

    Final accuracy without task identity, by raw logits and by FDC, and by raw logits when the
    true task is given. Points are means over seeds, bars one sample standard deviation. Empty
    markers are the paper's numbers, where runs follow its protocol.
    """
    if not groups:
        return None
    figure, lists = _lists(groups, "Final accuracy (%)")
    published = False
    for axes, members in lists:
        for row, group in enumerate(members):
            spans = {kind: evaluation.mean_and_std(group.values(kind)) for kind in KINDS}
            means = [mean for mean, _ in spans.values()]
            axes.plot([min(means), max(means)], [row, row], color=drawing.GRID, linewidth=0.9)
            for kind, (mean, std) in spans.items():
                look: dict[str, Any] = {"color": drawing.COLOURS[kind]}
                if math.isfinite(std):
                    ends = [mean - std, mean + std]
                    axes.plot(ends, [row, row], linewidth=2.2, alpha=0.45, **look)
                axes.plot([mean], [row], marker=drawing.MARKERS[kind], gid=f"{kind}-{row}", **look)
                value = paper.row("benchmark", group.learner, kind).get(group.benchmark)
                if group.follows_protocol and value is not None:
                    hollow = drawing.hollow(drawing.MARKERS[kind], drawing.COLOURS[kind])
                    axes.plot([value.mean], [row], **hollow)
                    published = True
    key = Line2D([], [], **drawing.hollow("o", drawing.INK, "Paper"))
    keys = [drawing.key_of(kind, linestyle="none") for kind in KINDS]
    drawing.legend(figure, [*keys, *[key] * published])
    return figure


def gains(groups: Sequence[Group]) -> Figure | None:
    """Gain of FDC over raw.

    Gain of full FDC in percentage points, written at the right, with its 95 % interval: Student's
    t over gains paired within seeds, or, dashed, a bootstrap over test images where there is one
    seed. A cross marks the components that the paper selects for a learner, where those are not
    all. Empty markers are the paper's numbers, where runs follow its protocol.
    """
    measured = [group for group in groups if group.values("gain")]
    if not measured:
        return None
    figure, lists = _lists(measured, "Gain of FDC over raw (percentage points)")
    blue: dict[str, Any] = {"color": drawing.FDC}
    look: dict[str, dict[str, Any]] = {
        "gain": {"marker": "s", "linestyle": "none", "label": "FDC", **blue},
        "seeds": {"linestyle": "-", "linewidth": 1.1, "label": "95 % over seeds", **blue},
        "images": {"linestyle": _DASHED, "linewidth": 1.1, "label": "95 % over images", **blue},
        "selected": {"marker": "x", "linestyle": "none", "label": "Selected components", **blue},
        "paper": drawing.hollow("s", drawing.FDC, "Paper"),
    }
    used = {"gain"}
    for axes, members in lists:
        axes.axvline(0, color=drawing.INK, linewidth=0.8)
        for row, group in enumerate(members):
            marks = _gain_marks(group)
            used |= marks.keys()
            for name, places in marks.items():
                axes.plot(places, [row] * len(places), gid=f"{name}-{row}", **look[name])
            place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "fontsize": 7}
            place |= {"textcoords": "offset points", "va": "center", "annotation_clip": False}
            text = words.minus(words.number(marks["gain"][0], 1, signed=True))
            axes.annotate(text, (1, row), (3, 0), **place)
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, -0.5), max(high, 0.5))
    drawing.legend(figure, [Line2D([], [], **look[name]) for name in look if name in used])
    return figure


def _gain_marks(group: Group) -> dict[str, list[float]]:
    """Returns the places of a learner's marks by name, intervals first."""
    marks = {}
    interval = overview.gain_interval(group)
    if interval.of:
        marks[interval.of] = [interval.low, interval.high]
    marks["gain"] = [float(np.mean(group.values("gain")))]
    if group.runs[0].selected != "full" and (gains := group.values("selected_gain")):
        marks["selected"] = [float(np.mean(gains))]
    published = paper.plugin(group.learner, "full") or paper.plugin(group.learner, "selected")
    if group.follows_protocol and published and group.benchmark in published.gains:
        marks["paper"] = [published.gains[group.benchmark].mean]
    return marks


# All ----------------------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """A figure, ready to be shown and to be written.

    Attributes:
        name: stem of its files: small letters, digits, `_` and `-`.
        kind: of `FIGURES`.
        title: what it shows.
        caption: what one sees, and whose numbers: marks, units, spread, groups, seeds.
        groups: that it shows.
        figure: the figure itself.
        svg: the same as SVG text.
    """

    name: str
    kind: str
    title: str
    caption: str
    groups: list[Group]
    figure: Figure
    svg: str


# Of every figure, the most groups in one. What a function says of itself is the figure's title and
# caption. The first three are of a run itself, and stand at the head of the page.
_ONE, _SEVERAL, _ALL = 1, 5, 10**6
_SIZES: dict[Callable[[Sequence[Group]], Figure | None], int] = {
    accuracy_curve: _ONE,
    decomposition: _ONE,
    task_confusion: _ONE,
    task_identity: _ALL,
    gains: _ALL,
    feature_figures.similarity: _ONE,
    feature_figures.residual_contributions: _SEVERAL,
    feature_figures.residual_distributions: _ONE,
    feature_figures.prototype_geometry: _ONE,
    feature_figures.sweeps: _SEVERAL,
    feature_figures.neighbours: _SEVERAL,
}
FIGURES = tuple(function.__name__ for function in _SIZES)
OF_A_RUN = FIGURES[:3]

# Said only where it holds.
_BAND = " Means over seeds, with one sample standard deviation shaded."
_PAPER = " Empty markers are the paper's numbers, where runs follow its protocol."


def draw(name: str, groups: Sequence[Group]) -> list[Drawing]:
    """Draws the figures of a kind of `FIGURES`: one of all groups, or per group, or of several."""
    function, size = list(_SIZES.items())[FIGURES.index(name)]
    found: list[Drawing] = []
    for start in range(0, len(groups), size):
        members = list(groups[start : start + size])
        with drawing.style():
            figure = function(members)
            if figure is None:
                continue
            svg = drawing.finished(figure)
        title, _, caption = (function.__doc__ or "").partition(".\n\n")
        caption = " ".join(caption.split())
        if not any(group.follows_protocol for group in members):
            caption = caption.replace(_PAPER, "")
        if all(len(group.runs) == 1 for group in members):
            caption = caption.replace(_BAND, "")
        if size == _SEVERAL:
            seeds = [f"{each.name} (seeds {', '.join(map(str, each.seeds))})" for each in members]
            caption = f"{caption} {'; '.join(seeds)}."
        parts = [name]
        if size != _ALL and len(members) == 1:
            title, parts = f"{title}: {members[0].name}", [name, *members[0][:2]]
        stem = file = re.sub(r"[^a-z0-9_-]+", "-", "_".join(parts).lower())[:80]
        while any(file == each.name for each in found):
            file = f"{stem}_{len(found) + 1}"
        found.append(Drawing(file, name, title, caption, members, figure, svg))
    return found


def write(drawn: Drawing, folder: Path) -> None:
    """Writes `<name>.svg` and `<name>.png` (200 dots an inch, white face)."""
    with write_atomically(folder / f"{drawn.name}.svg") as file:
        file.write(drawn.svg.encode())
    with drawing.style(), write_atomically(folder / f"{drawn.name}.png") as file:
        drawn.figure.savefig(file, facecolor="white", metadata={"Software": None})
