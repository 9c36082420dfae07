"""Extends msgspec errors with the valid alternatives: names of fields, and values of enumerations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from persia.checks import did_you_mean

__all__ = ["explained"]


def explained(error: msgspec.ValidationError, tree: Any, kind: Any) -> str:
    """Returns the text of an error, with the valid fields or values at its path.

    Args:
        error: error of `msgspec.convert(tree, kind)`.
        tree: plain data.
        kind: the type.

    Returns:
        The text, followed by the path as msgspec writes it: `... - at `$.mode.kind``.
    """
    text, at, path = str(error).partition(" - at `")
    if "; expected one of: " in text or " - at `" in path:  # An inner record has explained it.
        return str(error)
    key, inside, rest = path.partition("` in `")
    kinds, data = _place(inspect.type_info(kind), tree, rest if inside else path)
    if inside and key == "key":
        kinds = [each.key_type for each in kinds if isinstance(each, inspect.DictType)]
    expected, wrong = _expected(text, kinds, data)
    if not expected:
        return str(error)
    question = did_you_mean(wrong, expected)
    return f"{text}; expected one of: {', '.join(expected)}{f'.{question}' if question else ''}{at}{path}"


def _expected(text: str, kinds: Sequence[Any], data: Any) -> tuple[list[str], str]:
    """Returns the valid names or values, and the actual one; no names if they are unknown."""
    structs = [each for each in kinds if isinstance(each, inspect.StructType)]
    if unknown := re.search(r"unknown field `(.*)`", text):
        tags = [each.tag_field for each in structs if each.tag_field is not None]
        return list(dict.fromkeys([*tags, *(f.encode_name for each in structs for f in each.fields)])), unknown[1]
    wrong = re.search(r"^Invalid (?:enum )?value '(.*)'", text)
    values = [value for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]
    values += [each.tag for each in structs if wrong]
    return list(map(str, values)), wrong[1] if wrong else ""


def _place(kind: Any, data: Any, path: str) -> tuple[list[Any], Any]:
    """Returns the types and the data at a msgspec path. The data are None if they are ambiguous."""
    kinds = [kind]
    steps = re.findall(r"\.([^.\[\]`]+)|\[([^\]]*)\]", path)
    for number, (name, index) in enumerate(steps):
        structs = [each for each in _members(kinds, data) if isinstance(each, inspect.StructType)]
        if name and number == len(steps) - 1 and any(name == each.tag_field for each in structs):
            return [each for each in _members(kinds, None) if isinstance(each, inspect.StructType)], data
        kinds = [inner for each in _members(kinds, data) for inner in _inside(each, name)]
        if name:
            data = data.get(name) if isinstance(data, dict) else None
        else:
            data = data[int(index)] if isinstance(data, list) and index.isdigit() and int(index) < len(data) else None
    return _members(kinds, data), data


def _inside(kind: Any, name: str) -> list[Any]:
    """Returns the types of a field of a struct, or of the items of a collection."""
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == name]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    if isinstance(kind, inspect.TupleType):
        return list(kind.item_types)
    return [kind.item_type] if hasattr(kind, "item_type") else []


def _members(kinds: Iterable[Any], data: Any) -> list[Any]:
    """Returns the types of unions; among structs with tags, only the one that the data name, if any."""
    flat: list[Any] = []
    for kind in kinds:
        kind = kind.type if isinstance(kind, inspect.Metadata) else kind
        flat += _members(kind.types, data) if isinstance(kind, inspect.UnionType) else [kind]
    if isinstance(data, dict):
        named = [each for each in flat if isinstance(each, inspect.StructType) and _is_tagged(each, data)]
        return named or flat
    return flat


def _is_tagged(kind: Any, data: dict[str, Any]) -> bool:
    return kind.tag_field is not None and data.get(kind.tag_field) == kind.tag
