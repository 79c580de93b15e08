"""Folders with more feature files than a process may open."""

import gc
from pathlib import Path

import numpy as np
import pytest

from fdc_jax.features import feature_files
from fdc_jax.machine import files
from tests import small_runs
from tests.errors import input_error, stale
from tests.features.test_feature_files import example, save

resource = pytest.importorskip("resource", reason="Windows has no limit of this kind")
TASKS, LIMIT = 30, 64
PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from fdc_jax import calibration
from fdc_jax.features import feature_files
from fdc_jax.posthoc.posthoc_command import main
from fdc_jax.report import diagnostics
folder, output = sys.argv[1:]
features = feature_files.load(folder)
pairs = diagnostics.similarity(features, features.fit(calibration.make("fdc")))
print(len(pairs), len(pairs.columns))
sys.exit(main([folder, "--method=gaussians,ncm-pretrained", f"--output={{output}}", "--quiet"]))
"""


def stream(folder):
    """Writes tasks with three views of their training images, the first of a task for testing."""
    arrays = example(TASKS)
    for task in range(1, TASKS):
        arrays[f"train_previous_{task}"] = arrays[f"train_adapted_{task}"][::-1]
    for name in ("labels", "adapted", "pretrained"):
        first = [arrays[f"train_{name}_{task}"][:1] for task in range(TASKS)]
        arrays[f"test_{name}"] = np.concatenate(first)
    return save(folder, arrays)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc, as Linux has it")
def test_maps_are_open_only_while_their_task_is_used(tmp_path):
    gc.collect()  # Maps of earlier tests may be open.
    before = open_files()
    features = feature_files.load(stream(tmp_path / "features"))
    assert open_files() == before + 2  # the test images in both views
    features.check()
    assert open_files() == before + 2
    task = features.tasks[-1]
    assert open_files() == before + 5
    assert [type(view) for view in (task.adapted, task.previous)] == [np.memmap] * 2
    del task
    assert [len(task.labels) for task in features.tasks[1:3]] == [5, 5]
    assert open_files() == before + 2


@pytest.mark.ci
def test_a_folder_of_more_tasks_than_files_may_be_open(tmp_path):
    output = tmp_path / "o.npz"
    printed = small_runs.python("-c", PROGRAM, stream(tmp_path / "features"), output)
    assert printed.split() == [str(TASKS * (TASKS - 1)), "5"]
    with np.load(output) as result:
        assert result["scores"].shape == (TASKS, TASKS)


@pytest.mark.parametrize("read", [files.read_npy, files.read_npz])
def test_an_error_of_the_system_is_no_damage(tmp_path, monkeypatch, read):
    path = tmp_path / "x"
    path.write_bytes(b"")

    monkeypatch.setattr(np.lib.format, "open_memmap", stale)
    monkeypatch.setattr(np, "load", stale)
    with input_error(r": cannot be read: Stale file handle$"):
        read(path)
