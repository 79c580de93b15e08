"""Damaged arrays of a feature file: one line and code 2, whatever the methods are."""

import numpy as np
import pytest

from tests.features.test_feature_files import example, save
from tests.posthoc.test_posthoc import run


def complete():
    """Returns every array of a feature file, of two tasks."""
    arrays = example()
    rng = np.random.default_rng(1)
    for task in range(2):
        arrays[f"head_classes_{task}"] = np.array([10 * task + 1, 10 * task])
        for name, shape in (("final_head_weight", (2, 4)), ("final_head_bias", 2)):
            arrays[f"{name}_{task}"] = rng.normal(size=shape).astype(np.float32)
        if task:
            arrays[f"train_previous_{task}"] = rng.normal(size=(5, 4)).astype(np.float32)
    return arrays


def spoiled(array, value):
    array = np.array(array, np.float64)
    array.flat[-1] = value
    return array


DAMAGE = {
    "nan": lambda array: spoiled(array, np.nan),
    "too large": lambda array: spoiled(array, 1e30),
    "text": lambda array: array.astype(str),
    "complex": lambda array: array.astype(complex),
    "a column less": lambda array: array[:, :-1],
    "a column more": lambda array: np.hstack([array, array[:, :1]]),
    "a row less": lambda array: array[:-1],
    "a row more": lambda array: np.concatenate([array, array[:1]]),
    "one dimension": lambda array: array.ravel(),
}
COLUMNS = {"a column less", "a column more", "one dimension"}
METHODS_TRIED = ("fdc,ncm", "ncm-pretrained", "all")


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_an_error_whatever_the_method(tmp_path, kind):
    accepted = []
    output = tmp_path / "o.npz"
    arrays = complete()
    names = [name for name, array in arrays.items() if array.ndim == 2 or kind not in COLUMNS]
    for index, name in enumerate(names):
        path = save(tmp_path / f"{name}.npz", arrays | {name: DAMAGE[kind](arrays[name])})
        methods = METHODS_TRIED[index % len(METHODS_TRIED)]
        code, out, error = run(path, f"--method={methods}", f"--output={output}")
        array_named = error.removeprefix(f"fdc_jax.posthoc: {path}: ").partition(":")[0]
        line = array_named in arrays and error.count("\n") == 1
        if (code, out) != (2, "") or not line or output.exists():
            accepted.append((name, methods, code, error))
    assert not accepted


def test_an_unknown_kind_of_head_is_an_error(tmp_path):
    for value in (np.nan, np.ones(3), np.array(b"linear"), np.array("Linear")):
        path = save(tmp_path / "features.npz", complete() | {"head_kind": np.asarray(value)})
        code, _, error = run(path, "--method=ncm")
        assert code == 2 and f"{path}: head_kind: expected one of linear" in error
