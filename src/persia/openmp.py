"""How long the threads of GNU's OpenMP spin while they wait, which is read once, when torch is loaded.

`import persia` shortens it if torch is not loaded yet; docs/performance.md, "Threads of torch", has the measurements.
"""

from __future__ import annotations

import os
import sys

__all__ = ["SPINS", "WAITING", "limit_spinning", "sleeps_soon"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user sets how threads wait."""

SPINS = 1_000
"""Some microseconds. By itself GNU's OpenMP spins 300,000 times: its threads take cores from those of persia."""


def limit_spinning() -> None:
    """Lets threads sleep after `SPINS`, in this process and its children, unless the user has said how they wait."""
    if "torch" not in sys.modules and not any(os.environ.get(name) for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def sleeps_soon() -> bool:
    """Returns whether threads that wait sleep after `SPINS` or fewer, but not at once."""
    spins = os.environ.get("GOMP_SPINCOUNT", "")
    return spins.isdecimal() and 0 < int(spins) <= SPINS
