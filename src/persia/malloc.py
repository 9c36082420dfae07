"""Keeps freed memory in the process, which glibc by default returns and faults in again; counts allocated bytes."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

__all__ = ["KEPT_BYTES", "LARGE_BYTES", "allocated_bytes", "keep_memory"]

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


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]
    uordblks: int
    hblkhd: int


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


def allocated_bytes() -> int | None:
    """Returns the bytes that malloc has handed out in this process; None without glibc 2.33 or newer.

    Freed memory that malloc keeps does not count, in contrast to the process's resident memory. Visits each free block,
    which takes 0.2 us: usually microseconds, but milliseconds if the heap is fragmented.
    """
    function = _mallinfo2()
    if function is None:
        return None
    info = function()
    return info.uordblks + info.hblkhd
