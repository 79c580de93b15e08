"""Draws docs/method.svg: what FDC does between the features of an image and its class.

python scripts/draw_method.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch

TARGET = Path(__file__).resolve().parents[1] / "docs" / "method.svg"
INK, GREY, CARD = "#1f2933", "#7b8794", "#f5f7fa"
TSF, RLC, PAC = "#2f6fb2", "#b8562b", "#3a7d44"


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str = CARD) -> None:
    """Draws a card with its lower left corner at (x, y)."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec=GREY
        )
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws an arrow from start to end."""
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=GREY, lw=1.2)
    )


def words(axes: Axes, x: float, y: float, text: str, size: float = 9, **style) -> None:
    """Writes centred text at (x, y)."""
    axes.text(x, y, text, {"color": INK} | style, ha="center", va="center", fontsize=size)


def component(axes: Axes, y: float, name: str, line: str, colour: str) -> tuple[float, float]:
    """Draws one of the three components and returns the centre of its sketch."""
    box(axes, 5.2, y, 5.4, 1.42, "white")
    words(axes, 7.0, y + 0.98, name, 10, weight="bold", color=colour)
    words(axes, 7.0, y + 0.45, line, 8.5)
    return 9.75, y + 0.71


def draw(axes: Axes) -> None:
    """Draws the whole figure."""
    box(axes, -0.25, 2.35, 1.75, 1.1)
    words(axes, 0.62, 2.9, "test image\nno task given", 8.5)
    for y, name, about in ((3.6, "$E_T$", "adapted encoder"), (1.0, "$E_0$", "pretrained encoder")):
        box(axes, 2.05, y, 2.2, 1.2)
        words(axes, 3.15, y + 0.78, name, 12)
        words(axes, 3.15, y + 0.32, about, 8, color=GREY)
        arrow(axes, (1.5, 2.9), (2.0, y + 0.6))

    x, y = component(axes, 4.1, "TSF", "heads see their task's\nsubspace, less of the rest", TSF)
    axes.add_patch(Ellipse((x, y), 1.3, 0.34, angle=30, fc=TSF, alpha=0.25, ec=TSF))
    arrow(axes, (x + 0.35, y - 0.5), (x + 0.18, y - 0.06))
    x, y = component(axes, 2.2, "RLC", "how foreign is the residual\noutside that subspace?", RLC)
    for shift, alpha in ((-0.28, 0.6), (0.28, 0.25)):
        curve = [shift + 0.02 * step for step in range(-22, 23)]
        height = [0.75 * 2.718 ** (-(((at - shift) / 0.2) ** 2)) for at in curve]
        axes.fill_between(
            [x + at for at in curve], y - 0.4, [y - 0.4 + h for h in height], color=RLC, alpha=alpha
        )
    x, y = component(axes, 0.3, "PAC", "how close is the nearest\nclass prototype?", PAC)
    for dx, dy in ((-0.4, 0.25), (0.1, -0.35), (0.35, 0.2)):
        axes.plot(x + dx, y + dy, marker="*", color=PAC, ms=9)
    axes.plot(x + 0.12, y + 0.02, marker="o", color=INK, ms=4)
    axes.plot([x + 0.12, x + 0.35], [y + 0.02, y + 0.2], color=GREY, lw=1)

    arrow(axes, (4.3, 4.35), (5.15, 4.75))
    for end in (2.95, 1.2):
        arrow(axes, (4.3, 4.0), (5.15, end + 0.1))
        arrow(axes, (4.3, 1.6), (5.15, end - 0.2))

    box(axes, 11.4, 1.55, 2.65, 2.7)
    words(axes, 12.72, 3.85, "score of each task", 9, weight="bold")
    for row, (length, colour) in enumerate(((0.9, GREY), (1.6, INK), (0.6, GREY), (1.1, GREY))):
        at = 3.4 - 0.36 * row
        axes.barh(at, length, left=11.75, height=0.2, color=colour, alpha=0.9)
    words(axes, 12.72, 1.85, "largest: task, then class", 8, color=GREY)
    for y in (4.8, 2.9, 1.0):
        arrow(axes, (10.65, y), (11.35, 2.9 + 0.25 * (y - 2.9)))
    words(axes, 11.05, 4.55, "logit", 8, color=TSF)
    words(axes, 11.02, 3.1, "−", 13, color=RLC)
    words(axes, 11.05, 1.35, "+", 12, color=PAC)
    words(
        axes,
        7.0,
        5.95,
        "After training, without gradients: the statistics of each task are taken once, "
        "when the task has been learned",
        8.5,
        color=GREY,
    )


def main() -> None:
    """Writes the figure."""
    with plt.rc_context({"svg.hashsalt": "method", "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=(10, 4.4))
        axes.set_xlim(-0.4, 14.2)
        axes.set_ylim(0.1, 6.2)
        axes.axis("off")
        draw(axes)
        figure.savefig(TARGET, bbox_inches="tight", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
