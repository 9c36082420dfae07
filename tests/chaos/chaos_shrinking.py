"""Shrinks a schedule of faults that fails to one in which each fault is needed (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shrink"]

T = TypeVar("T")


def shrink(faults: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Returns a part of a schedule that still fails, such that each of its faults is needed.

    Leaves out half of the faults, then a quarter, and so on to single ones. The result depends on `fails` alone.

    Args:
        faults: a schedule that fails.
        fails: runs a schedule; returns whether it fails.
    """
    left = list(faults)
    size = max(1, len(left) // 2)
    while True:
        before = len(left)
        at = 0
        while at < len(left):
            shorter = left[:at] + left[at + size :]
            if shorter and fails(shorter):
                left = shorter
            else:
                at += size
        if size == 1 and len(left) == before:
            return left
        size = max(1, size // 2)
