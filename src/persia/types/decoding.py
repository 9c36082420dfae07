"""Decoding of fields whose type is an interface with a registry of implementations, such as `persia.modes.Mode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["DECODERS", "decode_hook"]

DECODERS: dict[type, Callable[[Any], Any]] = {}
"""Functions that create an implementation from plain data, by interface. Filled at import, read-only afterwards."""


def decode_hook(kind: type, value: Any) -> Any:
    """Decodes a value for a field of an interface type: the msgspec `dec_hook` for such fields.

    Raises:
        NotImplementedError: the type has no decoder.
        ValueError: the value is invalid; msgspec adds the path of the field.
    """
    decoder = DECODERS.get(kind)
    if decoder is None:
        raise NotImplementedError(f"{kind} cannot be decoded.")
    return decoder(value)
