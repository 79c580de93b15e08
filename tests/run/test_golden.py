"""Runs on the digits as at commit c3e1f5a, and the keys of `results.json`, in `tests/golden`."""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import fdc_jax
from configs import digits
from fdc_jax.run import configuration
from tests import small_runs

GOLDEN = Path(__file__).parents[1] / "golden"
# Of all labels, those that rounding on another processor may change.
DIFFERENT = 0.005


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def digest(tree):
    """Returns the SHA-256 of the arrays of a tree, whatever their names and order."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(tree)]
    parts = [f"{leaf.shape} {leaf.dtype}".encode() + leaf.tobytes() for leaf in leaves]
    parts = sorted(hashlib.sha256(part).hexdigest() for part in parts)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "epochs"), [("digits_short", 2), pytest.param("digits", 20, marks=pytest.mark.slow)]
)
def test_digits_reproduce_the_golden_run(name, epochs, tmp_path, cache, caplog):
    """Bit for bit, where this machine computes as the one did that made the file.

    Nothing warns of its features.
    """
    config = digits.get_config()
    fields = {"cache_dir": str(cache), "report": False, "train.epochs": epochs}
    config.update_from_flattened_dict(fields)
    actual, expected = small_runs.run(configuration.typed(config), tmp_path), golden(name)
    assert not [message for message in caplog.messages if "probably" in message]
    same_state = digest(fdc_jax.open_run(tmp_path)._point.state) == expected.pop("state_sha256")
    columns = small_runs.predictions(tmp_path)
    del columns["class_names"]
    with np.load(GOLDEN / f"{name}.npz") as file:
        assert columns.keys() == set(file.files)
        for column, values in columns.items():
            different = np.mean(values != file[column])
            assert different <= (0 if same_state else DIFFERENT), column
    for section, numbers in expected.items():
        tolerance = 1e-9 if same_state or "storage" in section else 100 * DIFFERENT
        assert actual[section] == pytest.approx(numbers, abs=tolerance), section


def keys(value):
    """Returns names within names; of a list of objects, those of its objects, which are alike."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        first, *others = (keys(item) for item in value)
        assert others == [first] * len(others)
        return [first]
    return None


def test_keys_of_the_results(finished_run):
    """All of them; of the configuration those of the contract, beside which there may be others."""
    actual, expected = keys(small_runs.results(finished_run)), golden("results_keys")
    assert actual.pop("config").keys() >= expected.pop("config").keys()
    assert actual == expected
