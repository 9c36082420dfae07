"""`FileSource`: the base of sources that read files of any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from persia.batching.batch import Batch
from persia.data.files import File
from persia.data.fingerprints import fingerprint_of_files
from persia.data.rows import Conversion, require_rows
from persia.schema import InputRules, Schema
from persia.types import SourceFingerprint

__all__ = ["FileSource"]


@dataclass(frozen=True)
class FileSource:
    """Rows of files that are read one after another.

    Attributes:
        files: the files, in the order in which they are read.
        conversion: conversion of the rows to batches.
        counted: positions of files whose rows are not read, but count if rows are selected by their number.
        whole: whether these are all files of the source, which must have at least one row.
    """

    kind: ClassVar[str]
    """Format of the files, in fingerprints."""

    files: tuple[File, ...]
    conversion: Conversion
    counted: frozenset[int] = field(default=frozenset(), kw_only=True)
    whole: bool = field(default=True, kw_only=True)

    @property
    def input_rules(self) -> InputRules:
        """See `Conversion.input_rules`."""
        return self.conversion.input_rules

    def with_schema(self, schema: Schema) -> Self:
        """See `InputSource.with_schema`."""
        return replace(self, conversion=replace(self.conversion, schema=schema))

    def reading(self, names: Sequence[str]) -> Self:
        """Returns a source of the same rows that reads these columns of the schema only."""
        return replace(self, conversion=replace(self.conversion, only=frozenset(names)))

    def fingerprint(self) -> SourceFingerprint:
        """Returns the fingerprint of the files and the selection."""
        return fingerprint_of_files(self.kind, self.files, self.conversion.selection)

    def of_parts(self, order: Sequence[int], read: Sequence[int]) -> Self:
        """See `persia.services.Divisible`."""
        unread = {*order}.difference(read)
        counted = frozenset(place for place, number in enumerate(order) if number in unread)
        files = tuple(self.files[number] for number in order)
        return replace(self, files=files, counted=counted, whole=len(read) == len(self.files))

    def checked(self, batches: Iterator[Batch], skip: int) -> Iterator[Batch]:
        """Yields the batches of a pass from row `skip` on; raises DataError if the whole source has no row."""
        return require_rows(batches, self.files, skip, self.conversion.selection) if self.whole else batches
