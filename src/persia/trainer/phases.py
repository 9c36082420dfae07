"""Phases of a training run, each in one mode, and switches of mode between them.

docs/reference/protocol.md, section 12, has the order of the calls between roles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import msgspec

from persia.coordinator import TokenReport
from persia.dense import SharedNetwork
from persia.errors import ConfigError, NNWorkersDiedError
from persia.modes import Dense, Gba, Mode, ModeChoice
from persia.nn.arguments import NEW_MODE, check_arguments
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.owned_tables import check_ownership
from persia.nn.step_timings import StepTimings
from persia.nn.token_client import TokenClient
from persia.optim import APMSqueeze
from persia.optim.averaged import Averaged
from persia.services import Connection, DenseMaker, NNWorkersChange, TokenService, TrainingPhase
from persia.telemetry.logs import get_logger
from persia.trainer.loop import TrainingLoop, advise
from persia.trainer.options import Declared, TrainerOptions, check_dense_servers
from persia.trainer.schedule_recorder import ScheduleRecorder
from persia.trainer.sources import BatchSource, LocalSource
from persia.trainer.state import TrainingState
from persia.types import NO_LOSSES, Caller

__all__ = ["ModeSwitch", "Phases", "scheduled"]

LOG = get_logger("persia.modes")

REPORTS = 8
"""Reports of step times per NN worker in one window of Auto."""

POLL_SECONDS = 0.1
"""Seconds between two questions to the coordinator whether a switch was requested, in synchronous phases."""


class ModeSwitch(NamedTuple):
    """A change of mode.

    Attributes:
        step: global step at which it happened.
        before: the mode until then.
        after: the mode from then on.
        drain_seconds: from the end of the last batch until all NN workers had quiesced.
        seconds: the rest: hand-over of the network both ways, on Ray also a recovery point.
    """

    step: int
    before: Mode
    after: Mode
    drain_seconds: float
    seconds: float


class _EndedPhase(NamedTuple):
    """The last phase: its mode, when its training stopped, and when all NN workers had quiesced."""

    mode: Mode
    stopped_at: float
    quiesced_at: float


class Phases:
    """Runs the phases of a run on one NN worker: which mode is next, how a phase begins, and how it ends.

    All NN workers make the same calls.

    Args:
        state: what training changes, besides rows and the network's tensors.
        network: the dense network, its optimizer, and its replicas.
        embeddings: has the connection to the other roles.
        declared: the declarations of the run.
        trains_in_other_processes: whether this process only drives NN workers, and is none of them.

    Raises:
        ConfigError: the cluster, or the options, cannot run a mode that the declarations name.
    """

    def __init__(
        self,
        state: TrainingState,
        network: DenseStep,
        embeddings: EmbeddingCollection,
        declared: Declared,
        *,
        trains_in_other_processes: bool,
    ) -> None:
        self._state = state
        self._network = network
        self._embeddings = embeddings
        self._connection = embeddings.connection
        self._auto = declared.auto
        self._options = declared.options
        self._trains_in_other_processes = trains_in_other_processes
        self._servers_mode: Mode | None = None
        """The mode of the embedding PSs since the last phase began; None before the first one of a call of `fit`."""
        self._number = 0
        """Number of the last phase."""
        self._shared: SharedNetwork | None = None
        """The network on the dense PSs, from the first phase on that they hold it."""
        self._stopped_early = False
        """Whether the last phase stopped before its planned end, so that batches were read ahead of it."""
        self._dead: list[int] = []
        """NN workers that died in the last phase, while the others continued."""
        self._lost = NO_LOSSES
        """Losses of those."""
        self._leader = 0
        """Rank of the NN worker that drained the PSs after the last phase."""
        self._last_poll = 0.0
        self.busy: Callable[[], bool] = lambda: False
        """Returns whether a checkpoint is being written, so that the number of NN workers does not change yet."""
        self.switches: list[ModeSwitch] = []
        self._ended_phase: _EndedPhase | None = None
        """The phase whose mode a switch would leave; None once the next phase has begun."""
        self._recording = ScheduleRecorder(self._options.record_dir, state, network, embeddings)
        schedule = self._options.mode_schedule
        if self._auto is not None and schedule:
            raise ConfigError("mode_schedule and the mode Auto cannot both say when to switch.", field="mode_schedule")
        others = [self._auto.asynchronous] if self._auto is not None else [mode for _, mode in schedule]
        self._declared_modes = [self._auto.sync, self._auto.asynchronous] if self._auto is not None else others
        for candidate in (state.mode, *others):
            self.check(candidate)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError if this cluster, or these options, cannot run a mode."""
        check_arguments(mode=(mode, NEW_MODE))
        connection, options = self._connection, self._options
        name = type(mode).__name__
        check_ownership(self._embeddings.schema.resolved_tables(), mode)
        if not self._trains_in_other_processes:
            mode.group(connection.nn_workers, self._state.local_batch or 1)
        if mode.dense() is not Dense.SERVER:
            return
        if connection.tokens is None or connection.dense is None:
            raise ConfigError(f"This cluster has no dense PSs, which the mode {name} needs.", field="mode")
        check_dense_servers(options, name)

    def report(self) -> TokenReport | None:
        """Returns the report of asynchronous modes; None if there were none."""
        tokens = self._connection.tokens
        if tokens is None:
            return None
        report = tokens.summary()
        return report if report.workers else None

    def begin(self) -> None:
        """Begins a call of `fit`: the one before may have failed, so its PSs are switched again."""
        self._servers_mode = None
        self._begin_auto()

    # --- Auto ---------------------------------------------------------------------------------------------------

    def _begin_auto(self) -> None:
        """Reports step times to the coordinator from now on, if they decide the mode."""
        auto, tokens = self._auto, self._connection.tokens
        if auto is None or tokens is None:
            return

        def begin() -> None:
            if self._state.mode in (auto.sync, auto.asynchronous):  # Else the user chose it with `Trainer.switch`.
                tokens.begin_auto(auto, self._connection.nn_workers, self._state.mode == auto.asynchronous)

        self._embeddings.step_timings = StepTimings(tokens, self._connection.rank, auto.seconds / REPORTS, begin)
        self._network.replicas.run_on_rank0(begin, NoneType)

    def mode_choices(self) -> list[ModeChoice]:
        """Returns the decisions of Auto so far; the first NN worker writes their evidence to `log_dir`."""
        if self._auto is None:
            return []
        return self._network.replicas.run_on_rank0(self._logged_choices, list[ModeChoice])

    def _logged_choices(self) -> list[ModeChoice]:
        evidence = self._tokens.evidence()
        if self._options.log_dir is not None:
            evidence.save(Path(self._options.log_dir) / "auto.json")
        return evidence.choices

    # --- which mode is next -------------------------------------------------------------------------------------

    @property
    def next_switch(self) -> int | None:
        """Global step at which the schedule changes the mode next; None if it does not."""
        return next((step for step, _ in self._options.mode_schedule if step > self._state.global_step), None)

    def adopt_next_mode(self) -> bool:
        """Changes to the mode that was requested, or that the schedule has for this step, between two phases.

        Returns:
            Whether there was one; then call `confirm_mode`.
        """
        entry, before = scheduled(self._options.mode_schedule, self._state.global_step), self._state.schedule_entry
        due = entry[1] if entry is not None and entry != before else None
        self._state.schedule_entry = entry
        replicas = self._network.replicas
        next_mode = replicas.run_on_rank0(lambda: self._requested() or due, Mode | None)
        if next_mode is not None and next_mode != self._state.mode:
            if self._ended_phase is None:
                now = time.monotonic()
                self._ended_phase = _EndedPhase(self._state.mode, now, now)
            self._state.change_mode(next_mode)
        replicas.clear_stop_request()
        return next_mode is not None

    def _requested(self) -> Mode | None:
        """Returns the mode that was requested, if any; rejects one that cannot run here."""
        tokens = self._connection.tokens
        mode = tokens.requested() if tokens is not None else None
        if tokens is not None and mode is not None:
            try:
                self.check(mode)
            except ConfigError as error:
                LOG.error("Mode switch rejected: %s", error)
                tokens.resolve(mode)
                return None
        return mode

    def confirm_mode(self) -> None:
        """Tells the coordinator that the mode is in force, also for NN workers that restart after a death."""
        tokens, mode = self._connection.tokens, self._state.mode

        def resolve() -> None:
            if tokens is not None:
                tokens.resolve(mode)

        self._network.replicas.run_on_rank0(resolve, NoneType)

    # --- phases -------------------------------------------------------------------------------------------------

    def train(self, loop: TrainingLoop, source: BatchSource, steps: int | None) -> bool:
        """Trains one phase, of `steps` steps at most. Returns whether the pass over the data has ended."""
        self._number += 1
        on_demand = self._state.mode.dense() is Dense.SERVER
        source.begin_phase(on_demand, self._stopped_early)
        self._stopped_early = False
        if on_demand:
            return self._token_driven(loop, source, steps)
        self._begin_synchronous()
        batches = None if steps is None else steps * self._options.accumulation_steps
        end = loop.synchronous(source, batches, lambda: self._must_quiesce() or self._switch_requested())
        self._recording.end(self._state.local_batch)
        if end.stopped_at is not None:
            self._stopped_early = True
            self._ended_phase = _EndedPhase(self._state.mode, end.stopped_at, time.monotonic())
        return end.pass_ended

    def raise_if_nn_workers_died(self) -> None:
        """Raises NNWorkersDiedError if NN workers died in the last phase and the others cannot train without them.

        Collectives of torch.distributed need all ranks. A cluster with its own replicas continues with the living.
        """
        if self._dead and self._connection.replicas is None:
            ranks = ", ".join(map(str, self._dead))
            # One of the others counts their losses.
            lost = self._lost if self._connection.rank == self._leader else NO_LOSSES
            raise NNWorkersDiedError(f"NN workers {ranks} have died.", ranks=self._dead, lost=lost)

    def _begin_synchronous(self) -> None:
        """Begins a phase with a replica of the network on each NN worker."""
        connection, state = self._connection, self._state
        replicas = self._network.replicas
        due = self._servers_mode != state.mode
        if connection.rounds is not None and not due:
            due = replicas.run_on_rank0(self._moves_wait, bool)
        if due:
            # After an error in the middle of a step counts may differ. Pushes that are still on their way are of steps
            # before the largest count, so PSs ignore them.
            state.global_step = max(map(int, replicas.gather(str(state.global_step).encode())))
            self._follow(replicas.run_on_rank0(self._switch_servers, int))
            self._embeddings.forget_failed_pass()
        self._recording.begin(None)
        if connection.tokens is not None and connection.rank == 0:
            connection.tokens.announce(connection.nn_workers, state.local_batch)
        self._phase_began()
        self._last_poll = time.monotonic()

    def _moves_wait(self) -> bool:
        """Returns whether NN worker 0 learns here that rows are ready to move to other PSs."""
        rounds = self._connection.rounds
        return rounds is not None and self._connection.rank == 0 and rounds.ready

    def _must_quiesce(self) -> bool:
        """Returns whether NN worker 0 learns here that rows are to move, or that NN workers are to join or leave."""
        return self._moves_wait() or self._requested_change() is not None

    def change_requested(self) -> bool:
        """Returns whether another number of NN workers is to train from here on. All NN workers call it. Blocks."""
        changes = self._connection.changes
        if changes is None:
            return False
        return self._network.replicas.run_on_rank0(
            lambda: (change := self._requested_change()) is not None and changes.accept(change), bool
        )

    def _requested_change(self) -> NNWorkersChange | None:
        """Returns the other number of NN workers, if NN worker 0 learns here of one. Refuses one that cannot train."""
        changes = self._connection.changes
        if changes is None or self._connection.rank > 0 or (change := changes.requested) is None or self.busy():
            return None
        try:
            self._check_change(change)
        except ConfigError as error:
            changes.refuse(change, error.message)
            return None
        return change

    def _check_change(self, change: NNWorkersChange) -> None:
        """Raises ConfigError if training cannot continue with another number of NN workers."""
        batches, now = self._options.accumulation_steps, self._connection.nn_workers
        each = batches * change.factor
        if each.denominator > 1:
            raise ConfigError(
                f"{change.nn_workers} NN workers cannot keep the global batch: a step has {batches * now} batches of "
                f"the data ({now} NN workers x accumulation_steps = {batches}), which they cannot share equally. "
                "Choose a number that divides them, or let the global batch change with the number of NN workers.",
                field="cluster.nn_workers",
            )
        msgspec.structs.replace(self._options, accumulation_steps=int(each))  # Checks the other options.
        for mode in (self._state.mode, *self._declared_modes):
            mode.group(change.nn_workers, self._state.local_batch or 1)
            if each > 1 and mode.dense() is Dense.SERVER:
                raise ConfigError(
                    f"{change.nn_workers} NN workers cannot keep the global batch: each would need accumulation_steps "
                    f"= {each}, which does not go with the mode {type(mode).__name__}. Let the global batch of modes "
                    "with all-reduce change with the number of NN workers; the one of Gba stays anyway.",
                    field="cluster.nn_workers",
                )

    def _switch_requested(self) -> bool:
        """Returns whether NN worker 0 learns here that a switch was requested. Polls the coordinator now and then."""
        tokens = self._connection.tokens
        if tokens is None or self._connection.rank > 0:
            return False
        now = time.monotonic()
        if now - self._last_poll <= POLL_SECONDS:
            return False
        self._last_poll = now
        return tokens.requested() is not None

    def _token_driven(self, loop: TrainingLoop, source: BatchSource, steps: int | None) -> bool:
        """Trains a phase with the network on the dense PSs: hands it over, trains, and takes it back."""
        state, optimizer = self._state, self._network.optimizer
        averaged = optimizer.hand_over() if isinstance(optimizer, APMSqueeze) else None
        if self._shared is None:
            self._shared = _shared_network(self._network, self._connection, self._options, averaged)
        shared = self._shared
        state.local_batch, servers = self._network.replicas.run_on_rank0(
            lambda: self._begin_tokens(shared, source, steps), tuple[int, int]
        )
        self._follow(servers)
        self._embeddings.forget_failed_pass()
        self._recording.begin(shared)
        self._phase_began()
        caller = Caller(self._connection.generation, self._number, self._connection.rank)
        worker, pushes = self._connection.worker, self._embeddings.pushes
        losses = self._embeddings.push_log.losses
        client = TokenClient(self._tokens, caller, worker, shared, pushes, source.idle, losses)
        loop.token_driven(source, client, self._must_quiesce)
        return self._quiesce(client, shared, source)

    def _begin_tokens(self, shared: SharedNetwork, source: BatchSource, steps: int | None) -> tuple[int, int]:
        """Hands the network to the dense PSs, and the phase to the token scheduler.

        Returns:
            The local batch, and the number of embedding PSs.
        """
        connection, state = self._connection, self._state
        state.local_batch = state.local_batch or self._rows_of_next_batch(source)
        advise(state.mode, connection.nn_workers, state.local_batch)
        shared.load(connection.generation, state.global_step, state.mode)
        servers = self._switch_servers()
        self._tokens.begin(
            TrainingPhase(
                generation=connection.generation,
                number=self._number,
                mode=state.mode,
                nn_workers=connection.nn_workers,
                epoch=state.pass_number,
                position=state.position,
                step=state.global_step,
                steps=steps,
                local_batch=state.local_batch,
            )
        )
        return state.local_batch, servers

    def _quiesce(self, client: TokenClient, shared: SharedNetwork, source: BatchSource) -> bool:
        """Ends an asynchronous phase: drains the PSs, takes the network back. Returns whether the pass has ended."""
        connection, state, optimizer = self._connection, self._state, self._network.optimizer
        stopped_at = time.monotonic()
        result = client.quiesce()
        quiesced_at = time.monotonic()
        step = result.step + (result.held > 0)  # Gradients held for an incomplete step are applied as one more step.
        if connection.rank == result.leader:
            for server in connection.servers:
                server.drain(connection.generation, result.step, result.held)
            shared.drain(connection.generation, result.step, result.held)
            client.report_drained(step)
            self._recording.write(state.local_batch)
        else:
            client.await_drained()
        shared.take_over()
        if isinstance(optimizer, APMSqueeze):
            optimizer.take_back()
        state.global_step, state.position = step, result.position
        source.forget(result.position)
        self._ended_phase = _EndedPhase(state.mode, stopped_at, quiesced_at)
        self._dead, self._lost, self._leader = result.dead, result.lost, result.leader
        return result.ended

    def _rows_of_next_batch(self, source: BatchSource) -> int:
        """Returns the local batch, as far as the next batch of the source tells it; 0 where data loaders read."""
        if not isinstance(source, LocalSource):
            return 0
        first, second = (source.read(self._state.position + ahead) for ahead in (0, 1))
        rows = len(first) if first is not None else 0
        if second is None and isinstance(self._state.mode, Gba):  # A single batch is a whole step, whatever M is.
            rows = max(rows, self._state.mode.global_batch_size)
        return rows

    def _switch_servers(self) -> int:
        """Switches all PSs to the mode of this phase, after a move of rows that is ready. Returns their number."""
        connection, state = self._connection, self._state
        if connection.rounds is not None:
            return connection.rounds.make(state.mode, state.global_step, connection.nn_workers)
        for server in connection.servers:
            server.switch(state.mode, connection.generation, state.global_step, connection.nn_workers)
        return len(connection.servers)

    def _follow(self, servers: int) -> None:
        """Continues with this number of PSs on this NN worker."""
        if self._connection.rounds is not None:
            self._connection.rounds.follow(servers)

    def _phase_began(self) -> None:
        """Notes that a phase begins now: the mode of the PSs, and the switch if the last phase had another mode."""
        state, ended = self._state, self._ended_phase
        self._servers_mode, self._ended_phase = state.mode, None
        if ended is None or ended.mode == state.mode:
            return
        done = ModeSwitch(
            step=state.global_step,
            before=ended.mode,
            after=state.mode,
            drain_seconds=ended.quiesced_at - ended.stopped_at,
            seconds=time.monotonic() - ended.quiesced_at,
        )
        self.switches.append(done)
        if self._connection.rank == 0:
            LOG.info(
                "Step %d: from %s to %s. Draining took %.3f s, the hand-over %.3f s.",
                done.step, done.before, done.after, done.drain_seconds, done.seconds,
            )  # fmt: skip

    @property
    def _tokens(self) -> TokenService:
        tokens = self._connection.tokens
        assert tokens is not None  # See `check`.
        return tokens


def _shared_network(
    network: DenseStep, connection: Connection, options: TrainerOptions, averaged: Averaged | None
) -> SharedNetwork:
    """Connects the network to the dense PSs; `averaged` replaces APMSqueeze there."""
    assert connection.dense is not None  # See `Phases.check`.
    optimizer = network.optimizer
    maker = DenseMaker(network.make_optimizer, options.schedule, options.clip_norm)
    if isinstance(optimizer, APMSqueeze) and averaged is not None:
        make = averaged.maker([p for p in network.model.parameters() if p.requires_grad])
        maker = DenseMaker(make, options.schedule, optimizer.options.clip_norm)
    servers = connection.dense(maker)
    return SharedNetwork(network.model, averaged or optimizer, network.scheduler, servers, options.timeout)


def scheduled(schedule: Sequence[tuple[int, Mode]], step: int) -> tuple[int, Mode] | None:
    """Returns the entry of a schedule that is in force at a step."""
    past = [entry for entry in schedule if entry[0] <= step]
    return max(past, key=lambda entry: entry[0]) if past else None
