"""Hooks of MkDocs: notebooks, API pages, links out of docs/, formulas, breaks in long names.

The pages in docs/ stay readable on a code host. In the site a notebook is a page, and every package
has a page of its docstrings. Files outside docs/ that pages link to are below `repository/`. TeX
becomes MathML, which browsers render without a script.
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
# Inline code, a long word or an option in it, and the positions at which a line may break.
_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>[^<]+</code>")
_LONG = re.compile(r"(?<![^\s<>])(?:[^\s<>]{16,}|-[^\s<>]+)(?![^\s<>])")
_PART = re.compile(r"(?<=[\w)\]}][._/=,:-])(?=[\w{\[])|(?<=\w)(?=\()")
# A dotted name, except fields of the configuration: the part with an entry in the API (the class
# for a class's member), then the rest.
_NAME = re.compile(
    r"`((?!config\.)(?=\w+\.)[a-z]\w*(?:\.[a-z]\w*)*(?:\.(?![A-Z]+_)[A-Z]\w*)?)((?:\.\w+)?)`"
)


def on_files(files: Files, config: Any) -> Files:
    """Adds generated pages, and the files outside docs/ that pages link to."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
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
        add(uri, _relinked(text, links, uri))
        waiting += links.values()
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites a page's links for the site, and links the names of the notation to the API."""
    uri = page.file.src_uri
    if uri == "notation.md":
        markdown = _NAME.sub(r"[`\1\2`][fdc_jax.\1]", markdown)
    return _relinked(markdown, _linked(markdown, (DOCS / uri).parent), uri)


def on_page_content(content: str, **_: Any) -> str:
    """Converts TeX to MathML, inserts line breaks into long names, and keeps them out of a ± b."""
    content = _CODE.sub(lambda match: _LONG.sub(_breakable, match[0]), content)
    return _FORMULA.sub(_mathml, content).replace(" ± ", "\u00a0±\u00a0")


def _breakable(match: re.Match[str]) -> str:
    parts = _PART.split(match[0])
    return "<wbr>".join(f'<span class="whole">{part}</span>' for part in parts)


def _mathml(match: re.Match[str]) -> str:
    tex = html.unescape(match[2])
    if match[1] == "span":
        return convert(tex)
    # The div scrolls if the formula is wider than the screen.
    return f'<div class="formula" tabindex="0">{convert(tex, display="block")}</div>'


def _notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yields a notebook's page, with a link to the notebook, and its pictures."""
    names = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = nbconvert.MarkdownExporter().from_filename(str(path), names)
    folder = path.parent.relative_to(DOCS)
    link = f'\n\n<a href="{path.name}" download>This page as a notebook</a>\n'
    yield f"{folder}/{path.stem}.md", text + link
    for name, picture in resources["outputs"].items():
        yield f"{folder}/{name}", picture


def _api() -> Iterator[tuple[str, str]]:
    """Yields a page of docstrings for every package."""
    for init in sorted(PACKAGE.rglob("__init__.py")):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        # Names imported from the modules are documented there.
        own = re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", init.read_text(), re.MULTILINE)
        options = f"{{heading_level: 1, members: [{', '.join(own)}]}}"
        text = f"::: {package}\n    options: {options}\n\n"
        modules = sorted(module.stem for module in init.parent.glob("[!_]*.py"))
        yield f"api/{package}.md", text + "".join(f"::: {package}.{name}\n\n" for name in modules)


def _page(path: Path) -> str:
    """Returns the Markdown of a text file of the repository, or the list of a folder's files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.name[0] not in "._")
        return f"# {name}\n\n" + "\n".join(f"- [{file}]({file})" for file in files)
    text = path.read_text()
    return text if path.suffix == ".md" else f"# {name}\n\n```python\n{text}```\n"


def _uri(path: Path) -> str:
    """Returns the site's URI of a file or folder of the repository; a page's ends in `.md`."""
    if path.is_dir():
        path /= "README.md" if (path / "README.md").exists() else "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix().replace(".ipynb", ".md")
    return f"repository/{path.relative_to(ROOT)}{'.md' * (path.suffix == '.py')}"


def _linked(text: str, folder: Path) -> dict[str, Path]:
    """Returns the files of the repository that a page in a folder links to, by link."""
    paths = {link: Path(os.path.normpath(folder / link)) for link in _LINK.findall(text)}
    return {
        link: path
        for link, path in paths.items()
        if path.is_relative_to(ROOT) and path.exists() and path != ROOT
    }


def _relinked(text: str, links: dict[str, Path], uri: str) -> str:
    """Returns a page's text with its links rewritten for the site."""
    folder = os.path.dirname(uri)
    targets = {link: os.path.relpath(_uri(path), folder) for link, path in links.items()}
    return _LINK.sub(lambda match: targets.get(match[0], match[0]), text)
