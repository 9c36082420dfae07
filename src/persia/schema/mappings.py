"""Mappings of ids to fewer ids, for small tables."""

from __future__ import annotations

from persia.checks import MAX_SEED, check_integer
from persia.schema.checks import TaggedRecord

__all__ = ["HashTo", "IdMapping", "Quotient", "Remainder"]

MAX_ID = (1 << 64) - 1


class HashTo(TaggedRecord, frozen=True, tag="hash"):
    """Hashes ids into buckets (feature hashing: Weinberger et al., ICML 2009); ids of one bucket share a row.

    Several features with different seeds are a multi-hash embedding (Tito Svenstrup et al., NeurIPS 2017): two ids
    seldom share all of their rows.

    Args:
        buckets: number of buckets; the resulting ids are 0 to `buckets` - 1.
        seed: seed of the hash.
    """

    buckets: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("HashTo.buckets", self.buckets, 1, MAX_ID)
        check_integer("HashTo.seed", self.seed, 0, MAX_SEED)


class Quotient(TaggedRecord, frozen=True, tag="quotient"):
    """Divides ids, rounding down. With `Remainder` by the same number, two small tables distinguish all ids.

    The quotient-remainder trick (Shi et al., KDD 2020, arXiv 1909.02107) for ids from 0 to n - 1: `by` near the root of
    n gives two tables of about that many rows. It divides integers: a text or a fraction in a feature of kind "auto",
    which would be hashed first, is rejected.

    Args:
        by: divisor.
    """

    by: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Quotient.by", self.by, 1, MAX_ID)


class Remainder(TaggedRecord, frozen=True, tag="remainder"):
    """Takes the remainder of ids; see `Quotient`.

    Args:
        by: divisor.
    """

    by: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Remainder.by", self.by, 1, MAX_ID)


IdMapping = HashTo | Quotient | Remainder
