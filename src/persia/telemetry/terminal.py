"""Output of commands through rich: tables and styled text. Escapes control characters, never truncates numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from persia.printable import one_line, printable

__all__ = ["UNLIMITED", "DataConsole", "Grid", "fitting", "plain"]

UNLIMITED = 1000
"""Width of lines that are not printed on a terminal."""

TEXT_WIDTH = 16
"""Minimum width of text columns: they shrink to it before a table continues below."""


def plain(text: str, style: str = "") -> Text:
    """Returns data as text for a console, without interpreting markup."""
    return Text(printable(text), style)


def fitting(parts: Sequence[str], width: int) -> str:
    """Joins as many of the first parts as fit into a line; at least one."""
    line = parts[0]
    for part in parts[1:]:
        if cell_len(line) + 2 + cell_len(part) > width:
            break
        line = f"{line}  {part}"
    return line


class DataConsole(Console):
    """A console for data: ignores markup in strings, and writes unwrapped lines to a pipe.

    Args:
        **options: options of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        if "width" not in options and not self.is_terminal:
            self.width = UNLIMITED

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text of a string, with control characters as escapes."""
        return super().render_str(printable(text), **options)


class Grid:
    """A table that never truncates a number: columns that do not fit into the width continue in another table below.

    Each part begins with the first column. Columns of text are wrapped.

    Args:
        *columns: names of the columns.
        text: names of the text columns, which are left-justified; the others hold numbers.
        title: title above the table.
    """

    def __init__(self, *columns: str, text: Collection[str] = (), title: str | None = None) -> None:
        self._columns = columns
        self._text = [name in text for name in columns]
        self._title = title
        self.rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row. Strings are data, not markup."""
        self.rows.append(tuple(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the parts."""
        widths = [self._width(number) for number in range(len(self._columns))]
        for number, part in enumerate(_parts(widths, self._text, options.max_width)):
            fits = _total([widths[i] for i in part]) <= options.max_width
            title = None if number or self._title is None else plain(self._title, "italic")
            table = Table(title=title, title_justify="left", show_header=any(self._columns))
            for i in part:
                name, text = Text(one_line(self._columns[i])), self._text[i]
                justify: Any = "left" if text else "right"
                table.add_column(name, justify=justify, overflow="fold", no_wrap=fits and not text)
            for row in self.rows:
                table.add_row(*(row[i] for i in part))
            yield table

    def _width(self, number: int) -> int:
        """Returns the width that a column needs."""
        cells = [self._columns[number], *(str(row[number]) for row in self.rows)]
        lines = [line for cell in cells for line in cell.splitlines()]
        width = max(map(cell_len, lines), default=0)
        return min(width, TEXT_WIDTH) if self._text[number] else width


def _total(widths: Sequence[int]) -> int:
    """Returns the width of a table with columns of these widths: each adds two blanks and a rule."""
    return sum(widths) + 3 * len(widths) + 1


def _parts(widths: Sequence[int], text: Sequence[bool], most: int) -> list[list[int]]:
    """Returns the columns of each part of a table. Each begins with the first column, which says what a row is.

    Text can be folded, numbers cannot: a part lacks the first column if both hold numbers and do not fit together.
    """
    parts = [[0]]
    for number in range(1, len(widths)):
        folds = text[0] or text[number]
        together = folds or _total([widths[0], widths[number]]) <= most
        if not together:
            parts.append([number])
        elif (len(parts[-1]) > 1 and _total([widths[i] for i in (*parts[-1], number)]) > most) or parts[-1][0] != 0:
            parts.append([0, number])
        else:
            parts[-1].append(number)
    return parts
