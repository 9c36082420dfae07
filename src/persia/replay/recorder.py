"""Records a phase of a real run: attaches to the roles, and collects their records."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from persia import rpc
from persia.errors import ConfigError
from persia.modes import Dense, Mode
from persia.replay.records import Records
from persia.rpc.fan_out import call_all
from persia.services import Connection, DensePS, Recordable, RecordableRows, RecordableTokens, RecordableWorker
from persia.types import LookedUp, ReadRecord

__all__ = ["Recorder"]


class Recorder:
    """The recording side of an NN worker's connection, and the observer of its embeddings.

    Args:
        connection: connection of the NN worker.

    Raises:
        ConfigError: the cluster has no token scheduler, which is needed to collect records of NN workers.
    """

    def __init__(self, connection: Connection) -> None:
        if connection.tokens is None:
            raise ConfigError(
                "This cluster has no token scheduler, which is needed to collect records. Use another cluster, or "
                "leave record_dir unset.",
                field="record_dir",
            )
        self._connection = connection
        self._tokens = rpc.cast_to(RecordableTokens, connection.tokens)

    def begin(self, mode: Mode, step: int, dense: Sequence[DensePS]) -> None:
        """Starts the records of a phase at all roles, which are quiescent. One NN worker calls it for all.

        Args:
            mode: mode of the phase.
            step: global step at the start of the phase.
            dense: the dense PSs; empty in modes with all-reduce.
        """
        nn_workers = self._connection.nn_workers
        on_arrival = mode.dense() is Dense.ALL_REDUCE and mode.group(nn_workers, 1) == 1
        version = step * nn_workers if on_arrival else step  # Then each push is a separate update.
        self._tokens.begin_recording()
        rows = [functools.partial(server.begin_recording, version) for server in self._servers()]
        call_all(rows + [functools.partial(server.begin_recording, step) for server in _recordable(dense)])

    def end(self, dense: Sequence[DensePS]) -> Records:
        """Ends the records of a phase, and returns them. The roles are quiescent."""
        token_records = self._tokens.end_recording()
        rows = call_all([functools.partial(server.end_recording) for server in self._servers()])
        dense_records = call_all([functools.partial(server.end_recording) for server in _recordable(dense)])
        buckets = self._connection.servers[0].buckets()
        return Records(token_records.reads, token_records.arrivals, rows, dense_records, buckets)

    def lookup(self, batch_id: int) -> LookedUp:
        """Looks up a batch for training; PSs record which version it reads."""
        return rpc.cast_to(RecordableWorker, self._connection.worker).recorded_lookup(batch_id)

    def note(self, read: ReadRecord) -> None:
        """Records the inputs of a gradient."""
        self._tokens.note(read)

    def _servers(self) -> list[RecordableRows]:
        return [rpc.cast_to(RecordableRows, server) for server in self._connection.servers]


def _recordable(servers: Sequence[DensePS]) -> list[Recordable]:
    return [rpc.cast_to(Recordable, server) for server in servers]
