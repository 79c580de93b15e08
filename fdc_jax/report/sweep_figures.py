"""Figures of accuracy against one setting of FDC (paper, "Hyperparameter Analysis").

Every function draws the groups that have the sweep and returns None where none has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fdc_jax.report import drawing, paper
from fdc_jax.report.analysis import Analyses, having, of_group
from fdc_jax.report.runs import Group

_PARAMETERS = {"attenuation": "Attenuation γ", "retained_energy": "Retained energy η"}
# Results of the sweep of K: colour, marker, the paper's name.
_REFERENCES = {
    "own": (drawing.FDC, "s", "Distributional matching"),
    "nearest": (drawing.PRETRAINED, "D", "Nearest"),
}


def sweeps(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Accuracy of full FDC against attenuation and retained energy (Figure tsf-hyperparameters).

    A column per group: means over seeds, one sample standard deviation shaded, the default dotted;
    each vertical axis has its own scale. An empty square is the paper's accuracy at the default,
    where a group follows its protocol.
    """
    names = [
        name
        for name in _PARAMETERS
        if any(of_group(group, analyses, f"sweep_{name}") for group in groups)
    ]
    shown = [
        group
        for group in groups
        if any(of_group(group, analyses, f"sweep_{name}") for name in names)
    ]
    if not shown:
        return None
    # One group: its two sweeps side by side. Several: one column each, as in the paper.
    alone = len(shown) == 1
    with drawing.style():
        columns = len(names) if alone else len(shown)
        width = drawing.width_of(columns)
        figure, panels = drawing.panels(
            len(names) * len(shown), width, 2.3 if alone else 1.75, columns
        )
        published = False
        for place, axes in enumerate(panels):
            row, column = divmod(place, len(shown))
            group, name = shown[column], names[row]
            published |= _curve(axes, group, of_group(group, analyses, f"sweep_{name}"))
            axes.set_xlabel(_PARAMETERS[name])
            if alone or column == 0:
                axes.set_ylabel("FDC accuracy (%)")
        top = list(zip(panels, shown, strict=False))
        drawing.name_panels(figure, top, width / columns - 0.35, columns)
        if published:
            drawing.legend(figure, [Line2D([], [], **drawing.hollow("s", drawing.FDC, "Paper"))])
    return figure


def _curve(axes: Axes, group: Group, results: Sequence[Mapping[str, Any]]) -> bool:
    """Draws one panel; returns whether a number of the paper is in it."""
    if not results:
        axes.annotate("not swept", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=7)
        axes.set_yticks([])
        return False
    values, default = results[0]["values"], results[0]["default"]
    alike = [each for each in results if each["values"] == values]
    accuracies = np.array([each["accuracy"] for each in alike])
    _dotted(axes, default)
    look: dict[str, Any] = {"marker": "s", "markersize": 3, "gid": "accuracy"}
    drawing.band(axes, values, accuracies, drawing.FDC, **look)
    reference = paper.accuracy(group.learner, "fdc").get(group.benchmark)
    if not group.follows_protocol or reference is None:
        return False
    axes.plot([default], [reference.mean], **drawing.hollow("s", drawing.FDC))
    return True


def _dotted(axes: Axes, default: float) -> None:
    axes.axvline(default, color=drawing.INK, linestyle=":", linewidth=1.0, gid="default")


def neighbours(groups: Sequence[Group], analyses: Analyses) -> Figure | None:
    """Accuracy against the number of neighbours K, for both references (Figure app-pac-k).

    Means over seeds with one sample standard deviation shaded; the default is dotted.
    """
    found = having(groups, analyses, "sweep_neighbours")
    if not found:
        return None
    with drawing.style():
        columns = min(len(found), 3)
        width = drawing.width_of(columns)
        height = 2.5 if columns == 1 else 2.1
        figure, panels = drawing.panels(len(found), width, height, columns)
        named = [(axes, group) for axes, (group, _) in zip(panels, found, strict=True)]
        drawing.name_panels(figure, named, width / columns - 0.35, columns)
        for axes, (_, results) in zip(panels, found, strict=True):
            values = results[0]["values"]
            alike = [each for each in results if each["values"] == values]
            _dotted(axes, results[0]["default"])
            for name, (colour, marker, _) in _REFERENCES.items():
                accuracies = np.array([each[name]["accuracy"] for each in alike])
                look: dict[str, Any] = {"marker": marker, "markersize": 3, "gid": name}
                drawing.band(axes, values, accuracies, colour, **look)
            axes.set_xlabel("Prototype neighbours K")
            axes.set_ylabel("FDC accuracy (%)")
            drawing.whole_numbers(axes.xaxis)
        drawing.legend(
            figure,
            [
                Line2D([], [], color=colour, marker=marker, markersize=3.5, label=label)
                for colour, marker, label in _REFERENCES.values()
            ],
        )
    return figure
