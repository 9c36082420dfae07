"""`EmbeddingCollection`: unbounded embedding tables as a PyTorch module."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from numpy.typing import ArrayLike

from persia.batching.batch import Batch
from persia.errors import ConfigError, PersiaError, StaleBatchError
from persia.membership.data_loaders import fed_batches
from persia.modes import Dense, Hybrid, Mode
from persia.nn.batch_counts import batch_counts
from persia.nn.evaluation import EvaluationReader
from persia.nn.gate import Staleness, StalenessGate
from persia.nn.options import CollectionOptions
from persia.nn.pending import Pending, Registered
from persia.nn.pipeline import READ_AHEAD, Pipeline, Stages
from persia.nn.pooling import Embeddings, Expander
from persia.nn.prepared import PreparedBatch, dummy_batch
from persia.nn.push_counts import PushCounter, PushCounts
from persia.nn.replicas import EqualSteps
from persia.nn.row_access import RowAccess
from persia.nn.step_timings import StepTimings
from persia.nn.token_client import DrawnToken, NumberedBatch, TokenClient
from persia.nn.transfer import Transfer, staging_for
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Cluster, ReadObserver
from persia.telemetry.metrics import Histogram
from persia.types import Contribution, FedBatch, PushHeader, RowsSet, RowState, StoredRows

__all__ = ["EmbeddingCollection"]


READ_AHEAD_ON_DEMAND = 0
"""With batches on demand: batches that a slow NN worker has read ahead are lost to the others."""


class EmbeddingCollection(torch.nn.Module):
    """All embedding tables of a schema: lookups by prefetching, gradients pushed by `loss.backward()`.

    A drop-in for `nn.EmbeddingBag` / TorchRec's `EmbeddingBagCollection` without a vocabulary. The module has no
    parameters: rows live in embedding parameter servers, which update them with their own optimizer.

    In training mode (`.train()`, the default) `prefetch` yields batches whose backward pass pushes gradients; in
    evaluation mode (`.eval()`) it only reads: no row is admitted or touched, and no gate applies.

    Use it from one thread, like any module. It owns its background threads; leaving the loop ends them.

    Args:
        schema: features and tables.
        optimizer: for tables that declare none.
        mode: how far lookups may run ahead of updates. It is the only place where staleness is set.
        cluster: where the roles run; None for this process.
        grad_scaler: the `torch.amp.GradScaler` of fp16 training; gradients are unscaled before they are pushed.
        options: further settings.

    Raises:
        ConfigError: an argument is not valid; the message names it.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        optimizer: EmbeddingOptimizer,
        mode: Mode | None = None,
        cluster: Cluster | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        options: CollectionOptions | None = None,
    ) -> None:
        super().__init__()
        if cluster is None:
            from persia.cluster.embedded import Embedded

            cluster = Embedded()
        self.options = options or CollectionOptions()
        self.schema = schema
        self.mode = mode or Hybrid()
        self.grad_scaler = grad_scaler
        self.global_step = 0
        self._staging = staging_for(self.options.device)
        self._expander = Expander(schema, self._staging.device)
        self._transfer = Transfer(self._staging, self._expander.on_host)
        self.connection = cluster.connect(schema, optimizer, self.mode, self.options.seed)
        self._worker = self.connection.worker
        self._rows = RowAccess(schema, self.connection.servers)
        looks = self._rows if self.connection.rank == 0 else None  # One of several NN workers is enough.
        self._reading = EvaluationReader(schema, self._worker, self._transfer, self.options.timeout, looks)
        self.gate = StalenessGate(self.mode, self.options.accumulation_steps)
        self._pipeline: Pipeline | None = None
        self._draws: TokenClient | None = None
        self._group: list[Pending] = []
        self._group_batches = 0
        self._registered: set[int] = set()
        self._inline: PreparedBatch | None = None
        self._push_failure: BaseException | None = None
        self.tally = PushCounter()
        self.waits = Histogram()
        """Time that the network has waited for batches."""
        self._compressed = False
        self.pushes = 0
        self.laps: StepTimings | None = None
        """Receives the compute time of each batch."""
        self.observer: ReadObserver | None = None
        """Looks up batches and receives the inputs of gradients while a schedule is recorded; one batch per push."""
        self._pid = os.getpid()

    def change_mode(self, mode: Mode) -> None:
        """Adopts another mode from the next pass of `prefetch` on. Switch the PSs separately."""
        self.mode = mode
        self.gate.mode, self.gate.depth = mode, mode.initial_depth()

    # --- the loop ---------------------------------------------------------------------------------------------

    def fed(self, epoch: int = 0, start: int = 0) -> Iterator[FedBatch]:
        """Yields the batches that data loaders have for this NN worker, for `prefetch`.

        Args:
            epoch: number of the pass, as given to the data loaders.
            start: batch number at which all NN workers began in it, as given to the data loaders.

        Raises:
            ConfigError: the cluster has no data loaders.
        """
        connection = self.connection
        if connection.loader is None:
            raise ConfigError("This cluster has no data loaders; give batches to `prefetch`.", field="cluster")
        return fed_batches(connection.loader, epoch, start, connection.rank, connection.nn_workers)

    def prefetch(
        self,
        loader: Iterable[Batch | FedBatch | NumberedBatch],
        equal_steps: EqualSteps | None = None,
        draws: TokenClient | None = None,
    ) -> Iterator[PreparedBatch]:
        """Iterates over a loader with rows looked up ahead, in background threads.

        Args:
            loader: any iterable of `persia.Batch`, a torch `DataLoader` with `batch_size=None` included; or `fed()`.
            equal_steps: the `persia.dense.AllReduce` of a network that several NN workers train. The iterator then
                yields the same number of batches on each of them, with dummy batches (`batch.dummy`) in place of
                missing ones. Without it, batches that were lost with an embedding worker are skipped, and an NN
                worker that has a batch when others have none raises UnequalStepsError where it is used.
            draws: the token client of an asynchronous mode; `loader` yields numbered batches then.

        Yields:
            Batches on the device. Use each before drawing the next; a batch without a backward pass by then is released
            and counted.

        Raises:
            DataError: a batch does not fit the schema.
            DeadlineError: a stage was late; the error names it.
            ConfigError: the mode is asynchronous, and there are no `draws`.
            PersiaError: another training pass over this collection is under way.
        """
        source = iter(loader)  # Here, so that DataLoader workers are forked by the caller's thread.
        if not self.training:
            self._check_process()
            return self._reading.batches(source)
        if (draws is None) != (self.mode.dense() is Dense.ALL_REDUCE):
            raise ConfigError(
                f"The mode {type(self.mode).__name__} keeps the network on dense PSs, so a `Trainer` has to run it.",
                field="mode",
            )
        return self._train(source, equal_steps, draws)

    def forward(self, batch: PreparedBatch | Batch) -> Embeddings:
        """Returns embeddings by feature: `[batch, dim]`, or a SequenceEmbedding if the feature is not pooled.

        Args:
            batch: from `prefetch`. A plain `persia.Batch` is looked up on the spot, which blocks.

        Raises:
            StaleBatchError: the batch was released or its gradient is pushed, and gradients are enabled.
        """
        if isinstance(batch, Batch):
            batch = self._prepare_now(batch)
        elif batch.batch_id is not None and not batch.trains and torch.is_grad_enabled() and self.training:
            raise StaleBatchError(
                "This batch is used up: its gradient was pushed, or a later batch was drawn. Use each batch before "
                "drawing the next.",
                batch_id=batch.batch_id,
            )
        if batch.trains and self._pipeline is not None and torch.is_grad_enabled():
            self._pipeline.check_others()
        return self._expander(batch.rows, batch.inverse, batch.offsets)

    def flush(self) -> None:
        """Applies an incomplete group of `accumulation_steps` batches that were called without `prefetch`. Blocks.

        A `prefetch` loop does this itself, when it begins and when it ends.
        """
        self._raise_push_failure()
        if self._inline is not None:
            self._release_if_unused(self._inline)
            self._inline = None
        self._flush_group()

    # --- measurements ----------------------------------------------------------------------------------------

    @property
    def staleness(self) -> Staleness:
        """Measured staleness of the lookups so far, in steps of this NN worker."""
        return self.gate.measured

    @property
    def ready(self) -> int:
        """Number of batches that are looked up and wait for the network."""
        pipeline = self._pipeline
        return pipeline.ready if pipeline is not None else 0

    @property
    def pushed(self) -> PushCounts:
        """Outcome of the gradients so far."""
        return self.tally.result(self._worker.statistics().get("lost_gradients", 0))

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns counters of the tables, summed over the PSs."""
        return self._rows.statistics()

    # --- rows by id -------------------------------------------------------------------------------------------

    def rows(self, table: str, ids: ArrayLike, *, state: bool = False) -> StoredRows:
        """Reads rows by id; nothing is admitted, touched or counted. Blocks. See `nn.row_access.RowAccess.read`."""
        return self._rows.read(table, ids, state)

    def set_rows(self, table: str, ids: ArrayLike, values: ArrayLike, *, state: RowState | None = None) -> RowsSet:
        """Inserts or overwrites rows by id; refused in a training pass. Blocks. See `nn.row_access.RowAccess.set`."""
        if self._pipeline is not None:
            raise PersiaError("Rows cannot be set during a training pass. Leave the `prefetch` loop first.")
        self.flush()
        return self._rows.set(table, ids, values, state)

    # --- training ---------------------------------------------------------------------------------------------

    def _train(
        self,
        source: Iterator[Batch | FedBatch | NumberedBatch],
        equal_steps: EqualSteps | None,
        draws: TokenClient | None,
    ) -> Iterator[PreparedBatch]:
        self._check_process()
        if self._pipeline is not None:
            raise PersiaError(
                "A training pass over this EmbeddingCollection is under way. Finish or close its prefetch iterator "
                "first (`del` it, or leave its loop)."
            )
        self.flush()
        self.gate.open()
        lookup = functools.partial(self._lookup, dummy_rows=equal_steps.dummy_rows if equal_steps else 1)
        stages = Stages(self._register, self.gate.pass_lookup, lookup, self.gate.drawn, self.gate.close)
        ahead = READ_AHEAD
        if draws is not None:
            stages = Stages(self._register, draws.pass_lookup, lookup, lambda _: None, draws.close)
            ahead = READ_AHEAD_ON_DEMAND
        self._draws = draws
        counts = batch_counts(self.connection, self.options.timeout) if equal_steps is None and draws is None else None
        pipeline = self._pipeline = Pipeline(source, stages, self.options.timeout, read_ahead=ahead, counts=counts)
        batch: PreparedBatch | None = None
        complete = False
        try:
            while True:
                batch = self._next(pipeline, equal_steps)
                if batch is None:
                    break
                if equal_steps is not None or not batch.dummy:
                    yield batch
                self._release_if_unused(batch)
                batch = None
            complete = True
        finally:
            # Also when the loop is left early: batches with a gradient are applied, others are forgotten. An abandoned
            # batch is no step; a dummy batch is the others' step.
            if batch is not None and batch.dummy and draws is None:
                self._batch_ended()
            elif batch is not None and batch.close():
                self.tally.released()
            if draws is not None:
                self._group, self._group_batches = [], 0
            elif complete or not self._held:
                self._flush_group()
            else:  # The others would have to push a step with it, which is not known here.
                self._group, self._group_batches = [], 0
            self._pipeline = None
            try:
                pipeline.close()
                if draws is not None and pipeline.push_failure is None:
                    draws.abandon()
            finally:
                self._draws = None
                for batch_id in self._registered:
                    self._worker.release(batch_id)
                self._registered.clear()
                self._push_failure = pipeline.push_failure
        self._raise_push_failure()

    @property
    def _held(self) -> bool:
        """Whether PSs hold a step until all NN workers have pushed, including those without gradients."""
        return self.mode.group(self.connection.nn_workers, 1) > 1

    def _next(self, pipeline: Pipeline, equal_steps: EqualSteps | None) -> PreparedBatch | None:
        """Returns the next batch; after the last one dummy batches while other NN workers have data, then None."""
        if self._draws is not None:
            self._draws.want()
        try:
            with self.waits.timed():
                batch = pipeline.draw()
        except StopIteration:
            if equal_steps is None:
                return None
            equal_steps.start(0, has_data=False)
            if equal_steps.over():
                return None
            return dummy_batch(self.schema, equal_steps.dummy_rows, self._staging.device)
        if equal_steps is not None:
            equal_steps.start(batch.weight, has_data=True)
        batch.began = time.monotonic()
        return batch

    def _register(self, item: Batch | FedBatch | NumberedBatch) -> Registered:
        number, batch = item if isinstance(item, NumberedBatch) else (-1, item)
        if isinstance(batch, FedBatch):
            batch_id = batch.batch_id
        else:
            batch.validate(self.schema)
            batch_id = self._worker.register(batch.id_features)
        self._registered.add(batch_id)
        return Registered(batch, batch_id, number)

    def _lookup(self, registered: Registered, dummy_rows: int = 1) -> tuple[PreparedBatch, Callable[[], None]]:
        if self._draws is None:
            return self._found(registered, dummy_rows)
        # Dense parameters first: rows are pushed before them, so the rows are at least as new.
        drawn = self._draws.draw(registered.number, len(registered.batch.labels))
        prepared, ready = self._found(registered, dummy_rows)
        prepared.drawn = drawn

        def adopt() -> None:
            drawn.adopt()
            ready()

        return prepared, adopt

    def _found(self, registered: Registered, dummy_rows: int) -> tuple[PreparedBatch, Callable[[], None]]:
        batch, batch_id, number = registered
        try:
            found = (self._worker if self.observer is None else self.observer).lookup(batch_id)
        except StaleBatchError:
            self._registered.discard(batch_id)
            self.tally.lost(len(batch.labels))
            return dummy_batch(self.schema, dummy_rows, self._staging.device), lambda: None
        self._compressed = found.scales is not None
        prepared, ready = self._transfer.rows(batch, found, batch_id)
        prepared.number = number
        prepared.await_gradient(self._end_of_backward)
        return prepared, ready

    def _end_of_backward(self, batch: PreparedBatch) -> None:
        assert batch.batch_id is not None
        scale = self.grad_scaler.get_scale() if self.grad_scaler is not None else 1.0
        with torch.no_grad():
            gradients = self._transfer.gradients(batch.contribution(scale), self._compressed)
        pending = Pending(batch.batch_id, len(batch), gradients, batch)
        if self.laps is not None and self._staging.device.type != "cuda":
            self.laps.add(batch.began)
        if self._draws is not None:
            assert batch.drawn is not None
            self._push_drawn(batch.drawn, [pending], self._draws.shared.gradients())
            return
        self._group.append(pending)
        self._batch_ended()

    def _release_if_unused(self, batch: PreparedBatch) -> None:
        if self._draws is not None:
            if batch.close():
                assert batch.batch_id is not None
                self._worker.release(batch.batch_id)
                self._registered.discard(batch.batch_id)
                self.tally.released()
            elif not batch.dummy:
                return  # Its gradient is being pushed.
            assert batch.drawn is not None
            self._push_drawn(batch.drawn, [], None)
        elif batch.dummy:
            self._batch_ended()
        elif batch.close():
            assert batch.batch_id is not None
            self._worker.release(batch.batch_id)
            self._registered.discard(batch.batch_id)
            self.tally.released()
            self._batch_ended()

    def _batch_ended(self) -> None:
        self._group_batches += 1
        if self._group_batches >= self.options.accumulation_steps:
            self._flush_group()

    def _flush_group(self) -> None:
        """Pushes the gradients of the batches since the last push."""
        group, batches = self._group, self._group_batches
        self._group, self._group_batches = [], 0
        if not batches:
            return
        step = self.global_step
        self.global_step += 1
        if self._pipeline is None:
            self._push(group, batches, step)
        else:
            self._pipeline.push(lambda: self._push(group, batches, step))

    def _push(self, group: list[Pending], batches: int, step: int) -> None:
        contributions = self._contributions(group)
        connection = self.connection
        if contributions or self._held:
            self.pushes += 1
            header = PushHeader(
                connection.generation, connection.rank, self.pushes, step, sum(pending.rows for pending in group)
            )
            self._note_read(group, self.pushes, [step])
            self.tally.pushed(self._worker.push(header, contributions))
            self._registered.difference_update(c.batch_id for c in contributions)
        self.gate.done(batches)

    def _contributions(self, group: list[Pending]) -> list[Contribution]:
        found = []
        for pending in group:
            found.append(Contribution(pending.batch_id, *pending.gradients()))
            if self.laps is not None and self._staging.device.type == "cuda":  # Only now the device has computed it.
                self.laps.add(pending.batch.began)
        return found

    def _note_read(self, group: list[Pending], sequence: int, dense: list[int]) -> None:
        if self.observer is not None:
            for pending in group:
                self.observer.note(pending.read(self.connection.rank, sequence, dense))

    def _push_drawn(
        self, drawn: DrawnToken, group: list[Pending], dense: Callable[[PushHeader, float], None] | None
    ) -> None:
        """Hands a gradient of an asynchronous mode to the push thread."""
        draws = self._draws
        assert draws is not None
        assert self._pipeline is not None
        version, versions = draws.shared.version, draws.shared.versions

        def push() -> None:
            contributions = self._contributions(group)
            self._note_read(group, drawn.sequence, versions)
            rows = sum(pending.rows for pending in group)
            ticket, counts = draws.push(drawn.sequence, rows, version, contributions, dense)
            self.tally.pushed(counts)
            self._registered.difference_update(c.batch_id for c in contributions)
            self.global_step = max(self.global_step, ticket.header.step)

        self._pipeline.push(push)

    # --- without a pipeline -----------------------------------------------------------------------------------

    def _prepare_now(self, batch: Batch) -> PreparedBatch:
        self._check_process()
        if self.training and torch.is_grad_enabled():
            if self.mode.dense() is Dense.SERVER:
                raise ConfigError(f"The mode {type(self.mode).__name__} needs a `Trainer`.", field="mode")
            if self._pipeline is not None:
                raise PersiaError(
                    "This EmbeddingCollection is in a `prefetch` loop; call it with the batches that the loop "
                    "yields, or switch to `.eval()` to read other ones."
                )
            prepared, ready = self._lookup(self._register(batch))
            if prepared.dummy:
                raise StaleBatchError("The batch was lost between its registration and its lookup; call again.")
            if self._inline is not None:
                self._release_if_unused(self._inline)
            self._inline = prepared
        else:
            prepared, ready = self._reading.now(batch)
        ready()
        return prepared

    def _raise_push_failure(self) -> None:
        """Raises, once, the failure of the push thread of an earlier pass."""
        failure, self._push_failure = self._push_failure, None
        if failure is not None:
            raise failure

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PersiaError(
                "This EmbeddingCollection was made in another process (before a fork). Make it in the process that "
                "trains; DataLoader workers only need the reader."
            )
