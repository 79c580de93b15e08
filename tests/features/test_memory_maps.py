"""Anonymous memory of a process that fits and scores a folder of memory-mapped feature files.

The pages of a file are not anonymous, a copy is. Samples of the memory are at most its peak, so
that a busy machine does not make the test fail.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import heads
from fdc_jax.features import feature_files
from tests import small_runs

WIDTH, CLASSES = 256, 10
PROGRAM = """
import sys, threading
from fdc_jax import calibration
from fdc_jax.features import feature_files

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

def watch(samples):
    while not done.wait(0.001):
        samples.append(anonymous())

def fit_and_score(folder, method):
    features = feature_files.load(folder)
    features.fit(calibration.make(method)).score(features.test_adapted, features.test_pretrained)

small, large = sys.argv[1:]
for method in ("fdc", "gaussians"):
    fit_and_score(small, method)  # compiles all programs
    before, samples, done = anonymous(), [], threading.Event()
    thread = threading.Thread(target=watch, args=[samples])
    thread.start()
    fit_and_score(large, method)
    done.set()
    thread.join()
    print(method, max(samples) - before, len(samples))
"""


def write(folder, rows):
    """Writes two tasks, a small one and one of `rows`; one large file serves as all its views."""
    labels = np.arange(rows) % CLASSES
    centres = 8 * np.eye(CLASSES, WIDTH, dtype=np.float32)
    features = centres[labels] + np.random.default_rng(0).random((rows, WIDTH), np.float32)
    head = heads.LinearHead(centres, np.zeros(CLASSES))
    few = slice(2_000)
    folder.mkdir()
    feature_files.write_task(folder, 0, features[few], labels[few], head, features[few])
    feature_files.write_task(folder, 1, features, labels + CLASSES, head)
    for name in ("train_pretrained_1", "train_previous_1", "test_adapted", "test_pretrained"):
        (folder / f"{name}.npy").symlink_to(folder / "train_adapted_1.npy")


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, as Linux has it")
def test_no_memory_map_is_copied(tmp_path):
    write(tmp_path / "small", 4_000)
    write(tmp_path / "large", 40_000)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    folders = (tmp_path / "small", tmp_path / "large")
    output = small_runs.python("-c", PROGRAM, *folders, env=environment)
    one_map = (tmp_path / "large" / "train_adapted_1.npy").stat().st_size
    for line in output.splitlines():
        method, added, samples = line.split()
        assert int(samples) > 10 and int(added) < one_map, (method, int(added) / one_map)
    assert len(output.splitlines()) == 2
