"""Feature Distribution Calibration (FDC): post-hoc task routing for class-incremental learning."""

__version__ = "0.1.0"
