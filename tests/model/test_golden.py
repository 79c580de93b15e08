"""Loader and encoder against the features that PyTorch and timm give.

timm read the small checkpoint by its own loader, encoded noise in both input ranges, at two sides,
and saved the checkpoint in its own layout.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from fdc_jax.model import vit, weights

GOLDEN = Path(__file__).parent / "golden"
SIDE, OTHER_SIDE = 32, 48


@pytest.mark.parametrize("input_range, side", [("pilot01", SIDE), ("augreg", OTHER_SIDE)])
def test_features_of_a_small_checkpoint(input_range, side):
    """Of the real layout. The other side has position embeddings that were resized."""
    golden = np.load(GOLDEN / "features.npz")
    loaded = weights.load(GOLDEN / "augreg.npz", "golden", side)
    assert loaded.skipped == ("head/bias", "head/kernel")
    assert loaded.resized_positions == (side != SIDE)
    model = vit.build("golden", side, input_range)
    actual = jax.jit(model.apply)({"params": loaded.params}, golden[f"images_{side}"])
    assert_allclose(actual, golden[f"{input_range}_{side}"], atol=2e-5)


@pytest.mark.ci
def test_features_of_the_real_checkpoint(shared_asset):
    golden = np.load(shared_asset("golden_vit_ti16_16images.npz"))
    loaded = weights.load(shared_asset("Ti_16-augreg-i21k-ft-i1k.npz"), "Ti/16", 224)
    assert loaded.skipped == ("head/bias", "head/kernel") and not loaded.resized_positions
    # 5,717,416 in the file, less the head of 1000 classes.
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == 5_717_416 - 193 * 1000
    model = vit.build("Ti/16", 224, "pilot01")
    actual = jax.jit(model.apply)({"params": loaded.params}, golden["images_uint8_nhwc"][:4])
    expected = golden["cls_unit"][:4]
    error = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < 2e-5
