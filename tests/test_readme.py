"""Every command of the README and of docs/: it parses, its files exist, the short ones are run."""

import itertools
import re
import shlex
import sys
from pathlib import Path

import pytest

from fdc_jax import export, learners, predict, run_command
from fdc_jax.posthoc import posthoc_command as posthoc
from fdc_jax.report import reference
from fdc_jax.report import report_command as report
from tests import small_runs

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
FILES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
FILES += sorted((REPOSITORY / "docs").rglob("*.md"))
PAGES = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in FILES}


def commands(text):
    """The commands of all shell blocks, one by one."""
    parts = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if not block.startswith("#!") or "python" in line:  # else a line of a script
                parts += re.split(r"\s+#", line)[0].split("&&")
    return [part.strip(" &") for part in parts if part.strip()]


def arguments_of(program):
    """Arguments of every command of the pages that runs the program, each once."""
    by_line = {}
    for line in itertools.chain.from_iterable(map(commands, PAGES.values())):
        tokens = shlex.split(line)
        tokens = tokens[tokens.index("fdc_jax") + 1 :] if "fdc_jax" in tokens else tokens
        if program in tokens:
            arguments = tokens[tokens.index(program) + 1 :]
            by_line[" ".join(arguments)] = arguments
    return list(by_line.values())


def test_every_command_of_the_pages_is_of_a_tested_kind():
    known = r"-m (venv|pytest|fdc_jax|benchmarks\.)|pip install|main\.py|jupyter nbconvert|"
    known += "bin/(ruff|pyright|mkdocs|lint-imports)"
    for page, text in PAGES.items():
        for line in commands(text):
            assert re.search(known, line), (page, line)
    assert len(commands(README)) >= 8 and len(README.split()) <= 850


@pytest.mark.parametrize("arguments", arguments_of("main.py"), ids=" ".join)
def test_runs_of_the_main_program_have_valid_configurations(arguments):
    arguments = [word for word in arguments if word.startswith("--config")]
    if arguments[0].endswith((":linear_probe", ":lwf")):
        return  # The learners that the pages show are run by other tests.
    run_command.configured(arguments)


@pytest.mark.parametrize("module", [export, predict, report], ids=lambda module: module.__name__)
def test_commands_have_known_options_and_files(module):
    for arguments in arguments_of(module.__name__.removesuffix(".__main__").rpartition(".")[2]):
        options = module.parser().parse_args(arguments)
        assert str(getattr(options, "workdir", "runs/*")).startswith("runs/")
        for path in getattr(options, "reference", ()):
            reference.read(REPOSITORY / path)


def test_posthoc_commands_run(tmp_path, monkeypatch):
    runs = [tokens for tokens in arguments_of("posthoc") if tokens[0] == "example"]
    assert len(runs) >= 2
    monkeypatch.chdir(tmp_path)
    for arguments in runs:
        # Ten thousand random features, the default, take most of the time.
        fewer = ["--projections=100"] if "--method=all" in arguments else []
        assert posthoc.main([*arguments, *fewer]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_files_named_on_a_page_exist(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((REPOSITORY / page).parent / target).exists(), target
    for program in re.findall(r"-m benchmarks\.(\w+)", PAGES[page]):
        path = REPOSITORY / "benchmarks" / f"{program}.py"
        assert path.is_file() or page == "CHANGELOG.md", program


def test_table_of_learners_equals_their_docstrings():
    """The first line of the docstring of a module, without its name."""
    expected = []
    for name in learners.names():
        first = sys.modules[learners.find(name).__module__].__doc__.partition("\n")[0]
        expected.append((name, first.partition(": ")[2].rstrip(".")))
    assert re.findall(r"^\| `(\w+)` \| (.+) \|$", README, re.MULTILINE) == expected


@pytest.mark.ci
def test_the_learner_that_the_readme_shows_runs(tmp_path, cache, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [block for block in blocks if "(Learner)" in block]
    (tmp_path / "linear_probe.py").write_text(code)
    (line,) = [line for line in commands(README) if "linear_probe" in line]
    arguments = shlex.split(line.partition("main.py")[2])
    process = small_runs.start(None, *arguments, "--quiet", cache=cache, cwd=tmp_path)
    small_runs.finish(process)
    folder = tmp_path / "runs" / "probe"
    record = small_runs.results(folder)
    assert record["config"]["learner.linear_probe.temperature"] == 0.5
    assert record["accuracy"]["fdc"] > record["accuracy"]["raw"]
    monkeypatch.syspath_prepend(tmp_path)
    assert export.main([str(folder), str(tmp_path / "model"), "--learner=linear_probe"]) == 0
