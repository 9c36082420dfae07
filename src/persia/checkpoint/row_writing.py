"""Has each PS write its part of a checkpoint straight to the storage, all of them concurrently."""

from __future__ import annotations

import functools
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import NamedTuple

from persia.checkpoint.format import MOST_SHARDS, checksum_text, step_name
from persia.checkpoint.packing import pack
from persia.checkpoint.row_files import RowFiles, base_of, segment, write_file
from persia.checkpoint.servers import by_problem
from persia.checkpoint.storage import Storage, ahead
from persia.checkpoint.throttle import Throttle
from persia.checkpoint.writer import MARK_BYTES, CheckpointWriter
from persia.checks import without_userinfo
from persia.errors import CheckpointError, PersiaError
from persia.rpc.fan_out import call_all
from persia.services import EmbeddingPS, RowChunk, StatePiece
from persia.telemetry.logs import get_logger
from persia.types import PlaceCheck, RowsToWrite, WrittenPart, WrittenState

__all__ = ["SnapshotSource", "check_place", "write_rows", "write_snapshot", "write_state", "write_states"]

_log = get_logger("persia.checkpoint")


class SnapshotSource(NamedTuple):
    """Where the rows of a store snapshot come from.

    Attributes:
        rows: yields the rows.
        removed: yields the ids that were evicted since the snapshot that it adds to.
        hurry: once set, there are no more pauses.
        writing: a context in which a file is written.
    """

    rows: Callable[[], Iterator[RowChunk]]
    removed: Callable[[], Iterator[RowChunk]]
    hurry: threading.Event
    writing: Callable[[], AbstractContextManager[object]] = nullcontext


def check_place(url: str, path: str, checksum: str) -> PlaceCheck:
    """Checks whether this process sees a file, and can write there. See `EmbeddingPS.check_place`."""
    problem = ""
    try:
        storage = Storage(url)
        size = storage.size(path)
        if size is None:
            problem = f"{storage.full(path)} does not exist there."
        elif size > MARK_BYTES or checksum_text(storage.load(path, size)[1]) != checksum:
            problem = f"{storage.full(path)} is another file there."
        else:
            own = f"{path}-{secrets.token_hex(4)}"  # What is left of it goes with the directory of the step.
            storage.put(own, b"Temporary file: an embedding PS checks that it can write here.\n", durable=False)
            storage.remove(own)
    except PersiaError as error:
        problem = error.message
    return PlaceCheck(socket.gethostname(), problem)


def write_snapshot(order: RowsToWrite, source: SnapshotSource) -> Iterator[WrittenPart]:
    """Writes the rows of a snapshot; all files are synced when it ends. See `EmbeddingPS.write_snapshot`.

    Each item may be asked for by another thread. Nothing is written between two items.

    Yields:
        Each file, once it is written.

    Raises:
        CheckpointError: a file cannot be written.
    """
    storage, step, base = Storage(order.url), step_name(order.step), base_of(order.rewrite)
    files = RowFiles(lambda path, views: write_file(storage, step, base + path, views), order.claim)
    throttle = Throttle(order.share, source.hurry)
    if order.share < 1:
        storage.between = throttle
    first = order.server * MOST_SHARDS
    rows = source.rows()
    with closing(ahead(rows)) if order.share >= 1 else nullcontext(rows) as chunks:
        for chunk in chunks:
            with source.writing():
                part = files.rows(chunk.table, first + chunk.shard, chunk.arrays)
            yield part
            throttle.resume()
    for chunk in source.removed():
        with source.writing():
            part = files.removed(chunk.table, first + chunk.shard, chunk.arrays["ids"])
        yield part
        throttle.resume()
    storage.sync()


def write_state(order: RowsToWrite, state: Iterator[list[StatePiece]]) -> Iterator[WrittenState]:
    """Writes the state of a PS besides rows; all files are synced when it ends. See `EmbeddingPS.write_state`.

    Yields:
        Each file, once it is written.

    Raises:
        CheckpointError: a file cannot be written.
    """
    storage, step, base = Storage(order.url), step_name(order.step), base_of(order.rewrite)
    for part, pieces in enumerate(state):
        name = f"server-{order.server}.{part}"
        path = f"{base}state/{segment(name)}.{order.claim}.safetensors"
        file = write_file(storage, step, path, pack([piece._asdict() for piece in pieces], name))
        yield WrittenState(name, *file)
    storage.sync()


def write_states(writer: CheckpointWriter, servers: Sequence[EmbeddingPS]) -> None:
    """Has each PS write its state besides rows, as `write_rows` has them write rows; blocks.

    Raises:
        CheckpointError: a PS cannot write its state.
    """
    url, checks = _checked(writer, servers)

    def write(number: int) -> list[WrittenState]:
        server, order = servers[number], writer.order(number, 1.0)
        try:
            if checks[number].problem:
                return list(write_state(order, server.export_state()))
            return list(server.write_state(order))
        except CheckpointError as error:
            raise _named(error, number, checks[number].host, url) from error

    written = call_all([functools.partial(write, number) for number in range(len(servers))])
    for number, states in enumerate(written):
        for state in states:
            writer.add_server_state(number, state)


def write_rows(
    writer: CheckpointWriter,
    servers: Sequence[EmbeddingPS],
    name: str,
    *,
    share: float = 1.0,
    hurry: threading.Event | None = None,
) -> None:
    """Has each PS write the rows of a snapshot; blocks until all files are written.

    PSs that do not see the place of the checkpoint, or cannot write there, send their rows here, one PS after the
    other, and a warning says so.

    Args:
        writer: of the checkpoint.
        servers: all PSs.
        name: name of the snapshot.
        share: maximum share of the processors of each host; 1 for no limit.
        hurry: once set, rows that are sent here are written without pauses. `EmbeddingPS.hurry_snapshot` does the same
            for PSs.

    Raises:
        CheckpointError: a PS cannot write its rows. Once the snapshots have ended, no PS writes any more.
    """
    url, checks = _checked(writer, servers)
    neighbours = Counter(check.host for check in checks)
    stop = threading.Event()
    written: list[list[WrittenPart]] = [[] for _ in servers]

    def write(number: int, parts: Iterator[WrittenPart]) -> None:
        try:
            for part in parts:
                written[number].append(part)
                if stop.is_set():
                    return
        except BaseException as error:
            stop.set()
            if isinstance(error, CheckpointError):
                raise _named(error, number, checks[number].host, url) from error
            raise
        finally:
            if (close := getattr(parts, "close", None)) is not None:
                close()

    def write_here(numbers: Sequence[int]) -> None:
        for number in numbers:
            server = servers[number]
            source = SnapshotSource(
                functools.partial(server.snapshot_rows, name),
                functools.partial(server.snapshot_removed, name),
                hurry or threading.Event(),
            )
            if not stop.is_set():
                write(number, write_snapshot(writer.order(number, share), source))

    def write_there(number: int) -> None:
        order = writer.order(number, share if share >= 1 else share / neighbours[checks[number].host])
        write(number, servers[number].write_snapshot(name, order))

    here = [number for number, check in enumerate(checks) if check.problem]
    work = [functools.partial(write_there, number) for number, check in enumerate(checks) if not check.problem]
    call_all([*work, functools.partial(write_here, here)] if here else work)
    for parts in written:
        for part in parts:
            writer.add_part(part)


def _checked(writer: CheckpointWriter, servers: Sequence[EmbeddingPS]) -> tuple[str, list[PlaceCheck]]:
    """Returns the place of a checkpoint, and for each PS whether it can write there; warns of those that cannot."""
    with writer.mark() as (path, checksum):
        url = writer.order(0, 1.0).url
        checks = call_all([functools.partial(server.check_place, url, path, checksum) for server in servers])
    problems = {number: f"on host {host}: {problem}" for number, (host, problem) in enumerate(checks) if problem}
    if problems:
        _log.warning(
            "%d of %d embedding PSs cannot write to %s, so their rows go through the NN worker that writes the "
            "checkpoint, which is slower. Give all hosts the same storage there, and the same credentials. %s",
            len(problems), len(checks), without_userinfo(url), by_problem(problems),
        )  # fmt: skip
    return url, checks


def _named(error: CheckpointError, number: int, host: str, url: str) -> CheckpointError:
    return CheckpointError(
        f"Embedding PS {number} on host {host} cannot write its part to {without_userinfo(url)}: {error.message}",
        **{**error.fields, "server": number, "host": host},
    )
