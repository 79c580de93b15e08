"""Figures of what FDC reads from features: the paper's diagnostics and sweeps.

Every function draws the groups that have the analysis it shows, and returns None where none has.
What the analyses hold is said in `fdc_jax.report.diagnostics` and `fdc_jax.report.analysis`.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fdc_jax.report import drawing, paper, words
from fdc_jax.report.runs import Group

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
    "own": (drawing.FDC, "s", "Distributional matching"),
    "nearest": (drawing.PRETRAINED, "D", "Nearest"),
}
_SWEPT = {"attenuation": "Attenuation γ", "retained_energy": "Retained energy η"}
_MANY_PAIRS = 100  # beyond which points are small


def _having(groups: Sequence[Group], name: str) -> list[tuple[Group, list[dict[str, Any]]]]:
    """Returns the groups of which a run has an analysis, with its results by seed."""
    return [(group, found) for group in groups if (found := group.analyses(name))]


def _mean(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Mean over seeds; NaN where a seed has no number."""
    return np.array(rows, dtype=np.float64).mean(axis=0)


def _name_panels(panels: Sequence[Axes], groups: Sequence[Group], inches: float) -> None:
    """Names panels after what tells their groups apart; a single group is named by the caption."""
    if len(groups) > 1:
        for axes, name in zip(panels, drawing.names(groups), strict=False):
            drawing.title(axes, name, inches)


# Similarity and routing error ---------------------------------------------------------------------


# Figure motivation-confusability of the paper.
def similarity(groups: Sequence[Group]) -> Figure | None:
    """Feature similarity against routing error.

    Each point is an ordered pair of tasks, mean over seeds: the share of the first task's test
    images that the second one's head wins by raw logits, against how well the first task's
    training images fit the second task compared with their own, by subspace residuals (left) and
    by prototype affinities (right), in standard deviations of the task they are measured against.
    Larger is more alike. ρ is Spearman's rank correlation, mean over seeds.
    """
    results = groups[0].analyses("similarity")
    if not results:
        return None
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


# Residuals ----------------------------------------------------------------------------------------


# Figure routing-osp of the paper.
def residual_contributions(groups: Sequence[Group]) -> Figure | None:
    """What features outside the task subspace add to logits.

    Each point is a head, from the first task at the left to the last at the right of its column:
    the mean over its own, or over all foreign, test images of what features outside the head's
    subspace add to the logit of the class it predicts, in standard deviations of the head's own-
    training largest logits; means over seeds. Bars are means over heads.
    """
    found = _having(groups, "residual_contributions")
    if not found:
        return None
    width = drawing.COLUMN if len(found) <= 2 else drawing.PAGE
    figure, (axes,) = drawing.panels(1, 2.5, 1, width)
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    for place, (_, results) in enumerate(found):
        for side, (offset, colour, marker, _) in _SIDES.items():
            values = _mean([each[side] for each in results])
            # From the first task at the left to the last at the right.
            spread = np.linspace(-0.13, 0.13, len(values)) if len(values) > 1 else np.zeros(1)
            x = place + offset + spread
            drawing.marks(axes, x, values, colour, marker, 3.4, alpha=0.75, gid=side)
            mean = float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
            axes.plot([place + offset - 0.17, place + offset + 0.17], [mean] * 2, color=colour)
    names = drawing.names([group for group, _ in found])
    inches = (width - 0.5) / len(found)
    axes.set_xticks(range(len(found)), [drawing.shortened(name, inches) for name in names])
    axes.set_xlim(-0.5, len(found) - 0.5)
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
    results = groups[0].analyses("residual_distributions")
    if not results:
        return None
    views = [view for view in _VIEWS if view in results[0]]
    cells = [(view, place) for view in views for place in ("first", "last")]
    figure, panels = drawing.panels(len(cells), 1.95, 2)
    pink: dict[str, Any] = {"color": drawing.FOREIGN}
    for axes, (view, place) in zip(panels, cells, strict=True):
        found = results[0][view][place]
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


# Prototypes ---------------------------------------------------------------------------------------


# Figure routing-par of the paper.
def prototype_geometry(groups: Sequence[Group]) -> Figure | None:
    """Geometry of prototypes.

    Class prototypes (dots) and the task prototypes that average them (stars), embedded together
    by t-SNE in each view; positions have no unit. First seed. Colours run from the first task to
    the last.
    """
    results = groups[0].analyses("prototype_geometry")
    if not results:
        return None
    views = [view for view in _VIEWS if view in results[0]]
    figure, panels = drawing.panels(len(views), 2.9, 2)
    # Viridis without its ends, which vanish on dark and on light pages.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.12, 0.93, 64))
    count = len(results[0][views[0]]["tasks"])
    colours = ScalarMappable(
        Normalize(1, max(count, 2)), LinearSegmentedColormap.from_list("tasks", shades)
    )
    look: dict[str, Any] = {"edgecolors": drawing.INK}
    of_class, of_task = np.array(results[0]["class_tasks"]) + 1, np.arange(1, count + 1)
    for axes, view in zip(panels, views, strict=True):
        classes, tasks = (np.array(results[0][view][name]).T for name in ("classes", "tasks"))
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


# Sweeps (paper, "Hyperparameter Analysis") --------------------------------------------------------


# Figure tsf-hyperparameters of the paper.
def sweeps(groups: Sequence[Group]) -> Figure | None:
    """Attenuation and retained energy.

    Final accuracy of full FDC in percent, fitted anew at every setting. The dotted line is the
    setting of the run; vertical axes differ. Means over seeds, with one sample standard deviation
    shaded. Empty markers are the paper's numbers, where runs follow its protocol.
    """
    parts = [name for name in _SWEPT if _having(groups, f"sweep_{name}")]
    shown = [group for group in groups if any(group.analyses(f"sweep_{name}") for name in parts)]
    if not shown:
        return None
    # One group: its two sweeps side by side. Several: a column each, as in the paper.
    alone = len(shown) == 1
    columns = len(parts) if alone else len(shown)
    figure, panels = drawing.panels(len(parts) * len(shown), 2.3 if alone else 1.75, columns)
    published = False
    for place, axes in enumerate(panels):
        row, column = divmod(place, len(shown))
        group, name = shown[column], parts[row]
        axes.set_xlabel(_SWEPT[name])
        if alone or column == 0:
            axes.set_ylabel("FDC accuracy (%)")
        results = group.analyses(f"sweep_{name}")
        if not results:
            place = {"xycoords": "axes fraction", "ha": "center", "fontsize": 7}
            axes.annotate("not swept", (0.5, 0.5), **place)
            axes.set_yticks([])
            continue
        _swept(axes, results, ("accuracy",), drawing.FDC, "s", "accuracy")
        reference = paper.row("benchmark", group.learner, "fdc").get(group.benchmark)
        if group.follows_protocol and reference is not None:
            default = results[0]["default"]
            axes.plot([default], [reference.mean], **drawing.hollow("s", drawing.FDC))
            published = True
    _name_panels(panels, shown, figure.get_figwidth() / columns - 0.35)
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
    found = _having(groups, "sweep_neighbours")
    if not found:
        return None
    columns = min(len(found), 3)
    figure, panels = drawing.panels(len(found), 2.5 if columns == 1 else 2.1, columns)
    for axes, (_, results) in zip(panels, found, strict=True):
        for name, (colour, marker, _) in _REFERENCES.items():
            _swept(axes, results, (name, "accuracy"), colour, marker, name)
        axes.set_xlabel("Prototype neighbours K")
        axes.set_ylabel("FDC accuracy (%)")
        drawing.whole_numbers(axes.xaxis)
    _name_panels(panels, [group for group, _ in found], figure.get_figwidth() / columns - 0.35)
    looks = _REFERENCES.values()
    keys = [drawing.key(text, colour, marker=m, markersize=3.5) for colour, m, text in looks]
    drawing.legend(figure, keys)
    return figure


def _swept(
    axes: Axes,
    results: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    colour: str,
    marker: str,
    gid: str,
) -> None:
    """Draws accuracies over the values of a sweep, with the run's own value dotted."""
    values = results[0]["values"]
    # Of `neighbours`, another seed may allow fewer.
    alike = [each for each in results if each["values"] == values]
    rows = np.array([functools.reduce(operator.getitem, keys, each) for each in alike])
    drawing.band(axes, values, rows, colour, marker=marker, markersize=3, gid=gid)
    if not any(line.get_gid() == "default" for line in axes.lines):
        look: dict[str, Any] = {"color": drawing.INK, "linestyle": ":", "linewidth": 1.0}
        axes.axvline(results[0]["default"], gid="default", **look)
