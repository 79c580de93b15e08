"""What MkDocs does beside `mkdocs.yml`: notebooks, API pages, links that leave docs/, formulas,
names in the code that may go on in the next line.

Pages stay as a code host reads them. In the site a notebook is a page, every package has a page of
its docstrings, what pages link to outside docs/ lies below `repository/`, and TeX is MathML, which
browsers draw without a script.
"""

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbconvert
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "fdc_jax"
_LINK = re.compile(r"(?<=\]\()[^()#:\s]+")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# Code in a line of text, a long word or an option in it, where that may go on in the next line.
_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>[^<]+</code>")
_LONG = re.compile(r"(?<![^\s<>])(?:[^\s<>]{16,}|-[^\s<>]+)(?![^\s<>])")
_PART = re.compile(r"(?<=[\w)\]}][._/=,:-])(?=[\w{\[])|(?<=\w)(?=\()")
# A dotted name in the code but for fields of the configuration: first what has a place in the API,
# which of what a class holds is the class.
_NAME = re.compile(
    r"`((?!config\.)(?=\w+\.)[a-z]\w*(?:\.[a-z]\w*)*(?:\.(?![A-Z]+_)[A-Z]\w*)?)((?:\.\w+)?)`"
)


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that are made, and files outside docs/ that pages link to."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for file in [each for each in files if each.src_uri.endswith(".ipynb")]:
        for uri, content in _notebook(DOCS / file.src_uri):
            add(uri, content)
    for uri, content in _api():
        add(uri, content)
    waiting = []
    for file in files.documentation_pages():
        waiting += _linked(file.content_string, (DOCS / file.src_uri).parent).values()
    while waiting:
        path = waiting.pop()
        uri = _uri(path)
        if path.is_relative_to(DOCS) or files.get_file_from_path(uri):
            continue
        if not uri.endswith(".md"):
            add(uri, path.read_bytes())
            continue
        text, folder = _page(path), path if path.is_dir() else path.parent
        links = {} if path.suffix == ".py" else _linked(text, folder)
        add(uri, _placed(text, links, uri))
        waiting += links.values()
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links of pages of docs/ at what the site has, names of the notation at the API."""
    uri = page.file.src_uri
    if uri == "notation.md":
        markdown = _NAME.sub(r"[`\1\2`][fdc_jax.\1]", markdown)
    return _placed(markdown, _linked(markdown, (DOCS / uri).parent), uri)


def on_page_content(content: str, **_: Any) -> str:
    """Turns TeX into MathML, and lets long names go on in the next line."""
    content = _CODE.sub(lambda found: _LONG.sub(_parted, found[0]), content)
    return _FORMULA.sub(_mathml, content)


def _parted(found: re.Match[str]) -> str:
    parts = _PART.split(found[0])
    return "<wbr>".join(f'<span class="whole">{part}</span>' for part in parts)


def _mathml(found: re.Match[str]) -> str:
    tex = html.unescape(found[2])
    if found[1] == "span":
        return convert(tex)
    # Scrolls where it is wider than the screen.
    return f'<div class="formula" tabindex="0">{convert(tex, display="block")}</div>'


def _notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yields the page of a notebook, which offers the notebook itself, and its pictures."""
    place = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, found = nbconvert.MarkdownExporter().from_filename(str(path), place)
    folder = path.parent.relative_to(DOCS)
    link = f'\n\n<a href="{path.name}" download>This page as a notebook</a>\n'
    yield f"{folder}/{path.stem}.md", text + link
    for name, picture in found["outputs"].items():
        yield f"{folder}/{name}", picture


def _api() -> Iterator[tuple[str, str]]:
    """Yields a page of docstrings for every package."""
    for init in sorted(PACKAGE.rglob("__init__.py")):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        # What it takes from its modules stands there.
        own = re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", init.read_text(), re.MULTILINE)
        options = f"{{heading_level: 1, members: [{', '.join(own)}]}}"
        text = f"::: {package}\n    options: {options}\n\n"
        modules = sorted(each.stem for each in init.parent.glob("[!_]*.py"))
        yield f"api/{package}.md", text + "".join(f"::: {package}.{each}\n\n" for each in modules)


def _page(path: Path) -> str:
    """Returns Markdown of a text file of the repository, or of a folder: its names."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        found = sorted(each.name for each in path.iterdir() if each.name[0] not in "._")
        return f"# {name}\n\n" + "\n".join(f"- [{each}]({each})" for each in found)
    text = path.read_text()
    return text if path.suffix == ".md" else f"# {name}\n\n```python\n{text}```\n"


def _uri(path: Path) -> str:
    """Returns where the site has a file or folder of the repository; a page's ends in `.md`."""
    if path.is_dir():
        path /= "README.md" if (path / "README.md").exists() else "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix().replace(".ipynb", ".md")
    return f"repository/{path.relative_to(ROOT)}{'.md' * (path.suffix == '.py')}"


def _linked(text: str, folder: Path) -> dict[str, Path]:
    """Returns what a page in a folder links to within the repository, by its links."""
    found = {link: Path(os.path.normpath(folder / link)) for link in _LINK.findall(text)}
    return {
        link: path
        for link, path in found.items()
        if path.is_relative_to(ROOT) and path.exists() and path != ROOT
    }


def _placed(text: str, links: dict[str, Path], uri: str) -> str:
    """Returns the text of a page with its links as the site has them."""
    folder = os.path.dirname(uri)
    places = {link: os.path.relpath(_uri(path), folder) for link, path in links.items()}
    return _LINK.sub(lambda found: places.get(found[0], found[0]), text)
