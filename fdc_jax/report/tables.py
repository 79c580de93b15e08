"""All tables of the report: built from groups of runs, written as CSV, Markdown and LaTeX."""

from fdc_jax.report.cells import Cell, Table

__all__ = ["Cell", "Table"]
