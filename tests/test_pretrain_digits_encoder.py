"""The script that made the embedded encoder: letters only, reproducible, a file that loads."""

import importlib.util
import sys
import unicodedata
from pathlib import Path

import pytest

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


def test_no_letter_is_a_digit_or_a_number(script):
    letters = script.letters()
    assert len(letters) == len(set(letters)) > 200
    for letter in letters:
        assert unicodedata.category(letter) in ("Lu", "Ll", "Lo")
        assert unicodedata.numeric(letter, None) is None
        assert not letter.isdigit() and not letter.isnumeric()
