"""The size of the package by room; `.ci/run` checks the layers of its imports (pyproject.toml)."""

import ast
import collections
import tokenize
from pathlib import Path

import fdc_jax

PACKAGE = Path(fdc_jax.__file__).parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Tokens by room, the sizes that were reached. A module outside a folder belongs to "package".
LIMITS = {
    "calibration": 27_060,
    "data": 14_420,
    "features": 3_480,
    "learners": 22_770,
    "machine": 7_610,
    "model": 11_500,
    "package": 14_120,
    "paper": 5_560,
    "posthoc": 3_380,
    "report": 22_920,
    "run": 21_980,
}


def uncounted_lines(tree: ast.Module) -> set[int]:
    """Returns the lines of docstrings and imports."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines |= {*range(node.lineno, node.end_lineno + 1)}
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines |= {*range(docstring.lineno, docstring.end_lineno + 1)}
    return lines


def count_tokens(path: Path) -> int:
    """Returns the number of tokens of a file without comments, docstrings, imports and layout."""
    uncounted = uncounted_lines(ast.parse(path.read_text("utf-8")))
    with open(path, "rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in LAYOUT]
    return sum(token.start[0] not in uncounted for token in tokens)


def tokens_by_room() -> dict[str, int]:
    """Returns the number of tokens of every folder of the package."""
    rooms: dict[str, int] = collections.Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        if parts[0] != "configs":  # a folder of the package only if it is installed
            rooms[parts[0] if len(parts) > 1 else "package"] += count_tokens(path)
    return dict(rooms)


def test_rooms_stay_within_their_sizes():
    rooms = tokens_by_room()
    grown = {name: size for name, size in rooms.items() if size > LIMITS.get(name, 0)}
    assert not grown, f"more tokens than in LIMITS: {grown}"
    assert rooms.keys() == LIMITS.keys()


def test_algorithm_1_stays_readable():
    paths = [PACKAGE / "calibration" / f"{name}.py" for name in ("fdc", "compiled", "statistics")]
    assert sum(map(count_tokens, paths)) <= 6_000
    assert len(paths[0].read_text("utf-8").splitlines()) <= 480
