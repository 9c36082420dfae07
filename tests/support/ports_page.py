"""The table of `docs/reference/ports.md`: who listens where, and what a stranger sees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Row", "rows"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ports.md"


class Row(NamedTuple):
    """A kind of socket, by the columns of the table."""

    what: str
    process: str
    port: str
    where: str
    protocol: str
    who: str
    stranger: str

    def covers(self, title: str, address: str, host: str, seen: str) -> bool:
        """Whether a socket is of this kind.

        Args:
            title: name of its process; "driver" for the program that trains.
            address: IP address at which it listens.
            host: address of its host in the cluster.
            seen: what `support.listening.seen_by_a_stranger` returns.
        """
        places = {"the host": {host}, "all interfaces": {address}, "127.0.0.1": {"127.0.0.1"}}
        where = re.split(r"[,;]", self.where)[0]
        if title.startswith("ray::") and "each role" in self.process:
            title = "each role"
        speaks = seen in self.protocol if seen != "other" else not re.search("ZMTP|HTTP$", self.protocol)
        return title in self.process and address in places[where] and speaks


def rows() -> list[Row]:
    """Returns the rows of the table, without links."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    _, *found = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in lines if not line.startswith("|---")]
    return [Row(*(cell.strip().replace("`", "") for cell in line.strip("|").split("|"))) for line in found]
