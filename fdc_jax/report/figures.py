"""Figures of the report and their files.

Functions draw one group or all groups, and return None if numbers are missing. `figures.json` has
titles and captions by the names of the functions.
"""

import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from fdc_jax import evaluation
from fdc_jax.machine.files import read_json, write_atomically, write_text
from fdc_jax.report import diagnostics, drawing, formatting
from fdc_jax.report.drawing import Figure, Normalize, PowerNorm, ScalarMappable
from fdc_jax.report.runs import Group, accuracy_matrices, predictions

_TEXTS: dict[str, dict[str, str]] = read_json(Path(__file__).with_name("figures.json"))
# Colour, marker, label.
_VIEWS = {
    "adapted": (drawing.ADAPTED, "o", "adapted view"),
    "pretrained": (drawing.PRETRAINED, "D", "pretrained view"),
}
_SIDES = {
    "own": (drawing.OWN, "o", "Own images"),
    "foreign": (drawing.FOREIGN, "D", "Foreign images"),
}
_MOST_TEXTS = 10  # columns of a heat map that has its numbers in its cells
# Label of the axis, and quantities.
_SWEPT = {
    "attenuation": ("Attenuation γ", ("attenuation",)),
    "retained_energy": ("Retained energy η", ("retained_energy",)),
    "neighbours": ("Prototype neighbours K", ("neighbours", "nearest")),
}


def accuracy_curve(group: Group) -> Figure | None:
    """Draws accuracies over all learned classes by the number of tasks."""
    accuracies = curve(group)
    if accuracies is None:
        return None
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    for name, (colour, marker) in drawing.looks(accuracies.columns).items():
        values = accuracies[name].unstack("task")
        look = {"marker": marker, "gid": name, "label": formatting.method_title(name)}
        drawing.band(axes, values.columns, values.to_numpy(), colour, **look)
    axes.set(xlabel="Tasks learned", ylabel="Accuracy (%)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    drawing.whole_numbers(axes.xaxis)
    drawing.legend(figure)
    return figure


def curve(group: Group) -> pd.DataFrame | None:
    """Returns accuracies in percent by seed and evaluated task (row) and method (column).

    None if fewer than two tasks were evaluated.
    """
    names = [*group.methods, "oracle"]
    rows: list[dict[str, Any]] = []
    for run in group.runs:
        seed = {"seed": run.results.seed}
        rows += [seed | {"task": p.task + 1} | p.accuracy for p in run.results.curve]
    if len({row["task"] for row in rows}) < 2:
        return None
    return pd.DataFrame(rows).set_index(["seed", "task"]).reindex(columns=names).astype(float)


def task_confusion(group: Group) -> Figure | None:
    """Draws the shares of the images of a task that are sent to other tasks."""
    matrices = ((name, confusion(group, name)) for name in group.methods)
    kept = {name: matrix for name, matrix in matrices if matrix is not None}
    if not kept:
        return None
    titles = {f"Task chosen by {formatting.method_title(name)}": kept[name] for name in kept}
    return _heat_maps(titles, PowerNorm(0.5, 0, 100), "True task", "Images of the true task (%)")


def accuracy_matrix(group: Group) -> Figure | None:
    """Draws the accuracy on every task after every task."""
    matrices = {}
    for name in group.methods:
        by_seed = [*accuracy_matrices(group, name).values()]
        if all(matrix.shape == by_seed[0].shape and len(matrix) > 1 for matrix in by_seed):
            matrices[f"Task, by {formatting.method_title(name)}"] = _mean(by_seed)
    if not matrices:
        return None
    return _heat_maps(matrices, Normalize(0, 100), "Tasks learned", "Accuracy on the task (%)")


def _heat_maps(matrices: Mapping[str, Any], scale: Normalize, rows: str, unit: str) -> Figure:
    """Draws square matrices of percentages by the label of their columns."""
    columns = 2 if len(matrices) == 4 else 3
    figure, panels = drawing.panels(len(matrices), 6.3 / columns, columns, sharey=True)
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        height, width = matrix.shape
        cells = np.asarray(matrix)
        axes.imshow(cells, "Blues", norm=scale, extent=(0.5, width + 0.5, height + 0.5, 0.5))
        if width <= _MOST_TEXTS:
            for row, column in np.argwhere(~np.isnan(cells)):
                value = cells[row, column]
                ink = "white" if scale(value) > 0.5 else drawing.INK
                label = column + 1, row + 1, f"{value:.0f}"
                axes.text(*label, color=ink, fontsize=6, ha="center", va="center")
        axes.grid(visible=False)
        axes.set_xlabel(textwrap.fill(title, 26))
        drawing.whole_numbers(axes.xaxis, axes.yaxis)
    panels[0].set_ylabel(rows)
    figure.colorbar(ScalarMappable(scale, "Blues"), ax=panels, label=unit, shrink=0.8)
    return figure


def confusion(group: Group, method: str) -> Float[np.ndarray, "tasks tasks"] | None:
    """Returns the percentage of a task's test images (row) that are sent to a task (column).

    Mean over seeds; None if predictions were not kept.
    """
    shares, count = [], group.results.num_tasks
    for columns in map(predictions, group.runs):
        if f"{method}_task" in columns:
            counts = evaluation.task_confusion(columns["task"], columns[f"{method}_task"], count)
            shares.append(100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    return np.mean(shares, axis=0) if shares else None


# Figure motivation-gap of the paper.
def task_identity(groups: Sequence[Group]) -> Figure | None:
    """Draws final accuracies of all groups, without task identity and with the task given."""
    if len(groups) < 2:
        return None
    figure, (axes,) = drawing.panels(1, 1.2 + 0.22 * len(groups), 1)
    methods = itertools.chain.from_iterable(group.methods for group in groups)
    looks = drawing.looks([*methods, "oracle"])
    for row, group in enumerate(groups):
        for name in filter(group.has, (*group.methods, "oracle")):
            colour, marker = looks[name]
            accuracy = group.row(name)
            look: dict[str, Any] = {"color": colour, "gid": f"{name}-{row}"}
            look["label"] = formatting.method_title(name)
            deviation = np.nan_to_num(accuracy["std"])
            axes.errorbar([accuracy["mean"]], [row], xerr=[deviation], fmt=marker, **look)
    names = [group.name if len(group.name) < 48 else f"{group.name[:47]}…" for group in groups]
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.4, -0.6), xlabel="Final accuracy (%)")
    axes.yaxis.grid(visible=False)
    drawing.legend(figure)
    return figure


def _mean(seeds: Sequence[Any]) -> Any:
    """Returns the mean over the frames of seeds; NaN if a seed has no number."""
    return sum(seeds) / len(seeds)


# Figure motivation-confusability of the paper.
def similarity(group: Group) -> Figure | None:
    """Draws routing errors of pairs of tasks against their similarity."""
    if not (seeds := group.analyses.get("similarity")):
        return None
    mean = _mean(seeds)
    correlation = _mean([diagnostics.correlations(pairs) for pairs in seeds])
    figure, panels = drawing.panels(2, 2.6, 2, sharey="row")
    kinds = {"residual": "residuals", "affinity": "affinities"}
    for axes, (kind, label) in zip(panels, kinds.items(), strict=True):
        for view, (colour, marker, name) in _VIEWS.items():
            column = f"{view}_{kind}"
            if column in mean:
                if column in correlation:
                    name += f", ρ = {formatting.minus(str(formatting.number(correlation[column])))}"
                drawing.points(axes, mean[column], mean["error"], colour, marker, view, name)
        axes.set_xlabel(f"Similarity by {label} (std of the other task)")
        axes.legend()
    panels[0].set_ylabel("Routing error (%)")
    return figure


# Figure routing-osp of the paper.
def residual_contributions(group: Group) -> Figure | None:
    """Draws the residual contribution to own and foreign logits by head."""
    if not (seeds := group.analyses.get("residual_contributions")):
        return None
    mean = _mean(seeds)
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    for side, (colour, marker, label) in _SIDES.items():
        drawing.points(axes, mean.index + 1, mean[side], colour, marker, side, label)
        axes.axhline(mean[side].mean(), color=colour)
    axes.set(xlabel="Task of the head", ylabel="Residual contribution\n(std of own logits)")
    drawing.whole_numbers(axes.xaxis)
    drawing.legend(figure)
    return figure


# Figure routing-srlr of the paper.
def residual_distributions(group: Group) -> Figure | None:
    """Draws densities of residuals of own and foreign images, by view, for two heads."""
    if not (seeds := group.analyses.get("residual_distributions")):
        return None
    cells = [*itertools.product(seeds[0], ("first", "last"))]
    figure, panels = drawing.panels(len(cells), 1.95, 2)
    for axes, (view, head) in zip(panels, cells, strict=True):
        densities = seeds[0][view][head]
        task = 0 if head == "first" else group.results.num_tasks - 1
        own = densities.reindex(columns=[task])[task]  # NaN if the task has no density
        foreign = densities.drop(columns=task, errors="ignore")
        mean = foreign.mean(axis=1)
        axes.plot(own, color=drawing.OWN, linewidth=1.8, label="Own task", gid="own")
        dashes, name = (0, (4, 2)), "Mean of foreign tasks"
        axes.plot(mean, color=drawing.FOREIGN, linestyle=dashes, gid="foreign_mean", label=name)
        look = {"color": drawing.FOREIGN, "linewidth": 0.6, "alpha": 0.4, "zorder": 1}
        axes.plot(foreign, label="Single foreign tasks", **look)
        # The densities of single tasks may be far higher.
        axes.set_ylim(0, 1.35 * np.nanmax([1e-9, own.max(), mean.max()]))
        axes.set_xlabel(f"Standardised residual, {head} head (task {task + 1})")
        if head == "first":
            axes.set_ylabel(f"Density,\n{_VIEWS[view][2]}")
    drawing.legend(figure)
    return figure


# Figure routing-par of the paper.
def prototype_geometry(group: Group) -> Figure | None:
    """Draws prototypes of classes and tasks in the plane, by view."""
    if not (seeds := group.analyses.get("prototype_geometry")):
        return None
    figure, panels = drawing.panels(len(seeds[0]), 2.9, 2)
    colours = ScalarMappable(Normalize(1, max(group.results.num_tasks, 2)), "viridis")
    for axes, (view, prototypes) in zip(panels, seeds[0].items(), strict=True):
        of_task = prototypes["label"] < 0
        for rows, size, mark in ((~of_task, 13, "o"), (of_task, 75, "*")):
            dots, look = prototypes[rows], {"edgecolors": drawing.INK, "linewidths": 0.4}
            axes.scatter(dots.x, dots.y, size, colours.to_rgba(dots.task + 1), marker=mark, **look)
        axes.set(xticks=[], yticks=[], xlabel=f"t-SNE, {_VIEWS[view][2]}")
        axes.spines[:].set_visible(True)
    drawing.whole_numbers(figure.colorbar(colours, ax=panels, label="Task", shrink=0.7).ax.yaxis)
    return figure


# Figures tsf-hyperparameters and app-pac-k of the paper.
def sweeps(group: Group) -> Figure | None:
    """Draws the accuracy of FDC by values of its settings."""
    swept: Any = group.numbers[group.numbers["quantity"].str.contains("=")]
    if swept.empty:
        return None
    names = swept["quantity"].str.partition("=")
    swept = swept.assign(setting=names[0], at=names[2].astype(float))
    shown = [name for name in _SWEPT if name in set(swept["setting"])]
    figure, panels = drawing.panels(len(shown), 2.3, 3)
    for axes, name in zip(panels, shown, strict=True):
        title, columns = _SWEPT[name]
        for column in columns:
            of_setting = swept[swept["setting"] == column]
            accuracy = of_setting.pivot(index="seed", columns="at", values="value")
            other = column == "nearest"
            colour, marker = (drawing.PRETRAINED, "D") if other else (drawing.FDC, "s")
            look = {"marker": marker, "gid": column, "label": "Nearest" if other else "FDC"}
            drawing.band(axes, accuracy.columns, accuracy.to_numpy(), colour, **look)
        default: float = group.results.config[f"fdc.{name}"]
        axes.axvline(default, color=drawing.INK, linestyle=":", linewidth=1.0, gid="default")
        axes.set_xlabel(title)
        if name == "neighbours":
            drawing.whole_numbers(axes.xaxis)
    panels[0].set_ylabel("FDC accuracy (%)")
    drawing.legend(figure)
    return figure


# Files -------------------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """A figure, ready to be shown and to be written."""

    name: str  # stem of its files: small letters, digits, `_` and `-`
    kind: str  # name of the function that drew it
    title: str
    caption: str
    groups: list[Group]
    figure: Figure
    svg: str


# Figures of runs, at the head of the page, and of analyses.
_OF_A_RUN = (accuracy_curve, accuracy_matrix, task_confusion)
_OF_ANALYSES = (
    similarity,
    residual_contributions,
    residual_distributions,
    prototype_geometry,
    sweeps,
)
OF_A_RUN = tuple(function.__name__ for function in _OF_A_RUN)


def draw(groups: Sequence[Group]) -> list[Drawing]:
    """Draws the figure of all groups, and the figures of every group."""
    drawn = [_drawn(task_identity, groups)]
    for function in (*_OF_A_RUN, *_OF_ANALYSES):
        drawn += [_drawn(function, group, number) for number, group in enumerate(groups, 1)]
    return [*filter(None, drawn)]


def _drawn(function: Callable[[Any], Figure | None], shown: Any, number: int = 0) -> Drawing | None:
    """Draws a figure of all groups, or of one group with its number."""
    with drawing.style():
        figure = function(shown)
        if figure is None:
            return None
        text = drawing.svg(figure)
        figure.set_layout_engine("none")  # files of other kinds keep this layout
    kind = name = function.__name__
    title = _TEXTS[kind]["title"]
    if isinstance(shown, Group):
        stem = f"{kind}_{number}_{shown.benchmark}_{shown.learner}".lower()
        name, title = re.sub(r"[^a-z0-9_-]+", "-", stem), f"{title}: {shown.name}"
        shown = [shown]
    return Drawing(name[:80], kind, title, _TEXTS[kind]["caption"], [*shown], figure, text)


def write(drawn: Drawing, folder: Path) -> None:
    """Writes a figure as SVG, PDF and PNG."""
    write_text(folder / f"{drawn.name}.svg", drawn.svg)
    drawn.figure.set_facecolor("white")
    for kind, field in (("pdf", "CreationDate"), ("png", "Software")):
        with drawing.style(), write_atomically(folder / f"{drawn.name}.{kind}") as file:
            drawing.write(drawn.figure, kind, file, {field: None})
