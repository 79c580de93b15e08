"""Figures of curves and of single predictions: what was learned when, and where images were sent.

Every function draws the groups it is given and returns None where they have nothing to draw.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fdc_jax.report import drawing
from fdc_jax.report.analysis import Analyses, having, mean_over_seeds
from fdc_jax.report.runs import Group, RunFolder

_KINDS = ("raw", "fdc", "oracle")
_COLOURS = "Blues"
_CHOSEN = {"raw": "raw scores", "fdc": "FDC"}
_FEW_TASKS = 8  # that fit a column of text
_SHARE = (0, 1, 5, 20, 50, 100)  # percent, marks of the colour scale


# Curves -------------------------------------------------------------------------------------------


def accuracy_curves(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Accuracy in percent over all classes seen so far, after each task.

    Means over seeds with the sample standard deviation as a band.
    """
    curves = [(group, _curves(group.runs)) for group in groups]
    curves = [(group, found) for group, found in curves if found["raw"].shape[1] > 1]
    if not curves:
        return None
    columns = min(len(curves), 3)
    with drawing.style():
        width = drawing.width_of(columns)
        height = 2.4 if columns == 1 else 2.15
        figure, panels = drawing.panels(len(curves), width, height, columns)
        named = [(axes, group) for axes, (group, _) in zip(panels, curves, strict=True)]
        drawing.name_panels(figure, named, width / columns - 0.35, columns)
        for axes, (_, found) in zip(panels, curves, strict=True):
            for name in _KINDS:
                places = np.arange(1.0, found[name].shape[1] + 1)
                look: dict[str, Any] = {
                    "marker": drawing.MARKERS[name],
                    "markersize": 3,
                    "gid": name,
                }
                drawing.band(axes, places, found[name], drawing.COLOURS[name], **look)
            axes.set_xlabel("Tasks learned")
            axes.set_ylabel("Accuracy (%)")
            axes.set_ylim(top=min(axes.get_ylim()[1], 101))
            drawing.whole_numbers(axes.xaxis)
        drawing.legend(figure, [drawing.key(name, line=True) for name in _KINDS])
    return figure


def _curves(runs: Sequence[RunFolder]) -> dict[str, Float[np.ndarray, "seeds tasks"]]:
    """Returns one row per seed that was evaluated after every task."""
    complete = []
    for run in runs:
        points = [_accuracies(point) for point in run.results.get("curve") or []]
        if len(points) == run.results.get("num_tasks") and None not in points:
            complete.append(points)
    alike = [points for points in complete if len(points) == len(complete[0])]
    values = np.array(alike, dtype=np.float64) if alike else np.zeros((0, 0, len(_KINDS)))
    return {name: values[:, :, place] for place, name in enumerate(_KINDS)}


def _accuracies(point: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Returns raw, FDC and oracle, or None where one is missing."""
    found = point.get("accuracy") or {}
    values = [found.get(name) for name in _KINDS]
    known = tuple(float(value) for value in values if isinstance(value, int | float))
    return known if len(known) == len(values) else None


# Where images were sent --------------------------------------------------------------------------


def decomposition(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Four shares of the test images of every task and of all: raw left, FDC right; over seeds.

    Shares in percent that sum to 100: right task and class; right task, wrong class; wrong task
    though the class is right given the task; wrong both ways.
    """
    found = having(groups, analyses, "task_confusion")
    if not found:
        return None
    most = max(len(results[0]["num_images"]) for _, results in found)
    with drawing.style():
        width = drawing.COLUMN if most <= _FEW_TASKS else drawing.PAGE
        figure, panels = drawing.panels(len(found), width, 2.5, 1)
        for axes, (group, results) in zip(panels, found, strict=True):
            drawing.name_panels(figure, [(axes, group)], width - 0.5)
            _stacked(axes, {kind: _shares(group, results, kind) for kind in ("raw", "fdc")})
        handles = [
            Patch(facecolor=colour, hatch=hatch, label=label, edgecolor=drawing.INK, linewidth=0.4)
            for colour, hatch, label in drawing.SHARES.values()
        ]
        drawing.legend(figure, handles, columns=1 if width == drawing.COLUMN else 2)
    return figure


def _shares(
    group: Group, results: Sequence[Mapping[str, Any]], kind: str
) -> Float[np.ndarray, "tasks_and_all 4"]:
    """Returns means over seeds in percent, one row per task, and one of all images."""
    tasks = [mean_over_seeds([each[kind][name] for each in results]) for name in drawing.SHARES]
    whole = [group.values("decomposition", kind, name) for name in drawing.SHARES]
    last = [np.mean(values) if values else np.nan for values in whole]
    return np.vstack([np.stack(tasks, axis=1), np.array(last)])


def _stacked(axes: Axes, shares: Mapping[str, Float[np.ndarray, "tasks_and_all 4"]]) -> None:
    count = len(shares["raw"])
    # All images stand apart from the tasks.
    places = np.arange(1, count + 1, dtype=float)
    places[-1] += 0.6
    for offset, kind in ((-0.21, "raw"), (0.21, "fdc")):
        values = np.nan_to_num(shares[kind])
        bottom = np.zeros(count)
        for column, (name, (colour, hatch, _)) in enumerate(drawing.SHARES.items()):
            bars = axes.bar(
                places + offset,
                values[:, column],
                0.38,
                bottom,
                color=colour,
                hatch=hatch,
                edgecolor=drawing.INK,
                linewidth=0.25,
            )
            bars.set_label(f"_{kind} {name}")
            bottom += values[:, column]
    axes.set_xticks(places, [*map(str, range(1, count)), "all"])
    axes.set_xlim(0.4, places[-1] + 0.6)
    axes.set_ylim(0, 100)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("Task (left bar raw, right bar FDC)")
    axes.set_ylabel("Share of images (%)")


def task_confusion(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Where images of each task are sent, raw and with FDC; percent of the task's images.

    Means over seeds. The colour scale is a square root, to show what lies off the diagonal.
    """
    found = having(groups, analyses, "task_confusion")
    if not found:
        return None
    with drawing.style():
        figure, panels = drawing.panels(2 * len(found), drawing.PAGE, 3.2, 2)
        scale = PowerNorm(0.5, 0, 100)
        for row, (group, results) in enumerate(found):
            pair = panels[2 * row : 2 * row + 2]
            for axes, kind in zip(pair, ("raw", "fdc"), strict=True):
                shares = np.mean([_percent(each, kind) for each in results], axis=0)
                _matrix(axes, shares, scale)
                axes.set_xlabel(f"Task chosen by {_CHOSEN[kind]}")
            drawing.name_panels(figure, [(pair[0], group)], 2.6)
            pair[0].set_ylabel("True task")
        bar = figure.colorbar(
            ScalarMappable(scale, _COLOURS), ax=panels, shrink=0.8, ticks=_SHARE, pad=0.02
        )
        bar.set_label("Images of the true task (%)")
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _percent(result: Mapping[str, Any], kind: str) -> Float[np.ndarray, "tasks tasks"]:
    counts = np.array(result[kind]["confusion"], dtype=np.float64)
    return 100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)


def _matrix(axes: Axes, shares: Float[np.ndarray, "tasks tasks"], scale: PowerNorm) -> None:
    count = len(shares)
    extent = (0.5, count + 0.5, count + 0.5, 0.5)
    axes.imshow(shares, cmap=_COLOURS, norm=scale, extent=extent, aspect="auto")
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    for axis in (axes.xaxis, axes.yaxis):
        drawing.whole_numbers(axis)
