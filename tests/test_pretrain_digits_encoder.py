"""The script that made the embedded encoder: letters only, reproducible, a file that loads."""

import importlib.util
import sys
import unicodedata
from pathlib import Path

import jax
import numpy as np
import pytest

from fdc_jax.model import weights

pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "pretrain_digits_encoder.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[SCRIPT.stem]


@pytest.fixture(scope="module")
def pool(script):
    return script.render()


def test_no_letter_is_a_digit_or_a_number(script):
    letters = script.letters()
    assert len(letters) == len(set(letters)) > 200
    for letter in letters:
        assert unicodedata.category(letter) in ("Lu", "Ll", "Lo")
        assert unicodedata.numeric(letter, None) is None
        assert not letter.isdigit() and not letter.isnumeric()


@pytest.mark.slow
def test_a_few_steps_write_a_file_that_loads_and_repeats(
    script, pool, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(script, "render", lambda: pool)
    arguments = ["--steps=12", "--batch_size=8", "--seed=5"]
    for name in ("first.npz", "second.npz"):
        script.main([*arguments, f"--output={tmp_path / name}"])
    printed = capsys.readouterr().out
    assert "classes of letters" in printed and str(tmp_path / "second.npz") in printed
    first = weights.load(tmp_path / "first.npz", "digits", 32)
    second = weights.load(tmp_path / "second.npz", "digits", 32)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert len(list(tmp_path.iterdir())) == 2
