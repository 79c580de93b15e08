import jax
import pytest

from fdc_jax.model import vit


@pytest.mark.parametrize(
    ("images", "side", "patch", "expected"),
    [
        (64, 128, 16, 16),  # 65 tokens an image.
        (64, 224, 16, 4),  # 197 tokens: five fit, four divide.
        (12, 128, 16, 12),
        (45, 128, 16, 15),
        (0, 128, 16, 0),
        (67, 128, 16, 67),  # A prime number.
        (64, 32, 8, 64),
        (6, 1024, 16, 1),
    ],
)
def test_a_portion_divides_the_batch_and_fits(images, side, patch, expected):
    assert vit.images_together(images, side, patch) == expected


@pytest.mark.parametrize(("backend", "count"), [("gpu", 1), ("cpu", 2)])
def test_accelerators_and_several_devices_take_the_batch(monkeypatch, backend, count):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    assert vit.images_together(64, 128, 16) == 64
