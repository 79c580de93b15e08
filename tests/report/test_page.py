"""The page: its golden words, self-contained, escaped, and the same for the same runs.

`python -m tests.report.test_page` writes the golden words anew, after a change that is wanted.
"""

import html.parser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fdc_jax.report import classes, figures, page, pictures, tables
from fdc_jax.report.pictures import Answer, Evidence, Picture, Pictures
from fdc_jax.report.tables import Table
from tests.report import made_up

HOSTILE = "<script>alert('x')</script>\"&$x$--><b>"
PAGE, SINGLE = (Path(__file__).parents[1] / "golden" / f"{name}.txt" for name in ("page", "pages"))

# Elements without an end.
VOID = {"meta", "link", "br", "wbr", "hr", "img", "input"}


class Reader(html.parser.HTMLParser):
    """Collects elements, and refuses a page whose elements are not nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts_by_tag = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style" and data.strip():
            text = data.strip().replace("\N{NO-BREAK SPACE}", " ")
            self.texts_by_tag.append((self.open[-1], text))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def texts(self, tag):
        return [text for name, text in self.texts_by_tag if name == tag]


def table(name="accuracy", title="Final accuracy", note="Percent."):
    index = pd.MultiIndex.from_tuples(
        [("Raw", "ours"), ("Raw", "paper"), ("FDC", "ours")], names=["method", "numbers"]
    )
    columns = {"CIFAR-100": ["61.20 ± 0.30 (3)", "60.10", "70.10"], "CUB": [np.nan, "-1.50", "7.5"]}
    return Table(name, title, pd.DataFrame(columns, index), note)


def picture(name="ant", row=3):
    evidence = [Evidence("Raw logit", 2.0, 3.0), Evidence("Residual, E_T", 0.5, -1.0)]
    evidence.append(Evidence("FDC score", 2.5, 2.0))
    uri = pictures.data_uri(np.full((8, 8, 3), 40 * row, np.uint8))
    return Picture(row, uri, True, Answer(name, 1), Answer("bee", 2), Answer(name, 1), evidence)


def material(name="ant"):
    return Pictures([picture(name), picture(name, 5)], 12, [picture(name, 6)], 1)


def rendered(members, built=(), skipped=None, kinds=(), shown=None):
    """The page of runs, with figures of some kinds; others are not drawn."""
    groups = made_up.analysed(*members)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_OF_A_RUN", "_OF_ANALYSES"):
            functions = getattr(figures, name)
            patch.setattr(figures, name, [of for of in functions if of.__name__ in kinds])
        drawn = [drawing for drawing in figures.draw(groups) if drawing.kind in kinds]
    by_class = [classes.load(group) for group in groups]
    shown = shown or [material() for _ in groups]
    return page.render(groups, skipped or {}, built, drawn, shown, by_class)


def several():
    """The page of two configurations and a folder that was skipped, with figures."""
    members = [made_up.run(seed) for seed in (1, 2, 3)]
    members.append(made_up.run(1, learner="splitlora", **{"train.epochs": 5}))
    skipped = {Path("runs/broken"): "unfinished: no results.json, 3 tasks done"}
    kinds = ("accuracy_curve", "task_confusion", "task_identity", "prototype_geometry")
    return rendered(members, [table()], skipped, kinds)


def single():
    """The pages of a run on digits, on photographs, and of features with and without heads."""
    features = made_up.run(1, "seed1+seed2")
    features.results.encoder = None
    headless = made_up.run(1, "seed1")
    headless.results.encoder = None
    for point in (headless.results, *headless.results.curve):
        for name in ("raw", "oracle"):
            del point.accuracy[name]
    pages = []
    for run in (made_up.run(1, "digits"), made_up.run(1, "my photographs"), features, headless):
        pages.append(rendered([run], tables.build(made_up.groups(run))))
    return pages


def words_of(*pages):
    """The words of pages outside tables, a line each with its tag."""
    lines = []
    for page_text in pages:
        for tag, sentence in Reader(page_text).texts_by_tag:
            if tag not in ("td", "th"):
                lines.append(f"{tag}: {sentence}\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def text():
    return several()


def test_a_page_of_two_configurations_has_its_golden_words(text):
    assert words_of(text) == PAGE.read_text("utf-8")


@pytest.mark.ci
def test_pages_of_single_runs_have_their_golden_words():
    assert words_of(*single()) == SINGLE.read_text("utf-8")


def test_nothing_comes_from_elsewhere(text):
    read = Reader(text)
    assert {tag for tag, _ in read.elements}.isdisjoint({"script", "link", "iframe", "object"})
    for tag, attributes in read.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                assert value.startswith(("#", "tables/", "figures/", "classes_", "data:image/"))
    (policy,) = [attributes for attributes in read.all("meta") if "http-equiv" in attributes]
    assert "default-src 'none'" in policy["content"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style and "http" not in style


def test_names_from_files_are_text():
    run = made_up.run(1, learner=HOSTILE, **{HOSTILE: HOSTILE})
    frame = pd.DataFrame({HOSTILE: [HOSTILE]}, pd.Index([HOSTILE], name=HOSTILE))
    built = [Table(HOSTILE, HOSTILE, frame, HOSTILE)]
    kinds = ("accuracy_curve", "residual_contributions")
    first, second = (
        rendered([run], built, {Path(HOSTILE): HOSTILE}, kinds, [material(HOSTILE)])
        for _ in range(2)
    )
    assert first == second
    assert "<script" not in first and "<b>" not in first and "-->" not in first
    read = Reader(first)
    for tag in ("h1", "h3", "td", "th", "strong", "dd", "code"):
        assert any(HOSTILE in text for text in read.texts(tag)), tag


if __name__ == "__main__":
    PAGE.write_text(words_of(several()), "utf-8")
    SINGLE.write_text(words_of(*single()), "utf-8")
