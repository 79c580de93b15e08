"""What all figures share: style, colours, panels, reproducible files. The only Matplotlib set-up.

Figures are made without pyplot, so nothing is shown and no global state changes.
"""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fdc_jax.files import write_atomically
from fdc_jax.learners import title as learner_title
from fdc_jax.report import paper
from fdc_jax.report.runs import Group

# Inches.
COLUMN, PAGE = 3.3, 6.75

# Points, the mean width of a letter at 7 pt, and of a bold one at 8 pt.
_LETTER, _BOLD_LETTER = 3.7, 5.3

# Dark, medium and light for eyes of every kind, and each with a marker of its own for grey prints.
INK = "#222222"
PAPER = "#fefefe"
GRID = "#8c8c8c"
RAW, FDC, ORACLE = "#c77700", "#0b559f", "#6e6e6e"
MARKERS = {"raw": "o", "fdc": "s", "oracle": "^"}
COLOURS = {"raw": RAW, "fdc": FDC, "oracle": ORACLE}
TITLES = {"raw": "Raw", "fdc": "FDC", "oracle": "Given task identity"}
OWN, FOREIGN = "#00664d", "#c75f9f"
ADAPTED, PRETRAINED = "#4b3f8f", "#b58900"
SHARES = {
    "right_task_right_class": ("#3a7d5d", "", "right task, right class"),
    "right_task_wrong_class": ("#b9d5c5", "", "right task, wrong class"),
    "wrong_task_oracle_right": ("#e3b04b", "////", "wrong task, class right given the task"),
    "wrong_task_oracle_wrong": ("#8c4a3c", "", "wrong task, wrong given the task too"),
}

_STYLE = Path(__file__).with_name("fdc.mplstyle")


@contextmanager
def style() -> Iterator[None]:
    """Draws or saves with this package's style, whatever the user's own settings are."""
    with matplotlib.rc_context(fname=_STYLE):
        yield


def panels(
    count: int, width: float, height: float, columns: int, **keywords: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of `count` panels, row by row; to be called within `style()`.

    Args:
        count: number of panels, at least 1.
        width: of the figure in inches.
        height: of one row in inches.
        columns: panels in a row.
        keywords: for `Figure.subplots`, such as sharey.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width, rows * height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **keywords).ravel()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, list(axes[:count])


def width_of(columns: int) -> float:
    """Returns the width in inches of a figure with that many panels side by side."""
    return COLUMN if columns == 1 else PAGE


def shortened(text: str, inches: float, letter: float = _LETTER) -> str:
    """Cuts what would be wider than that; `letter` is the mean width of a letter in points."""
    most = max(int(inches * 72 / letter), 1)
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: float, digits: int, signed: bool = False) -> str:
    """Says a number with a minus sign in place of a hyphen, and no minus before a zero."""
    value = round(value, digits) + 0.0
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def title(axes: Axes, name: str, deviation: str, inches: float) -> None:
    """Names a panel; what differs from the paper's protocol stands below in plain letters.

    Args:
        axes: of the panel.
        name: in bold letters.
        deviation: may be empty.
        inches: width that the lines of the deviation may take.
    """
    name = shortened(name, inches, _BOLD_LETTER)
    if not deviation:
        axes.set_title(name)
        return
    lines = textwrap.wrap(deviation, int(inches * 72 / _LETTER))
    axes.set_title(name, pad=5 + 8.5 * len(lines))
    axes.annotate(
        "\n".join(lines),
        (0, 1),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=7,
        verticalalignment="bottom",
    )


def name_panels(
    figure: Figure, named: Sequence[tuple[Axes, Group]], inches: float, columns: int = 1
) -> None:
    """Names panels after their groups, by what tells these apart.

    What differs from the paper's protocol stands below the name, or, where it is the same for
    several panels, once at the foot of the figure.

    Args:
        figure: that holds the panels.
        named: panels and their groups.
        inches: width of a name.
        columns: panels side by side.
    """
    groups = [group for _, group in named]
    learners, benchmarks = {each.learner for each in groups}, {each.benchmark for each in groups}
    shared = len(groups) > 1 and len({each.title for each in groups}) == 1
    for axes, group in named:
        parts = []
        if len(benchmarks) > 1 or len(learners) == 1:
            parts.append(paper.benchmark_title(group.benchmark))
        if len(learners) > 1 or len(groups) == 1:
            parts.append(learner_title(group.learner))
        title(axes, ", ".join(parts), "" if shared else group.title, inches)
    if shared and groups[0].title:
        foot = [paper.benchmark_title(groups[0].benchmark)] if len(benchmarks) == 1 else []
        foot += [groups[0].title]
        lines = textwrap.wrap(", ".join(foot), int(width_of(columns) * 72 / _LETTER))
        figure.supxlabel("\n".join(lines), x=0.01, horizontalalignment="left", fontsize=7)


def band(
    axes: Axes,
    places: Float[np.ndarray, " n"] | Sequence[float],
    values: Float[np.ndarray, "seeds n"],
    colour: str,
    **line: Any,
) -> Line2D:
    """Draws the mean over seeds and, for several seeds, one sample standard deviation around it."""
    mean = values.mean(axis=0)
    (drawn,) = axes.plot(places, mean, color=colour, **line)
    if len(values) > 1:
        std = values.std(axis=0, ddof=1)
        axes.fill_between(places, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
    return drawn


def whole_numbers(axis: Axis, most: int = 9) -> None:
    """Puts marks on whole numbers only."""
    axis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def legend(figure: Figure, handles: Sequence[Any], columns: int | None = None) -> None:
    """Puts one legend for all panels above them."""
    figure.legend(handles=handles, loc="outside upper center", ncols=columns or len(handles))


def key(name: str, line: bool = False) -> Line2D:
    """Returns a legend entry of raw, FDC or oracle."""
    return Line2D(
        [],
        [],
        color=COLOURS[name],
        marker=MARKERS[name],
        linestyle="-" if line else "none",
        label=TITLES[name],
    )


def hollow(marker: str, colour: str, label: str | None = None) -> dict[str, Any]:
    """Returns line properties of a value of the paper, beside ours: an empty marker."""
    return {
        "marker": marker,
        "color": colour,
        "markerfacecolor": "none",
        "markersize": 7,
        "markeredgewidth": 0.9,
        "linestyle": "none",
        "label": label,
    }


# Files --------------------------------------------------------------------------------------------


def svg(figure: Figure) -> str:
    """Returns a figure as SVG text, the same for the same figure."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode("utf-8")


def write(figure: Figure, folder: Path, name: str, text: str | None = None) -> list[Path]:
    """Writes `name`.svg and `name`.png (200 dots an inch, white face), and returns their paths.

    Args:
        figure: what to write.
        folder: made when missing.
        name: stem of the files.
        text: `svg(figure)`, where the caller has it.
    """
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    with write_atomically(paths[0]) as file:
        file.write((svg(figure) if text is None else text).encode("utf-8"))
    with style(), write_atomically(paths[1]) as file:
        figure.savefig(file, format="png", facecolor="white", metadata={"Software": None})
    return paths


# In a page ----------------------------------------------------------------------------------------

# Colours that a dark page changes; all others read well on both.
_VARIABLES = {
    INK: "currentColor",
    PAPER: "var(--paper)",
    RAW: "var(--raw)",
    FDC: "var(--fdc)",
    ORACLE: "var(--oracle)",
    OWN: "var(--own)",
    ADAPTED: "var(--adapted)",
}


def inline_svg(text: str, prefix: str, label: str) -> str:
    """Returns SVG for use inside a page that holds other figures and has two themes.

    Names within the drawing get a prefix, since those of several drawings would clash, and
    colours become the variables of the page's style sheet.

    Args:
        text: what `svg` returned.
        prefix: a name unique in the page: letters, digits, `_` and `-`.
        label: id of the element that names the figure.
    """
    text = text[text.index("<svg") :]
    # Remarks, and a style sheet that would hold for the whole page.
    for part in ("<metadata>.*?</metadata>", "<defs>\\s*<style.*?</defs>", "<!--.*?-->"):
        text = re.sub(part + r"\s*", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))

    def rename(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', rename, text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = text.replace("xlink:href", "href").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    opening = f'<svg role="img" aria-labelledby="{label}" style="stroke-linejoin: round" '
    return text.replace("<svg ", opening, 1)
