"""Shared by all tests: CPU, and the optional folder of real weights and images."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of small decompositions wait for each other on busy machines, a hundred times too long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

SHARED_ASSETS = Path(__file__).resolve().parents[2] / "shared" / "assets"


@pytest.fixture
def shared_asset():
    """Returns a function from a name to the path of a real asset; skips where it is absent."""

    def find(name: str) -> Path:
        path = SHARED_ASSETS / name
        if not path.exists():
            pytest.skip(f"needs the real asset {name}, looked for in ../shared/assets")
        return path

    return find


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A folder for compiled programs, the same for all workers of one test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory, compiled):
    """A folder for what runs share: compiled programs, features of the pretrained encoder."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "compiled").symlink_to(compiled)
    return folder
