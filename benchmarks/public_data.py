"""The public data sets of benchmarks, which PERSIA_DATA has or has not."""

from __future__ import annotations

import sys

from persia import data

__all__ = ["GLOBO", "is_here"]

GLOBO = (
    "globo_ctr is made by `python -m persia.data.datasets.prepare_globo SOURCE $PERSIA_DATA/globo_ctr` from the "
    "published News Portal User Interactions by Globo.com, whose terms allow academic use only."
)
SOURCES = {
    "globo_ctr": GLOBO,
    "criteo": "Kaggle's train.txt of the Display Advertising Challenge, or Criteo's Terabyte logs day_0 to day_23.",
    "avazu": "Kaggle's train.gz of the Click-Through Rate Prediction.",
    "ml-1m": "ml-1m.zip of GroupLens's MovieLens, with ratings.dat; its terms do not allow commercial use.",
    "ml-20m": "ml-20m.zip of GroupLens's MovieLens, with ratings.csv; its terms do not allow commercial use.",
    "taobao_ad": "raw_sample.csv, ad_feature.csv and user_profile.csv of Tianchi's data set 56.",
}
"""Where a data set comes from, by its directory."""


def is_here(name: str) -> bool:
    """Returns whether PERSIA_DATA has a data set; prints where to get it if not."""
    if data.find(name) is not None:
        return True
    source = f" {SOURCES[name]}" if name in SOURCES else ""
    print(f"{name} is not here; set PERSIA_DATA to the directory that holds it.{source}", file=sys.stderr)
    return False
