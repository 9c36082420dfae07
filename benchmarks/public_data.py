"""The public data sets of benchmarks, which PERSIA_DATA has or has not."""

from __future__ import annotations

import sys

from persia import data

__all__ = ["GLOBO", "is_here"]

GLOBO = (
    "globo_ctr is made by `python -m persia.data.datasets.prepare_globo SOURCE $PERSIA_DATA/globo_ctr` from the "
    "published News Portal User Interactions by Globo.com, whose terms allow academic use only."
)


def is_here(name: str) -> bool:
    """Returns whether PERSIA_DATA has a data set; prints where to get it if not."""
    if data.find(name) is not None:
        return True
    source = f" {GLOBO}" if name == "globo_ctr" else ""
    print(f"{name} is not here; set PERSIA_DATA to the directory that holds it.{source}", file=sys.stderr)
    return False
