"""Formats values and comments of a configuration file."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["toml_comment", "toml_value"]


def toml_value(value: Any) -> str:
    """Formats plain data; a long list on several lines."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + _wrapped([toml_value(item) for item in value]) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def toml_comment(text: str) -> str:
    """Converts a text to one line of printable characters, for a comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def _wrapped(items: list[str], width: int = 100) -> str:
    """Joins items by commas; on several lines if they are long."""
    line = ", ".join(items)
    if len(line) <= width:
        return line
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) > width:
            lines.append("")
        lines[-1] += f"{item}, "
    return "\n" + "\n".join(f"  {line.rstrip()}" for line in lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
