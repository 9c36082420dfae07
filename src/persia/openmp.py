"""Limits the spinning of waiting threads of GNU's OpenMP, which is configured once, when torch is loaded.

A user's program keeps torch's default. Processes that persia starts (`persia train`, the roles on Ray) shorten it;
docs/performance.md, "Threads of torch", has the measurements.
"""

from __future__ import annotations

import os
import sys

__all__ = ["SPINS", "SPINS_SHARED", "WAITING", "limit_spinning", "spins"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user sets how threads wait."""

SPINS = 7_000
"""Some ten microseconds. Reaches nine tenths of the rate of torch's default of 300,000 spins on an idle machine, and
several times its rate on a machine with other programs."""

SPINS_SHARED = 1_000
"""Best value for a machine whose cores other programs use all the time."""


def limit_spinning() -> None:
    """Lets threads sleep after `SPINS`, in this process and its children, unless a variable in `WAITING` is set.

    No effect once torch is loaded.
    """
    if "torch" not in sys.modules and not any(os.environ.get(name) for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def spins() -> int | None:
    """Returns the number of spins of a thread before it sleeps; None if no variable sets it."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return 0
    count = os.environ.get("GOMP_SPINCOUNT", "")
    return int(count) if count.isdecimal() else None
