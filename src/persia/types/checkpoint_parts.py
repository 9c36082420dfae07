"""Records by which PSs write and read their own parts of a checkpoint."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MarkPath",
    "PartCheck",
    "PlaceCheck",
    "RowsRead",
    "RowsToRead",
    "RowsToWrite",
    "TableToRead",
    "WrittenPart",
    "WrittenState",
]

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

MarkPath = Annotated[str, msgspec.Meta(pattern=r"^step-[0-9]{12}/(rewrite-[0-9]+/)?mark-[0-9a-f]+\Z")]
"""Path of a file in a directory of checkpoints by which other processes know that they see the same place."""


class PlaceCheck(NamedTuple):
    """Whether a PS can use a place for checkpoints.

    Attributes:
        host: name of the PS's host.
        problem: why it cannot; empty if it can.
    """

    host: str
    problem: str


class RowsToWrite(NamedTuple):
    """An order to a PS to write its part of a checkpoint. The PS makes the names of its files from these numbers.

    Attributes:
        url: directory of checkpoints: an absolute path, or any URL that fsspec supports.
        step: the step, which names its directory.
        rewrite: number of the `rewrite-N` directory in it; 0 for none.
        claim: hexadecimal digits, in the names of all files. They differ for each attempt to write a step, so that a
            PS that finishes a file too late does not replace one of a later attempt.
        server: number of this PS.
        share: maximum share of the processors of its host; 1 for no limit.
    """

    url: str
    step: Count
    rewrite: Count
    claim: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")]
    server: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    share: float


class WrittenPart(NamedTuple):
    """A file of rows, or of ids of removed rows, that has been written.

    Attributes:
        table: name of the table.
        shard: number of the shard, over all PSs.
        path: path relative to the directory of the step.
        bytes: size of the file.
        checksum: checksum of the file, as in a manifest.
        entries: number of rows or ids.
        steps: lowest and highest `last_step` of the rows; None without rows.
        layout: dim, width of the optimizer state, and dtype of the embeddings; None for ids of removed rows.
    """

    table: str
    shard: int
    path: str
    bytes: int
    checksum: str
    entries: int
    steps: tuple[int, int] | None
    layout: tuple[int, int, str] | None


class WrittenState(NamedTuple):
    """A file of the state of a PS besides rows that has been written.

    Attributes:
        name: name of the state in the manifest.
        path: path relative to the directory of the step.
        bytes: size of the file.
        checksum: checksum of the file, as in a manifest.
    """

    name: str
    path: str
    bytes: int
    checksum: str


class TableToRead(NamedTuple):
    """A table whose rows a PS reads from a checkpoint.

    Attributes:
        name: name of the table in the PS.
        source: name of the table in the checkpoint.
        state: whether to read the optimizer state; otherwise it starts anew.
        shards: shards of the checkpoint whose stamps are to be raised, uint64 `[n]`, ascending.
        gaps: by how much, uint32 `[n]`.
    """

    name: str
    source: str
    state: bool
    shards: NDArray[np.uint64]
    gaps: NDArray[np.uint32]


class RowsToRead(NamedTuple):
    """An order to a PS to read from a checkpoint the rows that it owns by its bucket map.

    Attributes:
        url: directory of checkpoints, or of one step: an absolute path, or any URL that fsspec supports.
        step: the step; None if `url` is its directory.
        checksum: checksum of its manifest.
        server: number of this PS.
        map_version: version of the bucket map.
        tables: the tables.
        state: whether to also import the state besides rows that the PS of this number wrote.
    """

    url: str
    step: Count | None
    checksum: str
    server: int
    map_version: int
    tables: list[TableToRead]
    state: bool


class RowsRead(NamedTuple):
    """Progress of a PS that reads a checkpoint: one part of it.

    Attributes:
        table: name of the table in the PS; empty if the part has no rows.
        rows: number of rows that this PS owns.
    """

    table: str
    rows: int


class PartCheck(NamedTuple):
    """Result of reading a part of a checkpoint.

    Attributes:
        bytes: size of the part.
        problem: why it is damaged; empty if it is intact.
    """

    bytes: int
    problem: str
