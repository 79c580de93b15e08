"""Packages of the distribution; all other metadata is in pyproject.toml."""

from setuptools import find_packages, setup

# `configs` is a top-level folder in a clone and part of the package elsewhere.
setup(
    packages=[*find_packages(include=["fdc_jax", "fdc_jax.*"]), "fdc_jax.configs"],
    package_dir={"fdc_jax.configs": "configs"},
)
