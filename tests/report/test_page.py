"""The page: complete, self-contained, escaped, and the same for the same runs."""

import html.parser
import itertools
import re
from pathlib import Path

import pytest

from fdc_jax.report import drawing, figures, page, provenance, runs
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.runs import Loaded, Skipped
from tests.report import made_up
from tests.report.run_folders import write_run

HOSTILE = "<script>alert('x')</script>\"&$x$--><b>"

# Elements without an end.
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(html.parser.HTMLParser):
    """Collects elements, and refuses a page whose elements are not nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.words = [], [], []
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
            self.words.append((self.open[-1], data.strip()))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def texts(self, tag):
        return [text for name, text in self.words if name == tag]


def table(**changes):
    cells = [
        [Cell("Raw"), Cell("61.20 ± 0.30 (3)", 61.2, 0.3, 3), Cell("–", gap=True)],
        [Cell("FDC"), Cell("70.10", 70.1, best=True), Cell("-1.50", -1.5)],
    ]
    whole = Table("accuracy", "Final accuracy", "Percent.", ["method", "CIFAR-100", "CUB"], cells)
    return whole._replace(**changes)


def rendered(members, tables=(), skipped=(), drawn=None, missing=None):
    groups = runs.group(members)
    if drawn is None:
        found = made_up.analyses(*groups)
        names = ("gains", "task_confusion", "prototype_geometry")
        drawn = [each for name in names for each in figures.draw(name, groups, found)]
    origin = provenance.describe(groups, missing)
    return page.render(Loaded(list(members), list(skipped)), tables, drawn, origin)


@pytest.fixture(scope="module")
def text():
    members = [made_up.run(seed) for seed in (1, 2, 3)]
    members.append(made_up.run(1, learner="splitlora", **{"train.epochs": 5}))
    skipped = [Skipped(Path("runs/broken"), "unfinished: no results.json, 3 tasks done")]
    return rendered(members, [table()], skipped)


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


def test_nothing_comes_from_elsewhere(read):
    assert {tag for tag, _ in read.elements}.isdisjoint({"script", "link", "iframe", "object"})
    for tag, attributes in read.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                inside = value.startswith(("#", "tables/", "figures/", "data:image/png;base64,"))
                assert inside and "//" not in value.removeprefix("data:image/png;base64,")[:20]
    (policy,) = [each for each in read.all("meta") if "http-equiv" in each]
    assert "default-src 'none'" in policy["content"]


def test_styles_load_nothing(text):
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style and "http" not in style


def test_links_lead_somewhere(read):
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in read.elements:
        target = attributes.get("href", "")
        if target.startswith("#"):
            assert target[1:] in ids
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids
    drawings = [
        match for each in read.elements for match in re.findall(r"url\(#([^)]+)", str(each))
    ]
    assert drawings and set(drawings) <= set(ids)


def test_files_beside_the_page_are_linked(read):
    targets = [each.get("href", "") for each in read.all("a")]
    for suffix in ("csv", "md", "tex"):
        assert f"tables/accuracy.{suffix}" in targets
    assert "figures/gains.svg" in targets and "figures/gains.png" in targets


def test_a_caption_is_said_once(read):
    captions = read.texts("figcaption")
    assert captions[2].startswith("As in Figure 2. SplitLoRA, CIFAR-100, 5 epochs; seed 1.")
    assert len(captions) == 5 and len(set(captions)) == 5


def test_the_page_can_be_read_by_everybody(read):
    ((language),) = read.all("html")
    assert language["lang"] == "en"
    names = {each.get("name"): each.get("content") for each in read.all("meta")}
    assert "width=device-width" in names["viewport"] and names["color-scheme"] == "light dark"
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for each in read.all("svg"):
        assert each["role"] == "img" and each["aria-labelledby"]
    assert all("scope" in each for each in read.all("th"))
    for tag, attributes in read.elements:
        if "scroll" in attributes.get("class", "").split() and "tabindex" in attributes:
            assert attributes["role"] == "region", tag
            assert "aria-label" in attributes or "aria-labelledby" in attributes


def test_gaps_are_visible_and_the_best_is_bold(read):
    cells = read.all("td")
    gaps = [each for each in cells if "gap" in each.get("class", "").split()]
    assert len(gaps) == 1 and "no run" in gaps[0]["title"]
    assert ("td", "–") in read.words and ("span", "no value") in read.words
    assert read.texts("strong") == ["70.10"]
    assert ("td", "61.20 ± 0.30 (3)") in read.words
    assert ("td", "\N{MINUS SIGN}1.50") in read.words


def test_repeated_labels_make_no_headings():
    rows = [[Cell("Raw"), Cell("1")], [Cell(""), Cell("2")]]
    read = Reader(rendered([], [table(columns=["a", "b"], rows=rows)], drawn=[]))
    assert [each["scope"] for each in read.all("th")] == ["col", "col", "row"]


def test_only_numbers_get_a_minus_sign():
    assert page._minus("-1.5 ± 0.2 to -3") == "\N{MINUS SIGN}1.5 ± 0.2 to \N{MINUS SIGN}3"
    unchanged = "CIFAR-100, 1e-05, Ti-16, - none"
    assert page._minus(unchanged) == unchanged


def test_skipped_folders_have_reasons(read):
    assert "runs/broken" in read.texts("code")
    assert "unfinished: no results.json, 3 tasks done" in read.texts("td")


def test_the_summary_says_what_was_run():
    members = [made_up.run(seed) for seed in (1, 2, 3)]
    members.append(made_up.run(1, learner="splitlora", **{"train.epochs": 5}))
    groups = runs.group(members)
    summary = page.summarise(groups, 2)
    assert summary.scope == (
        "4 runs, 2 learners, 1 benchmark. 1 of 2 configurations follows the paper's protocol. "
        "2 folders skipped, with reasons below."
    )
    low, high = sorted(sum(group.gains("full")) / len(group.runs) for group in groups)
    assert f"in 2 of 2 configurations: by {low:+.2f} to {high:+.2f} " in summary.sentences[0]
    first = dict(zip(summary.columns, summary.rows[0], strict=True))
    raw = sum(groups[0].values("accuracy", "raw")) / 3
    assert first["Runs"] == "Cumulative-LoRA, CIFAR-100" and first["Seed numbers"] == "1, 2, 3"
    assert first["Raw"].startswith(f"{raw:.2f} ± ") and first["Settings"] == "the paper's"
    second = dict(zip(summary.columns, summary.rows[1], strict=True))
    gain = sum(groups[1].gains("full"))
    assert second["Gain"] == f"{gain:+.2f}" and second["Settings"] == "5 epochs"


def test_the_share_of_errors_that_the_task_repairs():
    run = made_up.run(1)
    run.results["accuracy"] = {"raw": 60.0, "fdc": 55.0, "oracle": 90.0}
    run.results["components"]["full"] = 55.0
    run.results["components"]["raw"] = 60.0
    sentences = page.summarise(runs.group([run])).sentences
    assert sentences == [
        "FDC lowers final accuracy by 5.00 percentage points.",
        "Knowing the task would repair 75 % of the errors of raw predictions.",
    ]


def test_a_page_without_runs_is_a_page():
    read = Reader(rendered([], skipped=[Skipped(Path("x"), "no")], drawn=[]))
    assert "No run could be read; 1 folder was skipped." in read.texts("p")
    assert "tables" not in [attributes.get("id") for _, attributes in read.elements]


def test_provenance_lists_where_seeds_differ():
    members = [made_up.run(1), made_up.run(2)]
    members[1].results["device"] = "1 x gpu"
    missing = {str(members[0].path): ["no similarity: no saved features"]}
    read = Reader(rendered(members, drawn=[], missing=missing))
    values = read.texts("dd")
    assert "seed 1: 1 x cpu; seed 2: 1 x gpu" in values
    assert "d" * 40 in values and "a" * 64 in values and "protocol" in values
    assert "no similarity: no saved features" in values
    assert "learner.preset" in read.texts("dt") and "class order seed" in read.texts("dt")


def test_names_from_files_are_text(tmp_path):
    run = made_up.run(1, learner=HOSTILE, **{HOSTILE: HOSTILE})
    run.results["device"] = HOSTILE
    run.results["versions"]["commit"] = HOSTILE
    rows = [[Cell(HOSTILE), Cell(HOSTILE, best=True), Cell(HOSTILE, gap=True)]]
    hostile = table(name=HOSTILE, title=HOSTILE, note=HOSTILE, columns=[HOSTILE] * 3, rows=rows)
    skipped = [Skipped(Path(HOSTILE), HOSTILE)]
    text = rendered([run], [hostile], skipped)
    read = Reader(text)
    assert "<script" not in text and "<b>" not in text and "-->" not in text
    for tag in ("h3", "td", "th", "strong", "dd", "dt", "p", "code", "figcaption"):
        assert any(HOSTILE in words for words in read.texts(tag)), tag
    assert not any(name.startswith("on") for _, each in read.elements for name in each)


def test_the_same_runs_give_the_same_page(text):
    members = [made_up.run(seed) for seed in (1, 2, 3)]
    members.append(made_up.run(1, learner="splitlora", **{"train.epochs": 5}))
    skipped = [Skipped(Path("runs/broken"), "unfinished: no results.json, 3 tasks done")]
    assert rendered(members, [table()], skipped) == text


# Drawings -----------------------------------------------------------------------------------------


def test_drawings_take_the_colours_of_the_page(text):
    drawn = text[text.index("<svg") : text.rindex("</svg>")]
    for colour in drawing._VARIABLES:
        assert colour not in drawn
    assert "currentColor" in drawn and "var(--fdc)" in drawn
    style = (Path(page.__file__).parent / "page.css").read_text()
    for variable in re.findall(r"var\((--[a-z]+)\)", drawn):
        assert style.count(f"{variable}:") == 3, variable


def schemes():
    """Variables of the light and of the dark page."""
    style = (Path(page.__file__).parent / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    return [dict(re.findall(r"(--[a-z-]+): (#[0-9a-f]{6});", block)) for block in blocks[:2]]


def luminance(colour):
    """Relative luminance of WCAG 2."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out(index):
    scheme = schemes()[index]

    def contrast(one, other):
        low, high = sorted((luminance(scheme[one]), luminance(scheme[other])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("--paper", "--card"):
        for text in ("--ink", "--soft", "--link"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    for mark in ("--raw", "--fdc", "--oracle", "--own", "--adapted"):
        assert contrast(mark, "--paper") >= 3, mark


def test_a_light_page_draws_as_the_files_do():
    scheme = schemes()[0]
    for colour, variable in drawing._VARIABLES.items():
        name = variable.removeprefix("var(").removesuffix(")")
        if name in scheme and colour != drawing.PAPER:
            assert scheme[name] == colour


def test_provenance_tells_nothing_of_the_machine(tmp_path):
    write_run(tmp_path / "mine" / "seed_1")
    groups = runs.group(runs.load([tmp_path / "mine"]).runs)
    found = provenance.describe(groups, {})
    assert "mine/seed_1" in str(found)
    assert str(tmp_path) not in str(found)
