"""Takes the pictures of docs/report.md from results/example_report.html: $CHROMIUM is the browser.

CHROMIUM=chromium python scripts/draw_gallery.py
"""

import io
import os
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CURVE = "figure-accuracy_curve_1_digits_cumulative_lora-title"
# By file: the page, and the headings where a picture begins and before which it ends.
PICTURES = {
    "result": ("example_report", "run-1-heading", "run-1-calibrators"),
    "calibrators": ("example_report", "run-1-calibrators", CURVE),
    "tasks": ("example_report", CURVE, "run-1-tasks"),
    "images": ("example_report", "run-1-pictures", "tables-heading"),
    "confusion": ("classes_1", "confusion", "classes"),
    "classes": ("classes_1", "classes", ""),
}
CLIP = """headings => {
  const [top, end] = headings.map(id => document.getElementById(id)?.getBoundingClientRect().top);
  const height = (end || document.documentElement.scrollHeight) - top + 4;
  return {x: 0, y: top - 12, width: innerWidth, height: height};
}"""

with sync_playwright() as started:
    browser = started.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1000, "height": 900}, device_scale_factor=1.4)
    for name, (of, *headings) in PICTURES.items():
        page.goto((ROOT / "results" / f"{of}.html").as_uri())
        taken = page.screenshot(clip=page.evaluate(CLIP, headings), full_page=True)
        few = Image.open(io.BytesIO(taken)).convert("RGB").quantize(255, dither=Image.Dither.NONE)
        few.save(ROOT / "docs" / "report" / f"{name}.png", optimize=True)
    browser.close()
