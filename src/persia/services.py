"""The Protocols through which roles meet, and nothing else.

A role is a plain class that has these methods. A caller holds the object itself or a stub of it and cannot tell.
All methods block, are safe to call from several threads, and raise :class:`persia.errors.PersiaError`. All of them
may be repeated: the same call again has the effect of one. docs/reference/protocol.md tells who calls what when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch, IdColumn
from persia.modes import Mode
from persia.schema import EmbeddingOptimizer, Schedule, Schema, Table
from persia.types import (
    Caller,
    Contribution,
    Delivery,
    DenseState,
    Event,
    Feed,
    Floats,
    Gradients,
    Ids,
    LookedUp,
    Member,
    Membership,
    Pulled,
    PushedDense,
    PushHeader,
    Rest,
    Segment,
    SlotCounts,
    Ticket,
    Token,
    UpdateCounts,
)

__all__ = [
    "Cluster",
    "Connection",
    "ControlPlane",
    "Coordinator",
    "CutInfo",
    "DataLoader",
    "DenseMaker",
    "DensePS",
    "EmbeddingPS",
    "EmbeddingWorker",
    "ProcessCluster",
    "RowChunk",
    "Seekable",
    "Sharded",
    "StatePiece",
    "Tokens",
]

T = TypeVar("T")


class RowChunk(NamedTuple):
    """Whole rows of one shard, for checkpoints.

    Attributes:
        table: name of the table.
        shard: internal slice of the PS that the rows are from.
        arrays: the columns of `persia.store.Rows`: `ids` uint64 `[n]`, `embeddings` float32 `[n, dim]`, `state`
            float32 `[n, width]`, `update_count`, `last_step` and `stamp` uint32 `[n]`.
    """

    table: str
    shard: int
    arrays: dict[str, np.ndarray]


class CutInfo(NamedTuple):
    """What a PS says when it has made a cut.

    Attributes:
        epochs: by table: the number of this cut, for `since` of a later one.
        whole: whether all rows are in it, also where only changes were asked for: what has changed is not known
            after a restart or very many evictions.
    """

    epochs: dict[str, int]
    whole: bool


class StatePiece(NamedTuple):
    """A part of what a shard knows besides its rows, for checkpoints.

    Attributes:
        table: name of the table.
        shard: internal slice of the PS.
        array: which of the arrays of `persia.store.ShardState`: `clocks`, `counters` or `sketch`.
        start: index of its first value in that array.
        values: so many of its values, `[n]`.
    """

    table: str
    shard: int
    array: str
    start: int
    values: NDArray[Any]


class EmbeddingPS(Protocol):
    """Embedding parameter server: owns the rows of a partition of every table."""

    def tables(self) -> Mapping[str, Table]:
        """The tables by name, their optimizers filled in."""

    def lookup(self, ids: Mapping[str, Ids], train: bool) -> dict[str, Floats]:
        """Rows of distinct ids, by table.

        Args:
            ids: by table, uint64 `[n]`, distinct.
            train: whether missing ids may be admitted; otherwise they read as zeros and nothing changes.

        Returns:
            By table, float32 `[n, dim]`.
        """

    def push(self, header: PushHeader, gradients: Mapping[str, Gradients]) -> dict[str, UpdateCounts]:
        """Takes gradients of an NN worker; returns once they are applied, as the mode says, each once.

        In a mode that holds gradients this blocks until those of all NN workers have come. Send a push without
        gradients too, to every PS: it counts.

        Args:
            header: who pushes, and for which step; the learning-rate schedule and `last_step` of the rows follow it.
            gradients: by table.

        Returns:
            By table, what became of the gradients. The counts of a step that was summed over NN workers go to the
            lowest rank, the others get none.

        Raises:
            StoreError: an unknown table, or arrays that do not fit; nothing is held or applied.
            DeadlineError: gradients of the step did not come in time; it names the NN workers. What was sent stays
                held, and the call may be repeated.
            StalePushError: the NN workers have started anew since, or the step is not the one in work.
        """

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table: rows, bytes, hits, misses, admitted, evicted, absent gradients, ..."""

    def slots(self) -> SlotCounts:
        """How stale rows were in asynchronous modes."""

    def export_rows(self) -> Iterator[RowChunk]:
        """All rows, in chunks of bounded size; each row is of one moment."""

    def begin_cut(self, name: str, since: Mapping[str, int], directory: str, live: bool = False) -> CutInfo:
        """Marks this moment, so that `cut_rows` gives the rows as they are now while training goes on.

        Returns at once. A repetition changes nothing; a cut of another name that was not ended is given up.

        Args:
            name: of the cut, unique.
            since: by table, `CutInfo.epochs` of an earlier cut: only what has changed since. Empty for all rows.
            directory: where rows that change before they are read may be kept; a directory that this PS does not
                have is replaced by that for temporary files.
            live: give rows as they are when they are read, each of one moment, and keep none.
        """

    def cut_rows(self, name: str) -> Iterator[RowChunk]:
        """The rows of a cut, in chunks of bounded size, shard by shard; to be read once.

        Raises:
            StoreError: there is no cut of this name (any more), or its disk was full; training is unharmed.
        """

    def cut_removed(self, name: str) -> Iterator[RowChunk]:
        """Ids that were evicted between `since` and the cut, as chunks that have `ids` only; none if it is whole."""

    def end_cut(self, name: str) -> None:
        """Forgets a cut; an unknown one is no error."""

    def import_rows(self, chunk: RowChunk) -> None:
        """Puts rows back; rows of the same ids are replaced.

        Without the column `state`, or with one of another width, rows begin with the optimizer's first state and
        an update count of 0.
        """

    def export_state(self) -> Iterator[list[StatePiece]]:
        """What besides the rows decides the future: clocks, counters, admission sketches. In lists of bounded size."""

    def import_state(self, pieces: Sequence[StatePiece]) -> None:
        """Puts pieces back, after the rows, into a PS at rest: of the same capacity, shards and admission."""

    def switch(self, mode: str, generation: int, step: int) -> None:
        """Another mode from `step` on; nothing may be held.

        Args:
            mode: `persia.modes.encode`.
            generation: of the NN workers.
            step: global step that comes next.

        Raises:
            PersiaError: gradients are held: drain first.
        """

    def drain(self, generation: int, step: int, held: int) -> dict[str, UpdateCounts]:
        """Applies the `held` gradients that have arrived of `step`, in an asynchronous mode.

        Raises:
            PersiaError: this PS has others: it is out of phase.
        """


class EmbeddingWorker(Protocol):
    """Embedding worker (Persia paper, Algorithm 1): buffers ID features, removes duplicates, routes.

    With `compression="fp16"` rows and gradients travel as float16 with a scale per row.
    """

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers the ID features of a batch and returns its batch id. A repetition registers another batch.

        Blocks while the buffer is full.

        Raises:
            DeadlineError: the buffer stayed full.
            MovedError: this embedding worker is leaving; register with another one.
        """

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        """Rows of a registered batch.

        Args:
            batch_id: what `register` returned.
            train: if so, ids may be admitted, and the batch stays registered until its push or release. Otherwise
                nothing changes, and the batch is forgotten.

        Raises:
            StaleBatchError: the batch is unknown here: pushed, released, expired, or of an earlier incarnation.
        """

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the sum of the gradients of these batches to the PSs as one update, and forgets the batches.

        Every PS gets a push, also when it owns no row of it, and also without contributions: it counts. A repetition
        of an NN worker's last push gets the same answer.

        Args:
            header: passed on to the PSs.
            contributions: of batches that were looked up here; none for a push without data.

        Returns:
            By table, what became of the gradients, over all PSs.

        Raises:
            StaleBatchError: a batch is unknown; nothing is sent.
            DeadlineError: a PS, or what it waits for, was late.
        """

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient; an unknown one is no error."""

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Rows for evaluation: read-only, nothing is admitted, touched or buffered."""

    def statistics(self) -> dict[str, int]:
        """Counters: batches buffered, registered, looked up, pushed, released, expired; rows of gradients."""


class DataLoader(Protocol):
    """Data loader: reads its share of the batches, registers their ID features, and has them ready for NN workers.

    It decides nothing: NN workers ask for batches by number, so a restarted or added loader repeats and skips nothing.
    """

    def begin(self, feed: Feed) -> None:
        """Starts reading for a pass, or for another share of it; what is ready and no longer wanted is released.

        Raises:
            DataError: the source cannot be read from the middle, and this would be needed.
        """

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Batch `number` of a pass, for the NN worker `rank`. Blocks until it is ready.

        It acknowledges all lower numbers that this rank has taken here; those are forgotten. A batch that is not
        ready because the loader is new, or has been asked for a higher one, is sought in the source.

        Raises:
            DataError: the batch could not be read, or does not fit the schema.
            DeadlineError: the source, or the embedding workers, were late.
            MovedError: the batch is another loader's; get the membership anew.
        """

    def end(self) -> None:
        """Stops reading; what is ready is released."""

    def statistics(self) -> dict[str, int]:
        """Counters: batches read, ready, taken, registered again; rows and bytes read."""


class Coordinator(Protocol):
    """The control plane: who is there, how far training is, and what everyone reports. No data pass through it."""

    def join(self, role: str, rank: int, address: str) -> Member:
        """A process has started. Returns it with its incarnation; an earlier one of this rank is dead from now on."""

    def depart(self, role: str, rank: int, incarnation: int, reason: str = "") -> None:
        """A process has ended, or is found dead; without a reason it ended as it was asked to."""

    def retire(self, role: str, rank: int) -> None:
        """Asks an embedding worker or a data loader to finish what it has and leave."""

    def regenerate(self, nn_workers: int) -> int:
        """The NN workers start anew, so many of them. Returns the new generation."""

    def membership(self, newer_than: int = 0, timeout: float = 0.0) -> Membership:
        """All members; waits until the version is above `newer_than`, at most `timeout` seconds."""

    def report(self, role: str, rank: int, counters: Mapping[str, float]) -> None:
        """A sign of life with counters; NN workers report `step`, `epoch`, `position`, `ended` among them."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """The last report of every member, by "role-rank", with its `age` in seconds."""


class Tokens(Protocol):
    """The data list and the token list of asynchronous modes (GBA paper, section 4.1), and the order of arrivals.

    docs/reference/protocol.md, section 12.
    """

    def begin(self, segment: Segment) -> None:
        """Begins a segment; the one before is at rest. Calls of later segments wait for this.

        Raises:
            PersiaError: the segment before is not at rest.
            ConfigError: the mode cannot run with so many NN workers.
        """

    def take(self, caller: Caller, request: int) -> int | None:
        """Number of a batch of the pass that this NN worker is to train; None: no more in this segment.

        Args:
            caller: who asks.
            request: number of the request within the segment, from 1.
        """

    def end(self, caller: Caller, number: int) -> None:
        """The pass has no batch of this number, nor any later one."""

    def stop(self) -> None:
        """No more batches are handed out in this segment."""

    def draw(self, caller: Caller, sequence: int, number: int, rows: int, done: int, filled: int) -> Token:
        """Token of a batch, drawn when the NN worker is about to look it up. Waits while the mode's gate is shut.

        Args:
            caller: who asks.
            sequence: number of the push of this batch.
            number: of the batch.
            rows: of the batch.
            done: pushes up to this sequence number have returned.
            filled: how many orphans of this segment it has pushed, in the order in which it was given them.

        Raises:
            ConfigError: the mode cannot run with batches of so many rows.
            DeadlineError: the gate stayed shut; it names the slowest NN workers.
        """

    def arrive(self, caller: Caller, sequence: int, rows: int, version: int) -> Ticket:
        """A gradient is computed: what becomes of it, and its place in the order of all.

        Args:
            caller: who asks.
            sequence: as it was drawn.
            rows: of the batch; 0 if nothing is to be learned of it.
            version: of the dense parameters that it was computed with.
        """

    def orphans(self, caller: Caller, filled: int) -> list[PushHeader]:
        """Slots of dead NN workers that this one is to fill: for an NN worker that waits for a version."""

    def rest(self, caller: Caller, done: int, filled: int) -> Rest:
        """This NN worker is done with the segment; waits until all are.

        Raises:
            DeadlineError: it names those that are not.
        """

    def settled(self, caller: Caller, step: int) -> int:
        """The leader has drained all PSs, which are at `step` now. Others give -1 and wait for it. Returns the step."""

    def announce(self, nn_workers: int, local_batch: int) -> None:
        """A segment of an all-reduce mode begins; what is known of it serves to check requests."""

    def request(self, mode: str) -> None:
        """Asks for another mode (`persia.modes.encode`) from the next boundary on.

        Raises:
            ConfigError: there is no such mode, or it cannot run with these NN workers or batches.
            PersiaError: another switch is under way.
        """

    def requested(self) -> str:
        """The mode that was asked for; empty if none was."""

    def resolve(self) -> str:
        """At rest: what `requested` says, which is then forgotten."""

    def cancel(self, generation: int, rank: int) -> None:
        """An NN worker is dead: its tokens are drawn again, its batches go back to the list."""

    def summary(self) -> str:
        """What has happened so far, as JSON: `persia.coordinator.TokenReport`."""

    def schedule(self) -> list[Event]:
        """Every arrival so far, in order, if they are recorded."""


class ControlPlane(Coordinator, Tokens, Protocol):
    """What the process of the coordinator serves."""


class DensePS(Protocol):
    """Dense parameter server: owns whole tensors of the network, and the user's optimizer for them."""

    def load(self, state: DenseState, generation: int, step: int) -> None:
        """Takes its part of the network over, at `step`."""

    def pull(self, have: int, least: int, timeout: float) -> Pulled:
        """Parameters of the newest version.

        Args:
            have: version that the caller has; -1 for none.
            least: waits until this version is there.
            timeout: seconds to wait.

        Raises:
            DeadlineError: it did not come; it names the slot that is missing.
        """

    def push(self, header: PushHeader, part: PushedDense) -> None:
        """Adds a gradient to the step in work, in the order of slots, and applies the step with its last one.

        Raises:
            StalePushError: of an earlier generation.
            StoreError: the gradient does not fit; nothing is changed.
        """

    def drain(self, generation: int, step: int, held: int) -> None:
        """Applies the `held` gradients that have arrived of `step`.

        Raises:
            PersiaError: this PS has others: it is out of phase.
        """

    def export(self) -> DenseState:
        """All that is owned here, at rest."""

    def statistics(self) -> dict[str, int]:
        """Counters: `version`, `pushes`, `pulls`, `bytes`."""


@runtime_checkable
class Seekable(Protocol):
    """A source of batches that can begin anywhere, so that a resumed run neither repeats nor skips a batch."""

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; the same ones every time."""


@runtime_checkable
class Sharded(Seekable, Protocol):
    """A source that can pass over other loaders' batches without making them."""

    def shard(self, index: int, count: int) -> Seekable:
        """The batches with number % count == index; number `i` there is `i * count + index` here."""


class DenseMaker(NamedTuple):
    """What a dense PS is made of.

    Attributes:
        optimizer: takes parameters, returns a `torch.optim.Optimizer`.
        schedule: of its learning rates, by updates made.
        clip_norm: largest global norm of a step's gradient.
    """

    optimizer: Callable[[Any], Any]
    schedule: Schedule | None = None
    clip_norm: float | None = None


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
        replicas: makes the network's `persia.nn.sync.Replicas`, given the network and seconds to wait; None where
            torch.distributed does.
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


@runtime_checkable
class ProcessCluster(Cluster, Protocol):
    """A cluster whose roles are processes."""

    def run(self, function: Callable[[], T]) -> list[T]:
        """Runs a function on every NN worker, where `connect` returns that worker's connection; results by rank."""

    def feed(self, source: Iterable[Batch] | Seekable, epoch: int, start: int, accumulation_steps: int = 1) -> None:
        """Lets the data loaders read a source, from batch `start` of an epoch on."""

    def scale(self, embedding_workers: int | None = None, data_loaders: int | None = None) -> None:
        """Starts or retires embedding workers and data loaders, while training. Returns when they serve."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """What all roles last reported; see `Coordinator.statistics`."""

    def close(self) -> None:
        """Ends all processes; a second call does nothing."""
