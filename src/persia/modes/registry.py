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

__all__ = ["combined_as", "decode", "encode", "mode_of", "modules", "recorded_mode", "register"]

ABSENT: dict[str, dict[str, Any]] = {
    "hybrid": {"combine": False, "reduction": "per_id", "warmup": 0},
    "bsp": {"reduction": "per_id"},
    "hop_bw": {"reduction": "per_id"},
}
"""Values of fields that records of version 0.1 lack, by the name of the mode: the behaviour of that version."""

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
    found = {mode.__module__ for mode in _MODES.values()}
    return sorted(name for name in found if name != "__main__" and not name.startswith("persia."))


def encode(mode: object) -> str:
    """Returns a mode, or a `persia.modes.Auto`, as JSON."""
    return msgspec.json.encode(mode).decode()


def recorded_mode(tree: Any) -> Any:
    """Returns the plain data of a recorded mode, or of an `Auto`, with the fields that version 0.1 did not write.

    A record has all fields, so one that is missing is older than the field. Not for files of users, where a missing
    field has its default.
    """
    if not isinstance(tree, dict):
        return tree
    known = ABSENT.get(str(tree.get("kind")), {})
    return {**known, **{name: recorded_mode(value) for name, value in tree.items()}}


def combined_as(mode: Mode, other: Mode) -> Mode:
    """Returns a mode with the `reduction`, `combine` and `warmup` of another one, as far as both have these fields.

    A declared mode that equals the present one but for these does not change a run: it goes on as it was begun, perhaps
    in a version with other defaults.
    """
    fields = {"combine", "reduction", "warmup"}.intersection(
        *(getattr(type(m), "__struct_fields__", ()) for m in (mode, other))
    )
    if getattr(mode, "staleness", None) != getattr(other, "staleness", None):
        fields.discard("warmup")  # It leads to a limit, and this is another one.
    if not fields:
        return mode
    return cast(Mode, msgspec.structs.replace(cast(Any, mode), **{name: getattr(other, name) for name in fields}))


def decode(text: str, *, recorded: bool = False) -> Mode:
    """Makes a mode from JSON.

    Args:
        text: the JSON.
        recorded: whether the text may be a record of an earlier version; see `recorded_mode`.

    Raises:
        ConfigError: the text is not a mode, or the mode does not accept these arguments.
    """
    try:
        tree = msgspec.json.decode(text)
        return mode_of(recorded_mode(tree) if recorded else tree)
    except (ValueError, msgspec.DecodeError) as error:  # Text that is not UTF-8 is a ValueError too.
        raise ConfigError(f"Invalid mode {text!r}: {error}.", field="mode") from error


DECODERS[Mode] = mode_of
