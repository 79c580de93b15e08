"""Files of a stranger in the current folder: no command takes them for modules."""

import os
import subprocess
import sys

import pytest

from fdc_jax import export
from tests import small_runs

# Optional modules of libraries, and modules that the standard library or a finder would load.
OPTIONAL = ("pytz", "pillow_heif", "numexpr", "zstandard", "bottleneck", "numba")
TRAP = "with open({marker!r}, 'a') as file:\n    file.write(__name__ + '\\n')\n"
ENTRY_POINTS = """
[jax_plugins]
x = entered

[pandas_plotting_backends]
x = entered

[tensorflow_datasets]
x = entered

[orbax]
x = entered
"""
# A name in a call, which matplotlib before 3.10 evaluates.
SETTINGS = "axes.prop_cycle: cycler(unknown, ['r'])\n"


@pytest.fixture(scope="module")
def stranger(finished_run, tmp_path_factory):
    """A folder with an export, an image, and files named as modules that write a marker.

    Modules that `python -m` loads before it runs the first line of a module have no such file.
    """
    loaded = small_runs.python("-P", "-c", "import runpy, sys; print(*sys.modules)").split()
    folder = tmp_path_factory.mktemp("current") / "stranger"
    marker = folder.with_name("marker")
    export.write(finished_run, folder / "model")
    run = export.open_run(finished_run)
    run.tasks.test.image(0).save(folder / "image.png")
    trap = TRAP.format(marker=str(marker))
    names = {*OPTIONAL, *sys.stdlib_module_names} - {name.partition(".")[0] for name in loaded}
    names -= {"nt", "_winapi"}  # An editable installation looks for them at the start.
    (folder / "jax_plugins/x").mkdir(parents=True)
    for name in (*names, "jax_plugins/x/__init__", "entered"):
        (folder / f"{name}.py").write_text(trap)
    information = folder / "entered-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: entered\nVersion: 1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "matplotlibrc").write_text(SETTINGS)
    (folder / "digits").write_text(trap)
    return folder


def run_in(folder, cache, *command, path=(str(small_runs.REPOSITORY),), code=0):
    """Runs Python in a folder; asserts that no trap ran."""
    variables = {"PYTHONPATH": os.pathsep.join(path), "FDC_JAX_CACHE": str(cache)}
    options = {"cwd": folder, "env": os.environ | variables | {"PYTHONSAFEPATH": ""}}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    marker = folder.parent / "marker"
    assert not marker.exists(), (command, sorted({*marker.read_text().split()}))
    assert done.returncode == code, done.stderr
    assert "matplotlibrc" not in done.stderr


FIELDS = small_runs.FIELDS | {"num_tasks": 1, "train.epochs": 1}
SMALL = " ".join(f"--config.{name}={value}" for name, value in FIELDS.items())
COMMANDS = {
    "predict": "model image.png --html=page.html",
    "run": f"--config=digits --workdir=mine {SMALL}",
}


# All commands share the entry point: one that trains, and one that reads files of others.
@pytest.mark.ci
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_files_of_the_current_folder(name, stranger, cache):
    run_in(stranger, cache, "-m", "fdc_jax", name, *COMMANDS[name].split())


@pytest.mark.ci
def test_modules_of_the_current_folder_do_not_run(stranger, cache, tmp_path):
    run_in(stranger, cache, small_runs.REPOSITORY / "main.py", "--help", path=())
    # An empty entry is the current folder for Python, too.
    path = ("", str(small_runs.REPOSITORY))
    script = tmp_path / "fdc"
    script.write_text("from fdc_jax.__main__ import main\nmain()\n")
    run_in(stranger, cache, script, "predict", "--help", path=path)
    run_in(stranger, cache, "-m", "fdc_jax.latency", code=1)
