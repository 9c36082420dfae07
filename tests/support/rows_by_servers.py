"""PSs with rows, which write and read checkpoints of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from persia import batching
from persia.checkpoint import Base, CheckpointReader, CheckpointWriter
from persia.checkpoint.row_reading import ServerReading
from persia.checkpoint.row_writing import write_rows
from persia.errors import CheckpointError, PersiaError
from persia.modes import Hybrid
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.schema import Adagrad, IdFeature, Schema, Table
from persia.types import BucketMap, Gradients, PlaceCheck, PushHeader, TableToRead

OPTIMIZER = Adagrad(0.1)
NO_GAPS = np.empty(0, np.uint64), np.empty(0, np.uint32)


def schema_of(capacity: int | None = None) -> Schema:
    tables = [Table("item", 4, capacity=capacity), Table("user", 2)]
    return Schema([IdFeature("item", 4), IdFeature("user", 2)], [], ["click"], tables)


def servers_of(buckets: BucketMap, schema: Schema | None = None) -> list[EmbeddingServer]:
    tables = (schema or schema_of()).resolved_tables()
    return [
        EmbeddingServer(tables, OPTIMIZER, Hybrid(4), 3, 1, ServerOptions(**shares._asdict(), buckets=buckets, rank=n))
        for n, shares in enumerate(divide_here(tables, OPTIMIZER, buckets.servers))
    ]


def train(servers: Sequence[EmbeddingServer], ids: Iterable[int], step: int) -> None:
    """Looks the ids up and updates their rows."""
    buckets = servers[0].buckets()
    array = np.unique(np.fromiter(ids, np.uint64))
    for number, server in enumerate(servers):
        gradients = {}
        for table, dim in (("item", 4), ("user", 2)):
            own = array[batching.owners(table, array, buckets) == number]
            server.lookup({table: own}, True, buckets.version)
            gradients[table] = Gradients(own, np.full((len(own), dim), 0.1 * (step + 1), np.float32))
        server.push(PushHeader(1, 0, step + 1, step, 1), gradients, buckets.version)


def save(
    servers: Sequence[EmbeddingServer],
    directory: str | Path,
    step: int,
    since: Sequence[Mapping[str, int]] | None = None,
    base: Base | None = None,
) -> tuple[list[dict[str, int]], Base]:
    """Writes a checkpoint; returns what the next one may add to."""
    name = f"snapshot-{step}"
    known = since or [{} for _ in servers]
    infos = [server.begin_snapshot(name, s, "") for server, s in zip(servers, known, strict=True)]
    assert all(info.whole == (base is None) for info in infos)
    with CheckpointWriter(directory, step) as writer:
        for number, server in enumerate(servers):
            for part, pieces in enumerate(server.export_state()):
                writer.add_state(f"server-{number}.{part}", [piece._asdict() for piece in pieces])
        try:
            write_rows(writer, servers, name)
        finally:
            for server in servers:
                with suppress(PersiaError):
                    server.end_snapshot(name)
        schema = Schema([IdFeature("item", 4), IdFeature("user", 2)], [], ["click"])
        writer.commit(schema=schema, optimizer=OPTIMIZER, base=base, buckets=servers[0].buckets())
    return [info.numbers for info in infos], Base(step, writer.content)


def load(servers: Sequence[EmbeddingServer], directory: str | Path, *, state: bool = False) -> Mapping[str, int]:
    """Verifies a checkpoint and reads it into PSs; returns the numbers of rows."""
    reading = ServerReading(CheckpointReader(directory), servers, range(len(servers)))
    reading.verify()
    return reading.read([TableToRead(table, table, True, *NO_GAPS) for table in ("item", "user")], state=state)


def blind(server: EmbeddingServer) -> None:
    """Lets a PS see no checkpoint, as on a host without that storage."""

    def lost(*_: Any) -> Any:
        raise CheckpointError("it is not there")
        yield

    server.check_place = lambda *_: PlaceCheck("host-b", "it is not there")  # type: ignore[method-assign]
    server.write_snapshot = server.write_state = lost  # type: ignore[method-assign]
    server.read_own_rows = server.check_row_parts = lost  # type: ignore[method-assign]


def contents(directory: str | Path) -> dict[str, dict[int, list[tuple[Any, ...]]]]:
    """The rows of a checkpoint by table and shard, in order."""
    reader = CheckpointReader(directory)
    found: dict[str, dict[int, list[tuple[Any, ...]]]] = {}
    for table in reader.manifest.tables:
        for shard, arrays in reader.rows(table):
            rows = zip(*(array.tolist() for array in arrays.values()), strict=True)
            found.setdefault(table, {}).setdefault(shard, []).extend(map(repr, rows))
    return found


def rows_of(servers: Sequence[EmbeddingServer]) -> list[dict[tuple[str, int], list[str]]]:
    """The rows of each PS by table and shard, in order."""
    found: list[dict[tuple[str, int], list[str]]] = []
    for server in servers:
        of_server: dict[tuple[str, int], list[str]] = {}
        for chunk in server.export_rows():
            rows = zip(*(array.tolist() for array in chunk.arrays.values()), strict=True)
            of_server.setdefault((chunk.table, chunk.shard), []).extend(map(repr, rows))
        found.append(of_server)
    return found


def clocks_of(servers: Sequence[EmbeddingServer]) -> list[list[list[int]]]:
    """The clocks of the shards of each PS."""
    return [
        [piece.values.tolist() for pieces in server.export_state() for piece in pieces if piece.array == "clocks"]
        for server in servers
    ]
