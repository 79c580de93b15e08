"""All tables of the report: built from groups of runs, written as CSV, Markdown and LaTeX."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdc_jax.files import write_atomically
from fdc_jax.report import accuracy_tables, beyond_tables, cost_tables, plugin_tables, significance
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.reference import Reference
from fdc_jax.report.runs import Group

__all__ = ["Cell", "Table", "build", "to_csv", "to_latex", "to_markdown", "write"]


def build(
    groups: Sequence[Group],
    analyses: Mapping[str, Mapping[str, Any]],
    latency: Sequence[str] = (),
    references: Sequence[Reference] = (),
) -> list[Table]:
    """Builds every table of the report, in the order of the report.

    Args:
        groups: from `runs.group`.
        analyses: by path of a run and name of the analysis.
        latency: files that `benchmarks/latency.py` wrote.
        references: from `reference.read`; each becomes a table.

    Raises:
        InputError: a file of `latency` is not as expected.
    """
    return [
        accuracy_tables.benchmark(groups),
        accuracy_tables.ablation(groups),
        plugin_tables.plugin(groups),
        plugin_tables.selected_by_rule(groups, analyses),
        plugin_tables.logit_standardisation(groups, analyses),
        accuracy_tables.average_incremental_accuracy(groups),
        significance.table(groups),
        cost_tables.partitions(groups),
        cost_tables.cost(groups),
        cost_tables.latency(latency),
        beyond_tables.methods(groups, analyses),
        beyond_tables.ingredients(groups, analyses),
        *(reference.table(groups) for reference in references),
    ]


def write(table: Table, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes a table as `.csv` (its numbers), `.md` and `.tex` (as it reads).

    Returns:
        The three paths.

    Raises:
        InputError: the disk refuses.
    """
    paths = []
    for suffix, text in (
        (".csv", to_csv(table)),
        (".md", to_markdown(table)),
        (".tex", to_latex(table)),
    ):
        path = Path(folder) / f"{table.name}{suffix}"
        with write_atomically(path) as file:
            file.write(text.encode())
        paths.append(path)
    return paths


def to_csv(table: Table) -> str:
    """Returns one line per number, unrounded, under a header; a missing number is empty."""
    names = list(dict.fromkeys(name for record in table.records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.records)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """Returns the table as it reads, in GitHub's dialect; the best are bold."""
    from tabulate import tabulate  # Takes time that no other command should pay.

    def shown(cell: Cell) -> str:
        text = cell.text.replace("|", "\\|")
        return f"**{text}**" if cell.best else text

    align = ["left"] * table.num_labels + ["right"] * (len(table.columns) - table.num_labels)
    body = tabulate(
        [[shown(cell) for cell in row] for row in table.rows],
        [name.replace("|", "\\|") for name in table.columns],
        tablefmt="pipe",
        colalign=align,
        disable_numparse=True,
    )
    return f"**{table.title}**\n\n{body}\n\n{table.note}\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "–": "--",
    "²": r"$^2$",
    "√": r"$\surd$",
    "η": r"$\eta$",
    "γ": r"$\gamma$",
}


def _escape(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return escaped.replace(r"E\_0", "$E_0$").replace(r"E\_T", "$E_T$")


def _latex_cell(cell: Cell) -> str:
    text = _escape(cell.text)
    if cell.mean is not None and text.startswith("-"):
        text = f"$-${text[1:]}"
    return rf"\textbf{{{text}}}" if cell.best else text


def to_latex(table: Table) -> str:
    """Returns a table environment; it needs the packages booktabs and graphicx."""
    align = "l" * table.num_labels + "r" * (len(table.columns) - table.num_labels)
    lines = []
    for index, row in enumerate(table.rows):
        # A row with a name of its own begins what belongs together.
        if index and row[0].text:
            lines.append(r"\addlinespace")
        lines.append(" & ".join(_latex_cell(cell) for cell in row) + r" \\")
    return "\n".join(
        [
            "% Needs the packages booktabs and graphicx.",
            r"\begin{table}[htb]",
            r"\centering\small",
            rf"\caption{{{_escape(table.title)}.}}",
            rf"\label{{tab:{table.name.replace('_', '-')}}}",
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            " & ".join(_escape(name) for name in table.columns) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\par\smallskip",
            rf"\parbox{{\linewidth}}{{\footnotesize {_escape(table.note)}}}",
            r"\end{table}",
            "",
        ]
    )
