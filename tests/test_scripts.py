"""Scripts behind published numbers name what they cannot use in one line, before any work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["held_out_features", "affinity_study", "beyond_variants"])
def test_a_folder_that_is_no_run(name, tmp_path):
    (tmp_path / "file").write_text("")
    for output, culprit in (("new.json", "nothing_here"), ("file/new.json", "--output")):
        done = subprocess.run(
            [
                *(sys.executable, "-m", f"scripts.{name}", str(tmp_path / "nothing_here")),
                f"--output={tmp_path / output}",
            ],
            cwd=REPOSITORY,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith(f"scripts.{name}: ") and culprit in line
        assert done.stdout == ""
