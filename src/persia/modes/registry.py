"""Modes as text: what crosses from one role to another."""

from __future__ import annotations

import msgspec

from persia.errors import ConfigError
from persia.modes.async_ import Async
from persia.modes.auto import Auto
from persia.modes.base import Mode
from persia.modes.bsp import Bsp
from persia.modes.gba import Gba
from persia.modes.hop_bs import HopBs
from persia.modes.hop_bw import HopBw
from persia.modes.hybrid import Hybrid
from persia.modes.sync import Sync

__all__ = ["decode", "encode"]


def encode(mode: Mode | Auto) -> str:
    """A mode, or the rule that chooses one, as JSON."""
    return msgspec.json.encode(mode).decode()


def decode(text: str) -> Mode:
    """A mode from JSON.

    Raises:
        ConfigError: there is no such mode, or it does not take these arguments.
    """
    try:
        mode: Mode = msgspec.json.decode(text, type=Sync | Hybrid | Async | Bsp | HopBs | HopBw | Gba)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{text!r} is no mode: {error}", field="mode") from error
    return mode
