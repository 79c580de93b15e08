"""The site of docs/: navigation, notation, notebooks; that it builds, and loads nothing else."""

import importlib
import itertools
import json
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from fdc_jax import calibration
from fdc_jax.run import config
from tests import small_runs

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PACKAGE = REPOSITORY / "fdc_jax"
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
LONG = ("learner", "run")  # notebooks that train for minutes
NOTATION = re.findall(r"`([a-z]\w*(?:\.\w+)+)`", (DOCS / "notation.md").read_text())


def leaves(nav):
    """Returns the paths in a navigation, a list of pages and of lists under a title."""
    if isinstance(nav, str):
        return [nav]
    paths = []
    for part in nav if isinstance(nav, list) else nav.values():
        paths += leaves(part)
    return paths


def test_navigation_has_every_page_and_package_once():
    pages = (*DOCS.rglob("*.md"), *NOTEBOOKS)
    expected = [page.relative_to(DOCS).with_suffix(".md").as_posix() for page in pages]
    for init in PACKAGE.rglob("__init__.py"):
        expected.append(f"api/{'.'.join(init.parent.relative_to(REPOSITORY).parts)}.md")
    actual = leaves(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    assert sorted(expected) == sorted(path for path in actual if "repository/" not in path)


def is_there(name):
    """Tells whether a dotted name below the package is a module or something that one holds."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(["fdc_jax", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            named = part in getattr(value, "__annotations__", ())
            if not (named or hasattr(value, part)):
                return value is calibration.FDC and part in vars(value())
            value = getattr(value, part, None)
        return True
    return False


@pytest.mark.parametrize("name", sorted(set(NOTATION)))
def test_names_of_the_notation_exist(name):
    if name.startswith("config."):
        assert name.removeprefix("config.") in dict(config.fields())
    else:
        assert is_there(name)


def test_the_notation_has_every_setting_of_the_paper():
    for name in calibration.Settings.__struct_fields__:
        assert f"calibration.fdc.Settings.{name}" in NOTATION
        assert f"config.fdc.{name}" in NOTATION


# Notebooks ---------------------------------------------------------------------------------------


def is_unexpected(output):
    """Returns True if a cell failed or warned; refusals of commands are expected."""
    text = "".join(output.get("text", ""))
    warned = output.get("name") == "stderr" and re.search("warning|error|traceback", text, re.I)
    refused = text.startswith("fdc_jax.run: ")
    return bool(warned and not refused) or output["output_type"] == "error"


def outputs_of(path):
    """Returns the cells of code in a notebook, and their outputs."""
    cells = json.loads(path.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    return cells, list(itertools.chain.from_iterable(cell["outputs"] for cell in cells))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_compile_and_hold_their_outputs(path):
    transformers = pytest.importorskip("IPython.core.inputtransformer2")
    assert path.stat().st_size < 400_000
    cells, outputs = outputs_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(map(is_unexpected, outputs))
    assert not re.search(r"/(home|root|tmp|work|Users)/", json.dumps(outputs))
    for cell in cells:
        source = "".join(cell["source"])
        compile(transformers.TransformerManager().transform_cell(source), path.name, "exec")


@pytest.mark.ci
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else (), id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_notebooks_run(path, tmp_path):
    pytest.importorskip("nbconvert")
    if path.stem in ("peft", "pytorch"):
        pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")
    for name in ("main.py", "configs", "fdc_jax"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    folder = tmp_path / "docs" / "tutorials"
    folder.mkdir(parents=True)
    copy = Path(shutil.copy(path, folder))
    bin_first = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    convert = ("-m", "nbconvert", "--execute", "--inplace", copy)
    small_runs.python(*convert, env=os.environ | {"PATH": bin_first})
    assert not [*filter(is_unexpected, outputs_of(copy)[1])]


# The site ----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page loads (`loaded`), what it links to, and the identifiers of its elements."""

    def __init__(self, path):
        super().__init__()
        self.loaded = []
        self.linked = []
        self.ids = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        loads = tag != "a" and given.get("rel") not in ("prev", "next", "canonical")
        target = given.get("src") or given.get("href")
        if target:
            (self.loaded if loads else self.linked).append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    # Not quietly: what is not logged does not count as a warning.
    small_runs.python("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    return folder


@pytest.mark.ci
def test_links_of_the_site_exist_and_nothing_else_is_loaded(site):
    # The report is there without its other files; the page for what is missing has absolute links.
    left = ("404.html", "example_report.html")
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name not in left}
    assert len(pages) > 40
    for path, page in pages.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, (path, link)
        for link in (*page.loaded, *page.linked):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), (path, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, (path, link)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text()), sheet

    names = pages[site / "api" / "fdc_jax.calibration.html"].ids
    assert "fdc_jax.calibration.calibrator.Calibrator.fit_task" in names
