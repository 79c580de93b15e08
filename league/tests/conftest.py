"""Fixtures that the league's tests share with those of the package."""

import shutil

import pytest

import fdc_jax
from league import __main__ as command
from league.images import export
from tests.conftest import cache, shared_asset, whole  # noqa: F401


@pytest.fixture(scope="session")
def _made(whole, tmp_path_factory):  # noqa: F811
    """Records and exported images of a small run."""
    base = tmp_path_factory.mktemp("league")
    assert command.main(["record", str(whole), f"--output={base / 'records'}"]) == 0
    export(base / "images", fdc_jax.open_run(whole).tasks)
    return base


@pytest.fixture
def folder(_made, tmp_path):
    """A folder of the records of a small run."""
    return shutil.copytree(_made / "records", tmp_path / "records")


@pytest.fixture
def images(_made, tmp_path):
    """The images of a small run's protocol as files."""
    return shutil.copytree(_made / "images", tmp_path / "images")
