"""The interface of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from persia.batching.batch import Batch
from persia.errors import RoleDiedError
from persia.modes import Mode
from persia.schema import EmbeddingOptimizer, Schema
from persia.services.control_plane import TokenService
from persia.services.data import DataLoader, Seekable
from persia.services.dense import DenseMaker, DensePS
from persia.services.embedding import EmbeddingPS, EmbeddingWorker
from persia.services.moving import MapRoundsOfRun
from persia.services.nn_workers import NNWorkersChanges
from persia.services.streams import LoaderStream
from persia.telemetry.metrics import Readings
from persia.telemetry.tracing import Tracer
from persia.types import StreamStart

__all__ = ["Attempt", "Cluster", "Connection", "ProcessCluster", "RecoveryPoints"]


T = TypeVar("T")


class Connection(NamedTuple):
    """The handles through which an NN worker uses a cluster.

    Attributes:
        worker: the embedding workers as one; the batch id selects the one that is called.
        servers: the embedding PSs, by partition.
        loader: the data loaders as one; the number of the batch selects the one that is called. None if the NN worker
            reads its data itself.
        rank: rank of this NN worker.
        nn_workers: number of NN workers.
        generation: generation of the NN workers.
        tokens: the token scheduler of asynchronous modes.
        dense: finds or starts the dense PSs, given the maker of the network's optimizer. None, like `tokens`, if there
            are no asynchronous modes.
        replicas: makes the network's `persia.nn.replicas.Replicas`, given the network and a timeout in seconds; None to
            use torch.distributed.
        observe: registers the function that reads the metrics of this NN worker, for the health of its process; None
            if metrics are not collected.
        save_recovery_point: sends a recovery point to the driver, from which training continues if an NN worker dies;
            None without recovery.
        halted: whether the driver requests that training end after the current step; None if it never does.
        gpus: number of GPUs that are reserved for each NN worker, which must then train on them.
        tracer: records the spans of this process; None if the cluster does not trace it.
        stream: lets the data loaders read the data of `fit` if it is a stream, and returns the stream; returns None
            for other data. All NN workers call it. None without data loaders that read streams.
        near: whether the rows of all tables are in memory of this process, so that lookups and pushes do not wait.
        pools: whether embedding workers may pool features, where that sends fewer bytes.
        rounds: makes the rounds in which rows move to other PSs and the mode changes; None if no rows can move.
        changes: requested changes of the number of NN workers; None if it does not change.
        survives: whether this NN worker returns its state if training fails because another one has died.
    """

    worker: EmbeddingWorker
    servers: Sequence[EmbeddingPS]
    loader: DataLoader | None = None
    rank: int = 0
    nn_workers: int = 1
    generation: int = 1
    tokens: TokenService | None = None
    dense: Callable[[DenseMaker], Sequence[DensePS]] | None = None
    replicas: Callable[[Any, float], Any] | None = None
    observe: Callable[[Callable[[], Readings]], None] | None = None
    save_recovery_point: Callable[[Any], None] | None = None
    halted: Callable[[], bool] | None = None
    gpus: float = 0.0
    tracer: Tracer | None = None
    stream: Callable[[object], LoaderStream | None] | None = None
    near: bool = False
    pools: bool = False
    rounds: MapRoundsOfRun | None = None
    changes: NNWorkersChanges | None = None
    survives: bool = False


class Cluster(Protocol):
    """A way to run the roles."""

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Starts the roles for this schema, or finds them, and returns the connection of an NN worker.

        Args:
            schema: the input of the model.
            optimizer: optimizer of tables that declare none.
            mode: aggregation of gradients.
            seed: seed of row initialization and admission.
        """


class Attempt(NamedTuple):
    """Result of a function on all NN workers.

    Attributes:
        results: return values, by rank, of the NN workers that have returned.
        deaths: deaths of processes that the function needs, or of NN workers that are missing in `results`, each with
            `role` and `rank`. Empty if all have returned.
        recovery_point: the last recovery point from `Connection.save_recovery_point`; None without one.
    """

    results: dict[int, Any]
    deaths: list[RoleDiedError]
    recovery_point: Any


class RecoveryPoints(Protocol):
    """Recovery points on storage: if this driver dies, the same program goes on from the last one. For one thread."""

    @property
    def left(self) -> memoryview | None:
        """The last one of a driver that has died, to whose rows this cluster is attached; None if there is none."""

    @property
    def place(self) -> str:
        """Where they are, for messages."""

    def claim(self, owner: object) -> None:
        """Lets one object alone keep recovery points.

        Raises:
            ConfigError: another object does.
        """

    def take(self) -> None:
        """Takes over the run: from now on, closing the cluster removes what the dead driver has left.

        Until then a program that fails, for example because it has another schema, leaves the run as it was.
        """

    def keep(self, point: Sequence[bytes | memoryview]) -> None:
        """Stores one in place of the last, and takes over the run. Blocks until it is on storage.

        Args:
            point: the state of the run, as a list of buffers.

        Raises:
            PersiaError: it cannot be written; the last one is intact.
        """


@runtime_checkable
class ProcessCluster(Cluster, Protocol):
    """A cluster whose roles are processes."""

    @property
    def gpus(self) -> float:
        """Number of GPUs that are reserved for each NN worker."""

    @property
    def share(self) -> Fraction:
        """Factor of `TrainerOptions.accumulation_steps`, by which the global batch has stayed when `scale` was told so.

        In a function, it is the factor of this run.
        """

    def run(self, function: Callable[[], T]) -> list[T]:
        """Runs a function on every NN worker, where `connect` returns its connection; returns the results by rank."""

    @property
    def recovery_points(self) -> RecoveryPoints | None:
        """Recovery points that outlive this process, once it is connected; None if the cluster keeps none."""

    def attempt(
        self,
        function: Callable[[], Any],
        halting: Callable[[], bool],
        keep: Callable[[Any], object] | None = None,
    ) -> Attempt:
        """Like `run`, but returns the death of a process that can be restarted; the next call restarts it.

        Args:
            function: see `run`.
            halting: polled while it runs; once true, `Connection.halted` is true on all NN workers.
            keep: called with each recovery point, while NN workers wait; if it fails, so does the function.
        """

    def fitting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for the attempts of one call of `fit`.

        In it, NN workers join or leave only where NN worker 0 accepts it. Between two attempts it cannot check
        whether the mode permits another number. Nor do rows move then, so that rows of a checkpoint can be loaded.
        """

    def keeping_rows(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no rows move to other PSs, between two runs: all can be saved, or others loaded.

        Entering it waits for a move that is being finished. Connections of this process then have the PSs of the map.
        """

    def owning_servers(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks of those PSs that own rows. A PS that joins or leaves may own none."""

    def restart_servers(self, ranks: Sequence[int]) -> None:
        """Replaces embedding PSs that have died permanently with empty ones, on any node with free resources.

        Those that have left are not replaced. Connections of this process continue with the PSs of the bucket map.
        """

    def feed(
        self,
        source: Iterable[Batch] | Seekable,
        epoch: int,
        start: int,
        accumulation_steps: int = 1,
        record: StreamStart | None = None,
    ) -> None:
        """Lets the data loaders read a source, from batch `start` of an epoch on.

        Args:
            source: the source.
            epoch: number of the pass.
            start: number of its first batch.
            accumulation_steps: batches per update.
            record: start of a stream; None for the start that the stream defines.
        """

    def scale(
        self,
        embedding_workers: int | None = None,
        data_loaders: int | None = None,
        ps: int | None = None,
        nn_workers: int | None = None,
        *,
        keep_global_batch: bool = False,
    ) -> None:
        """Starts or retires embedding workers, data loaders, PSs and NN workers during training.

        Returns once new processes serve, or train.
        """

    def statistics(self) -> dict[str, dict[str, float]]:
        """Returns the last report of each role; see `Coordinator.statistics`."""

    def close(self) -> None:
        """Ends all processes. Idempotent."""
