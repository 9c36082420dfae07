"""Reads TOML configurations into frozen records, with errors that name the field."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from persia.checks import unknown_option
from persia.errors import ConfigError
from persia.types.decoding import decode_hook
from persia.types.explaining import explained

__all__ = ["call", "convert", "dump", "load", "override"]

T = TypeVar("T")


def load(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Reads a TOML file into plain data.

    Args:
        path: path of the file.
        overrides: `a.b=value` assignments, applied on top. A value that is not valid TOML is a text.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", path=path) from error
    for assignment in overrides:
        override(tree, assignment)
    return tree


def convert(tree: Any, kind: type[T], origin: str) -> T:
    """Checks plain data against a record type.

    Args:
        tree: dicts, lists and scalars.
        kind: type of the record.
        origin: name of the source, for error messages.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type; the message names the field by its path.
    """
    try:
        return msgspec.convert(tree, kind, dec_hook=decode_hook)
    except msgspec.ValidationError as error:
        text, *places = explained(error, tree, kind).split(" - at `")  # The innermost record first.
        paths = [place.rpartition("` in `")[2].rstrip("`").removeprefix("$") for place in places]
        field = "".join(reversed(paths)).lstrip(".")
        ended = text if text.endswith(("?", ".")) else f"{text}."
        raise ConfigError(
            f"{origin}: {field or 'top level'}: {ended} Run `persia train --dump-config` on an example to list all "
            "fields.",
            field=field,
            origin=origin,
        ) from error


def dump(record: Any) -> dict[str, Any]:
    """Converts a record to plain data, including defaults."""
    tree: dict[str, Any] = msgspec.to_builtins(record)
    return tree


def call(make: Callable[..., T], options: Mapping[str, Any], where: str, *positional: Any) -> T:
    """Calls `make` with options of a configuration.

    Args:
        make: a function or class.
        options: keyword arguments of `make`.
        where: section of the options, for error messages.
        *positional: further arguments, before the options.

    Raises:
        ConfigError: an option is unknown, missing or invalid; the message has the valid names.
    """
    parameters = inspect.signature(make).parameters
    known = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for name in options:
        if name not in known:
            raise unknown_option(f"{where}.{name}", name, known, field=f"{where}.{name}")
    for name in known[len(positional) :]:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise ConfigError(f"{where}: {name} is missing; set {where}.{name}.", field=f"{where}.{name}")
    try:
        return make(*positional, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}.", field=where) from error
    except ConfigError as error:
        if where in error.message:
            raise
        raise ConfigError(f"{where}: {error.message}", **error.fields) from error


def override(tree: dict[str, Any], text: str) -> None:
    """Sets a field of plain data.

    Args:
        tree: plain data, changed in place.
        text: `a.b=value`; a value that is not valid TOML is a text.

    Raises:
        ConfigError: the text has another form, or the path leads through a value.
    """
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"Invalid --set {text!r}; expected a.b=value.", field=path)
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"Invalid --set {text!r}: {key!r} is a value, not a section; --dump-config lists the fields.",
                field=path,
            )
    tree[keys[-1]] = parsed
