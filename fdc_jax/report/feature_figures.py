"""Figures of what FDC reads from features: the paper's diagnostics and sweeps.

Every function draws the groups that have the analysis it shows, and returns None where none has.
What the analyses hold is said in `fdc_jax.report.diagnostics` and `fdc_jax.report.sweeps`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fdc_jax.learners import title as learner_title
from fdc_jax.report import drawing, paper
from fdc_jax.report.analysis import Analyses, having, mean_over_seeds
from fdc_jax.report.runs import Group

_VIEWS = {"adapted": drawing.ADAPTED, "pretrained": drawing.PRETRAINED}
_VIEW_MARKERS = {"adapted": "o", "pretrained": "D"}
_VIEW_TITLES = {"adapted": "adapted view", "pretrained": "pretrained view"}
# Parts of equally many task pairs for a trend: the most, and the fewest pairs in one.
_MOST_PARTS, _LEAST_PAIRS = 8, 12
_MANY_PAIRS = 100  # beyond which points are small


# Similarity and routing error ---------------------------------------------------------------------


def similarity(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Routing error of task pairs against their likeness to FDC (Figure motivation-confusability).

    A point is an ordered pair of tasks, mean over seeds; lines are means over equal parts of the
    pairs.
    """
    found = having(groups, analyses, "similarity")
    if not found:
        return None
    with drawing.style():
        figure, panels = drawing.panels(2 * len(found), drawing.PAGE, 2.6, 2, sharey="row")
        for row, (group, results) in enumerate(found):
            pair = panels[2 * row : 2 * row + 2]
            for axes, kind, label in zip(
                pair, ("residual", "affinity"), ("residuals", "affinities"), strict=True
            ):
                _scatter(axes, results, kind)
                axes.set_xlabel(f"Similarity by {label} (std of the other task)")
                axes.xaxis.set_major_locator(MaxNLocator(6))
            drawing.name_panels(figure, [(pair[0], group)], 2.9)
            pair[0].set_ylabel("Routing error (%)")
            # Room for the notes.
            pair[0].set_ylim(top=1.22 * pair[0].get_ylim()[1])
    return figure


def _scatter(axes: Axes, results: Sequence[Mapping[str, Any]], kind: str) -> None:
    error = mean_over_seeds([each["routing_error_percent"] for each in results])
    line = 0
    for view, colour in _VIEWS.items():
        if any(view not in each for each in results):
            continue
        alike = mean_over_seeds([each[view][kind] for each in results])
        look: dict[str, Any] = {
            "marker": _VIEW_MARKERS[view],
            "color": colour,
            "markeredgewidth": 0,
        }
        size = 2.6 if len(error) > _MANY_PAIRS else 4
        axes.plot(alike, error, linestyle="none", markersize=size, alpha=0.5, gid=view, **look)
        places, means = _trend(alike, error)
        axes.plot(places, means, color=drawing.PAPER, linewidth=3)
        axes.plot(places, means, color=colour, linewidth=1.6)
        known = [each["spearman"][view][kind]["correlation"] for each in results]
        known = [value for value in known if value is not None]
        rank = f", ρ = {drawing.number(float(np.mean(known)), 2)}" if known else ""
        _note(axes, line, f"{_VIEW_TITLES[view]}{rank}", colour)
        line += 1


def _trend(
    values: Float[np.ndarray, " n"], error: Float[np.ndarray, " n"]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean value and mean error of equal parts of the pairs; none where there are few."""
    count = min(_MOST_PARTS, len(values) // _LEAST_PAIRS)
    if count < 2:
        return np.array([]), np.array([])
    parts = np.array_split(np.argsort(values, kind="stable"), count)
    return (
        np.array([values[part].mean() for part in parts]),
        np.array([error[part].mean() for part in parts]),
    )


def _note(axes: Axes, line: int, text: str, colour: str) -> None:
    """Writes a line in the upper left corner of a panel."""
    axes.annotate(
        text,
        (0, 1),
        (3, -3 - 9 * line),
        xycoords="axes fraction",
        textcoords="offset points",
        color=colour,
        fontsize=7,
        fontweight="bold",
        verticalalignment="top",
    )


# Residuals ----------------------------------------------------------------------------------------


def residual_contributions(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """What features outside the subspace add to the predicted logit (Figure routing-osp).

    A point is a head, mean over its own or all foreign test images and over seeds, in standard
    deviations of its own-training largest logits; a bar is the mean over heads.
    """
    found = having(groups, analyses, "residual_contributions")
    if not found:
        return None
    with drawing.style():
        width = drawing.width_of(1 if len(found) <= 2 else 3)
        figure, (axes,) = drawing.panels(1, width, 2.5, 1)
        axes.axhline(0, color=drawing.INK, linewidth=0.8)
        for place, (_, results) in enumerate(found):
            for offset, side, colour, marker in _SIDES:
                values = mean_over_seeds([each[side] for each in results])
                # From the first task at the left to the last at the right.
                spread = np.linspace(-0.13, 0.13, len(values)) if len(values) > 1 else np.zeros(1)
                axes.plot(
                    place + offset + spread,
                    values,
                    linestyle="none",
                    marker=marker,
                    markersize=3.4,
                    color=colour,
                    alpha=0.75,
                    markeredgewidth=0,
                    gid=side,
                )
                mean = float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
                axes.plot([place + offset - 0.17, place + offset + 0.17], [mean] * 2, color=colour)
        names = _names([group for group, _ in found], (width - 0.5) / len(found))
        axes.set_xticks(range(len(found)), names)
        axes.set_xlim(-0.5, len(found) - 0.5)
        axes.grid(axis="x", visible=False)
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel("Residual contribution\n(std of own logits)")
        drawing.legend(figure, _side_key("Own images", "Foreign images"))
    return figure


_SIDES = ((-0.2, "own", drawing.OWN, "o"), (0.2, "foreign", drawing.FOREIGN, "D"))


def _side_key(*labels: str) -> list[Line2D]:
    return [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=label)
        for (_, _, colour, marker), label in zip(_SIDES, labels, strict=True)
    ]


def _names(groups: Sequence[Group], inches: float) -> list[str]:
    """Returns benchmarks, learners below them, or what of the two differs."""
    learners = len({group.learner for group in groups}) > 1
    benchmarks = len({group.benchmark for group in groups}) > 1 or not learners
    names = []
    for group in groups:
        lines = [paper.benchmark_title(group.benchmark)] if benchmarks else []
        lines += [learner_title(group.learner)] if learners else []
        names.append("\n".join(drawing.shortened(line, inches) for line in lines))
    return names


def _by_view(
    groups: Sequence[Group], analyses: Analyses, name: str
) -> list[tuple[Group, Any, str]]:
    """Returns every group with its first seed's analysis, once per view that this has."""
    return [
        (group, results[0], view)
        for group, results in having(groups, analyses, name)
        for view in _VIEWS
        if view in results[0]
    ]


def residual_distributions(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Residuals of test images as the first and the last head see them (Figure routing-srlr).

    Densities of one seed, residuals standardised by the head's own training images; thin lines
    are single foreign tasks, the dashed one their mean with equal weights.
    """
    rows = _by_view(groups, analyses, "residual_distributions")
    if not rows:
        return None
    with drawing.style():
        figure, panels = drawing.panels(2 * len(rows), drawing.PAGE, 1.95, 2)
        for row, (group, result, view) in enumerate(rows):
            pair = panels[2 * row : 2 * row + 2]
            for axes, place in zip(pair, ("first", "last"), strict=True):
                _densities(axes, result[view][place])
                axes.set_xlabel(
                    f"Standardised residual, {place} head (task {result[view][place]['task'] + 1})"
                )
            if view == next(iter(_VIEWS)):
                drawing.name_panels(figure, [(pair[0], group)], 2.9)
            pair[0].set_ylabel(f"Density,\n{_VIEW_TITLES[view]}")
        line: dict[str, Any] = {"color": drawing.FOREIGN}
        drawing.legend(
            figure,
            [
                Line2D([], [], color=drawing.OWN, linewidth=1.8, label="Own task"),
                Line2D([], [], linestyle=(0, (4, 2)), label="Mean of foreign tasks", **line),
                Line2D([], [], linewidth=0.7, alpha=0.5, label="Single foreign tasks", **line),
            ],
        )
    return figure


def _densities(axes: Axes, result: Mapping[str, Any]) -> None:
    grid = result["grid"]
    for density in result["foreign"].values():
        axes.plot(grid, density, color=drawing.FOREIGN, linewidth=0.6, alpha=0.4)
    if result["foreign_mean"] is not None:
        axes.plot(
            grid,
            result["foreign_mean"],
            color=drawing.FOREIGN,
            linestyle=(0, (4, 2)),
            gid="foreign_mean",
        )
    if result["own"] is not None:
        axes.plot(grid, result["own"], color=drawing.OWN, linewidth=1.8, gid="own")
    # Single tasks may be far narrower than what matters here.
    shown = [curve for curve in (result["own"], result["foreign_mean"]) if curve is not None]
    if shown:
        axes.set_ylim(0, 1.35 * max(map(max, shown)))


# Prototypes ---------------------------------------------------------------------------------------


def prototype_geometry(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Class prototypes as dots, task prototypes as stars, embedded by t-SNE (Figure routing-par).

    One seed; positions have no unit. Colours run from the first task to the last.
    """
    found = _by_view(groups, analyses, "prototype_geometry")
    if not found:
        return None
    with drawing.style():
        columns = 2 if len(found) > 1 else 1
        figure, panels = drawing.panels(len(found), drawing.width_of(columns), 2.9, columns)
        most = max(len(result[view]["tasks"]) for _, result, view in found)
        colours = ScalarMappable(Normalize(1, max(most, 2)), _task_colours())
        for axes, (group, result, view) in zip(panels, found, strict=True):
            classes, tasks = (np.array(result[view][name]) for name in ("classes", "tasks"))
            look: dict[str, Any] = {"edgecolors": drawing.INK}
            shades = colours.to_rgba(np.array(result["class_tasks"]) + 1)
            axes.scatter(*classes.T, s=13, c=shades, linewidths=0.25, gid="classes", **look)
            shades = colours.to_rgba(np.arange(1, len(tasks) + 1))
            look["marker"] = "*"
            axes.scatter(*tasks.T, s=75, c=shades, linewidths=0.6, gid="tasks", **look)
            if view == next(iter(_VIEWS)):
                drawing.name_panels(figure, [(axes, group)], 2.8)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(True)
            axes.set_xlabel(f"t-SNE, {_VIEW_TITLES[view]}")
        bar = figure.colorbar(colours, ax=panels, shrink=0.7, pad=0.02)
        bar.set_label("Task")
        drawing.whole_numbers(bar.ax.yaxis)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _task_colours() -> LinearSegmentedColormap:
    """Viridis without its ends, which vanish on dark and on light pages."""
    whole = matplotlib.colormaps["viridis"]
    return LinearSegmentedColormap.from_list("tasks", whole(np.linspace(0.12, 0.93, 64)))
