"""Lets a process keep the memory of messages for the next ones.

By default, glibc returns freed blocks above 128 KiB to the system and requests new ones for the next message. Each
page is then mapped and zeroed again, which takes longer than copying it, and many times longer on a virtual machine.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 256 << 20
"""Free bytes at the end of a malloc arena above which glibc returns memory to the system."""

LARGE_BYTES = 32 << 20
"""Size above which a block is mapped separately and returned at once. The maximum of glibc."""


def keep_memory() -> None:
    """Sets malloc's thresholds for this process. No-op if they are set by the environment, or without glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
