"""All figures of the report: what they show, which are drawn for which groups, and their files.

Every function draws a group, or all of them, which have the analyses that it shows, and returns
None where there is nothing to draw. What it says of itself is the figure's title and caption.
"""

import functools
import math
import operator
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
from fdc_jax.machine.files import write_atomically, write_text
from fdc_jax.report import drawing, frames, paper, words
from fdc_jax.report.runs import Group

# Inches: a row of a list; title, axis and legend around it; names at its left.
_ROW, _FRAME, _NAMES = 0.19, 1.2, 1.15
_FEW_TASKS = 10  # that fit a column of a paper
_MOST_NUMBERS = 20  # tasks up to which a confusion matrix has numbers in its cells
_MANY_PAIRS = 100  # beyond which points are small
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
    "own": (drawing.OWN, "o", "Own images"),
    "foreign": (drawing.FOREIGN, "D", "Foreign images"),
}
_REFERENCES = {
    "accuracy": (drawing.FDC, "s", "FDC"),
    "nearest": (drawing.PRETRAINED, "D", "Nearest"),
}
_SWEPT = {
    "attenuation": "Attenuation γ",
    "retained_energy": "Retained energy η",
    "neighbours": "Prototype neighbours K",
}


def accuracy_curve(group: Group) -> Figure | None:
    """Accuracy as tasks are learned.

    Accuracy over all classes seen so far, after each task. Means over seeds, with one sample
    standard deviation shaded.
    """
    found = frames.curve(group)
    if found is None or group.results["num_tasks"] < 2:
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


def decomposition(group: Group) -> Figure | None:
    """Where the errors are.

    Test images by the two decisions of a prediction: the task and the class. Hatched is what the
    right task alone would put right.
    """
    found = frames.shares(group)
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


def task_confusion(group: Group) -> Figure | None:
    """Where the images of each task are sent.

    Percent of the test images of a true task (row) that each task (column) wins. The diagonal is
    right. Colours follow the square root, to show what lies off the diagonal.
    """
    matrices = {name: frames.confusion(group, name) for name in group.methods}
    found = {name: values for name, values in matrices.items() if values is not None}
    if not found:
        return None
    count = group.results["num_tasks"]
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


# Figure motivation-gap of the paper.
def task_identity(groups: Sequence[Group]) -> Figure | None:
    """Final accuracy with and without task identity.

    Final accuracy without task identity, by raw logits and by calibrators, and by raw logits when
    the true task is given. Points are means over seeds, bars one sample standard deviation. Empty
    markers are the paper's numbers, where runs follow its protocol.
    """
    width = drawing.PAGE
    figure, (axes,) = drawing.panels(1, _FRAME + _ROW * len(groups), 1, width)
    looks = drawing.looks([*(name for group in groups for name in group.methods), "oracle"])
    published = False
    for row, group in enumerate(groups):
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
    names = [drawing.shortened(group.name, width / 3) for group in groups]
    axes.set_yticks(range(len(groups)), names)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    drawing.lines_only(axes, "y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("Final accuracy (%)")
    key = Line2D([], [], **drawing.hollow("o", drawing.INK, "Paper"))
    drawing.legend_of(figure, looks, *[key] * published, linestyle="none")
    return figure


def _mean(seeds: Sequence[Any]) -> Any:
    """Mean over the seeds' frames; NaN where a seed has no number."""
    return functools.reduce(operator.add, seeds) / len(seeds)


# Figure motivation-confusability of the paper.
def similarity(group: Group) -> Figure | None:
    """Feature similarity against routing error.

    Each point is an ordered pair of tasks, mean over seeds: the share of the first task's test
    images that the second one's head wins by raw logits, against how well the first task's
    training images fit the second task compared with their own, by subspace residuals (left) and
    by prototype affinities (right), in standard deviations of the task they are measured against.
    Larger is more alike. ρ is Spearman's rank correlation, mean over seeds.
    """
    seeds = group.analyses["similarity"]
    mean = _mean(seeds)
    correlation = _mean([each.corr(method="spearman")["error"] for each in seeds])
    figure, panels = drawing.panels(2, 2.6, 2, sharey="row")
    size = 2.6 if len(mean) > _MANY_PAIRS else 4
    kinds = {"residual": "residuals", "affinity": "affinities"}
    for axes, (kind, label) in zip(panels, kinds.items(), strict=True):
        shown = [view for view in _VIEWS if f"{view}_{kind}" in mean]
        for line, view in enumerate(shown):
            (colour, marker, name), column = _VIEWS[view], f"{view}_{kind}"
            points = mean[column], mean["error"]
            drawing.marks(axes, *points, colour, marker, size, alpha=0.5, gid=view)
            if np.isfinite(correlation[column]):
                name += f", ρ = {words.minus(words.number(correlation[column]))}"
            place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
            look: dict[str, Any] = {"fontsize": 7, "fontweight": "bold", "va": "top"}
            axes.annotate(name, (0, 1), (3, -3 - 9 * line), color=colour, **place, **look)
        axes.set_xlabel(f"Similarity by {label} (std of the other task)")
    panels[0].set_ylabel("Routing error (%)")
    panels[0].set_ylim(top=1.22 * panels[0].get_ylim()[1])  # room for the notes
    return figure


# Figure routing-osp of the paper.
def residual_contributions(group: Group) -> Figure | None:
    """What features outside the task subspace add to logits.

    For the head of each task, the mean over its own, or over all foreign, test images of what
    features outside the head's subspace add to the logit of the class it predicts, in standard
    deviations of the head's own-training largest logits; means over seeds. Lines are means over
    heads.
    """
    seeds = group.analyses["residual_contributions"]
    mean = _mean(seeds)
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    for side, (colour, marker, _) in _SIDES.items():
        drawing.marks(axes, mean.index + 1, mean[side], colour, marker, 3.4, alpha=0.75, gid=side)
        axes.axhline(mean[side].mean(), color=colour)
    axes.set_xlabel("Task of the head")
    axes.set_ylabel("Residual contribution\n(std of own logits)")
    drawing.whole_numbers(axes.xaxis)
    keys = [drawing.key(text, colour, marker=m) for colour, m, text in _SIDES.values()]
    drawing.legend(figure, keys)
    return figure


# Figure routing-srlr of the paper.
def residual_distributions(group: Group) -> Figure | None:
    """Residuals of own and foreign images.

    Densities of the residual ratios of test images as the first and the last head see them,
    standardised by the head's own training images, so that 0 is the mean of those and 1 is one
    standard deviation above it; first seed. The dashed curve is the mean of the foreign tasks'
    densities, each with equal weight.
    """
    found = group.analyses["residual_distributions"][0]
    cells = [(view, head) for view in found for head in ("first", "last")]
    figure, panels = drawing.panels(len(cells), 1.95, 2)
    pink: dict[str, Any] = {"color": drawing.FOREIGN}
    for axes, (view, head) in zip(panels, cells, strict=True):
        densities = found[view][head]
        task = 0 if head == "first" else group.results["num_tasks"] - 1
        foreign = densities.drop(columns=task, errors="ignore")
        axes.plot(foreign, linewidth=0.6, alpha=0.4, **pink)
        main = {"foreign_mean": foreign.mean(axis=1), "own": densities.get(task)}
        looks: dict[str, dict[str, Any]] = {"own": {"color": drawing.OWN, "linewidth": 1.8}}
        looks["foreign_mean"] = pink | {"linestyle": (0, (4, 2))}
        known = {name: curve for name, curve in main.items() if curve is not None}
        for name, curve in known.items():
            axes.plot(curve, gid=name, **looks[name])
        # Single tasks may be far narrower than what matters here.
        top = np.nanmax([1e-9, *(curve.max() for curve in known.values())])
        axes.set_ylim(0, 1.35 * top)
        axes.set_xlabel(f"Standardised residual, {head} head (task {task + 1})")
        if head == "first":
            axes.set_ylabel(f"Density,\n{_VIEWS[view][2]}")
    handles = [
        drawing.key("Own task", drawing.OWN, linewidth=1.8),
        drawing.key("Mean of foreign tasks", drawing.FOREIGN, linestyle=(0, (4, 2))),
        drawing.key("Single foreign tasks", drawing.FOREIGN, linewidth=0.7, alpha=0.5),
    ]
    drawing.legend(figure, handles)
    return figure


# Figure routing-par of the paper.
def prototype_geometry(group: Group) -> Figure | None:
    """Geometry of prototypes.

    Class prototypes (dots) and the task prototypes that average them (stars), embedded together
    by t-SNE in each view; positions have no unit. First seed. Colours run from the first task to
    the last.
    """
    found = group.analyses["prototype_geometry"][0]
    figure, panels = drawing.panels(len(found), 2.9, 2)
    # Viridis without its ends, which vanish on dark and on light pages.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.12, 0.93, 64))
    shades = LinearSegmentedColormap.from_list("tasks", shades)
    colours = ScalarMappable(Normalize(1, max(group.results["num_tasks"], 2)), shades)
    for axes, (view, points) in zip(panels, found.items(), strict=True):
        of_task = points["label"] < 0
        for mine, size, marker, width in ((~of_task, 13, "o", 0.25), (of_task, 75, "*", 0.6)):
            of = points[mine]
            look: dict[str, Any] = {"edgecolors": drawing.INK, "linewidths": width}
            look |= {"marker": marker}
            axes.scatter(of.x, of.y, size, colours.to_rgba(of.task + 1), **look)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.set_xlabel(f"t-SNE, {_VIEWS[view][2]}")
    bar = drawing.colour_bar(figure, colours, panels, "Task", shrink=0.7)
    drawing.whole_numbers(bar.ax.yaxis)
    return figure


# Figures tsf-hyperparameters and app-pac-k of the paper.
def sweeps(group: Group) -> Figure | None:
    """Settings of FDC.

    Final accuracy of full FDC in percent, fitted anew at every setting. The dotted line is the
    setting of the run; vertical axes differ. Nearest standardises affinities not by the task's own
    training images for the same K but over the tasks that compete for an image. Means over seeds,
    with one sample standard deviation shaded. Empty markers are the paper's numbers, where runs
    follow its protocol.
    """
    found = {name: group.analyses.get(f"sweep_{name}") for name in _SWEPT}
    found = {name: seeds for name, seeds in found.items() if seeds}
    figure, panels = drawing.panels(len(found), 2.3, 3)
    published = paper.row("benchmark", group.learner, "fdc").get(group.benchmark)
    keys = {}
    for axes, (name, seeds) in zip(panels, found.items(), strict=True):
        for column in seeds[0]:
            colour, marker, title = _REFERENCES[column]
            # With fewer images in a class, another seed may allow fewer neighbours.
            rows = np.array([each[column].reindex(seeds[0].index) for each in seeds])
            look: dict[str, Any] = {"marker": marker, "markersize": 3}
            drawing.band(axes, seeds[0].index, rows, colour, gid=column, **look)
            keys[column] = drawing.key(title, colour, **look)
        default: float = group.results["config"][f"fdc.{name}"]
        look = {"color": drawing.INK, "linestyle": ":", "linewidth": 1.0}
        axes.axvline(default, gid="default", **look)
        if group.follows_protocol and published is not None:
            axes.plot([default], [published.mean], **drawing.hollow("s", drawing.FDC))
            keys["paper"] = Line2D([], [], **drawing.hollow("s", drawing.FDC, "Paper"))
        axes.set_xlabel(_SWEPT[name])
        if name == "neighbours":
            drawing.whole_numbers(axes.xaxis)
    panels[0].set_ylabel("FDC accuracy (%)")
    if len(keys) > 1:
        drawing.legend(figure, [*keys.values()])
    return figure


# Files -------------------------------------------------------------------------------------------


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


# The analyses of which a group needs one. The first three are of a run itself, and stand at the
# head of the page.
_OF_A_GROUP: dict[Callable[[Group], Figure | None], tuple[str, ...]] = {
    accuracy_curve: (),
    decomposition: (),
    task_confusion: (),
    similarity: ("similarity",),
    residual_contributions: ("residual_contributions",),
    residual_distributions: ("residual_distributions",),
    prototype_geometry: ("prototype_geometry",),
    sweeps: tuple(f"sweep_{name}" for name in _SWEPT),
}
OF_A_RUN = tuple(each.__name__ for each in _OF_A_GROUP)[:3]

# Said only where it holds.
_BAND = " Means over seeds, with one sample standard deviation shaded."
_PAPER = " Empty markers are the paper's numbers, where runs follow its protocol."


def draw(groups: Sequence[Group]) -> list[Drawing]:
    """Draws all figures of some groups: those of each group, and one of all."""
    found = [_drawn(task_identity, groups, [*groups])] if len(groups) > 1 else []
    for function, needed in _OF_A_GROUP.items():
        for group in groups:
            if not needed or any(group.analyses.get(name) for name in needed):
                found.append(_drawn(function, group, [group]))
    drawn: dict[str, Drawing] = {}
    for each in filter(None, found):
        name, count = each.name, 1
        while name in drawn:
            name, count = f"{each.name}_{count + 1}", count + 1
        drawn[name] = each._replace(name=name)
    return [*drawn.values()]


def _drawn(function: Callable[[Any], Figure | None], of: Any, groups: list[Group]) -> Any:
    """Draws a figure, if there is one, with the title and caption of its function."""
    with drawing.style():
        figure = function(of)
        if figure is None:
            return None
        svg = drawing.finished(figure)
    kind = function.__name__
    title, _, caption = (function.__doc__ or "").partition(".\n\n")
    caption = " ".join(caption.split())
    if not any(group.follows_protocol for group in groups):
        caption = caption.replace(_PAPER, "")
    if all(len(group.runs) == 1 for group in groups):
        caption = caption.replace(_BAND, "")
    parts = [kind]
    if isinstance(of, Group):
        title = f"{title}: {of.name}"
        parts += [of.benchmark, of.learner]
    name = re.sub(r"[^a-z0-9_-]+", "-", "_".join(parts).lower())[:80]
    return Drawing(name, kind, title, caption, groups, figure, svg)


def write(drawn: Drawing, folder: Path) -> None:
    """Writes `<name>.svg` and `<name>.png` (200 dots an inch, white face)."""
    write_text(folder / f"{drawn.name}.svg", drawn.svg)
    with drawing.style(), write_atomically(folder / f"{drawn.name}.png") as file:
        drawn.figure.savefig(file, facecolor="white", metadata={"Software": None})
