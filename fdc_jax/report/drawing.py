"""What all figures share: style, colours, panels, reproducible files. The only Matplotlib set-up.

Figures are made without pyplot, so nothing is shown and no global state changes.
"""

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fdc_jax.report import words

# Inches.
COLUMN, PAGE = 3.3, 6.75

# Points: the mean width of a letter at 7 pt.
_LETTER = 3.7

# Dark, medium and light for eyes of every kind, and each with a marker of its own for grey prints.
INK = "#222222"
GRID = "#8c8c8c"
RAW, FDC, ORACLE = "#c77700", "#0b559f", "#6e6e6e"
OWN, FOREIGN = "#00664d", "#c75f9f"
ADAPTED, PRETRAINED = "#4b3f8f", "#b58900"
# Colour and marker of methods that every run has, and of the calibrators beside them in turn.
_FIXED = {"raw": (RAW, "o"), "fdc": (FDC, "s"), "oracle": (ORACLE, "^")}
_OTHERS = ((OWN, "D"), (FOREIGN, "v"), (ADAPTED, "P"), (PRETRAINED, "X"), ("#8c4a3c", "<"))

_STYLE = Path(__file__).with_name("fdc.mplstyle")


def style() -> AbstractContextManager[None]:
    """Draws or saves with this package's style, whatever the user's own settings are."""
    return matplotlib.rc_context(fname=_STYLE)


def panels(
    count: int, height: float, columns: int, width: float | None = None, **keywords: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of `count` panels, row by row; to be called within `style()`.

    Args:
        count: number of panels, at least 1.
        height: of one row in inches.
        columns: panels in a row, at most.
        width: of the figure in inches; else a column of a paper for one panel in a row, or a page.
        keywords: for `Figure.subplots`, such as sharey.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = width or (COLUMN if columns == 1 else PAGE)
    figure = Figure(figsize=(width, rows * height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **keywords).ravel()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, list(axes[:count])


def lines_only(axes: Axes, across: str) -> None:
    """Leaves the ticks of an axis of names without marks and without a grid."""
    getattr(axes, f"{across}axis").grid(visible=False)
    axes.tick_params(axis=across, length=0)  # pyright: ignore[reportArgumentType]


def colour_bar(figure: Figure, colours: ScalarMappable, panels: Sequence[Axes], label: str, **look):
    """Adds a bar of colours beside all panels and returns it."""
    bar = figure.colorbar(colours, ax=panels, pad=0.02, label=label, **look)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return bar


def shortened(text: str, inches: float) -> str:
    """Cuts what would be wider than that at 7 pt."""
    most = max(int(inches * 72 / _LETTER), 1)
    return text if len(text) <= most else text[: most - 1] + "…"


def band(
    axes: Axes, places: Any, values: Float[np.ndarray, "seeds n"], colour: str, **line: Any
) -> None:
    """Draws the mean over seeds and, for several seeds, one sample standard deviation around it."""
    mean = values.mean(axis=0)
    axes.plot(places, mean, color=colour, **line)
    if len(values) > 1:
        std = values.std(axis=0, ddof=1)
        axes.fill_between(places, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)


def marks(axes: Axes, x: Any, y: Any, colour: str, marker: str, size: float, **look: Any) -> None:
    """Draws points that may lie on each other."""
    line = {"linestyle": "none", "markersize": size, "markeredgewidth": 0}
    axes.plot(x, y, color=colour, marker=marker, **(line | look))


def whole_numbers(axis: Axis) -> None:
    """Puts ticks at whole numbers alone."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend(figure: Figure, handles: Sequence[Any], columns: int | None = None) -> None:
    """Puts one legend for all panels above them."""
    figure.legend(handles=handles, loc="outside upper center", ncols=columns or len(handles))


def key(label: str, colour: str, **look: Any) -> Line2D:
    """Returns a legend entry."""
    return Line2D([], [], color=colour, label=label, **look)


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns colour and marker of methods, the same for the same names in the same order."""
    others = itertools.cycle(_OTHERS)
    return {name: _FIXED.get(name) or next(others) for name in dict.fromkeys(methods)}


def legend_of(figure: Figure, looks: Mapping[str, tuple[str, str]], *further: Line2D, **line: Any):
    """Puts a legend of methods, and what else is given, above all panels."""
    keys = [
        key(words.method_title(name), colour, marker=marker, **line)
        for name, (colour, marker) in looks.items()
    ]
    legend(figure, [*keys, *further], min(len(keys) + len(further), 4))


def hollow(marker: str, colour: str, label: str | None = None) -> dict[str, Any]:
    """Returns line properties of a value of the paper, beside ours: an empty marker."""
    look: dict[str, Any] = {"marker": marker, "color": colour, "linestyle": "none", "label": label}
    return look | {"markerfacecolor": "none", "markersize": 7, "markeredgewidth": 0.9}


def finished(figure: Figure) -> str:
    """Places everything once for all files; returns SVG text, the same for the same figure."""
    layout, buffer = figure.get_layout_engine(), io.BytesIO()
    assert layout is not None
    layout.execute(figure)
    figure.set_layout_engine("none")
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode("utf-8")


# Colours that a dark page changes; all others read well on both.
VARIABLES = {
    INK: "currentColor",
    RAW: "var(--raw)",
    FDC: "var(--fdc)",
    ORACLE: "var(--oracle)",
    OWN: "var(--own)",
    ADAPTED: "var(--adapted)",
}


def inline_svg(text: str, name: str) -> str:
    """Returns SVG for use inside a page that holds other figures and has two themes.

    Names within the drawing get a prefix, since those of several drawings would clash, and
    colours become the variables of the page's style sheet.

    Args:
        text: what `finished` returned.
        name: unique in the page, which has a title and a caption of the figure.
    """
    prefix = f"drawing-{name}"
    text = text[text.index("<svg") :]
    # Remarks, and a style sheet that would hold for the whole page.
    for part in ("<metadata>.*?</metadata>", "<defs>\\s*<style.*?</defs>", "<!--.*?-->"):
        text = re.sub(part + r"\s*", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))

    def rename(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', rename, text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    changed = {' xmlns:xlink="http://www.w3.org/1999/xlink"': "", "xlink:href": "href"}
    for old, new in (changed | VARIABLES).items():
        text = text.replace(old, new)
    label = f"figure-{name}-title figure-{name}-caption"
    opening = f'<svg role="img" aria-labelledby="{label}" style="stroke-linejoin: round" '
    return text.replace("<svg ", opening, 1)
