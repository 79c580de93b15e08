"""All figures of the report: which are drawn for which groups, what they say, and their files.

Every function draws the groups it is given, which have the analyses it shows (of
`fdc_jax.report.analysis`), and returns None where they have nothing to draw.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fdc_jax import evaluation
from fdc_jax.learners import title as learner_title
from fdc_jax.machine.files import write_atomically, write_text
from fdc_jax.report import drawing, frames, paper, words
from fdc_jax.report.runs import Group

# Inches: a learner in a list; title, axis and legend around it; names at its left.
_ROW, _FRAME, _NAMES = 0.19, 1.2, 1.15
_FEW_TASKS = 10  # that fit a column of a paper
_MOST_NUMBERS = 20  # tasks up to which a confusion matrix has numbers in its cells
_SHARES = {
    "right_task_right_class": ("#3a7d5d", "", "right task, right class"),
    "right_task_wrong_class": ("#b9d5c5", "", "right task, wrong class"),
    "wrong_task_oracle_right": ("#e3b04b", "////", "wrong task, class right given the task"),
    "wrong_task_oracle_wrong": ("#8c4a3c", "", "wrong task, wrong given the task too"),
}


# Colour, marker, title.
_VIEWS = {
    "adapted": (drawing.ADAPTED, "o", "adapted view"),
    "pretrained": (drawing.PRETRAINED, "D", "pretrained view"),
}
_SIDES = {
    "own": (-0.2, drawing.OWN, "o", "Own images"),
    "foreign": (0.2, drawing.FOREIGN, "D", "Foreign images"),
}
_REFERENCES = {
    "accuracy": (drawing.FDC, "s", "Distributional matching"),
    "nearest": (drawing.PRETRAINED, "D", "Nearest"),
}
_SWEPT = {"attenuation": "Attenuation γ", "retained_energy": "Retained energy η"}
_MANY_PAIRS = 100  # beyond which points are small


def accuracy_curve(groups: Sequence[Group]) -> Figure | None:
    """Accuracy as tasks are learned.

    Accuracy over all classes seen so far, after each task. Means over seeds, with one sample
    standard deviation shaded.
    """
    found = frames.curve(groups[0])
    if found is None or groups[0].results["num_tasks"] < 2:
        return None
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    looks = drawing.looks(found.columns)
    for name, (colour, marker) in looks.items():
        values = found[name].unstack("task")
        look = {"marker": marker, "markersize": 3, "gid": name}
        drawing.band(axes, values.columns, values.to_numpy(), colour, **look)
    axes.set_xlabel("Tasks learned")
    axes.set_ylabel("Accuracy (%)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    drawing.whole_numbers(axes.xaxis)
    drawing.legend_of(figure, looks)
    return figure


def decomposition(groups: Sequence[Group]) -> Figure | None:
    """Where the errors are.

    Test images by the two decisions of a prediction: the task and the class. Hatched is what the
    right task alone would put right.
    """
    found = frames.shares(groups[0])
    if found.empty:
        return None
    figure, (axes,) = drawing.panels(1, _FRAME + 0.26 * len(found), 1)
    rows, left = np.arange(len(found)), np.zeros(len(found))
    for name, (colour, hatch, label) in _SHARES.items():
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": drawing.INK}
        widths = found[name].to_numpy()
        axes.barh(rows, widths, 0.7, left, linewidth=0.25, label=label, **look)
        left += widths
    titles = [words.method_title(name) for name in found.index]
    axes.set_yticks(rows, [drawing.shortened(title, _NAMES) for title in titles])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    drawing.lines_only(axes, "y")
    axes.set_xlabel("Share of test images (%)")
    handles = [
        Patch(facecolor=colour, hatch=hatch, label=label, edgecolor=drawing.INK, linewidth=0.4)
        for colour, hatch, label in _SHARES.values()
    ]
    drawing.legend(figure, handles, columns=1)
    return figure


def task_confusion(groups: Sequence[Group]) -> Figure | None:
    """Where the images of each task are sent.

    Percent of the test images of a true task (row) that each task (column) wins. The diagonal is
    right. Colours follow the square root, to show what lies off the diagonal.
    """
    matrices = {name: frames.confusion(groups[0], name) for name in groups[0].methods}
    found = {name: values for name, values in matrices.items() if values is not None}
    if not found:
        return None
    count = groups[0].results["num_tasks"]
    few = count <= _FEW_TASKS
    columns = 3 if few and len(found) > 2 else 1 if few else 2
    figure, panels = drawing.panels(len(found), 3.3 if columns == 2 else 2.5, columns)
    scale = PowerNorm(0.5, 0, 100)
    for axes, (name, values) in zip(panels, found.items(), strict=True):
        _matrix(axes, values, scale)
        axes.set_xlabel(f"Task chosen by {words.method_title(name)}")
        axes.set_ylabel("True task")
    if count > _MOST_NUMBERS:
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


def _lists(groups: Sequence[Group]) -> tuple[Figure, list[tuple[Axes, list[Group]]]]:
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
        axes.set_xlabel("Final accuracy (%)")
    return figure, list(zip(panels, lists.values(), strict=True))


# Figure motivation-gap of the paper.
def task_identity(groups: Sequence[Group]) -> Figure | None:
    """Final accuracy with and without task identity.

    Final accuracy without task identity, by raw logits and by calibrators, and by raw logits when
    the true task is given. Points are means over seeds, bars one sample standard deviation. Empty
    markers are the paper's numbers, where runs follow its protocol.
    """
    figure, lists = _lists(groups)
    looks = drawing.looks([*(name for group in groups for name in group.methods), "oracle"])
    published = False
    for axes, members in lists:
        for row, group in enumerate(members):
            names = [*group.methods, "oracle"]
            spans = {name: evaluation.mean_and_std(group.values(name)) for name in names}
            means = [mean for mean, _ in spans.values()]
            axes.plot([min(means), max(means)], [row, row], color=drawing.GRID, linewidth=0.9)
            for name, (mean, std) in spans.items():
                colour, marker = looks[name]
                if math.isfinite(std):
                    ends = [mean - std, mean + std]
                    axes.plot(ends, [row, row], linewidth=2.2, alpha=0.45, color=colour)
                axes.plot([mean], [row], marker=marker, gid=f"{name}-{row}", color=colour)
                value = paper.row("benchmark", group.learner, name).get(group.benchmark)
                if group.follows_protocol and value is not None:
                    axes.plot([value.mean], [row], **drawing.hollow(marker, colour))
                    published = True
    key = Line2D([], [], **drawing.hollow("o", drawing.INK, "Paper"))
    drawing.legend_of(figure, looks, *[key] * published, linestyle="none")
    return figure


def _mean(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Mean over seeds; NaN where a seed has no number."""
    return np.array(rows, dtype=np.float64).mean(axis=0)


def _name_panels(panels: Sequence[Axes], groups: Sequence[Group], inches: float) -> None:
    """Names panels after what tells their groups apart; a single group is named by the caption."""
    if len(groups) > 1:
        for axes, name in zip(panels, drawing.names(groups), strict=False):
            drawing.title(axes, name, inches)


# Figure motivation-confusability of the paper.
def similarity(groups: Sequence[Group]) -> Figure | None:
    """Feature similarity against routing error.

    Each point is an ordered pair of tasks, mean over seeds: the share of the first task's test
    images that the second one's head wins by raw logits, against how well the first task's
    training images fit the second task compared with their own, by subspace residuals (left) and
    by prototype affinities (right), in standard deviations of the task they are measured against.
    Larger is more alike. ρ is Spearman's rank correlation, mean over seeds.
    """
    results = groups[0].analyses["similarity"]
    figure, panels = drawing.panels(2, 2.6, 2, sharey="row")
    error = _mean([each["routing_error_percent"] for each in results])
    kinds = {"residual": "residuals", "affinity": "affinities"}
    shown = [view for view in _VIEWS if all(view in each for each in results)]
    size = 2.6 if len(error) > _MANY_PAIRS else 4
    for axes, (kind, label) in zip(panels, kinds.items(), strict=True):
        for line, view in enumerate(shown):
            colour, marker, name = _VIEWS[view]
            alike = _mean([each[view][kind] for each in results])
            drawing.marks(axes, alike, error, colour, marker, size, alpha=0.5, gid=view)
            known = [each["spearman"][view][kind]["correlation"] for each in results]
            known = [value for value in known if value is not None]
            if known:
                name += f", ρ = {words.minus(words.number(float(np.mean(known))))}"
            place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
            look: dict[str, Any] = {"fontsize": 7, "fontweight": "bold", "va": "top"}
            axes.annotate(name, (0, 1), (3, -3 - 9 * line), color=colour, **place, **look)
        axes.set_xlabel(f"Similarity by {label} (std of the other task)")
    panels[0].set_ylabel("Routing error (%)")
    panels[0].set_ylim(top=1.22 * panels[0].get_ylim()[1])  # room for the notes
    return figure


# Figure routing-osp of the paper.
def residual_contributions(groups: Sequence[Group]) -> Figure | None:
    """What features outside the task subspace add to logits.

    Each point is a head, from the first task at the left to the last at the right of its column:
    the mean over its own, or over all foreign, test images of what features outside the head's
    subspace add to the logit of the class it predicts, in standard deviations of the head's own-
    training largest logits; means over seeds. Bars are means over heads.
    """
    width = drawing.COLUMN if len(groups) <= 2 else drawing.PAGE
    figure, (axes,) = drawing.panels(1, 2.5, 1, width)
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    for place, group in enumerate(groups):
        results = group.analyses["residual_contributions"]
        for side, (offset, colour, marker, _) in _SIDES.items():
            values = _mean([each[side] for each in results])
            # From the first task at the left to the last at the right.
            spread = np.linspace(-0.13, 0.13, len(values)) if len(values) > 1 else np.zeros(1)
            x = place + offset + spread
            drawing.marks(axes, x, values, colour, marker, 3.4, alpha=0.75, gid=side)
            mean = float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
            axes.plot([place + offset - 0.17, place + offset + 0.17], [mean] * 2, color=colour)
    inches = (width - 0.5) / len(groups)
    names = [drawing.shortened(name, inches) for name in drawing.names(groups)]
    axes.set_xticks(range(len(groups)), names)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    drawing.lines_only(axes, "x")
    axes.set_ylabel("Residual contribution\n(std of own logits)")
    looks = [(label, colour, marker) for _, colour, marker, label in _SIDES.values()]
    keys = [drawing.key(text, colour, marker=m, linestyle="none") for text, colour, m in looks]
    drawing.legend(figure, keys)
    return figure


# Figure routing-srlr of the paper.
def residual_distributions(groups: Sequence[Group]) -> Figure | None:
    """Residuals of own and foreign images.

    Densities of the residual ratios of test images as the first and the last head see them,
    standardised by the head's own training images, so that 0 is the mean of those and 1 is one
    standard deviation above it; first seed. The dashed curve is the mean of the foreign tasks'
    densities, each with equal weight.
    """
    result = groups[0].analyses["residual_distributions"][0]
    views = [view for view in _VIEWS if view in result]
    cells = [(view, place) for view in views for place in ("first", "last")]
    figure, panels = drawing.panels(len(cells), 1.95, 2)
    pink: dict[str, Any] = {"color": drawing.FOREIGN}
    for axes, (view, place) in zip(panels, cells, strict=True):
        found = result[view][place]
        grid, own, mean = found["grid"], found["own"], found["foreign_mean"]
        for density in found["foreign"].values():
            axes.plot(grid, density, linewidth=0.6, alpha=0.4, **pink)
        if mean is not None:
            axes.plot(grid, mean, linestyle=(0, (4, 2)), gid="foreign_mean", **pink)
        if own is not None:
            axes.plot(grid, own, color=drawing.OWN, linewidth=1.8, gid="own")
        # Single tasks may be far narrower than what matters here.
        shown = [max(curve) for curve in (own, mean) if curve is not None]
        if shown:
            axes.set_ylim(0, 1.35 * max(shown))
        axes.set_xlabel(f"Standardised residual, {place} head (task {found['task'] + 1})")
        if place == "first":
            axes.set_ylabel(f"Density,\n{_VIEWS[view][2]}")
    handles = [
        drawing.key("Own task", drawing.OWN, linewidth=1.8),
        drawing.key("Mean of foreign tasks", drawing.FOREIGN, linestyle=(0, (4, 2))),
        drawing.key("Single foreign tasks", drawing.FOREIGN, linewidth=0.7, alpha=0.5),
    ]
    drawing.legend(figure, handles)
    return figure


# Figure routing-par of the paper.
def prototype_geometry(groups: Sequence[Group]) -> Figure | None:
    """Geometry of prototypes.

    Class prototypes (dots) and the task prototypes that average them (stars), embedded together
    by t-SNE in each view; positions have no unit. First seed. Colours run from the first task to
    the last.
    """
    result = groups[0].analyses["prototype_geometry"][0]
    views = [view for view in _VIEWS if view in result]
    figure, panels = drawing.panels(len(views), 2.9, 2)
    # Viridis without its ends, which vanish on dark and on light pages.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.12, 0.93, 64))
    count = len(result[views[0]]["tasks"])
    shades = LinearSegmentedColormap.from_list("tasks", shades)
    colours = ScalarMappable(Normalize(1, max(count, 2)), shades)
    look: dict[str, Any] = {"edgecolors": drawing.INK}
    of_class, of_task = np.array(result["class_tasks"]) + 1, np.arange(1, count + 1)
    for axes, view in zip(panels, views, strict=True):
        classes, tasks = (np.array(result[view][name]).T for name in ("classes", "tasks"))
        c = [colours.to_rgba(each) for each in (of_class, of_task)]
        axes.scatter(*classes, s=13, c=c[0], linewidths=0.25, gid="classes", **look)
        axes.scatter(*tasks, s=75, c=c[1], linewidths=0.6, gid="tasks", marker="*", **look)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.set_xlabel(f"t-SNE, {_VIEWS[view][2]}")
    bar = drawing.colour_bar(figure, colours, panels, "Task", shrink=0.7)
    drawing.whole_numbers(bar.ax.yaxis)
    return figure


# Figure tsf-hyperparameters of the paper.
def sweeps(groups: Sequence[Group]) -> Figure | None:
    """Attenuation and retained energy.

    Final accuracy of full FDC in percent, fitted anew at every setting. The dotted line is the
    setting of the run; vertical axes differ. Means over seeds, with one sample standard deviation
    shaded. Empty markers are the paper's numbers, where runs follow its protocol.
    """
    parts = [name for name in _SWEPT if any(f"sweep_{name}" in each.analyses for each in groups)]
    # One group: its two sweeps side by side. Several: a column each, as in the paper.
    alone = len(groups) == 1
    columns, cells = len(parts if alone else groups), itertools.product(parts, groups)
    figure, panels = drawing.panels(len(parts) * len(groups), 2.3 if alone else 1.75, columns)
    published = False
    for axes, (name, group) in zip(panels, cells, strict=True):
        axes.set_xlabel(_SWEPT[name])
        if alone or group is groups[0]:
            axes.set_ylabel("FDC accuracy (%)")
        results = group.analyses.get(f"sweep_{name}")
        if not results:
            place = {"xycoords": "axes fraction", "ha": "center", "fontsize": 7}
            axes.annotate("not swept", (0.5, 0.5), **place)
            axes.set_yticks([])
            continue
        _swept(axes, results, "accuracy", drawing.FDC, "s")
        reference = paper.row("benchmark", group.learner, "fdc").get(group.benchmark)
        if group.follows_protocol and reference is not None:
            default = results[0]["default"]
            axes.plot([default], [reference.mean], **drawing.hollow("s", drawing.FDC))
            published = True
    _name_panels(panels, groups, figure.get_figwidth() / columns - 0.35)
    if published:
        drawing.legend(figure, [Line2D([], [], **drawing.hollow("s", drawing.FDC, "Paper"))])
    return figure


# Figure app-pac-k of the paper.
def neighbours(groups: Sequence[Group]) -> Figure | None:
    """Number of prototype neighbours.

    Final accuracy of full FDC in percent when affinities average the K nearest prototypes of a
    task. Distributional matching standardises them by the task's own training affinities for the
    same K, Nearest by the affinities of the same image to all tasks. The dotted line is the
    setting of the run. Means over seeds, with one sample standard deviation shaded.
    """
    columns = min(len(groups), 3)
    figure, panels = drawing.panels(len(groups), 2.5 if columns == 1 else 2.1, columns)
    for axes, group in zip(panels, groups, strict=True):
        for name, (colour, marker, _) in _REFERENCES.items():
            results = group.analyses["sweep_neighbours"]
            _swept(axes, results, name, colour, marker)
        axes.set_xlabel("Prototype neighbours K")
        axes.set_ylabel("FDC accuracy (%)")
        drawing.whole_numbers(axes.xaxis)
    _name_panels(panels, groups, figure.get_figwidth() / columns - 0.35)
    looks = _REFERENCES.values()
    keys = [drawing.key(text, colour, marker=m, markersize=3.5) for colour, m, text in looks]
    drawing.legend(figure, keys)
    return figure


def _swept(axes: Axes, results: Sequence[Any], name: str, colour: str, marker: str) -> None:
    """Draws accuracies over the values of a sweep, with the run's own value dotted."""
    values = results[0]["values"]
    # Of `neighbours`, another seed may allow fewer.
    alike = [each for each in results if each["values"] == values]
    rows = np.array([each[name] for each in alike])
    drawing.band(axes, values, rows, colour, marker=marker, markersize=3, gid=name)
    if not any(line.get_gid() == "default" for line in axes.lines):
        look: dict[str, Any] = {"color": drawing.INK, "linestyle": ":", "linewidth": 1.0}
        axes.axvline(results[0]["default"], gid="default", **look)


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


# Of every figure, the most groups in one, and the analyses of which a group needs one. What a
# function says of itself is the figure's title and caption. The first three are of a run itself,
# and stand at the head of the page.
_ONE, _SEVERAL, _ALL = 1, 5, 10**6
_FIGURES: dict[str, tuple[Callable[[Sequence[Group]], Figure | None], int, tuple[str, ...]]] = {
    "accuracy_curve": (accuracy_curve, _ONE, ()),
    "decomposition": (decomposition, _ONE, ()),
    "task_confusion": (task_confusion, _ONE, ()),
    "task_identity": (task_identity, _ALL, ()),
    "similarity": (similarity, _ONE, ("similarity",)),
    "residual_contributions": (residual_contributions, _SEVERAL, ("residual_contributions",)),
    "residual_distributions": (residual_distributions, _ONE, ("residual_distributions",)),
    "prototype_geometry": (prototype_geometry, _ONE, ("prototype_geometry",)),
    "sweeps": (sweeps, _SEVERAL, ("sweep_attenuation", "sweep_retained_energy")),
    "neighbours": (neighbours, _SEVERAL, ("sweep_neighbours",)),
}
FIGURES = tuple(_FIGURES)
OF_A_RUN = FIGURES[:3]

# Said only where it holds.
_BAND = " Means over seeds, with one sample standard deviation shaded."
_PAPER = " Empty markers are the paper's numbers, where runs follow its protocol."


def draw(name: str, groups: Sequence[Group]) -> list[Drawing]:
    """Draws the figures of a kind of `FIGURES`: one of all groups, or per group, or of several."""
    function, size, needed = _FIGURES[name]
    groups = [each for each in groups if not needed or any(map(each.analyses.get, needed))]
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
            title, parts = (
                f"{title}: {members[0].name}",
                [name, members[0].benchmark, members[0].learner],
            )
        stem = file = re.sub(r"[^a-z0-9_-]+", "-", "_".join(parts).lower())[:80]
        while any(file == each.name for each in found):
            file = f"{stem}_{len(found) + 1}"
        found.append(Drawing(file, name, title, caption, members, figure, svg))
    return found


def write(drawn: Drawing, folder: Path) -> None:
    """Writes `<name>.svg` and `<name>.png` (200 dots an inch, white face)."""
    write_text(folder / f"{drawn.name}.svg", drawn.svg)
    with drawing.style(), write_atomically(folder / f"{drawn.name}.png") as file:
        drawn.figure.savefig(file, facecolor="white", metadata={"Software": None})
