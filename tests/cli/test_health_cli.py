"""What `persia health` prints."""

import io

from rich.console import Console

from persia.cli.health import _table
from persia.types import Member


def test_the_last_lines_of_the_dead_are_printed_as_they_are():
    """A log is no markup."""
    dead = Member("embedding_ps", 1, 1, "tcp://h:1", "dead")
    text = io.StringIO()
    Console(file=text, width=200).print(_table([(dead, "dead: no room in [/dev/shm] for table [item]")]))
    assert "no room in [/dev/shm] for table [item]" in text.getvalue()
