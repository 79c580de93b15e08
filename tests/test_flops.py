"""The formula for operations against what the compiler counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import flops
from fdc_jax.model import increments, vit

# Wide enough that the products, which alone the formula counts, are nearly everything.
SMALL = vit.Variant(width=192, depth=3, heads=3)
SIDE, BATCH = 64, 4


def counted(function, *arguments):
    analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
    assert analysis is not None
    return analysis["flops"]


@pytest.fixture(scope="module")
def setting():
    model = vit.VisionTransformer(SMALL)
    params = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), vit.parameter_shapes(model, SIDE)
    )
    return model, params, np.zeros((BATCH, SIDE, SIDE, 3), np.uint8)


def test_a_forward_pass(setting):
    model, params, images = setting
    found = counted(lambda p, i: model.apply({"params": p}, i), params, images)
    assert found == pytest.approx(BATCH * flops.forward(SMALL, SIDE), rel=0.03)


@pytest.mark.parametrize("rank", [4, 32])
def test_a_training_step(setting, rank):
    model, params, images = setting
    increment = increments.initialise(jax.random.key(0), SMALL, rank)

    def gradient(params, increment, images):
        return jax.grad(lambda i: model.apply({"params": params}, images, None, i).sum())(increment)

    found = counted(gradient, params, increment, images)
    expected = flops.training_step(SMALL, SIDE, rank, BATCH)
    assert found == pytest.approx(expected, rel=0.03)


def test_published_sizes():
    """ViT-B/16 at 224 pixels is 17.6 GMAC with every token through the last block."""
    variant = vit.VARIANTS["B/16"]
    per_block = 24 * 197 * 768**2 + 4 * 197**2 * 768
    last = 4 * 197 * 768**2 + 20 * 768**2 + 4 * 197 * 768
    whole = flops.forward(variant, 224) + per_block - last
    assert whole / 2e9 == pytest.approx(17.56, rel=2e-3)


def test_peaks(monkeypatch):
    class Device:
        def __init__(self, kind):
            self.device_kind = kind

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    for kind, fast, parity in [
        ("NVIDIA H100 80GB HBM3", 2 * 989e12, 2 * 67e12),
        ("NVIDIA H100 PCIe", 2 * 756e12, 2 * 51e12),
        ("NVIDIA A100-SXM4-80GB", 2 * 312e12, 2 * 19.5e12),
        ("TPU v5 lite", 2 * 197e12, None),
        ("Unknown", None, None),
    ]:
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [Device(kind)])
        assert (flops.peak("fast"), flops.peak("parity")) == (fast, parity)


def test_the_peak_of_a_processor_is_measured(monkeypatch):
    monkeypatch.setattr(flops, "_measured", lambda precision: 7.0)
    assert flops.peak("parity") == 7.0
