"""Lets the process keep the memory of messages, for the next ones.

By default glibc gives freed memory back to the system above 128 KiB, and takes it anew for the next message. Each page
is then mapped and filled with zeros once more, which takes longer than copying it, on a virtual machine many times so.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 256 << 20
"""Free memory at the end of an arena of malloc beyond which it is given back."""

LARGE_BYTES = 32 << 20
"""Larger pieces are mapped by themselves, and given back at once. The largest that glibc allows."""


def keep_memory() -> None:
    """Sets malloc's thresholds for this process. Does nothing where they are set from outside, or without glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
