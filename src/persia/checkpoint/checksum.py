"""The checksum of parts: CRC-32 as `zlib.crc32` computes it, several times as fast."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["crc32"]

_core: Any = importlib.import_module("persia._core").checksum


def crc32(data: memoryview, crc: int = 0) -> int:
    """CRC-32 of contiguous bytes, behind those whose checksum is `crc`. Blocks; other threads run meanwhile."""
    return int(_core.crc32(data, crc))
