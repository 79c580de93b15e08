"""Feature Distribution Calibration (FDC): post-hoc task routing for class-incremental learning.

Importing this loads nothing else; what takes seconds is loaded when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdc_jax import calibration, heads
    from fdc_jax.estimator import FDCClassifier

__version__ = "0.1.0"
__all__ = ["FDCClassifier", "calibration", "heads", "open_run"]


def open_run(path: Any, data_dir: str | None = None, weights: str | None = None) -> Any:
    """Opens a work directory without training anything; see `fdc_jax.store.Run`."""
    from fdc_jax import store

    return store.Run(path, data_dir, weights)


def __getattr__(name: str) -> Any:
    if name == "FDCClassifier":
        return importlib.import_module("fdc_jax.estimator").FDCClassifier
    if name in __all__:
        return importlib.import_module(f"fdc_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
