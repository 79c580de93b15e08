"""Style, colours, panels and legends of all figures, without pyplot and global state."""

import contextlib
import io
import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxtyping import Float
from numpy import ndarray

# matplotlib reads `matplotlibrc` in the current folder, which may be a stranger's.
with contextlib.chdir(Path(__file__).parent):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backend_bases import get_registered_canvas_class
    from matplotlib.cm import ScalarMappable as ScalarMappable
    from matplotlib.colors import Normalize as Normalize
    from matplotlib.colors import PowerNorm as PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# Inches.
COLUMN, PAGE = 3.3, 6.75

# Colours differ in lightness, too.
INK = "#222222"
RAW, FDC, TASK_GIVEN = "#c77700", "#0b559f", "#6e6e6e"
OWN, FOREIGN = "#00664d", "#c75f9f"
ADAPTED, PRETRAINED = "#4b3f8f", "#b58900"
# Colour and marker of methods of every run, and of other calibrators in turn.
_FIXED = {"raw": (RAW, "o"), "fdc": (FDC, "s"), "oracle": (TASK_GIVEN, "^")}
_OTHERS = ((OWN, "D"), (FOREIGN, "v"), (ADAPTED, "P"), (PRETRAINED, "X"), ("#8c4a3c", "<"))

_STYLE = Path(__file__).with_name("fdc.mplstyle")


def style() -> AbstractContextManager[None]:
    """Returns the context in which figures have the package's style."""
    return matplotlib.rc_context(fname=_STYLE)


def panels(count: int, height: float, columns: int, **keywords: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure of at least one panel, row by row, within `style()`.

    A row has at most `columns` panels and `height` inches. The width is that of a column of a paper
    for one panel, else of a page. `keywords` are those of `Figure.subplots`.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(COLUMN if count == 1 else PAGE, rows * height))
    axes = figure.subplots(rows, columns, squeeze=False, **keywords).ravel()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, list(axes[:count])


def band(axes: Axes, x: Any, values: Float[ndarray, "seeds n"], colour: str, **line: Any) -> None:
    """Draws the mean over seeds, and one sample standard deviation of several seeds around it."""
    mean = values.mean(axis=0)
    axes.plot(x, mean, color=colour, markersize=3, **line)
    if len(values) > 1:
        std = values.std(axis=0, ddof=1)
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)


def points(axes: Axes, x: Any, y: Any, colour: str, marker: str, gid: str, label: str) -> None:
    """Draws points that may lie on each other."""
    look = {"linestyle": "none", "markersize": 3.4, "markeredgewidth": 0, "alpha": 0.6}
    axes.plot(x, y, color=colour, marker=marker, gid=gid, label=label, **look)


def whole_numbers(*axes: Axis) -> None:
    """Puts ticks at whole numbers alone."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend(figure: Figure) -> None:
    """Puts one legend above all panels, with one entry per label."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    longest = max(map(len, entries))
    columns = int(72 * figure.get_figwidth() / (25 + 4 * longest))  # in points
    columns = max(1, min(columns, len(entries)))
    figure.set_figheight(figure.get_figheight() + 0.15 * ((len(entries) - 1) // columns))
    figure.legend([*entries.values()], [*entries], loc="outside upper center", ncols=columns)


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns colour and marker by method."""
    others = itertools.cycle(_OTHERS)
    return {name: _FIXED.get(name) or next(others) for name in dict.fromkeys(methods)}


def svg(figure: Figure) -> str:
    """Returns a figure as SVG, the same text for the same figure."""
    file = io.StringIO()
    write(figure, "svg", file, {"Date": None, "Creator": None})
    return file.getvalue()


def write(figure: Figure, kind: str, file: Any, metadata: dict[str, None]) -> None:
    """Writes a figure as svg, pdf or png within `style()`; unlike `savefig`, draws it once."""
    figure.dpi = matplotlib.rcParams["figure.dpi"]  # SVG and PDF leave another one.
    canvas = get_registered_canvas_class(kind)(figure)
    getattr(canvas, f"print_{kind}")(file, metadata=metadata)
