"""Has each PS check and read the rows of a checkpoint straight from the storage, all of them concurrently."""

from __future__ import annotations

import functools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.checkpoint.format import Part, RemovedPart, RowsPart
from persia.checkpoint.owned import Owned
from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.servers import by_problem, server_pieces
from persia.checks import without_userinfo
from persia.errors import CheckpointError, MissingExtraError
from persia.rpc.fan_out import call_all
from persia.services import EmbeddingPS, RowChunk, StatePiece
from persia.telemetry.logs import get_logger
from persia.types import BucketMap, PartCheck, RowsRead, RowsToRead, TableToRead

__all__ = ["ServerReading", "check_row_parts", "read_own_rows"]

_log = get_logger("persia.checkpoint")

PROGRESS = RowsRead("", 0)
"""Says that a PS has made progress besides rows, as each item has a deadline."""


def check_row_parts(url: str, step: int | None, checksum: str, share: int, shares: int) -> Iterator[PartCheck]:
    """Reads and checks every n-th part of the rows of a checkpoint. See `EmbeddingPS.check_row_parts`."""
    try:
        reader = _opened(url, step, checksum)
    except CheckpointError as error:
        raise CheckpointError(_here(error.message), **error.fields) from error
    yield PartCheck(0, "")  # This PS sees the checkpoint.
    for check in reader.check(_row_parts(reader)[share::shares]):
        yield check._replace(problem=_here(check.problem)) if check.problem else check


def read_own_rows(server: EmbeddingPS, order: RowsToRead) -> Iterator[RowsRead]:
    """Imports what a PS of this process owns of a checkpoint. See `EmbeddingPS.read_own_rows`."""
    try:
        reader = _opened(order.url, order.step, order.checksum)
        yield PROGRESS
        buckets = server.buckets()
        buckets.check(order.map_version)  # Also if this PS owns nothing by it.
        for table in order.tables:
            owned = Owned(table.name, buckets, [order.server])
            for shard, arrays in _rows(reader, table, owned):
                if count := len(arrays["ids"]):
                    server.import_rows(RowChunk(table.name, shard, arrays), order.map_version)
                yield RowsRead(table.name, count)
        if order.state:
            for _, pieces in server_pieces(reader, order.server):
                server.import_state([StatePiece(**piece) for piece in pieces])
                yield PROGRESS
    except CheckpointError as error:
        raise CheckpointError(_here(error.message), **error.fields) from error


class ServerReading:
    """Reads a checkpoint into PSs.

    PSs that do not see the checkpoint get their rows from here, and a warning says so. All PSs share the work of
    verifying it.

    Args:
        reader: of the checkpoint.
        servers: all PSs.
        ranks: the PSs to read into.
    """

    def __init__(self, reader: CheckpointReader, servers: Sequence[EmbeddingPS], ranks: Collection[int]) -> None:
        self._reader = reader
        self._servers = servers
        self._ranks = sorted(ranks)
        self._blind: list[int] = []

    def verify(self) -> None:
        """Reads and checks every part, like `CheckpointReader.verify`; the PSs share the parts of rows.

        Raises:
            CheckpointError: parts are missing or damaged; the message lists all of them.
        """
        rows, shares = _row_parts(self._reader), len(self._servers)
        url, step = self._reader.address
        checksum = self._reader.manifest.checksum
        unseen: dict[int, str] = {}

        def there(rank: int) -> list[str]:
            checks = self._servers[rank].check_row_parts(url, step, checksum, rank, shares)
            try:
                next(checks)
            except (CheckpointError, MissingExtraError) as error:
                unseen[rank] = error.message
                return []
            return [_named(rank, check.problem) for check in checks if check.problem]

        def here(parts: Sequence[tuple[CheckpointReader, Part]]) -> list[str]:
            return [check.problem for check in self._reader.check(parts) if check.problem]

        rest = [pair for pair in self._reader.all_parts() if not isinstance(pair[1], RowsPart | RemovedPart)]
        shared = [functools.partial(there, rank) for rank in range(shares)]
        found = call_all([*shared, functools.partial(here, rest)])
        if unseen:
            self._blind = sorted(unseen.keys() & set(self._ranks))
            _log.warning(
                "%d of %d embedding PSs do not see %s, so they get their rows through this process, which is slower. "
                "Give all hosts the same storage there, and the same credentials. %s",
                len(unseen), shares, without_userinfo(url), by_problem(unseen),
            )  # fmt: skip
            found += [here(rows[rank::shares]) for rank in unseen]
        damaged = [problem for each in found for problem in each]
        if damaged:
            raise CheckpointError("\n".join(damaged), path=self._reader.path, problems=damaged)

    def read(self, tables: Sequence[TableToRead], *, state: bool = False) -> Mapping[str, int]:
        """Reads rows into the PSs that own them, after `verify`.

        Args:
            tables: the tables to read.
            state: whether each PS then takes the state besides rows that the PS of its number wrote.

        Returns:
            Number of rows by table.

        Raises:
            CheckpointError: a part cannot be read; some of the rows have been imported. Or these are not all PSs of
                the bucket map; then none have.
        """
        url, step = self._reader.address
        buckets = self._servers[0].buckets()
        if len(self._servers) != buckets.servers:
            raise CheckpointError(
                f"Bucket map {buckets.version} has {buckets.servers} embedding PSs, and this process knows "
                f"{len(self._servers)}: rows are moving to other PSs. Load again once they have moved.",
                path=self._reader.path,
            )
        stop = threading.Event()

        def there(rank: int) -> Counter[str]:
            order = RowsToRead(url, step, self._reader.manifest.checksum, rank, buckets.version, list(tables), state)
            rows: Counter[str] = Counter()
            try:
                with closing(cast("Any", self._servers[rank].read_own_rows(order))) as reads:
                    for table, count in reads:
                        if table:
                            rows[table] += count
                        if stop.is_set():
                            break
            except CheckpointError as error:
                stop.set()
                raise CheckpointError(_named(rank, error.message), **error.fields) from error
            except BaseException:
                stop.set()
                raise
            return rows

        calls: list[Callable[[], Counter[str]]] = [
            functools.partial(there, rank) for rank in self._ranks if rank not in self._blind
        ]
        if self._blind:
            calls.append(lambda: self._read_here(tables, buckets, state=state))
        return sum(call_all(calls), Counter())

    def _read_here(self, tables: Sequence[TableToRead], buckets: BucketMap, *, state: bool) -> Counter[str]:
        """Reads the rows of PSs that do not see the checkpoint, and sends them."""
        rows: Counter[str] = Counter()
        for table in tables:
            for shard, arrays in _rows(self._reader, table, Owned(table.name, buckets, self._blind)):
                rows[table.name] += len(arrays["ids"])
                owners = batching.owners(table.name, arrays["ids"], buckets)
                for owner in np.unique(owners).tolist():
                    part = {name: array[owners == owner] for name, array in arrays.items()}
                    self._servers[owner].import_rows(RowChunk(table.name, shard, part), buckets.version)
        for rank in self._blind if state else []:
            for _, pieces in server_pieces(self._reader, rank):
                self._servers[rank].import_state([StatePiece(**piece) for piece in pieces])
        return rows


def _opened(url: str, step: int | None, checksum: str) -> CheckpointReader:
    """Opens the checkpoint with this checksum of its manifest."""
    reader = CheckpointReader(url, step)
    if reader.manifest.checksum != checksum:
        raise CheckpointError(f"{reader.path} is another checkpoint than the one to load.", path=reader.path)
    return reader


def _row_parts(reader: CheckpointReader) -> list[tuple[CheckpointReader, Part]]:
    return [pair for pair in reader.all_parts() if isinstance(pair[1], RowsPart | RemovedPart)]


def _rows(reader: CheckpointReader, table: TableToRead, owned: Owned) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """Yields rows of a table as they are imported; some parts may have none."""
    for shard, arrays in reader.rows(table.source, owned):
        if not table.state:
            arrays.pop("state")
        at = int(np.searchsorted(table.shards, shard))
        if at < len(table.shards) and table.shards[at] == shard:
            arrays["stamp"] = arrays["stamp"] + table.gaps[at]
        yield shard, arrays


def _named(rank: int, problem: str) -> str:
    return f"Embedding PS {rank} {problem}"


def _here(problem: str) -> str:
    return f"on host {socket.gethostname()}: {problem}"
