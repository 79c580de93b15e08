"""Every command of the README: it parses, its files exist, and the short ones are run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fdc_jax import configuration
from fdc_jax.data import benchmarks
from fdc_jax.report import __main__ as report
from fdc_jax.report import reference

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()


def commands():
    """The commands of all shell blocks, one by one."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found += [part.strip(" &") for part in line.split("&&") if part.strip()]
    return found


def arguments_of(program):
    """Arguments of every README command that runs the program."""
    found = []
    for command in commands():
        words = shlex.split(command, comments=True)
        if program in words:
            found.append(words[words.index(program) + 1 :])
    return found


def load_config(path):
    spec = importlib.util.spec_from_file_location("config_under_test", REPOSITORY / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def test_every_command_is_of_a_kind_that_is_tested_here():
    known = ("-m venv", "pip install", "main.py", "-m pytest", "-m fdc_jax.")
    for command in commands():
        assert any(kind in command for kind in known), command
    assert len(commands()) >= 8


@pytest.mark.parametrize("arguments", arguments_of("main.py"), ids=" ".join)
def test_runs_of_the_main_program_have_valid_configurations(arguments):
    options = dict(word.removeprefix("--").split("=", 1) for word in arguments)
    config = load_config(options.pop("config"))
    if options.get("config.learner.name") == "linear_probe":
        pytest.skip("run by a test of its own")
    assert options.pop("workdir")
    for flag in ("coordinator_address", "num_processes", "process_id"):
        options.pop(flag, None)
    fields = configuration.flatten(config)
    for name, value in options.items():
        field = name.removeprefix("config.")
        assert field in fields, name
        kind = type(fields[field])
        values = [int(part) for part in value.split(",")] if kind is list else kind(value)
        config.update_from_flattened_dict({field: tuple(values) if kind is list else values})
    configuration.validate(config)
    benchmarks.find(config.benchmark)


@pytest.mark.parametrize("arguments", arguments_of("fdc_jax.data.prepare"), ids=" ".join)
def test_preparations_name_known_benchmarks_and_flags(arguments):
    name, *flags = arguments
    assert name in benchmarks.BENCHMARKS
    usage = subprocess.run(
        [sys.executable, "-m", "fdc_jax.data.prepare", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for flag in flags:
        assert flag.split("=")[0] in usage


def test_posthoc_commands_run_in_order(tmp_path):
    runs = arguments_of("fdc_jax.posthoc")
    assert len(runs) >= 2
    for arguments in runs:
        done = subprocess.run(
            [sys.executable, "-m", "fdc_jax.posthoc", *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", arguments_of("fdc_jax.report"), ids=" ".join)
def test_report_commands_have_known_options_and_files(arguments):
    options = report.parser().parse_args(arguments)
    assert options.runs == ["runs/*"]
    for path in options.reference:
        reference.read(REPOSITORY / path)


def test_requirement_files_exist():
    named = set(re.findall(r"-r (\S+\.txt)", README))
    assert named == {"requirements.txt", "requirements-dev.txt"}
    for name in named:
        assert (REPOSITORY / name).is_file()


def test_continuous_integration_runs_the_readmes_test_command():
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert "README.md" in script
    first = next(line for line in README.splitlines() if "python -m pytest" in line)
    assert first.startswith("python3 -m venv .venv && ")


def test_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if not target.startswith("http"):
            assert (REPOSITORY / target).exists(), target


def test_the_learner_that_the_readme_shows_runs(tmp_path):
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "TITLE =" in block
    ]
    (arguments,) = [words for words in arguments_of("main.py") if "linear_probe" in words[-1]]
    (tmp_path / "linear_probe.py").write_text(code)
    arguments = [
        *arguments,
        "--quiet",
        "--config.train.epochs=2",
        "--config.data.train_per_class=20",
    ]
    arguments[0] = f"--config={REPOSITORY}/configs/digits.py"
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "main.py"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs" / "probe" / "results.json").read_text())
    assert found["learner"] == "linear_probe"
    assert found["config"]["learner.linear_probe.temperature"] == 0.5
    assert found["accuracy"]["oracle"] > 80
    assert found["accuracy"]["fdc"] > found["accuracy"]["raw"]
