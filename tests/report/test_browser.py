"""The page in a real browser: no errors, no requests, nothing wider than the screen."""

import os
import shutil

import numpy as np
import pytest

from fdc_jax.report import page as page_of
from fdc_jax.report import pictures
from tests.report import made_up, test_classes, test_page

pytestmark = pytest.mark.ci

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# A picture of one pixel.
PIXEL = pictures.data_uri(np.zeros((1, 1, 3), np.uint8))
SCREENS = [(1280, 900, "light"), (390, 844, "dark")]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with tables, pictures, figures of all widths and a long name."""
    long = "a_very_long_name_of_a_learner_" * 4
    members = [made_up.run(1, num_tasks=11), made_up.run(1, learner=long)]
    kinds = ("task_confusion", "task_identity")
    shown = [test_page.material(), test_page.material(long)]
    built = [test_page.table(), test_page.table("other", long, long)]
    text = test_page.rendered(members, built, None, kinds, shown)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    named = os.environ.get("CHROMIUM")
    paths = [*filter(None, map(shutil.which, [named] if named else NAMES))]
    if not paths:
        pytest.skip(f"needs Chromium: $CHROMIUM, or one of {', '.join(NAMES)} on the path")
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize(("width", "height", "scheme"), SCREENS)
def test_the_page_fits_every_screen(browser, report, width, height, scheme):
    size = {"width": width, "height": height}
    page = browser.new_page(viewport=size, color_scheme=scheme)
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report)
    page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing is cut off: what is wider has a box of its own that scrolls.
    outside = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(it => !it.closest('.scroll, .unseen') "
        "&& !it.classList.contains('skip') && it.getBoundingClientRect().right > innerWidth + 1"
        ").map(it => it.outerHTML.slice(0, 80))"
    )
    assert outside == []
    clipped = page.evaluate(
        "[...document.querySelectorAll('.headline, .picture, .tasks, pre')].filter(it => "
        "it.scrollWidth > it.clientWidth + 1).map(it => it.className)"
    )
    assert clipped == []
    assert messages == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    page.close()


def test_predictions_are_filtered_and_sorted_without_a_script(browser, tmp_path):
    names = ["rhododendron", "great_crested_grebe", "a" * 18]
    shown = [
        {"class": names[i % 3], "position": 5 - i, "uri": PIXEL, "small": False}
        | {"name": f"photos/{i}.jpg", "changed": i == 0, "raw_class": names[1], "evidence": []}
        | {"confidence": 0.1 + 0.2 * i, "typicality": 0.0499 * (i + 1), "unlike_learned": i == 0}
        | {"true_class": names[(i + i // 4) % 3]}
        for i in range(6)
    ]
    numbers = {"num_tasks": 2, "num_classes": 3, "images": 6, "changed": 1, "unlike": 1}
    text = page_of.render_predictions(
        "birds",
        **numbers,
        notice="",
        method="gaussians",
        accuracy=91.2,
        labelled=6,
        right=4,
        unreadable=[],
        shown=shown,
    )
    path = tmp_path / "predictions.html"
    path.write_text(text, "utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    def seen():
        """Names of the visible images, from the top left on."""
        script = (
            "[...document.querySelectorAll('.picture')].map(it => [it.getBoundingClientRect(), it])"
            ".filter(([box]) => box.height).sort(([a], [b]) => a.top - b.top || a.left - b.left)"
            ".map(([box, it]) => it.querySelector('img').alt.slice(7, 8)).join('')"
        )
        return page.evaluate(script)

    assert seen() == "012345"
    page.check("#by-file")
    assert seen() == "543210"
    page.check("#by-class")
    assert seen() == "251403"  # by name, and in the order of the page
    page.check("#show-unlike")
    assert seen() == "0"
    page.check("#show-mistaken")
    assert seen() == "54"
    page.check("#show-uncertain")
    assert seen() == "10"
    page.check("#show-all")
    page.select_option("#of-class", label=names[0])
    assert seen() == "03"
    page.close()


def test_a_click_at_a_pair_shows_its_pictures(browser, tmp_path):
    run = test_classes.small_run(tmp_path)
    run.class_names = ("a_very_long_name_" * 4,) * 6
    group, _, pictured = test_classes.load(run)
    path = tmp_path / "classes.html"
    path.write_text(page_of.render_classes(group, pictured), "utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.inner_text("#count") == "3 pictures"
    page.click("rect[data-pair='0,3']")
    assert page.inner_text("#count") == "2 pictures" and page.input_value("#said") == "3"
    page.select_option("#is", "3")
    assert page.inner_text("#count") == "0 pictures" and messages == []
    page.close()
