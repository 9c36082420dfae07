"""`EmbeddingCollection`: unbounded embedding tables as a PyTorch module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator

import torch
from numpy.typing import ArrayLike

from persia.batching.batch import Batch
from persia.batching.items import check_data, checked_items
from persia.errors import ConfigError, PersiaError, StaleBatchError
from persia.membership.data_loaders import registered_batches
from persia.modes import Dense, Hybrid, Mode
from persia.nn.arguments import (
    BATCH,
    CLUSTER,
    EMBEDDING_OPTIMIZER,
    GRAD_SCALER,
    MODE,
    SCHEMA,
    check_arguments,
    needs_trainer,
    options_of,
)
from persia.nn.batch_counts import batch_counts
from persia.nn.draw_waits import DrawWaits
from persia.nn.evaluation_pass import EvaluationReader
from persia.nn.feature_costs import feature_costs
from persia.nn.gate import Staleness, StalenessGate
from persia.nn.gradients import GradientCollector
from persia.nn.lookahead import refreshes
from persia.nn.non_finite import NonFiniteLog
from persia.nn.options import CollectionOptions, check_gpus
from persia.nn.owned_tables import OwnedCounts, OwnedTables, check_ownership
from persia.nn.pooling import Embeddings, Expander
from persia.nn.prepared import PreparedBatch
from persia.nn.push_log import PushCounts, PushLog
from persia.nn.replicas import EqualSteps
from persia.nn.row_access import RowAccess
from persia.nn.row_cache import CacheCounts, RowCache
from persia.nn.staging import staging_for
from persia.nn.step_pass import StepPass, StepPushes
from persia.nn.step_timings import StepTimings
from persia.nn.token_client import TokenClient
from persia.nn.token_pass import TokenPass
from persia.nn.training_lookup import TrainingLookup
from persia.nn.training_pass import PassContext, PassData, Push, TrainingPass
from persia.nn.transfer import Transfer
from persia.schema import EmbeddingOptimizer, Schema
from persia.schema.pooled_features import sent_tables
from persia.services import Cluster, ProcessCluster
from persia.telemetry.run_record import FeatureCost
from persia.types import Ids, RegisteredBatch, RowsSet, RowState, StoredRows

__all__ = ["EmbeddingCollection"]


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
        mode: how far lookups may run ahead of updates. It is the only place where staleness is set. By default
            `persia.modes.Hybrid("auto")`, which is `Sync` in its warm-up of 500 global steps.
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
        check_arguments(
            schema=(schema, SCHEMA),
            optimizer=(optimizer, EMBEDDING_OPTIMIZER),
            mode=(mode, MODE),
            cluster=(cluster, CLUSTER),
            grad_scaler=(grad_scaler, GRAD_SCALER),
            options=(options, options_of(CollectionOptions)),
        )
        if cluster is None:
            from persia.cluster.embedded import Embedded

            cluster = Embedded()
        self.options = options or CollectionOptions()
        self.schema = schema
        self.optimizer = optimizer
        self._staging = staging_for(self.options.device)
        self._expander = pools = Expander(schema, self._staging.device)
        tables, clip_norm = sent_tables(schema), self.options.clip_embedding_norm
        self._transfer = Transfer(self._staging, pools.on_host, tables, clip_norm, pools)
        check_ownership(schema.resolved_tables(), mode := mode or Hybrid(), cluster)
        connection = cluster.connect(schema, optimizer, mode, self.options.seed)
        self._owned = OwnedTables(schema, optimizer, connection, self.options, self._staging.device)
        connection = self.connection = self._owned.watched(connection)
        if not isinstance(cluster, ProcessCluster):  # There, NN workers train.
            check_gpus(self._staging.device.type, self.connection.gpus)
        self._worker = self.connection.worker
        self._rows = RowAccess(schema, self.connection.servers)
        checked = self._rows if self.connection.rank == 0 else None  # One of several NN workers is enough.
        far = not self.connection.near or self._staging.device.type != "cpu"
        self._reading = EvaluationReader(schema, connection, self._transfer, self.options.timeout, checked, ahead=far)
        self.gate = StalenessGate(mode, self.options.accumulation_steps, self.connection.near)
        scaled = grad_scaler is not None and grad_scaler.is_enabled()
        self.push_log = PushLog(self.connection, NonFiniteLog(schema, usual=scaled))
        """What is registered, pushed and lost so far."""
        self._cache = RowCache(schema.resolved_tables(), warns=self.connection.rank == 0)
        device, accumulation = self._staging.device, self.options.accumulation_steps
        self._steps = StepPushes(self.push_log, self.gate, accumulation)
        self._lookup = TrainingLookup(schema, self.push_log, self._transfer, self._expander, self.gate, device)
        self._gradients = GradientCollector(self._transfer, grad_scaler, device, accumulation)
        self._pass: TrainingPass | None = None
        """The current training pass; None outside of one."""
        self._called_last: PreparedBatch | None = None  # Without `prefetch`.
        self._push_failure: BaseException | None = None
        self.tracer = self.push_log.tracer
        """Records what the threads of this process do, while a trace is taken."""
        self.waits = DrawWaits()
        """Time that the network has waited for batches."""
        self.idle: Callable[[], None] | None = None
        """Called now and then by the training thread while it waits for a batch of a training pass."""
        self._pid = os.getpid()

    @property
    def mode(self) -> Mode:
        """How far lookups run ahead of updates."""
        return self.gate.mode

    def change_mode(self, mode: Mode) -> None:
        """Adopts another mode from the next pass of `prefetch` on. Switch the PSs separately."""
        check_ownership(self.schema.resolved_tables(), mode)
        self.gate.adopt(mode)

    def forget_failed_pass(self) -> None:
        """Lets training continue after a pass that has failed. Switch the PSs to `global_step` first."""
        self._steps.forget_not_applied()

    # --- the loop ---------------------------------------------------------------------------------------------

    def registered(self, epoch: int = 0, start: int = 0) -> Iterator[RegisteredBatch]:
        """Yields the batches that data loaders have for this NN worker, for `prefetch`.

        Args:
            epoch: number of the pass, as given to the data loaders.
            start: batch number at which all NN workers began in it, as given to the data loaders.

        Raises:
            ConfigError: the cluster has no data loaders.
        """
        connection = self.connection
        if connection.loader is None:
            raise ConfigError("This cluster has no data loaders. Pass batches to `prefetch`.", field="cluster")
        return registered_batches(connection.loader, epoch, start, connection.rank, connection.nn_workers)

    def prefetch(
        self,
        loader: Iterable[Batch | RegisteredBatch],
        equal_steps: EqualSteps | None = None,
        *,
        tokens: TokenClient | None = None,
        start: int = 0,
        endless: bool = False,
    ) -> Generator[PreparedBatch, None, None]:
        """Iterates over a loader with rows looked up: as far ahead as the mode allows, in background threads.

        In `Sync`, and while the depth of a `Hybrid` is 0, the calling thread looks rows up and pushes gradients as it
        draws batches, if the rows are in memory of this process. `CollectionOptions.one_thread` may decide otherwise.

        Args:
            loader: any iterable of `persia.Batch`, a torch `DataLoader` with `batch_size=None` included; or
                `registered()`.
            equal_steps: the `persia.dense.AllReduce` of a network that several NN workers train. The iterator then
                yields the same number of batches on each of them, with dummy batches (`batch.dummy`) in place of
                missing ones. Without it, batches that were lost with an embedding worker are skipped, and an NN
                worker that has a batch when others have none raises UnequalStepsError where it is used.
            tokens: the token client of an asynchronous mode; `loader` yields its `batches` then.
            start: batch number at which all NN workers begin in the pass over the data, as for `registered`.
                Only recorded schedules use it.
            endless: whether `loader` may be idle for any time, like a stream; its next batch then has no deadline.

        Yields:
            Batches on the device. Use each before drawing the next; a batch without a backward pass by then is released
            and counted.

        Raises:
            DataError: `loader` or an item of it is not of the kind above, or a batch does not fit the schema. The error
                names the position of the item.
            DeadlineError: a stage was late; the error names it.
            ConfigError: the mode keeps the network on dense PSs, and there are no `tokens`; or the other way round.
            PersiaError: another training pass over this collection is under way.
        """
        check_data("loader", loader)
        source = checked_items(iter(loader))  # `iter` here, so that DataLoader workers are forked by this thread.
        if not self.training:
            self._check_process()
            self._await_own_pushes()
            return self._reading.batches(source)
        if (tokens is None) != (self.mode.dense() is Dense.ALL_REDUCE):
            raise needs_trainer(self.mode)
        if tokens is not None and equal_steps is not None:
            raise ConfigError(
                "Both `tokens` and `equal_steps` were given; in asynchronous modes NN workers make unequal numbers of "
                "steps. Leave `equal_steps` out.",
                field="equal_steps",
            )
        return self._train(PassData(source, start, endless), equal_steps, tokens)

    def forward(self, batch: PreparedBatch | Batch) -> Embeddings:
        """Returns embeddings by feature: `[batch, dim]`, or a SequenceEmbedding if the feature is not pooled.

        Args:
            batch: from `prefetch`. A plain `persia.Batch` is looked up on the spot, which blocks.

        Raises:
            ConfigError: `batch` is of another kind.
            StaleBatchError: the batch was released or its gradient is pushed, and gradients are enabled.
        """
        check_arguments(batch=(batch, BATCH))
        if isinstance(batch, Batch):
            batch = self._prepare_now(batch)
        elif batch.batch_id is not None and not batch.trains and torch.is_grad_enabled() and self.training:
            raise StaleBatchError(
                "This batch is used up: its gradient was pushed, or a later batch was drawn. Use each batch before "
                "drawing the next.",
                batch_id=batch.batch_id,
            )
        with self.tracer.span("pool", batch=batch.batch_id or 0):
            if batch.trains and self._pass is not None and torch.is_grad_enabled():
                self._pass.check_others()
            if batch.pooled is not None:
                return batch.pooled.embeddings()
            pool = self._expander.of_pooled(batch.pooled_ids)
            return pool(batch.rows, *pool.index(batch.inverse, batch.offsets, batch.id_weights))

    def looked_up_again(self, batch: PreparedBatch) -> PreparedBatch:
        """Returns the batch whose gradient was pushed last, with its rows as they are now; read-only. Blocks.

        If its embedding worker does not have it any more, it has the rows that it was trained with.
        """
        if batch.batch_id is None:
            return batch
        try:
            rows = self._worker.lookup(batch.batch_id, False, self.connection.pools)
        except StaleBatchError:  # Its gradient was dropped, or its embedding worker has been replaced.
            return batch
        now, ready = self._transfer.rows(batch.on_host(), rows)
        ready()
        return now

    def flush(self) -> None:
        """Applies an incomplete step of `accumulation_steps` batches that were called without `prefetch`. Blocks.

        A `prefetch` loop does this itself, when it begins and when it ends.
        """
        self._raise_push_failure()
        self._steps.check_applied()
        self._finish_last_call()
        self._push(self._steps.complete())

    def await_pushes(self) -> None:
        """Waits until the gradients that backward passes have passed on are applied, also in a `prefetch` loop. Blocks.

        Rows that are read now have the updates of all steps so far. With several NN workers, of one that pushes alone.

        Raises:
            DeadlineError: they are not applied in time.
            Exception: the failure of a push.
        """
        if self._pass is None:
            self.flush()
        else:
            self._pass.await_pushes()

    # --- measurements ----------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Number of global steps that have been pushed."""
        return self.push_log.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.push_log.global_step = step

    @property
    def pushes(self) -> int:
        """Sequence number of the last push of this NN worker, in whatever mode."""
        return self.push_log.sequence

    @property
    def staleness(self) -> Staleness:
        """Measured staleness so far, in steps of this NN worker."""
        return self.gate.measured

    @property
    def cached(self) -> CacheCounts:
        """Outcome of lookups of tables with `cache_rows` so far, in distinct rows of batches."""
        return self._cache.counts

    @property
    def owned(self) -> OwnedCounts:
        """Rows of tables with `owned_rows` on the device, and outcome of their lookups so far."""
        return self._owned.counts

    @property
    def ready(self) -> int:
        """Number of batches that are looked up and wait for the network."""
        current = self._pass
        return current.ready if current is not None else 0

    @property
    def ahead(self) -> bool:
        """Whether rows of the current training pass are looked up ahead, in threads next to the network."""
        current = self._pass
        return current is not None and current.ahead

    @property
    def pushed(self) -> PushCounts:
        """Outcome of the gradients so far."""
        return self.push_log.counts(self._worker.statistics().get("lost_gradients", 0))

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns counters of the tables, summed over the PSs."""
        return self._rows.statistics()

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """Scaler of the loss; gradients are unscaled before they are pushed."""
        return self._gradients.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._gradients.scaler = scaler

    @property
    def step_timings(self) -> StepTimings | None:
        """Receives the compute time of each batch; None if nobody asks."""
        return self._gradients.timings

    @step_timings.setter
    def step_timings(self, timings: StepTimings | None) -> None:
        self._gradients.timings = timings

    def feature_costs(self, batch: PreparedBatch) -> list[FeatureCost]:
        """Measures the work that each feature causes in a trained batch; most expensive first. Blocks."""
        return feature_costs(self.schema, self._expander.of_pooled(batch.pooled_ids), batch)

    # --- rows by id -------------------------------------------------------------------------------------------

    def rows(self, table: str, ids: ArrayLike, *, state: bool = False) -> StoredRows:
        """Reads rows by id; nothing is admitted, touched or counted. Blocks. See `nn.row_access.RowAccess.read`."""
        self._await_own_pushes()
        return self._rows.read(table, ids, state)

    def set_rows(self, table: str, ids: ArrayLike, values: ArrayLike, *, state: RowState | None = None) -> RowsSet:
        """Inserts or overwrites rows by id; refused in a training pass. Blocks. See `nn.row_access.RowAccess.set`."""
        if self._pass is not None:
            raise PersiaError("Rows cannot be set during a training pass. Leave the `prefetch` loop first.")
        self.flush()
        return self._rows.set(table, ids, values, state)

    def row_ids(self, table: str, values: ArrayLike) -> Ids:
        """Returns the ids uint64 `[n]` of a column of values, as `rows` and `set_rows` map them."""
        return self._rows.ids(table, values)

    # --- training ---------------------------------------------------------------------------------------------

    def _train(
        self, data: PassData, equal_steps: EqualSteps | None, tokens: TokenClient | None
    ) -> Generator[PreparedBatch, None, None]:
        self._check_process()
        if self._pass is not None:
            raise PersiaError(
                "A training pass over this EmbeddingCollection is under way. Finish or close its prefetch iterator "
                "first (`del` it, or leave its loop)."
            )
        self.flush()
        current = self._pass = self._begin_pass(data, equal_steps, tokens)
        try:
            yield from current.batches()
        finally:
            if not sys.is_finalizing():  # At the exit of a program torch is being taken down.
                self._end_pass(current, sys.exc_info()[1])
        self._raise_push_failure()

    def _end_pass(self, ended: TrainingPass, failure: BaseException | None) -> None:
        self._pass = None
        self._push_failure = ended.unraised_failure
        self._steps.warn_of_not_applied()
        self._owned.close(failure)

    def _begin_pass(self, data: PassData, equal_steps: EqualSteps | None, tokens: TokenClient | None) -> TrainingPass:
        """Starts a training pass, with its threads."""
        log, data = self.push_log, data._replace(idle=self.idle)
        context = PassContext(log, self._lookup, self._gradients, self.gate, self.waits, self.options.timeout)
        # No copy could serve a batch of an asynchronous mode.
        self.gate.reserves = self._cache.open(self.mode, self._staging.free_bytes, recording=log.observer is not None)
        owns = self._owned.open(self.mode, self._staging.free_bytes, recording=log.observer is not None)
        cache = self._owned if owns else self._cache if self.gate.reserves else None
        refresh = refreshes(self.mode, self.schema, self.connection.near, self.options)
        if cache is not None or log.observer is not None:  # A replay has one version of all rows of a batch.
            refresh = None
        if tokens is not None:
            return TokenPass(context, data, tokens, finds=refresh is not None)
        return StepPass(
            context,
            data,
            self._steps,
            near=self.connection.near and (owns or cache is None),
            one_thread=self.options.one_thread,
            refresh=refresh,
            cache=cache,
            equal_steps=equal_steps,
            counts=batch_counts(self.connection, self.options.timeout) if equal_steps is None else None,
        )

    # --- without `prefetch` -----------------------------------------------------------------------------------

    def _prepare_now(self, batch: Batch) -> PreparedBatch:
        self._check_process()
        if self.training and torch.is_grad_enabled():
            if self.mode.dense() is Dense.SERVER:
                raise needs_trainer(self.mode)
            if self._pass is not None:
                raise PersiaError(
                    "This EmbeddingCollection is in a `prefetch` loop; call it with the batches that the loop "
                    "yields, or switch to `.eval()` to read other ones."
                )
            self._steps.check_applied()
            prepared, ready = self._lookup.look_up(self._lookup.register(batch), self._push_now)
            if prepared.dummy:
                raise StaleBatchError("The batch was lost between its registration and its lookup; call again.")
            self._finish_last_call()
            self._called_last = prepared
        else:
            self._await_own_pushes()
            prepared, ready = self._reading.now(batch)
        ready()
        return prepared

    def _push_now(self, batch: PreparedBatch) -> None:
        """Pushes a batch that was called without `prefetch`, if its step is complete. Blocks."""
        self._push(self._steps.add(batch, self._gradients.take(batch, unpushed=0)))

    def _push(self, push: Push | None) -> None:
        """Makes the push of a complete step: after those that a pass still has, or now. Blocks."""
        if self._pass is not None:
            self._pass.submit(push)
        elif push is not None:
            push()

    def _finish_last_call(self) -> None:
        """Releases the batch that was called last without `prefetch`, if no gradient of it has come."""
        batch, self._called_last = self._called_last, None
        if batch is not None and batch.close():
            self.push_log.release(batch)
            self._push(self._steps.skip())

    def _await_own_pushes(self) -> None:
        """Applies gradients that this thread would push with the next draw: whoever reads now expects them."""
        current = self._pass
        if current is not None and not current.ahead:
            current.await_pushes()

    def _raise_push_failure(self) -> None:
        """Raises, once, the failure of a push of an earlier pass."""
        failure, self._push_failure = self._push_failure, None
        if failure is not None:
            raise failure

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PersiaError(
                "This EmbeddingCollection was made in another process (before a fork). Make it in the process that "
                "trains; DataLoader workers only need the reader."
            )
