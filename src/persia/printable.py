"""Text for terminals and logs, with control characters as escapes."""

from __future__ import annotations

import re
import sys

__all__ = ["one_line", "printable", "say"]

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # Control characters, other than line ends and tabs.
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"  # Characters that reverse the direction of text, or end lines.
    r"|[\ud800-\udfff]"  # Bytes in names of files that are not UTF-8, which cannot be encoded.
)


def printable(text: str) -> str:
    r"""Returns a text that cannot control a terminal: control characters become escapes such as `\x1b`.

    Names of columns, tables and files are data, and may hold any character. Line ends and tabs are unchanged.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Returns a printable text in which line ends and tabs are also escaped."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def say(text: str, *, error: bool = False) -> None:
    """Prints a text and a line end to stdout, or to stderr, with control characters as escapes."""
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)
