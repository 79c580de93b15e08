"""What all learners and post-hoc methods have in common, seen in the programs that they compile."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learners.test_several_devices import FLAGS, REPOSITORY

# What a learner may take its statistics from, as its authors do.
IMAGES = {
    "cumulative_lora": [],
    "inflora": ["augmented"],
    "inflora_ca": ["augmented", "plain"],
    "splitlora": ["augmented"],
    "ewc_lora": ["augmented"],
    "sd_lora": [],
    "lora_subtraction": ["augmented", "plain"],
    "loda": ["augmented"],
    "rsiat": ["plain"],
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The images asked for, and the text of every compiled program."""
    folder = tmp_path_factory.mktemp("two_tasks")
    programs = folder / "programs"
    programs.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.learners.two_tasks", str(folder)],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(FLAGS[1:]),
            "JAX_DUMP_IR_TO": str(programs),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {path: path.read_text() for path in programs.iterdir()}


def test_parity_mode_leaves_no_product_to_the_precision_of_a_device(outcome):
    """GPUs would round the factors to 10 bits, TPUs to 7; a CPU never shows it."""
    count = 0
    for path, text in outcome[1].items():
        for line in re.findall(r".*stablehlo\.(?:dot_general|convolution).*", text):
            assert "[HIGHEST, HIGHEST]" in line, f"{Path(path).name}: {line}"
            count += 1
    assert count > 500


def test_images_that_learners_look_at(outcome):
    assert outcome[0] == IMAGES
