"""Takes the pictures of docs/report.md from results/example_report.html, in a headless Chromium.

CHROMIUM=chromium python scripts/draw_gallery.py
"""

import io
import os
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
# By file: the page, and the headings where a picture begins and before which it ends.
PICTURES = {
    "result": ("example_report", "run-1-heading", "run-1-calibrators"),
    "calibrators": (
        *("example_report", "run-1-calibrators"),
        "figure-accuracy_curve_1_digits_cumulative_lora-title",
    ),
    "tasks": (
        *("example_report", "figure-accuracy_curve_1_digits_cumulative_lora-title"),
        "run-1-tasks",
    ),
    "images": ("example_report", "run-1-pictures", "tables-heading"),
    "confusion": ("classes_1", "confusion", "classes"),
    "classes": ("classes_1", "classes", ""),
}
# Left, top, width and height between headings, or to the end of the page.
BETWEEN = """([first, last]) => {
  const top = document.getElementById(first).getBoundingClientRect().top + scrollY;
  const end = document.getElementById(last)?.getBoundingClientRect().top + scrollY;
  const bottom = (end || document.documentElement.scrollHeight) - 8;
  return {x: 0, y: top - 12, width: innerWidth, height: bottom - top + 12};
}"""


def main() -> None:
    """Writes the pictures."""
    folder = ROOT / "docs" / "report"
    folder.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": 1000, "height": 900}, device_scale_factor=1.4, color_scheme="light"
        )
        for name, (of, first, last) in PICTURES.items():
            page.goto((ROOT / "results" / f"{of}.html").as_uri())
            clip = page.evaluate(BETWEEN, [first, last])
            taken = Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True)))
            few = taken.convert("RGB").quantize(255, dither=Image.Dither.NONE)
            few.save(folder / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
