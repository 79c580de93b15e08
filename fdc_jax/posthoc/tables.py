"""Small tables on screen: with colours and rules on a terminal, as aligned text elsewhere."""

import sys
from collections.abc import Sequence


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is left-aligned, the others right-aligned."""
    if sys.stdout.isatty():
        # Imported here: output that goes to a file needs none of it.
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(title)
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def mebibytes(size: int) -> str:
    """A size for a table."""
    return f"{size / 2**20:.2f} MiB"
