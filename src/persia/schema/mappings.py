"""Mappings of ids to fewer ids, for small tables."""

from __future__ import annotations

from persia.checks import MAX_SEED, check_integer, check_kind
from persia.errors import ConfigError
from persia.schema.checks import TaggedRecord

__all__ = ["CodePrefix", "HashTo", "IdMapping", "Quotient", "Remainder"]

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


class CodePrefix(TaggedRecord, frozen=True, tag="code_prefix"):
    """Maps ids of items to the first codes of their semantic ids: items with similar vectors share a row.

    Semantic ids (Rajput et al., NeurIPS 2023, arXiv 2305.05065) as prefixes (Singh et al., RecSys 2024, arXiv
    2306.08121): one code tells a few hundred kinds of items apart, two codes kinds of kinds. An item that has not been
    trained begins with the rows of its prefixes, which its neighbours have trained. All ids that the file does not name
    share one row. Resulting ids of different lengths differ, so features of several lengths may read one table.

    Args:
        codes: Parquet file that `persia semantic-ids` wrote, a path or URL that every process can read. A process reads
            it once, and again where it has changed and an id is not in it.
        length: how many codes of an item count.
    """

    codes: str
    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("CodePrefix.codes", self.codes, str, "a path or URL")
        if not self.codes:
            raise ConfigError(
                "CodePrefix.codes is empty; name a file of `persia semantic-ids`.", field="CodePrefix.codes"
            )
        check_integer("CodePrefix.length", self.length, 1, MAX_CODES)


MAX_CODES = 16
"""The most codes of an item."""

IdMapping = HashTo | Quotient | Remainder | CodePrefix
