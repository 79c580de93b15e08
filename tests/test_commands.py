"""The command `fdc`, from the checkout and from a wheel."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

import fdc_jax
from fdc_jax import __main__ as programs
from fdc_jax.errors import InputError, Interrupted, Program, stop_on_signals
from fdc_jax.run import configuration
from tests import small_runs

REPOSITORY = Path(__file__).resolve().parents[1]


def run_python(*arguments, cwd=REPOSITORY, **variables):
    """Runs Python with the package on its path, whatever its exit code."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "error, code, text",
    [
        (PermissionError(13, "Permission denied", "/closed/x"), 2, "/closed/x: Permission denied"),
        (InputError("x" * 5000 + "\x1b"), 2, f"{'x' * 200}...{'x' * 16}\\x1b"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 2, "out of memory (RESOURCE_EXH"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
    ],
)
def test_errors_of_the_system_are_one_line(error, code, text, capsys):
    def body(options):
        raise error

    assert Program("predict", "").run(body, []) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fdc_jax.predict: {text}")


def test_an_error_of_the_program_has_a_traceback():
    with pytest.raises(ZeroDivisionError):
        Program("predict", "").run(lambda options: 1 / 0, [])


# Signals ------------------------------------------------------------------------------------------

# A signal at the first import of a module, within a block that swallows exceptions.
IMPORTS = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), {number})
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, Finder())
from fdc_jax.__main__ import main
main()
"""
# A signal in a callback of the garbage collector, where Python ignores exceptions.
COLLECTS = """
import gc, signal, sys, time, types
from fdc_jax.__main__ import load
def main():
    def interrupt(*_):
        gc.callbacks.remove(interrupt)
        signal.raise_signal({number})
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(60)
for module in ("run_command", "predict"):
    sys.modules[f"fdc_jax.{{module}}"] = types.SimpleNamespace(main=main)
load(sys.argv[1])()
"""


# A signal after the end of the program, while Python frees its modules.
FREES = """
import os, sys, types
from fdc_jax.__main__ import load
class Late:
    def __del__(self, kill=os.kill, write=os.write, process=os.getpid()):
        kill(process, {number})
        write(1, b"freed")
sys.late = Late()
sys.modules["fdc_jax.predict"] = types.SimpleNamespace(main=lambda: 2)
sys.exit(load("predict")())
"""


@pytest.mark.parametrize(
    ("name", "number", "code", "text"),
    [
        ("run", signal.SIGTERM, 75, "SIGTERM; the same command resumes"),
        ("predict", signal.SIGINT, 130, "SIGINT"),
    ],
)
@pytest.mark.parametrize("script", [IMPORTS, COLLECTS], ids=["imports", "garbage collector"])
def test_a_signal_ends_a_command_at_once(script, name, number, code, text):
    done = run_python("-c", script.format(module="numpy", number=int(number)), name)
    assert (done.returncode, done.stderr) == (code, f"fdc_jax.{name}: stopped by {text}\n")


def test_a_signal_after_the_end_changes_no_exit_code():
    done = run_python("-c", FREES.format(number=int(signal.SIGTERM)))
    assert (done.returncode, done.stdout, done.stderr) == (2, "freed", "")


# A loop that does not look at its request to stop.
LOOPS = """
import time
from fdc_jax.errors import stop_on_signals
with stop_on_signals() as stop:
    print("loops", flush=True)
    while not stop.requested():
        time.sleep(0.05)
    print("stops", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_ends(number):
    command = [sys.executable, "-c", LOOPS]
    with subprocess.Popen(command, cwd=REPOSITORY, **small_runs.PIPES) as process:
        assert process.stdout.readline() == "loops\n"
        process.send_signal(number)
        assert process.stdout.readline() == "stops\n"
        process.send_signal(number)  # as `timeout` does, which signals a process and its group
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        text = f"stopping after this step, with a checkpoint; a second {name} ends at once"
        assert process.stderr.readline() == f"fdc_jax.run: {text}\n"
        time.sleep(0.1)
        assert process.poll() is None
        time.sleep(0.6)
        process.send_signal(number)
        assert process.wait() == 128 + number


def test_signal_handlers_are_restored_after_the_loop():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped by SIGTERM; the same command resumes"):
            stop.poll()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "ending, code, message",
    [
        (">/dev/full", 2, "fdc_jax.posthoc: [Errno 28] No space left on device"),
        ("| exec sleep 0", 141, ""),
    ],
)
def test_closed_or_full_standard_output_is_one_line(ending, code, message, tmp_path):
    """Help longer than a pipe holds, so that it is noticed while it is written."""
    script = (
        "import sys; from fdc_jax.errors import Program\n"
        "sys.exit(Program('posthoc', '').run(lambda options: print('x' * 10**6), []))"
    )
    line = f"set -o pipefail; '{sys.executable}' -c \"$1\" {ending}"
    done = subprocess.run(
        ["bash", "-c", line, "-", script], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (code, message)


def test_a_flag_given_twice_is_refused(capsys):
    program = Program("predict", "")
    program.add_argument("--output")
    program.add_argument("--sweep", action="append", default=[])
    assert program.run(lambda options: None, ["--sweep=a", "--sweep=b"]) == 0
    assert program.run(lambda options: None, ["--output=a", "--output", "b"]) == 2
    assert capsys.readouterr().err == "fdc_jax.predict: --output is given twice\n"


def test_wrong_names_of_commands_are_one_line(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # restored after the test

    def message(*command):
        monkeypatch.setattr(sys, "argv", ["fdc", *command])
        programs.main()
        return capsys.readouterr().out

    assert re.findall(r"^  (\w+) ", message(), re.MULTILINE) == list(programs.PROGRAMS)
    assert message("--version") == f"{fdc_jax.__version__}\n"
    for name, end in (("posthic", "'; did you mean posthoc?\n"), ("x" * 5000, "...xxx")):
        with pytest.raises(SystemExit, match="2"):
            message(name)
        error = capsys.readouterr().err
        assert end in error and len(error) < 500


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param(
            "JAX_PLATFORMS",
            "cuda",
            "JAX_PLATFORMS=cuda: JAX finds no such device here",
            marks=pytest.mark.ci,
        ),
        ("JAX_DEBUG_NANS", "maybe", "(?=.*JAX_DEBUG_NANS).*maybe"),
    ],
)
def test_wrong_value_of_a_jax_variable_is_one_line(name, value, message, tmp_path):
    program = ("-m", "fdc_jax", "posthoc", "example")
    done = run_python(*program, cwd=tmp_path, **{name: value})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.match(f"fdc_jax.posthoc: {message}", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("name", ["omnibench", "configs/omnibench.py"])
def test_configurations_are_found_by_name(name, tmp_path, monkeypatch):
    """A path may name a file of the user's own, which is run; a bare name may not."""
    monkeypatch.chdir(tmp_path)
    assert configuration.load(name).benchmark == "omnibench"
    (tmp_path / "configs").mkdir()
    shutil.copy(REPOSITORY / "configs" / "digits.py", name)
    expected = "digits" if name.endswith(".py") else "omnibench"
    assert configuration.load(name).benchmark == expected


@pytest.mark.slow
def test_a_wheel_works_outside_of_the_checkout(tmp_path, cache):
    """The wheel of a clean copy of the repository, built without the network."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    site = tmp_path / "site"
    unkept = shutil.ignore_patterns(".*", "tests", "build", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=unkept)
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"--target={site}", copy], check=True)
    paths = {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu", "FDC_JAX_CACHE": str(cache)}
    flags = [f"--config.{name}={value}" for name, value in small_runs.FIELDS.items()]
    command = [site / "bin" / "fdc", "run", "--config", "digits", *flags]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | paths)
    assert small_runs.results(tmp_path / "runs" / "digits")["versions"]["commit"] is None


def test_texts_of_others_are_escaped_and_fit_any_encoding():
    script = (
        "import logging\n"
        "from fdc_jax.errors import Ending, InputError, plain_warnings\n"
        "with Ending('t') as ending, plain_warnings('t'):\n"
        "    print('caf\\u00e9')\n"
        "    logging.getLogger('fdc_jax').warning('a\\x1b[31mb\\nc')\n"
        "    raise InputError('d\\x1b[31m\\ne')\n"
        "assert ending.code == 2\n"
    )
    done = run_python("-c", script, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout == "caf\\xe9\n"
    assert done.stderr.splitlines() == ["t: WARNING: a\\x1b[31mb\\nc", "t: d\\x1b[31m\\ne"]


def test_the_citation_and_the_changelog_name_the_version():
    version = fdc_jax.__version__
    assert f"\nversion: {version}\n" in (REPOSITORY / "CITATION.cff").read_text()
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE)
