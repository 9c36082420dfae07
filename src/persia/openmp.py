"""How long the threads of GNU's OpenMP spin while they wait, which is read once, when torch is loaded.

In a user's program that is torch's own choice. Processes that persia starts for itself (`persia train`, the roles on
Ray) shorten it; docs/performance.md, "Threads of torch", has the measurements.
"""

from __future__ import annotations

import os
import sys

__all__ = ["SPINS", "SPINS_SHARED", "WAITING", "limit_spinning", "spins"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user sets how threads wait."""

SPINS = 7_000
"""Some ten microseconds: nine tenths of the rate on an idle machine, and some times that of torch's own, 300,000 spins,
on one with other programs."""

SPINS_SHARED = 1_000
"""What is best on a machine whose cores other programs use all the time."""


def limit_spinning() -> None:
    """Lets threads sleep after `SPINS`, in this process and its children, unless the user has said how they wait.

    Without effect once torch is loaded.
    """
    if "torch" not in sys.modules and not any(os.environ.get(name) for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def spins() -> int | None:
    """Returns how often a thread spins before it sleeps, if a variable says it."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return 0
    count = os.environ.get("GOMP_SPINCOUNT", "")
    return int(count) if count.isdecimal() else None
