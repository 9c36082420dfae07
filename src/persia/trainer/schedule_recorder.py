"""The schedule of each phase of a run as a file, for `persia.replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import NoneType

from persia.dense import SharedNetwork
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.replay import check_replayable, recorded
from persia.replay.recorder import Recorder
from persia.services import DensePS
from persia.trainer.state import TrainingState

__all__ = ["ScheduleRecorder"]


class ScheduleRecorder:
    """Writes the schedule of each phase to `directory/phase-1.jsonl`, ...; no-op without a directory.

    Args:
        directory: `TrainerOptions.record_dir`.
        state: has the global step and the mode.
        network: its replicas run functions on the first NN worker.
        embeddings: a recorder is attached to them.

    Raises:
        ConfigError: the cluster cannot record, or the run could not be replayed.
    """

    def __init__(
        self, directory: str | None, state: TrainingState, network: DenseStep, embeddings: EmbeddingCollection
    ) -> None:
        self._directory = directory
        self._state = state
        self._network = network
        self._nn_workers = embeddings.connection.nn_workers
        self._number = 0
        self._step = 0
        self._dense: Sequence[DensePS] = []
        self._recorder: Recorder | None = None
        if directory is not None:
            check_replayable(embeddings.schema)
            self._recorder = embeddings.push_log.observer = Recorder(embeddings.connection)

    def begin(self, shared: SharedNetwork | None) -> None:
        """Starts to record a phase. All NN workers call it while all roles are quiescent.

        Args:
            shared: the dense PSs; None in modes with all-reduce.
        """
        recorder = self._recorder
        if recorder is None:
            return
        self._number += 1
        self._step = self._state.global_step
        self._dense = shared.servers if shared is not None else []
        self._network.replicas.run_on_rank0(lambda: recorder.begin(self._state.mode, self._step, self._dense), NoneType)

    def end(self, local_batch: int) -> None:
        """Writes the schedule of the phase that has ended. All NN workers call it; the first one writes."""
        if self._recorder is not None:
            self._network.replicas.gather(b"")  # Others may still push rows of the last step.
            self._network.replicas.run_on_rank0(lambda: self.write(local_batch), NoneType)

    def write(self, local_batch: int) -> None:
        """Writes the schedule of the phase that has ended, unless nothing was trained.

        Args:
            local_batch: rows of a full batch, as far as this NN worker knows: it may have had no batch at all.

        Raises:
            DataError: the records do not fit together.
        """
        if self._recorder is None or self._directory is None:
            return
        records = self._recorder.end(self._dense)
        if not records.reads:
            return
        local_batch = max(local_batch, *(read.rows for read in records.reads))
        schedule = recorded(self._state.mode, self._nn_workers, local_batch, self._step, records)
        path = Path(self._directory) / f"phase-{self._number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule.save(path)
