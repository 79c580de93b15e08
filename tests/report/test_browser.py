"""The page in a real browser: no errors, no requests, nothing wider than the screen."""

import io

import numpy as np
import pytest
from PIL import Image

from fdc_jax.report import figures, page, provenance, tables
from fdc_jax.report.runs import Loaded
from tests.report import browser, made_up

SCREENS = {
    "desktop": (1280, 900, False),
    "phone": (390, 844, False),
    "narrow phone": (320, 640, False),
    "desktop, dark": (1280, 900, True),
    "phone, dark": (390, 844, True),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with tables, figures of all widths and a hostile name."""
    members = [made_up.run(seed) for seed in (1, 2)]
    members.append(made_up.run(1, learner="a_very_long_name_of_a_learner_" * 4))
    groups = made_up.groups(*members)
    found = made_up.analyses(*groups)
    drawn = [
        each
        for name in ("task_identity", "residual_contributions", "task_confusion")
        for each in figures.draw(name, groups, found)
    ]
    built = tables.build(groups, found)
    path = tmp_path_factory.mktemp("report") / "report.html"
    text = page.render(Loaded(members, []), built, drawn, provenance.describe(groups))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of a headless Chromium."""
    path = browser.find()
    if path is None:
        pytest.skip(f"needs Chromium: $CHROMIUM, or one of {', '.join(browser.NAMES)} on the path")
    with browser.launched(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.float64)


@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_fits_every_screen(report, shown, screen):
    width, height, dark = SCREENS[screen]
    shown.requests.clear()
    shown.open(report, width, height, dark)
    assert shown.value("document.documentElement.scrollWidth") <= width
    # What is wider has a box of its own.
    boxes = shown.value(
        "[...document.querySelectorAll('.scroll')].map(box => "
        "[box.getBoundingClientRect().right, box.scrollWidth > box.clientWidth])"
    )
    assert all(right <= width for right, _ in boxes)
    assert any(scrolls for _, scrolls in boxes)
    image = pixels(shown.screenshot())
    assert image.shape == (height, width, 3)
    ground = image[-1, -1].mean()
    assert (ground < 60) if dark else (ground > 240)
    # Something is written in a colour that stands out.
    assert np.abs(image - image[-1, -1]).max() > 150
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:image/png"))] == []


def test_figures_are_drawn_in_the_page(report, shown):
    for dark in (False, True):
        shown.open(report, 1280, 900, dark)
        sizes = shown.value(
            "[...document.querySelectorAll('figure svg')].map(drawing => "
            "[drawing.getBoundingClientRect().width, drawing.getBoundingClientRect().height])"
        )
        assert len(sizes) == 4 and all(min(size) > 80 for size in sizes)
        ink = shown.value(
            "getComputedStyle(document.querySelector('figure svg [style*=currentColor]')).stroke"
        )
        red = int(ink.removeprefix("rgb(").split(",")[0])
        assert (red > 200) if dark else (red < 60)


def test_the_page_prints(report, shown):
    shown.open(report, 1280, 900)
    data = shown.pdf()
    assert data.startswith(b"%PDF") and len(data) > 10_000
