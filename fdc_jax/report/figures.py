"""All figures of the report: which are drawn for which groups, what they say, and their files."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from fdc_jax.learners import title as learner_title
from fdc_jax.report import drawing, paper
from fdc_jax.report.accuracy_figures import gains, task_identity
from fdc_jax.report.analysis import Analyses
from fdc_jax.report.feature_figures import (
    prototype_geometry,
    residual_contributions,
    residual_distributions,
    similarity,
)
from fdc_jax.report.prediction_figures import accuracy_curves, decomposition, task_confusion
from fdc_jax.report.runs import Group
from fdc_jax.report.sweep_figures import neighbours, sweeps

__all__ = [
    "FIGURES",
    "Drawing",
    "accuracy_curves",
    "build",
    "decomposition",
    "draw",
    "gains",
    "neighbours",
    "prototype_geometry",
    "residual_contributions",
    "residual_distributions",
    "similarity",
    "sweeps",
    "task_confusion",
    "task_identity",
    "write",
]

# Benchmarks side by side.
_MOST_COLUMNS = 5


class Drawing(NamedTuple):
    """A figure, ready to be shown and to be written.

    Attributes:
        name: stem of its files: small letters, digits, `_` and `-`.
        kind: name of the function that drew it.
        title: what it shows.
        caption: what one sees: marks, units, spread.
        shown: which groups and seeds.
        figure: the figure itself.
        svg: the same as SVG text.
    """

    name: str
    kind: str
    title: str
    caption: str
    shown: str
    figure: Figure
    svg: str


class _Kind(NamedTuple):
    """A kind of figure; `of` says what one figure holds: all groups, several side by side, one."""

    draw: Callable[[Sequence[Group], Analyses], Figure | None]
    of: str
    title: str
    caption: str


_SPREAD = "Points are means over seeds, bars one sample standard deviation."
_BAND = "Means over seeds, with one sample standard deviation shaded."
_PAPER = " Empty markers are the paper's numbers, where runs follow its protocol."

_KINDS = (
    _Kind(
        task_identity,
        "all",
        "Final accuracy with and without task identity",
        "Final accuracy in percent without task identity, by raw logits and by FDC, and by raw "
        "logits when the true task is given. " + _SPREAD + _PAPER,
    ),
    _Kind(
        gains,
        "all",
        "Gain of FDC over raw",
        "Gain of full FDC in percentage points, written at the right, with its 95 % interval: "
        "Student's t over gains paired within seeds, or, dashed, a bootstrap over test images "
        "where there is one seed. A cross marks the components that the paper selects for a "
        "learner, where those are not all." + _PAPER,
    ),
    _Kind(
        accuracy_curves,
        "several",
        "Accuracy as tasks are learned",
        "Accuracy in percent over all classes seen so far, after each task. " + _BAND,
    ),
    _Kind(
        decomposition,
        "group",
        "What predictions get right and wrong, by task",
        "Test images of each task, and of all, in percent, by the two decisions of a prediction: "
        "the task and the class. Left bars are raw, right bars FDC; means over seeds. Hatched is "
        "what the right task alone would repair. Where an older run recorded the class given the "
        "task for raw logits only, it stands in for FDC's on single tasks.",
    ),
    _Kind(
        task_confusion,
        "group",
        "Where the images of each task are sent",
        "Percent of the test images of a true task (row) that each head wins (column), raw and "
        "with FDC; means over seeds. The diagonal is right. The colour scale follows the square "
        "root, to show what lies off the diagonal.",
    ),
    _Kind(
        similarity,
        "group",
        "Feature similarity against routing error",
        "Each point is an ordered pair of tasks, mean over seeds: the share in percent of the "
        "first task's test images that the second one's head wins by raw logits, against how well "
        "the first task's training images fit the second task compared with their own, by subspace "
        "residuals (left) and by prototype affinities (right), in standard deviations of the task "
        "they are measured against. Larger is more alike. Lines join means over equal parts "
        "of the pairs; ρ is Spearman's rank correlation, mean over seeds.",
    ),
    _Kind(
        residual_contributions,
        "several",
        "What features outside the task subspace add to logits",
        "Each point is a head, from the first task at the left to the last at the right of its "
        "column: the mean over its own, or over all foreign, test images of what features outside "
        "the head's subspace add to the logit of the class it predicts, in standard deviations of "
        "the head's own-training largest logits; means over seeds. Bars are means over heads.",
    ),
    _Kind(
        residual_distributions,
        "group",
        "Residuals of own and foreign images",
        "Densities of the residual ratios of test images as the first and the last head see them, "
        "standardised by the head's own training images, so that 0 is the mean of those and 1 is "
        "one standard deviation above it. The dashed curve is the mean of the foreign tasks' "
        "densities, each with equal weight.",
    ),
    _Kind(
        prototype_geometry,
        "group",
        "Geometry of prototypes",
        "Class prototypes (dots) and the task prototypes that average them (stars), embedded "
        "together by t-SNE in each view; positions have no unit. Colours run from the first task "
        "to the last.",
    ),
    _Kind(
        sweeps,
        "several",
        "Attenuation and retained energy",
        "Final accuracy of full FDC in percent, fitted anew at every setting. The dotted line is "
        "the setting of the run; vertical axes differ. " + _BAND + _PAPER,
    ),
    _Kind(
        neighbours,
        "several",
        "Number of prototype neighbours",
        "Final accuracy of full FDC in percent when affinities average the K nearest prototypes of "
        "a task. Distributional matching standardises them by the task's own training affinities "
        "for the same K, Nearest by the affinities of the same image to all tasks. The dotted line "
        "is the setting of the run. " + _BAND,
    ),
)


# What has no mean over seeds.
_OF_ONE_SEED = (residual_distributions, prototype_geometry)

# Analyses that not every run may have.
_FROM = {
    "sweeps": ("sweep_attenuation", "sweep_retained_energy"),
    "neighbours": ("sweep_neighbours",),
    "residual_contributions": ("residual_contributions",),
}

FIGURES = tuple(kind.draw.__name__ for kind in _KINDS)


def build(groups: Sequence[Group], analyses: Analyses) -> list[Drawing]:
    """Draws every figure that there is data for.

    Args:
        groups: of the report.
        analyses: by path of the run, then by name of the analysis; may lack any.
    """
    return [each for name in FIGURES for each in draw(name, groups, analyses)]


def draw(name: str, groups: Sequence[Group], analyses: Analyses) -> list[Drawing]:
    """Draws the figures of one kind: one of all groups, one per group, or several side by side.

    Args:
        name: of `FIGURES`.
        groups: of the report.
        analyses: by path of the run, then by name of the analysis; may lack any.
    """
    kind = _KINDS[FIGURES.index(name)]
    found: list[Drawing] = []
    taken: set[str] = set()
    for stem, members in _parts(groups, kind.of):
        figure = kind.draw(members, analyses)
        if figure is None:
            continue
        file = _unique("_".join([name, *stem]), taken)
        title, caption = _title(kind, members), _caption(kind, members)
        shown = _shown(kind, members, analyses)
        found.append(Drawing(file, name, title, caption, shown, figure, drawing.svg(figure)))
    return found


def write(figure: Drawing, folder: Path) -> list[Path]:
    """Writes `<name>.svg` and `<name>.png` (200 dots an inch) and returns their paths."""
    return drawing.write(figure.figure, folder, figure.name, figure.svg)


def _parts(groups: Sequence[Group], of: str) -> list[tuple[list[str], list[Group]]]:
    """Returns the groups of each figure, with what tells their files apart."""
    if of == "all":
        return [([], list(groups))]
    if of == "group":
        return [([group.learner, group.benchmark], [group]) for group in groups]
    # As in the paper, a learner on all benchmarks; or all learners on the one there is.
    by_learner = max(Counter(group.learner for group in groups).values(), default=0) > 2
    lists: dict[str, list[Group]] = {}
    for group in groups:
        lists.setdefault(group.learner if by_learner else group.benchmark, []).append(group)
    parts = []
    for name, members in lists.items():
        # Figures of about as many columns each.
        count = -(-len(members) // _MOST_COLUMNS)
        for part in range(count):
            alike = members[part * len(members) // count : (part + 1) * len(members) // count]
            parts.append(([name], alike))
    return parts


def _unique(name: str, taken: set[str]) -> str:
    stem = re.sub(r"[^a-z0-9_-]+", "-", name.lower())[:80]
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def _title(kind: _Kind, members: Sequence[Group]) -> str:
    if kind.of == "all":
        return kind.title
    learners = {learner_title(group.learner) for group in members}
    benchmarks = {paper.benchmark_title(group.benchmark) for group in members}
    common = [next(iter(names)) for names in (learners, benchmarks) if len(names) == 1]
    return ": ".join([kind.title, ", ".join(common)]) if common else kind.title


def _caption(kind: _Kind, members: Sequence[Group]) -> str:
    published = any(group.follows_protocol for group in members)
    return kind.caption if published else kind.caption.replace(_PAPER, "")


def _shown(kind: _Kind, members: Sequence[Group], analyses: Analyses) -> str:
    """Says whose numbers a figure shows; nothing where it shows all."""
    if kind.of == "all":
        return ""
    if kind.draw in _OF_ONE_SEED:
        name = kind.draw.__name__
        run = next(run for run in members[0].runs if analyses[str(run.path)].get(name))
        return f"{members[0].name}; seed {run.seed}."
    members = [group for group in members if _has_data(kind, group, analyses)]
    if len(members) == 1:
        return f"{members[0].name}; {_seeds(members[0])}."
    return "; ".join(f"{group.name} ({_seeds(group)})" for group in members) + "."


def _has_data(kind: _Kind, group: Group, analyses: Analyses) -> bool:
    names = _FROM.get(kind.draw.__name__, ())
    found = [analyses.get(str(run.path), {}) for run in group.runs]
    return not names or any(each.get(name) for each in found for name in names)


def _seeds(group: Group) -> str:
    numbers = ", ".join(str(seed) for seed in group.seeds)
    return f"seed{'s' if len(group.seeds) > 1 else ''} {numbers}"
