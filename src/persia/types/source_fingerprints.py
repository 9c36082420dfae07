"""Fingerprints of sources of batches: they cover everything that a position in a source depends on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

__all__ = ["SourceFingerprint", "SourcePart", "changed_options", "distinct_parts"]


class SourcePart(msgspec.Struct, frozen=True):
    """An identifiable part of a source, such as a file.

    Attributes:
        name: path of the file, name of the topic, or a description of the data.
        size: size in bytes; None if unknown.
        modified: time of the last modification in nanoseconds since 1970; None if unknown.
    """

    name: str
    size: int | None = None
    modified: int | None = None


class SourceFingerprint(msgspec.Struct, frozen=True):
    """Identity of a source: all that determines which row is in which batch. A position is valid for one fingerprint.

    Attributes:
        kind: kind of the source, such as "parquet".
        parts: parts in the order of reading; no two are equal.
        rows: options that determine which rows are read, such as a filter, by name.
        order: options that determine the batch of a row, such as the batch size, by name.
        numbered: whether the number of a row over all parts determines if it is read, as with a random split.
    """

    kind: str
    parts: tuple[SourcePart, ...]
    rows: dict[str, str] = {}
    order: dict[str, str] = {}
    numbered: bool = False

    def keys(self) -> list[str]:
        """Returns a key for each part, which depends on its content and on which of its rows are read."""
        rows = sorted(self.rows.items())
        return [_digest((self.kind, rows, part.name, part.size, part.modified)) for part in self.parts]

    def merged(self, name: str) -> SourceFingerprint:
        """Returns the fingerprint of the same data as one part, for a source whose parts cannot be read separately."""
        parts = [(part.name, part.size, part.modified) for part in self.parts]
        part = SourcePart(f"{name} ({_digest(parts)})" if len(parts) > 1 else name, *parts[0][1:])
        return msgspec.structs.replace(self, parts=(part,))

    def ordered(self, **options: object) -> SourceFingerprint:
        """Returns a fingerprint with further options that determine the batch of a row."""
        return msgspec.structs.replace(self, order=self.order | {name: str(value) for name, value in options.items()})


def distinct_parts(parts: Iterable[SourcePart]) -> tuple[SourcePart, ...]:
    """Returns the parts, with a number in the names of repeated parts."""
    counts: Counter[SourcePart] = Counter()
    distinct = []
    for part in parts:
        counts[part] += 1
        count = counts[part]
        distinct.append(part if count == 1 else msgspec.structs.replace(part, name=f"{part.name} (again, {count})"))
    return tuple(distinct)


def changed_options(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Returns the names of options that differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _digest(value: Sequence[object]) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()
