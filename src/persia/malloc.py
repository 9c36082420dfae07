"""What malloc does with freed memory: by default glibc returns large blocks to the system and faults them in anew."""

from __future__ import annotations

import ctypes
import os

__all__ = ["KEPT_BYTES", "LARGE_BYTES", "keep_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 256 << 20
"""Free bytes at the end of a malloc arena above which glibc returns memory to the system."""

LARGE_BYTES = 32 << 20
"""Size above which a block is mapped separately and returned at once. The maximum of glibc."""


def keep_memory() -> None:
    """Lets this process keep the memory of messages and tensors for the next ones, by malloc's thresholds.

    By default, glibc returns freed blocks above 128 KiB to the system and requests new ones for the next message or
    step; it learns larger thresholds, but a step that frees all that it has allocated is above these, too. Each page is
    then mapped and zeroed again, which takes longer than copying it, and many times longer on a virtual machine. No-op
    if the environment sets thresholds, or without glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
