"""The page: complete, self-contained, escaped, and the same for the same runs."""

import html.parser
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fdc_jax.report import classes, figures, formatting, page, pictures, tables
from fdc_jax.report.pictures import Answer, Evidence, Picture, Pictures
from fdc_jax.report.tables import Table
from tests.report import made_up

HOSTILE = "<script>alert('x')</script>\"&$x$--><b>"
MINUS = "\N{MINUS SIGN}"

# Elements without an end.
VOID = {"meta", "link", "br", "wbr", "hr", "img", "input"}


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
            self.words.append((self.open[-1], data.strip().replace("\N{NO-BREAK SPACE}", " ")))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def texts(self, tag):
        return [text for name, text in self.words if name == tag]


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


def rendered(members, built=(), skipped=None, kinds=figures.OF_A_RUN, found=None):
    groups = made_up.analysed(*members)
    with pytest.MonkeyPatch.context() as patch:  # Figures that are not shown are not drawn.
        for name in ("_OF_A_RUN", "_OF_ANALYSES"):
            wanted = [each for each in getattr(figures, name) if each.__name__ in kinds]
            patch.setattr(figures, name, wanted)
        drawn = [each for each in figures.draw(groups) if each.kind in kinds]
    found = found or [material() for _ in groups]
    by_class = [classes.load(group) for group in groups]
    return page.render(groups, skipped or {}, built, drawn, found, by_class)


@pytest.fixture(scope="module")
def text():
    members = [made_up.run(seed) for seed in (1, 2, 3)]
    members.append(made_up.run(1, learner="splitlora", **{"train.epochs": 5}))
    skipped = {Path("runs/broken"): "unfinished: no results.json, 3 tasks done"}
    kinds = ("accuracy_curve", "task_confusion", "task_identity", "prototype_geometry")
    return rendered(members, [table()], skipped, kinds)


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


@pytest.fixture(scope="module")
def single():
    run = made_up.run(1, benchmark="digits")
    return Reader(rendered([run], tables.build(made_up.groups(run)), kinds=("accuracy_curve",)))


def test_nothing_comes_from_elsewhere(text, read):
    assert {tag for tag, _ in read.elements}.isdisjoint({"script", "link", "iframe", "object"})
    for tag, attributes in read.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                assert value.startswith(("#", "tables/", "figures/", "classes_", "data:image/"))
    (policy,) = [each for each in read.all("meta") if "http-equiv" in each]
    assert "default-src 'none'" in policy["content"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style and "http" not in style


def test_links_lead_somewhere(text, read):
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in read.elements:
        target = attributes.get("href", "")
        if target.startswith("#"):
            assert target[1:] in ids
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)", text)) <= set(ids)
    targets = [each.get("href", "") for each in read.all("a")]
    assert {f"tables/accuracy.{suffix}" for suffix in ("csv", "tex")} < set(targets)
    assert {"figures/task_identity.svg", "figures/task_identity.png"} < set(targets)


def test_a_single_run_of_digits_begins_with_fdc_and_the_papers_tables(single):
    assert single.texts("h1") == ["Cumulative-LoRA with FDC on Digits"]
    assert single.texts("h2") == ["Result", "Tables", "Calibrators and tasks", "Provenance"]
    results = made_up.run(1, benchmark="digits").results.accuracy
    assert f"{results['fdc']:.1f} %" in single.texts("span")
    best = f"the most accurate method of the run is class Gaussians, {results['gaussians']:.1f} %."
    assert any(best in text for text in single.texts("p"))
    share = made_up.groups(made_up.run(1, benchmark="digits"))[0].row("fdc")
    interval = f"(95 % interval {share['low']:.1f} to {share['high']:.1f})"
    assert any(interval in text for text in single.texts("p"))
    assert any("12 classes in 4 tasks, 120 test images, seed 1." in p for p in single.texts("p"))


@pytest.mark.parametrize(
    ("fdc", "lead"), [(70.0, "as accurate as class Gaussians"), (71.0, ", the most")]
)
def test_a_tie_names_no_winner(fdc, lead):
    run = made_up.run(1, benchmark="digits")
    run.results.accuracy |= {"raw": 60.0, "fdc": fdc, "gaussians": 70.0}
    (group,) = made_up.groups(run)
    assert group.headline == "fdc"
    words = " ".join(Reader(rendered([run], kinds=())).texts("p"))
    assert lead in words
    assert ("the most accurate method" in words) == (fdc > 70.0)


def test_photographs_are_introduced_without_heads_and_logits():
    def lead(run):
        built = Reader(rendered([run], kinds=()))
        return built.texts("p")[0]

    own = lead(made_up.run(1, benchmark="my photographs"))
    assert "your classes" in own and "photographs" in own
    assert not re.search(r"\b(head|heads|logits|FDC)\b", own)
    for benchmark in ("digits", "cub200"):
        assert "heads compete" in lead(made_up.run(1, benchmark=benchmark))
    features = made_up.run(1, benchmark="seed1+seed2")
    features.results.encoder = None
    assert "heads compete" in lead(features)
    for point in (features.results, *features.results.curve):
        for name in ("raw", "oracle"):
            del point.accuracy[name]
    assert "there are no heads" in lead(features)


def test_features_alone_have_no_pictures():
    run = made_up.run(1, benchmark="seed1")
    run.results.encoder = None
    built = tables.build(made_up.groups(run))
    text = rendered([run], built, kinds=(), found=[Pictures(missing="no images here")])
    words = text[text.index("<body>") :].lower()
    assert "picture" not in words and "no images here" not in words and "fdc put right" not in words
    # Nothing is compared, so that no column tells ours from others.
    assert "numbers" not in Reader(text).texts("th") and tables.READING not in text


def test_confused_pairs_are_counted():
    run = made_up.run(1, benchmark="photographs")
    found = classes.load(made_up.groups(run)[0])
    heading = "Classes that are taken for each other"
    assert f"{heading}: the five most frequent of {found.num_pairs} pairs" in Reader(
        rendered([run], kinds=())
    ).texts("h3")


def test_what_the_paper_has_is_folded_on_other_benchmarks_alone(single, read):
    fold = "Calibrators side by side, task by task, and how FDC chose"
    own = Reader(rendered([made_up.run(1, benchmark="photographs")], kinds=()))
    assert fold in own.texts("h3")
    assert own.texts("h1") == ["Cumulative-LoRA with class Gaussians on photographs"]
    assert fold not in single.texts("h3") + read.texts("h3")


def test_calibrators_tasks_and_pictures(single):
    results, cells = made_up.run(1, benchmark="digits").results, single.texts("td")
    assert {"Raw", "FDC", formatting.method_title("gaussians"), "Task given"} < set(
        single.texts("th")
    )
    assert single.texts("h3").count("Calibrators side by side") == 1
    for section in ("accuracy", "routing_accuracy", "average_incremental_accuracy"):
        assert {f"{getattr(results, section)[name]:.2f}" for name in made_up.METHODS} < set(cells)
    assert any("Class Gaussians with drift compensation." in each for each in single.texts("p"))
    last = results.curve[-1].task_accuracy
    assert {f"{values[0]:.1f}" for values in last.values()} < set(cells)
    assert "Forgetting" in single.texts("th") and "2.0" in cells  # losing one point a task
    headings = single.texts("h4")
    assert headings[0].endswith("FDC puts it right: 2 of 12") and headings[1].endswith("1 of 1")
    alt = [each["alt"] for each in single.all("img") if "image" in each["alt"]]
    assert alt == ["Test image 3: ant", "Test image 5: ant", "Test image 6: ant"]
    assert f"{MINUS}1.0" in cells


def test_several_configurations_have_tables_and_a_section_each(read):
    named = [f"{name} with FDC on CIFAR-100" for name in ("Cumulative-LoRA", "SplitLoRA")]
    assert read.texts("h2")[:3] == ["Tables", *named]
    raw, cells = made_up.groups()[0].values("raw"), read.texts("td")
    assert f"{np.mean(raw):.2f} ± {np.std(raw, ddof=1):.2f}" in cells
    assert "61.20 ± 0.30 (3)" in cells and f"{MINUS}1.50" in cells
    assert "unfinished: no results.json, 3 tasks done" in read.texts("dd")


def test_names_from_files_are_text():
    run = made_up.run(1, learner=HOSTILE, **{HOSTILE: HOSTILE})
    frame = pd.DataFrame({HOSTILE: [HOSTILE]}, pd.Index([HOSTILE], name=HOSTILE))
    hostile = Table(HOSTILE, HOSTILE, frame, HOSTILE)
    skipped = {Path(HOSTILE): HOSTILE}
    kinds = ("accuracy_curve", "residual_contributions")
    text = rendered([run], [hostile], skipped, kinds, [material(HOSTILE)])
    read = Reader(text)
    assert "<script" not in text and "<b>" not in text and "-->" not in text
    for tag in ("h1", "h3", "td", "th", "strong", "dd", "code"):
        assert any(HOSTILE in words for words in read.texts(tag)), tag
    assert not any(name.startswith("on") for _, each in read.elements for name in each)


def test_the_same_runs_give_the_same_page():
    one, other = (rendered([made_up.run(1)], kinds=("accuracy_curve",)) for _ in range(2))
    assert one == other
