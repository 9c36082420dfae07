"""Formats plain data as YAML. PyYAML is no dependency of persia."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["yaml_text"]

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
BLOCK = re.compile(r"(?:[!-~][ -~]*\n){2,}")
"""Several lines of printable ASCII, none of which begins with a space."""
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
"""Words that YAML 1.1 does not read as text."""


def yaml_text(document: Mapping[str, Any]) -> str:
    """Returns a document of dicts, lists, texts, whole numbers and booleans as YAML."""
    return "\n".join(_lines(document)) + "\n"


def _lines(value: Any) -> list[str]:
    """Returns the lines of a value; the first one may follow a key or a dash, unless it is a dict or a list."""
    if isinstance(value, Mapping) and value:
        lines = []
        for key, item in value.items():
            first, *others = _lines(item)
            if isinstance(item, Mapping | list) and item:
                lines += [f"{_scalar(key)}:", *_indented([first, *others])]
            else:
                lines += [f"{_scalar(key)}: {first}", *others]
        return lines
    if isinstance(value, list) and value:
        lines = []
        for item in value:
            first, *others = _lines(item)
            lines += [f"- {first}", *(others if isinstance(item, str) else _indented(others))]
        return lines
    if isinstance(value, str) and BLOCK.fullmatch(value):
        return ["|", *_indented(value.splitlines())]
    return [_scalar(value)]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in RESERVED:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)  # YAML has line breaks beyond ASCII.
