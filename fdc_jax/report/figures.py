"""All figures of the report: what they show, which are drawn for which groups, and their files.

Every function draws a group, or all of them, and returns None where what it shows is not known.
What it says of itself is the figure's title and caption.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from fdc_jax import evaluation
from fdc_jax.machine.files import write_atomically, write_text
from fdc_jax.report import drawing, formatting, frames
from fdc_jax.report.runs import Group

# Inches: a row of a list; axis and legend around it.
_ROW, _FRAME = 0.22, 1.2
# Colour, marker, label.
_VIEWS = {
    "adapted": (drawing.ADAPTED, "o", "adapted view"),
    "pretrained": (drawing.PRETRAINED, "D", "pretrained view"),
}
_SIDES = {
    "own": (drawing.OWN, "o", "Own images"),
    "foreign": (drawing.FOREIGN, "D", "Foreign images"),
}
_REFERENCES = ((drawing.FDC, "s", "FDC"), (drawing.PRETRAINED, "D", "Nearest"))
_SWEPT = {
    "attenuation": "Attenuation γ",
    "retained_energy": "Retained energy η",
    "neighbours": "Prototype neighbours K",
}


def accuracy_curve(group: Group) -> Figure | None:
    """Accuracy as tasks are learned.

    Accuracy over all classes seen so far, after each task. Means over seeds; of several, one sample
    standard deviation is shaded.
    """
    found = frames.curve(group)
    if found is None:
        return None
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    for name, (colour, marker) in drawing.looks(found.columns).items():
        values, label = found[name].unstack("task"), formatting.method_title(name)
        look = {"marker": marker, "gid": name, "label": label}
        drawing.band(axes, values.columns, values.to_numpy(), colour, **look)
    axes.set_xlabel("Tasks learned")
    axes.set_ylabel("Accuracy (%)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    drawing.whole_numbers(axes.xaxis)
    drawing.legend(figure)
    return figure


def task_confusion(group: Group) -> Figure | None:
    """Where the images of each task are sent.

    Percent of the test images of a true task (row) that each task (column) wins. The diagonal is
    right. Colours follow the square root, to show what lies off the diagonal.
    """
    matrices = {name: frames.confusion(group, name) for name in group.methods}
    found = {name: each for name, each in matrices.items() if each is not None}
    if not found:
        return None
    figure, panels = drawing.panels(len(found), 2.5, 3, sharey=True)
    scale, edge = PowerNorm(0.5, 0, 100), group.results["num_tasks"] + 0.5
    for axes, (name, values) in zip(panels, found.items(), strict=True):
        axes.imshow(values, "Blues", norm=scale, extent=(0.5, edge, edge, 0.5))
        axes.grid(visible=False)
        axes.set_xlabel(f"Task chosen by {formatting.method_title(name)}")
        drawing.whole_numbers(axes.xaxis)
        drawing.whole_numbers(axes.yaxis)
    panels[0].set_ylabel("True task")
    colours = ScalarMappable(scale, "Blues")
    figure.colorbar(colours, ax=panels, label="Images of the true task (%)", shrink=0.8)
    return figure


# Figure motivation-gap of the paper.
def task_identity(groups: Sequence[Group]) -> Figure | None:
    """Final accuracy with and without task identity.

    Final accuracy without task identity, by raw logits and by calibrators, and by raw logits when
    the true task is given. Points are means over seeds, bars one sample standard deviation.
    """
    if len(groups) < 2:
        return None
    figure, (axes,) = drawing.panels(1, _FRAME + _ROW * len(groups), 1)
    looks = drawing.looks([*(name for group in groups for name in group.methods), "oracle"])
    for row, group in enumerate(groups):
        for name in (*group.methods, "oracle"):
            (colour, marker), title = looks[name], formatting.method_title(name)
            mean, std = evaluation.mean_and_std(group.values(name))
            look: dict[str, Any] = {"color": colour, "label": title, "gid": f"{name}-{row}"}
            axes.errorbar([mean], [row], xerr=[np.nan_to_num(std)], fmt=marker, **look)
    drawing.names_down(axes, [group.name for group in groups])
    axes.set_xlabel("Final accuracy (%)")
    drawing.legend(figure)
    return figure


def _mean(seeds: Sequence[Any]) -> Any:
    """Mean over the seeds' frames; NaN where a seed has no number."""
    return sum(seeds) / len(seeds)


# Figure motivation-confusability of the paper.
def similarity(group: Group) -> Figure | None:
    """Feature similarity against routing error.

    Each point is an ordered pair of tasks, mean over seeds: the share of the first task's test
    images that the second one's head wins by raw logits, against how well the first task's
    training images fit the second task compared with their own, by subspace residuals (left) and
    by prototype affinities (right), in standard deviations of the task they are measured against.
    Larger is more alike. ρ is Spearman's rank correlation, mean over seeds.
    """
    seeds = group.analyses.get("similarity")
    if not seeds:
        return None
    mean = _mean(seeds)
    correlation = _mean([each.corr(method="spearman")["error"] for each in seeds])
    figure, panels = drawing.panels(2, 2.6, 2, sharey="row")
    kinds = {"residual": "residuals", "affinity": "affinities"}
    for axes, (kind, label) in zip(panels, kinds.items(), strict=True):
        for view, (colour, marker, name) in _VIEWS.items():
            column = f"{view}_{kind}"
            if column in mean:
                rank = f"{name}, ρ = {formatting.minus(f'{correlation[column]:.2f}')}"
                look = {"gid": view, "label": rank}
                drawing.points(axes, mean[column], mean["error"], colour, marker, **look)
        axes.set_xlabel(f"Similarity by {label} (std of the other task)")
        axes.legend()
    panels[0].set_ylabel("Routing error (%)")
    return figure


# Figure routing-osp of the paper.
def residual_contributions(group: Group) -> Figure | None:
    """What features outside the task subspace add to logits.

    For the head of each task, the mean over its own, or over all foreign, test images of what
    features outside the head's subspace add to the logit of the class it predicts, in standard
    deviations of the head's own-training largest logits; means over seeds. Lines are means over
    heads.
    """
    seeds = group.analyses.get("residual_contributions")
    if not seeds:
        return None
    mean = _mean(seeds)
    figure, (axes,) = drawing.panels(1, 2.5, 1)
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    for side, (colour, marker, label) in _SIDES.items():
        look = {"gid": side, "label": label}
        drawing.points(axes, mean.index + 1, mean[side], colour, marker, **look)
        axes.axhline(mean[side].mean(), color=colour)
    axes.set_xlabel("Task of the head")
    axes.set_ylabel("Residual contribution\n(std of own logits)")
    drawing.whole_numbers(axes.xaxis)
    drawing.legend(figure)
    return figure


# Figure routing-srlr of the paper.
def residual_distributions(group: Group) -> Figure | None:
    """Residuals of own and foreign images.

    Densities of the residual ratios of test images as the first and the last head see them,
    standardised by the head's own training images, so that 0 is the mean of those and 1 is one
    standard deviation above it; first seed. The dashed curve is the mean of the foreign tasks'
    densities, each with equal weight.
    """
    seeds = group.analyses.get("residual_distributions")
    if not seeds:
        return None
    cells = [(view, head) for view in seeds[0] for head in ("first", "last")]
    figure, panels = drawing.panels(len(cells), 1.95, 2)
    pink: dict[str, Any] = {"color": drawing.FOREIGN}
    for axes, (view, head) in zip(panels, cells, strict=True):
        densities = seeds[0][view][head]
        task = 0 if head == "first" else group.results["num_tasks"] - 1
        own = densities.reindex(columns=[task])[task]  # NaN where it has none.
        foreign = densities.drop(columns=task, errors="ignore")
        mean = foreign.mean(axis=1)
        axes.plot(own, color=drawing.OWN, linewidth=1.8, label="Own task", gid="own")
        look = {"linestyle": (0, (4, 2)), "gid": "foreign_mean"} | pink
        axes.plot(mean, label="Mean of foreign tasks", **look)
        label = "Single foreign tasks"
        axes.plot(foreign, linewidth=0.6, alpha=0.4, label=label, zorder=1, **pink)
        # Single tasks may be far narrower than what matters here.
        axes.set_ylim(0, 1.35 * np.nanmax([1e-9, own.max(), mean.max()]))
        axes.set_xlabel(f"Standardised residual, {head} head (task {task + 1})")
        if head == "first":
            axes.set_ylabel(f"Density,\n{_VIEWS[view][2]}")
    drawing.legend(figure)
    return figure


# Figure routing-par of the paper.
def prototype_geometry(group: Group) -> Figure | None:
    """Geometry of prototypes.

    Class prototypes (dots) and the task prototypes that average them (stars), embedded together
    by t-SNE in each view; positions have no unit. First seed. Colours run from the first task to
    the last.
    """
    seeds = group.analyses.get("prototype_geometry")
    if not seeds:
        return None
    figure, panels = drawing.panels(len(seeds[0]), 2.9, 2)
    colours = ScalarMappable(Normalize(1, max(group.results["num_tasks"], 2)), "viridis")
    for axes, (view, places) in zip(panels, seeds[0].items(), strict=True):
        of_task = places["label"] < 0
        for mine, size, marker in ((~of_task, 13, "o"), (of_task, 75, "*")):
            of, look = places[mine], {"edgecolors": drawing.INK, "linewidths": 0.4}
            axes.scatter(of.x, of.y, size, colours.to_rgba(of.task + 1), marker=marker, **look)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.set_xlabel(f"t-SNE, {_VIEWS[view][2]}")
    drawing.whole_numbers(figure.colorbar(colours, ax=panels, label="Task", shrink=0.7).ax.yaxis)
    return figure


# Figures tsf-hyperparameters and app-pac-k of the paper.
def sweeps(group: Group) -> Figure | None:
    """Settings of FDC.

    Final accuracy of full FDC in percent, fitted anew at every setting. The dotted line is the
    setting of the run; vertical axes differ. Nearest standardises affinities not by the task's own
    training images for the same K but over the tasks that compete for an image. Means over seeds;
    of several, one sample standard deviation is shaded.
    """
    swept = {name: frames.sweep(group, name) for name in (*_SWEPT, "nearest")}
    shown = [name for name in _SWEPT if len(swept[name].columns)]
    if not shown:
        return None
    figure, panels = drawing.panels(len(shown), 2.3, 3)
    for axes, name in zip(panels, shown, strict=True):
        for column in (name, *["nearest"] * (name == "neighbours")):
            (colour, marker, label), of = _REFERENCES[column == "nearest"], swept[column]
            look = {"marker": marker, "gid": column, "label": label}
            drawing.band(axes, of.columns, of.to_numpy(), colour, **look)
        default: float = group.results["config"][f"fdc.{name}"]
        axes.axvline(default, color=drawing.INK, linestyle=":", linewidth=1.0, gid="default")
        axes.set_xlabel(_SWEPT[name])
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
    caption: str  # what one sees, and whose numbers: marks, units, spread, groups, seeds
    groups: list[Group]
    figure: Figure
    svg: str


# Figures of a run itself, which stand at the head of the page, and of its analyses.
_OF_A_RUN = (accuracy_curve, task_confusion)
_OF_ANALYSES = (
    *(similarity, residual_contributions, residual_distributions, prototype_geometry),
    sweeps,
)
OF_A_RUN = tuple(each.__name__ for each in _OF_A_RUN)


def draw(groups: Sequence[Group]) -> list[Drawing]:
    """Draws all figures of some groups: one of all, and those of each group."""
    found = [_drawn(task_identity, groups)]
    for function in (*_OF_A_RUN, *_OF_ANALYSES):
        found += [_drawn(function, each, place) for place, each in enumerate(groups, 1)]
    return [*filter(None, found)]


def _drawn(function: Callable[[Any], Figure | None], of: Any, place: int = 0) -> Drawing | None:
    """Draws a figure, if there is one, with the title and caption of its function."""
    with drawing.style():
        figure = function(of)
        if figure is None:
            return None
        text = drawing.svg(figure)
        figure.set_layout_engine("none")  # files of other kinds keep this layout
    kind = name = function.__name__
    title, _, caption = (function.__doc__ or "").partition(".\n\n")
    if isinstance(of, Group):
        name = re.sub(r"[^a-z0-9_-]+", "-", f"{kind}_{place}_{of.benchmark}_{of.learner}".lower())
        title, of = f"{title}: {of.name}", [of]
    return Drawing(name[:80], kind, title, " ".join(caption.split()), [*of], figure, text)


def write(drawn: Drawing, folder: Path) -> None:
    """Writes `<name>.svg`, `<name>.pdf` and `<name>.png` (200 dots an inch, white face)."""
    write_text(folder / f"{drawn.name}.svg", drawn.svg)
    for kind, author in (("pdf", "CreationDate"), ("png", "Software")):
        with drawing.style(), write_atomically(folder / f"{drawn.name}.{kind}") as file:
            look = {"format": kind, "facecolor": "white", "metadata": {author: None}}
            drawn.figure.savefig(file, **look)
