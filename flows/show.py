"""Lines and tables on standard output. What they say is never cut: no figure, no name, no path."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_ENDLESS = 10_000


def standard_output() -> Console:
    """A console whose lines are left to the terminal to wrap; where there is none, tables are as wide as what they hold, too."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _ENDLESS)


def print_rows(console: Console, rows: Sequence[Mapping[str, str | Text]], *, left: int = 1, unbroken: Collection[str] = ()) -> None:
    """Print rows that have the same keys, which are the headings. Nothing in them is taken for markup.

    On a narrow terminal cells are broken between words, those of the columns ``unbroken`` not at all. The first ``left`` columns are of text, the
    others of figures.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(rows[0]):
        cells = [heading, *(str(row[heading]) for row in rows)]
        pieces = cells if heading in unbroken else [word for cell in cells for word in cell.split()]
        table.add_column(Text(heading), justify="left" if number < left else "right", min_width=max(map(len, pieces), default=0), overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row.values()))
    console.print(table, soft_wrap=False, crop=False)
