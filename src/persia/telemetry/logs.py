"""The format of the logs of commands and of a cluster's processes."""

from __future__ import annotations

import logging
import sys

from persia.printable import printable

__all__ = ["LAYOUT", "LogFormatter", "log_to_stderr"]

LAYOUT = "%(asctime)s %(levelname)s %(message)s"


class LogFormatter(logging.Formatter):
    """Formats records with control characters as escapes: names of columns, tables and files are part of them."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        return printable(super().format(record))


def log_to_stderr(level: int | str, layout: str = LAYOUT, *, force: bool = False) -> None:
    """Sends the log records of this process to stderr.

    Args:
        level: lowest level that is shown.
        layout: format of a line, as in `logging.Formatter`.
        force: replace the handlers that are there, else they stay and this one is not added.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler], force=force)
