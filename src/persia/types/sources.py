"""Fingerprints of sources of batches: what a position in a source depends on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

__all__ = ["SourceFingerprint", "SourcePart", "changed_options", "distinct_parts"]


class SourcePart(msgspec.Struct, frozen=True):
    """A part of a source that can be recognised, such as a file.

    Attributes:
        name: path of the file, name of the topic, or a text that describes the data.
        size: bytes; None if unknown.
        modified: time of the last modification in nanoseconds since 1970; None if unknown.
    """

    name: str
    size: int | None = None
    modified: int | None = None


class SourceFingerprint(msgspec.Struct, frozen=True):
    """Identity of a source: all that decides which row is in which batch. A position counts for one fingerprint.

    Attributes:
        kind: kind of the source, such as "parquet".
        parts: what is read, in this order; no two are equal.
        rows: options that decide which rows are read, such as a filter, by name.
        order: options that decide which batch a row is in, such as the batch size, by name.
        numbered: whether the number of a row over all parts decides if it is read, as with a random split.
    """

    kind: str
    parts: tuple[SourcePart, ...]
    rows: dict[str, str] = {}
    order: dict[str, str] = {}
    numbered: bool = False

    def keys(self) -> list[str]:
        """Returns a key for each part: that of its content and of the rows that are read of it."""
        rows = sorted(self.rows.items())
        return [_digest((self.kind, rows, part.name, part.size, part.modified)) for part in self.parts]

    def merged(self, name: str) -> SourceFingerprint:
        """Returns the fingerprint of the same data as one part, for a source whose parts cannot be read alone."""
        parts = [(part.name, part.size, part.modified) for part in self.parts]
        part = SourcePart(f"{name} ({_digest(parts)})" if len(parts) > 1 else name, *parts[0][1:])
        return msgspec.structs.replace(self, parts=(part,))

    def ordered(self, **options: object) -> SourceFingerprint:
        """Returns a fingerprint with further options that decide which batch a row is in."""
        return msgspec.structs.replace(self, order=self.order | {name: str(value) for name, value in options.items()})


def distinct_parts(parts: Iterable[SourcePart]) -> tuple[SourcePart, ...]:
    """Returns parts of which repeated ones have a number in their names."""
    met: Counter[SourcePart] = Counter()
    found = []
    for part in parts:
        met[part] += 1
        again = met[part]
        found.append(part if again == 1 else msgspec.structs.replace(part, name=f"{part.name} (again, {again})"))
    return tuple(found)


def changed_options(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Returns the names of options that differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _digest(value: Sequence[object]) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()
