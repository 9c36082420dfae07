"""Keeps freed memory in the process: by default glibc returns large blocks to the system and faults them in again."""

from __future__ import annotations

import ctypes
import os

__all__ = ["KEPT_BYTES", "LARGE_BYTES", "keep_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 256 << 20
"""Free bytes at the end of a malloc arena above which glibc returns memory to the system."""

LARGE_BYTES = 32 << 20
"""Size above which a block is mapped separately and returned immediately. The maximum of glibc."""


def keep_memory() -> None:
    """Sets malloc's thresholds so that this process reuses the memory of messages and tensors.

    By default, glibc returns freed blocks above 128 KiB to the system and requests new ones for the next message or
    step; it adapts its thresholds, but a step that frees all its allocations also exceeds the adapted ones. Each page
    is then mapped and zeroed again, which takes longer than copying it, and many times longer on a virtual machine.
    No-op if the environment sets thresholds, or without glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
