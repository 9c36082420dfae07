"""What a program needs of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from persia.batching.batch import Batch
from persia.errors import RoleDiedError
from persia.modes import Mode
from persia.schema import EmbeddingOptimizer, Schema
from persia.services.control import Tokens
from persia.services.data import DataLoader, Seekable
from persia.services.dense import DenseMaker, DensePS
from persia.services.embedding import EmbeddingPS, EmbeddingWorker
from persia.telemetry.metrics import Readings

__all__ = ["Attempt", "Cluster", "Connection", "ProcessCluster"]


T = TypeVar("T")


class Connection(NamedTuple):
    """What an NN worker holds of a cluster.

    Attributes:
        worker: the embedding workers as one: calls go to the one that the batch id names.
        servers: the embedding PSs, by partition.
        loader: the data loaders as one: `take` goes to the one that reads the number. None when the NN worker reads
            its data itself.
        rank: of this NN worker.
        nn_workers: how many there are.
        generation: of the NN workers.
        tokens: the lists of asynchronous modes.
        dense: finds or starts the dense PSs, given what makes the network's optimizer. None, as `tokens`, where there
            are no asynchronous modes.
        replicas: makes the network's `persia.nn.replicas.Replicas`, given the network and seconds to wait; None where
            torch.distributed does.
        observe: told how to observe this NN worker, for health and metrics of its process; None where nobody asks.
        keep: gives something to the process that began the run, to go on from if an NN worker dies; None where nobody
            would.
        halted: whether training here is to end after its step, as the process that began the run says; None where
            nobody would.
    """

    worker: EmbeddingWorker
    servers: Sequence[EmbeddingPS]
    loader: DataLoader | None = None
    rank: int = 0
    nn_workers: int = 1
    generation: int = 1
    tokens: Tokens | None = None
    dense: Callable[[DenseMaker], Sequence[DensePS]] | None = None
    replicas: Callable[[Any, float], Any] | None = None
    observe: Callable[[Callable[[], Readings]], None] | None = None
    keep: Callable[[Any], None] | None = None
    halted: Callable[[], bool] | None = None


class Cluster(Protocol):
    """A way to run the roles."""

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Starts the roles for this schema, or finds them, and returns what an NN worker needs of them.

        Args:
            schema: the input of the model.
            optimizer: for tables that declare none.
            mode: how gradients are aggregated.
            seed: of row initialisation and admission.
        """


class Attempt(NamedTuple):
    """How a function fared on all NN workers.

    Attributes:
        results: what it returned, by rank; of those that have.
        deaths: of processes without which it could not go on, or whose NN worker is missing in `results`, each with
            `role` and `rank`. None if all have returned.
        kept: what NN workers last gave to `Connection.keep`; None if nothing.
    """

    results: dict[int, Any]
    deaths: list[RoleDiedError]
    kept: Any


@runtime_checkable
class ProcessCluster(Cluster, Protocol):
    """A cluster whose roles are processes."""

    def run(self, function: Callable[[], T]) -> list[T]:
        """Runs a function on every NN worker, where `connect` returns that worker's connection; results by rank."""

    def attempt(self, function: Callable[[], Any], halting: Callable[[], bool]) -> Attempt:
        """Like `run`; but the death of a process that may be started anew is returned, and the next call does that.

        Args:
            function: see `run`.
            halting: asked now and then while it runs; once true, `Connection.halted` is so on all NN workers.
        """

    def restart_servers(self, ranks: Sequence[int]) -> None:
        """Starts embedding PSs without rows, wherever there is room, in place of those that have died for good."""

    def feed(self, source: Iterable[Batch] | Seekable, epoch: int, start: int, accumulation_steps: int = 1) -> None:
        """Lets the data loaders read a source, from batch `start` of an epoch on."""

    def scale(self, embedding_workers: int | None = None, data_loaders: int | None = None) -> None:
        """Starts or retires embedding workers and data loaders, while training. Returns when they serve."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """What all roles last reported; see `Coordinator.statistics`."""

    def close(self) -> None:
        """Ends all processes; a second call does nothing."""
