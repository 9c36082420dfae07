"""Log format of commands and of a cluster's processes."""

from __future__ import annotations

import logging
import sys

from persia.printable import printable

__all__ = ["LAYOUT", "LogFormatter", "get_logger", "log_to_stderr"]

LAYOUT = "%(asctime)s %(levelname)s %(message)s"


class LogFormatter(logging.Formatter):
    """Formats records with control characters as escapes: names of columns, tables and files are part of them."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        return printable(super().format(record))


def _escape(record: logging.LogRecord) -> bool:
    """Makes the message of a record printable. Keeps every record."""
    try:
        text = record.getMessage()
    except Exception:  # The handlers report it, as for any record.
        return True
    escaped = printable(text)
    if escaped != text:
        record.msg, record.args = escaped, None
    return True


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of this name. Its messages are printable with any handlers that a user's program adds."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)
    return logger


def log_to_stderr(level: int | str, layout: str = LAYOUT, *, force: bool = False) -> None:
    """Sends the log records of this process to stderr.

    Args:
        level: lowest level that is shown.
        layout: format of a line, as in `logging.Formatter`.
        force: whether to replace existing handlers; otherwise they stay and this one is not added.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler], force=force)
