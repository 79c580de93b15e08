"""FDC and its comparators on anybody's features: `python -m fdc_jax.posthoc features.npz`."""

from fdc_jax.posthoc.command import main

__all__ = ["main"]
