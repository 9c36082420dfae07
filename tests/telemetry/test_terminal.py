"""Output of commands: control characters are escapes, and figures are whole at any width."""

import io
import logging
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from persia.errors import ConfigError
from persia.printable import one_line, printable, say
from persia.telemetry.live import Snapshot
from persia.telemetry.logs import LogFormatter
from persia.telemetry.terminal import UNLIMITED, DataConsole, Grid, fitting, plain

HOSTILE = "\x1b]0;owned\x07\x1b[2J\rname\x9b31m\u202egnp\x00"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\rname\x9b31m\u202egnp\x00"


def on_terminal(renderable, width):
    """What a terminal without colours gets."""
    console = DataConsole(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(renderable)
    return console.file.getvalue().splitlines()


def test_control_characters_become_escapes_and_others_stay():
    assert printable(HOSTILE) == ESCAPED
    assert printable("naïve, 東京 🙂\tand\nlines") == "naïve, 東京 🙂\tand\nlines"
    assert one_line("a\tb\nc") == r"a\tb\nc"


@given(st.text(st.characters(), max_size=40))
def test_any_text_can_be_printed_and_controls_nothing(text):
    shown = printable(text)
    shown.encode()  # Also bytes of file names that are not UTF-8.
    assert not {c for c in shown if ord(c) < 32 and c not in "\n\t"}
    assert not set(shown) & {"\x7f", "\x9b", "\u202e", "\u2028"}
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_errors_and_logs_and_lines_are_escaped(capsys):
    assert str(ConfigError(f"Unknown column {HOSTILE}.")) == f"Unknown column {ESCAPED}."
    assert ConfigError(HOSTILE, column=HOSTILE).fields == {"column": HOSTILE}
    record = logging.LogRecord("persia", logging.WARNING, "f.py", 1, "table %s", (HOSTILE,), None)
    assert LogFormatter("%(message)s").format(record) == f"table {ESCAPED}"
    say(HOSTILE)
    say(HOSTILE, error=True)
    assert capsys.readouterr() == (f"{ESCAPED}\n", f"{ESCAPED}\n")


def test_strings_are_data_in_a_console():
    grid = Grid("[bold]name[/bold]", text=["[bold]name[/bold]"], title=f"[red]{HOSTILE}")
    grid.add_row(f":smile: [red]{HOSTILE}\nforged")
    for shown in (grid, f"[red]:smile:{HOSTILE}"):
        lines = "\n".join(on_terminal(shown, 200))
        assert ESCAPED in lines
        assert "[red]" in lines
        assert ":smile:" in lines
    assert r"\nforged" in "\n".join(on_terminal(grid, 200))


names = st.text(string.ascii_letters + " ", min_size=1, max_size=24).map(str.strip).filter(bool)
numbers = st.integers(0, 10**12).map(lambda n: f"{n:,}")


def test_two_wide_columns_of_numbers_are_in_tables_of_their_own():
    grid = Grid("A" * 13, "B" * 21, "C")
    grid.add_row("0", "1", "2")
    lines = "\n".join(on_terminal(grid, 40))
    assert all(name in lines for name in ("A" * 13, "B" * 21, "C"))


@given(st.lists(names, min_size=2, max_size=9, unique=True), st.data(), st.integers(40, 130))
def test_no_figure_of_a_table_is_cut_at_any_width(columns, data, width):
    text = data.draw(st.sets(st.sampled_from(columns)))
    rows = data.draw(st.lists(st.tuples(*(names if c in text else numbers for c in columns)), min_size=1, max_size=3))
    grid = Grid(*columns, text=text)
    for row in rows:
        grid.add_row(*row)
    lines = on_terminal(grid, width)
    assert max(map(cell_len, lines)) <= width
    shown = "\n".join(lines)
    assert "…" not in shown
    cells = [cell.strip() for line in lines for cell in line.replace("┃", "│").split("│")]
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            if column not in text:
                assert cell in cells
            else:
                assert set(cell.replace(" ", "")) <= set(shown)
    for column in columns:
        if column not in text:
            assert column in cells


def test_columns_that_do_not_fit_continue_in_a_table_below():
    grid = Grid("day", "one", "two", "three")
    grid.add_row("7", "1" * 20, "2" * 20, "3" * 20)
    headers = [line.replace("┃", " ").split() for line in on_terminal(grid, 60) if "┃" in line]
    assert headers == [["day", "one", "two"], ["day", "three"]]
    assert len([line for line in on_terminal(grid, 90) if "┃" in line]) == 1


def test_a_pipe_gets_whole_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    console = DataConsole(file=io.StringIO())
    grid = Grid("name", *(f"figure {i}" for i in range(12)), text=["name"])
    grid.add_row("x" * 300, *(str(10**9 + i) for i in range(12)))
    console.print(grid)
    (row,) = [line for line in console.file.getvalue().splitlines() if "x" * 300 in line]
    assert all(str(10**9 + i) in row for i in range(12))
    assert console.width == UNLIMITED


@pytest.mark.parametrize("width", [10, 40, 60, 80, 120])
def test_the_live_line_has_whole_figures(width):
    snapshot = Snapshot(123_456, 1_234_567_890, 1_234_567.0, 0.12345, 0.6789, 98_765_432, 3.25, 0.5)
    whole, line = snapshot.text().split("  "), snapshot.text(width)
    assert len(line) <= max(width, len(f"step {123_456:>7,}"))
    assert all(figure in whole for figure in line.split("  "))


def test_as_many_parts_as_fit():
    assert fitting(["aa", "bb", "cc"], 6) == "aa  bb"
    assert fitting(["東京", "bb"], 7) == "東京"
    assert fitting(["longer than that"], 3) == "longer than that"
    assert plain(HOSTILE, "red").plain == ESCAPED
