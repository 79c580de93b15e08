"""Pictures of docs/report.md from a report of one run of the digits.

    python -m scripts.report_pictures REPORT docs/report

Needs the package playwright, and Chromium at $CHROMIUM or on the path.
"""

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

WIDTH, SCALE = 1000, 1.4  # of the window in pixels, and of pixels in a picture
COLOURS = 256
# Page, and the first and the last element, by picture.
PICTURES = {
    "result": ("report.html", "h1", "#run-1"),
    "calibrators": ("report.html", "#run-1-calibrators", "#run-1-calibrators ~ .note"),
    "tasks": ("report.html", ".grid", ".grid"),
    "images": ("report.html", "#run-1-pictures", ".pictures >> nth=-1"),
    "confusion": ("classes_1.html", "#confusion", "#map"),
    "classes": ("classes_1.html", "#classes", ".wrongs li"),
}


def picture(page: Page, first: str, last: str) -> Image.Image:
    """Returns the part of a page from the top of an element to the end of another one."""
    top = page.locator(first).first.bounding_box()
    end = page.locator(last).first.bounding_box()
    assert top and end
    start = max(0, top["y"] - 12)
    height = end["y"] + end["height"] + 12 - start
    content = page.screenshot(
        full_page=True, clip={"x": 0, "y": start, "width": WIDTH, "height": height}
    )
    return Image.open(io.BytesIO(content)).convert("RGB").quantize(COLOURS)


def main(report: Path, output: Path) -> None:
    """Writes all pictures as PNG files."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as api:
        browser = api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
        for name, (file, first, last) in PICTURES.items():
            page.goto((report / file).resolve().as_uri())
            picture(page, first, last).save(output / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
