"""Reading configurations: TOML into frozen records, with errors that name the field."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from persia.errors import ConfigError

__all__ = ["convert", "dump", "read"]

T = TypeVar("T")


def read(path: str, overrides: Sequence[str], kind: type[T]) -> T:
    """Reads a TOML file as a record.

    Args:
        path: of the file.
        overrides: `a.b=value`, applied on top; a value is TOML, or else taken as text.
        kind: the record's type.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value has the wrong type.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", path=path) from error
    for override in overrides:
        _override(tree, override)
    return convert(tree, kind, path)


def convert(tree: Any, kind: type[T], origin: str) -> T:
    """Checks plain data against a record type.

    Args:
        tree: dicts, lists and scalars.
        kind: the record's type.
        origin: named in errors.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type; the message has the path of the field.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
        raise ConfigError(
            f"{origin}: {field or 'top level'}: {text}. Run `persia train --dump-config` on an example to see all "
            "fields.",
            field=field,
            origin=origin,
        ) from error


def dump(record: Any) -> dict[str, Any]:
    """A record as plain data, defaults included."""
    tree: dict[str, Any] = msgspec.to_builtins(record)
    return tree


def _override(tree: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not of the form a.b=value.", field=path)
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {text!r}: {key!r} is not a section of the configuration.", field=path)
    tree[keys[-1]] = parsed
