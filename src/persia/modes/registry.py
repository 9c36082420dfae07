"""The registry of modes, by name: for configurations, checkpoints and calls between roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from persia.checks import did_you_mean
from persia.errors import ConfigError
from persia.modes.base import Mode
from persia.types.decoding import DECODERS, decode_hook
from persia.types.explaining import explained

__all__ = ["decode", "encode", "mode_of", "modules", "register"]

M = TypeVar("M", bound=msgspec.Struct)

_MODES: dict[str, type[msgspec.Struct]] = {}
"""Modes by name. Filled at import, read-only afterwards."""


def register(mode: type[M]) -> type[M]:
    """Registers a mode under its tag; a class decorator.

    Raises:
        ConfigError: another module has registered a mode of this name.
    """
    name = str(mode.__struct_config__.tag)
    known = _MODES.setdefault(name, mode)
    if known.__module__ != mode.__module__:
        raise ConfigError(
            f"Mode {name!r} in {mode.__module__} has the name of a mode in {known.__module__}. Choose another tag.",
            field="mode.kind",
        )
    _MODES[name] = mode
    return mode


def mode_of(tree: Any, *, other_kinds: Sequence[str] = ()) -> Mode:
    """Makes a mode from plain data, such as `{"kind": "gba", "global_batch_size": 512}`.

    Args:
        tree: the data.
        other_kinds: kinds that the caller accepts besides, for the message.

    Raises:
        ValueError: the data do not match a mode; the message has the path of the field, as msgspec writes it.
        ConfigError: the mode does not accept these values.
    """
    if not isinstance(tree, dict):
        raise ValueError(f"Expected `object`, got `{type(tree).__name__}`")
    kind = tree.get("kind")
    if not isinstance(kind, str) or kind not in _MODES:
        known = sorted([*_MODES, *other_kinds])
        raise ValueError(
            f"Invalid mode {kind!r}; expected one of: {', '.join(known)}, or import its module first (`imports` in a "
            f"configuration, `--import` of `persia control switch`).{did_you_mean(kind, known)} - at `$.kind`"
        )
    try:
        return cast("Mode", msgspec.convert(tree, _MODES[kind], dec_hook=decode_hook))
    except msgspec.ValidationError as error:
        raise ValueError(explained(error, tree, _MODES[kind])) from error


def modules() -> list[str]:
    """Returns the modules of all modes outside persia, which every process of a cluster imports.

    Modes that a script itself defines are left out, as other processes cannot import them.
    """
    modules = {mode.__module__ for mode in _MODES.values()}
    return sorted(name for name in modules if name != "__main__" and not name.startswith("persia."))


def encode(mode: object) -> str:
    """Returns a mode, or a `persia.modes.Auto`, as JSON."""
    return msgspec.json.encode(mode).decode()


def decode(text: str) -> Mode:
    """Makes a mode from JSON.

    Raises:
        ConfigError: the text is not a mode, or the mode does not accept these arguments.
    """
    try:
        return mode_of(msgspec.json.decode(text))
    except (ValueError, msgspec.DecodeError) as error:  # Text that is not UTF-8 is a ValueError too.
        raise ConfigError(f"Invalid mode {text!r}: {error}.", field="mode") from error


DECODERS[Mode] = mode_of
