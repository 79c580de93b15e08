"""What the tests of the encoder share."""

import jax
import pytest

from fdc_jax.model import vit


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """Arrays meet with equal ranks; "golden" is the encoder of the small checkpoint."""
    variant = vit.Variant(width=24, depth=2, heads=3, patch=8)
    monkeypatch.setitem(vit.VARIANTS, "golden", variant)
    with jax.numpy_rank_promotion("raise"):
        yield
