"""A finished run is what was written; the fuzz tests have what else may stand in its JSON."""

import json
import shutil

import pytest

import fdc_jax
from fdc_jax.errors import InputError


def test_a_finished_run_is_what_was_written(whole, tmp_path):
    """One bit of any file that others read, and opening names the file."""
    known = json.loads((whole / "manifest.json").read_text())["sha256"]
    assert {"config.json", "results.json", "predictions.npz", "tasks/task_001.json"} < known.keys()
    assert {"calibrators/fdc.npz", "calibrators/gaussians.npz"} < known.keys()
    copied = shutil.copytree(whole, tmp_path / "copy")
    for name in known:
        content = (copied / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 3] ^= 4
        (copied / name).write_bytes(changed)
        with pytest.raises(InputError, match=f"{name}: is not what was written"):
            fdc_jax.open_run(copied)
        (copied / name).write_bytes(content)
    fdc_jax.open_run(copied)


@pytest.mark.parametrize(
    "field",
    ["num_tasks", "classes of planned tasks", "encoder.image_size", "evaluation.batch_size"],
)
def test_a_number_that_would_take_all_memory_is_refused_at_once(whole, tmp_path, field):
    config = json.loads((whole / "config.json").read_text())
    config[field] = [10**9] if isinstance(config[field], list) else 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"config.json.*{field}|{field}.*config.json"):
        fdc_jax.open_run(tmp_path)._configuration()
