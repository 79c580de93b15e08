"""Feature Distribution Calibration (FDC): post-hoc task routing for class-incremental learning.

Importing this loads nothing else; what takes seconds is loaded when it is asked for.
"""

import sys

from fdc_jax.machine.search_path import leave_out_current_folder
from fdc_jax.machine.versions import __version__ as __version__

# While Python looks for the module of `python -m`, `sys.argv` has "-m" in place of its name.
if sys.argv[:1] == ["-m"] and "m fdc_jax" in " ".join(sys.orig_argv):
    leave_out_current_folder()

TYPE_CHECKING = False  # The import of `typing` would leave Ctrl-C to Python for longer.
if TYPE_CHECKING:
    from typing import Any

    from fdc_jax import calibration, heads
    from fdc_jax.estimator import ContinualClassifier, FDCClassifier
    from fdc_jax.run.saved import open_run

__all__ = ["ContinualClassifier", "FDCClassifier", "calibration", "heads", "open_run"]


_HOME = {
    "ContinualClassifier": "fdc_jax.estimator",
    "FDCClassifier": "fdc_jax.estimator",
    "open_run": "fdc_jax.run.saved",
}


def __getattr__(name: str) -> "Any":
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in __all__:
        return importlib.import_module(f"fdc_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
