"""The schedule of each segment of a run as a file, for `persia.replay`."""

from __future__ import annotations

from pathlib import Path
from types import NoneType

from persia.dense import SharedNetwork
from persia.errors import ConfigError
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.replay import Records, recorded
from persia.trainer.state import TrainingState

__all__ = ["ScheduleRecorder"]


class ScheduleRecorder:
    """Writes the schedule of each phase to `directory/segment-1.jsonl`, ...; does nothing without a directory.

    Args:
        directory: `TrainerOptions.record_dir`.
        state: has the global step and the mode.
        network: its replicas run functions on the first NN worker.
        embeddings: tells what each gradient was computed from.

    Raises:
        ConfigError: the cluster cannot record.
    """

    def __init__(
        self, directory: str | None, state: TrainingState, network: DenseStep, embeddings: EmbeddingCollection
    ) -> None:
        self._directory = directory
        self._state = state
        self._network = network
        self._connection = embeddings.connection
        self._number = 0
        self._step = 0
        self._shared: SharedNetwork | None = None
        if self._directory is None:
            return
        tokens = self._connection.tokens
        if tokens is None:
            raise ConfigError("This cluster has no list of tokens, which keeps what is recorded.", field="record_dir")
        embeddings.note = tokens.note

    def begin(self, shared: SharedNetwork | None) -> None:
        """At rest, before a segment: all keep records from now on. All NN workers call it.

        Args:
            shared: the dense PSs; None in modes with all-reduce.
        """
        self._number += 1
        self._step = self._state.global_step
        self._shared = shared
        if self._directory is not None:
            self._network.replicas.run_on_rank0(self._begin, NoneType)

    def _begin(self) -> None:
        connection = self._connection
        assert connection.tokens is not None
        connection.tokens.record()
        for server in connection.servers:
            server.record()
        if self._shared is not None:
            self._shared.record()

    def end(self, local_batch: int) -> None:
        """At rest, after a segment. All NN workers call it; the first one writes."""
        if self._directory is not None:
            self._network.replicas.gather(b"")  # Others may still push rows of the last step.
            self._network.replicas.run_on_rank0(lambda: self.write(local_batch), NoneType)

    def write(self, local_batch: int) -> None:
        """Writes the schedule of the segment that has ended, unless nothing was trained.

        Args:
            local_batch: rows of a full batch, as far as this NN worker knows: it may have had no batch at all.

        Raises:
            DataError: the records do not fit together.
        """
        if self._directory is None:
            return
        connection = self._connection
        assert connection.tokens is not None
        records = Records(
            connection.tokens.reads(),
            connection.tokens.schedule(),
            [server.journal() for server in connection.servers],
            self._shared.journals() if self._shared is not None else [],
        )
        if not records.reads:
            return
        local_batch = max(local_batch, *(read.rows for read in records.reads))
        found = recorded(self._state.mode, connection.nn_workers, local_batch, self._step, records)
        path = Path(self._directory) / f"segment-{self._number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
