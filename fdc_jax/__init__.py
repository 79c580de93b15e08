"""Feature Distribution Calibration (FDC): post-hoc task routing for class-incremental learning."""

from typing import Any

__version__ = "0.1.0"


def open_run(path: Any, data_dir: str | None = None, weights: str | None = None) -> Any:
    """Opens a work directory without training anything; see `fdc_jax.store.Run`."""
    from fdc_jax import store  # takes seconds

    return store.Run(path, data_dir, weights)
