"""The size of the package; `.ci/run` checks the layers of its imports (pyproject.toml)."""

from pathlib import Path

import fdc_jax


def test_the_package_does_not_grow():
    """Whoever adds a feature takes another one out; the aim is 16,800 lines."""
    files = Path(fdc_jax.__file__).parent.rglob("*.py")
    assert sum(path.read_bytes().count(b"\n") for path in files) <= 19_132
