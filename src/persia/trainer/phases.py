"""Phases of a training run, each in one mode, and switches of mode between them.

docs/reference/protocol.md, section 12, has the order of the calls between roles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import NamedTuple

from persia.coordinator import TokenReport
from persia.dense import SharedNetwork
from persia.errors import ConfigError, NNWorkersDiedError
from persia.modes import Dense, Gba, Mode, ModeChoice
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.step_timings import StepTimings
from persia.nn.token_client import TokenClient
from persia.optim import APMSqueeze
from persia.optim.averaged import Averaged
from persia.services import Connection, DenseMaker, Tokens, TrainingPhase
from persia.trainer.loop import TrainingLoop, advise
from persia.trainer.options import Declared, TrainerOptions
from persia.trainer.recording import ScheduleRecorder
from persia.trainer.sources import BatchSource, LocalSource
from persia.trainer.state import TrainingState
from persia.types import Caller

__all__ = ["ModeSwitch", "Phases", "scheduled"]

LOG = logging.getLogger("persia.modes")

REPORTS = 8
"""Reports of step times per NN worker in one window of Auto."""

LOOK_SECONDS = 0.1
"""Seconds between two looks for a requested switch in synchronous phases."""


class ModeSwitch(NamedTuple):
    """A change of mode.

    Attributes:
        step: global step at which it happened.
        before: the mode until then.
        after: the mode from then on.
        drain_seconds: until all NN workers had quiesced.
        seconds: the rest: hand-over of the network both ways, on Ray also a recovery point.
    """

    step: int
    before: Mode
    after: Mode
    drain_seconds: float
    seconds: float


class Phases:
    """Runs the phases of a run on one NN worker: which mode is next, how a phase begins, and how it ends.

    All NN workers make the same calls.

    Args:
        state: what training changes, besides rows and the network's tensors.
        network: the dense network, its optimizer, and its replicas.
        embeddings: has the connection to the other roles.
        declared: the declarations of the run.
        elsewhere: whether other processes train, so that this one is none of the NN workers.

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
        elsewhere: bool,
    ) -> None:
        self._state = state
        self._network = network
        self._embeddings = embeddings
        self._connection = embeddings.connection
        self._auto = declared.auto
        self._options = declared.options
        self._elsewhere = elsewhere
        self._served: Mode | None = None
        """The mode that the PSs are in, as far as this NN worker has switched them."""
        self._number = 0
        self._shared: SharedNetwork | None = None
        self._again = False
        self._dead: list[int] = []
        """NN workers that died in the last phase, while the others continued."""
        self._looked = 0.0
        self.switches: list[ModeSwitch] = []
        self._leaving: tuple[Mode, float, float] | None = None
        """The mode of the last phase, when NN workers were asked to quiesce, and when they had."""
        self._recording = ScheduleRecorder(self._options.record_dir, state, network, embeddings)
        schedule = self._options.mode_schedule
        if self._auto is not None and schedule:
            raise ConfigError("mode_schedule and the mode Auto cannot both say when to switch.", field="mode_schedule")
        either = [self._auto.asynchronous] if self._auto is not None else []
        for candidate in (state.mode, *either, *(mode for _, mode in schedule)):
            self.check(candidate)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError if this cluster, or these options, cannot run a mode."""
        connection, options = self._connection, self._options
        name = type(mode).__name__
        if not self._elsewhere:
            mode.group(connection.nn_workers, self._state.local_batch or 1)
        if mode.dense() is not Dense.SERVER:
            return
        if connection.tokens is None or connection.dense is None:
            raise ConfigError(f"This cluster has no dense PSs, which the mode {name} needs.", field="mode")
        if options.accumulation_steps > 1:
            raise ConfigError(
                f"accumulation_steps = {options.accumulation_steps} does not go with the mode {name}. Leave it at 1: "
                "how many gradients make a step is the mode's, Gba's `global_batch_size` for example.",
                field="accumulation_steps",
            )
        if options.precision == "fp16":
            raise ConfigError(
                f'precision = "fp16" does not go with the mode {name}: the loss scale would follow a step that is made '
                'elsewhere. Use "bf16" or "float32".',
                field="precision",
            )

    def report(self) -> TokenReport | None:
        """Returns the report of asynchronous modes; None if there were none."""
        tokens = self._connection.tokens
        if tokens is None:
            return None
        report = tokens.summary()
        return report if report.workers else None

    # --- Auto ---------------------------------------------------------------------------------------------------

    def begin_auto(self) -> None:
        """Reports step times to the coordinator from now on, if they decide the mode."""
        auto, tokens = self._auto, self._connection.tokens
        if auto is None or tokens is None:
            return

        def begin() -> None:
            if self._state.mode in (auto.sync, auto.asynchronous):  # Else it has been chosen by hand.
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

    def follow(self) -> bool:
        """Takes over the mode that was requested, or that the schedule has for this step. Returns whether it did."""
        entry = scheduled(self._options.mode_schedule, self._state.global_step)
        due, self._state.schedule_entry = entry != self._state.schedule_entry, entry
        replicas = self._network.replicas
        wanted = replicas.run_on_rank0(lambda: self._requested() or (entry[1] if due and entry else None), Mode | None)
        if wanted is not None and wanted != self._state.mode:
            if self._leaving is None:
                now = time.monotonic()
                self._leaving = self._state.mode, now, now
            self._state.change_mode(wanted)
        replicas.clear_stop_request()
        return wanted is not None

    def _requested(self) -> Mode | None:
        """Returns the mode that was requested, if it can run here."""
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

    def followed(self) -> None:
        """Confirms that the requested mode is in force, also for NN workers that restart after a death."""
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
        source.arrange(on_demand, self._again)
        self._again = False
        if on_demand:
            return self._token_driven(loop, source, steps)
        return self._synchronous(loop, source, steps)

    def check_others(self) -> None:
        """Raises NNWorkersDiedError if NN workers died in the last phase, and no collective works without them.

        So it is where torch.distributed joins the replicas.
        """
        if self._dead and self._connection.replicas is None:
            ranks = ", ".join(map(str, self._dead))
            raise NNWorkersDiedError(f"NN workers {ranks} have died.", ranks=self._dead)

    def _synchronous(self, loop: TrainingLoop, source: BatchSource, steps: int | None) -> bool:
        """Trains a phase with a replica of the network on each NN worker."""
        connection, state = self._connection, self._state
        if self._served != state.mode:
            self._network.replicas.run_on_rank0(self._switch_servers, NoneType)
        self._recording.begin(None)
        if connection.tokens is not None and connection.rank == 0:
            connection.tokens.announce(connection.nn_workers, state.local_batch)
        self._entered()
        batches = None if steps is None else steps * self._options.accumulation_steps
        self._looked = time.monotonic()
        end = loop.synchronous(source, batches, self._switch_requested)
        self._recording.end(state.local_batch)
        if end.stopped_at is not None:
            self._again = True
            self._leaving = state.mode, end.stopped_at, time.monotonic()
        return end.pass_ended

    def _switch_requested(self) -> bool:
        """Asks the coordinator now and then, on NN worker 0, whether a switch was requested."""
        tokens = self._connection.tokens
        if tokens is None or self._connection.rank > 0:
            return False
        now = time.monotonic()
        if now - self._looked <= LOOK_SECONDS:
            return False
        self._looked = now
        return tokens.requested() is not None

    def _token_driven(self, loop: TrainingLoop, source: BatchSource, steps: int | None) -> bool:
        """Trains a phase with the network on the dense PSs: hands it over, trains, and takes it back."""
        state, optimizer = self._state, self._network.optimizer
        averaged = optimizer.hand_over() if isinstance(optimizer, APMSqueeze) else None
        if self._shared is None:
            self._shared = _shared_network(self._network, self._connection, self._options, averaged)
        shared = self._shared
        state.local_batch = self._network.replicas.run_on_rank0(lambda: self._begin_tokens(shared, source, steps), int)
        self._recording.begin(shared)
        self._entered()
        caller = Caller(self._connection.generation, self._number, self._connection.rank)
        client = TokenClient(self._tokens, caller, self._connection.worker, shared, self._embeddings.pushes)
        loop.token_driven(source, client)
        return self._quiesce(client, shared, source)

    def _begin_tokens(self, shared: SharedNetwork, source: BatchSource, steps: int | None) -> int:
        """Hands the network to the dense PSs, and the phase to the token scheduler. Returns the local batch."""
        connection, state = self._connection, self._state
        state.local_batch = state.local_batch or self._first_rows(source)
        advise(state.mode, connection.nn_workers, state.local_batch)
        shared.load(connection.generation, state.global_step)
        self._switch_servers()
        self._tokens.begin(
            TrainingPhase(
                connection.generation,
                self._number,
                state.mode,
                connection.nn_workers,
                state.epoch,
                state.position,
                state.global_step,
                steps,
                state.local_batch,
            )
        )
        return state.local_batch

    def _quiesce(self, client: TokenClient, shared: SharedNetwork, source: BatchSource) -> bool:
        """Ends a token-driven phase: drains the PSs, takes the network back. Returns whether the pass has ended."""
        connection, state, optimizer = self._connection, self._state, self._network.optimizer
        began = time.monotonic()
        result = client.quiesce()
        quiesced = time.monotonic()
        step = result.step + (result.held > 0)
        if connection.rank == result.leader:
            for server in connection.servers:
                server.drain(connection.generation, result.step, result.held)
            shared.drain(connection.generation, result.step, result.held)
            client.drained(step)
            self._recording.write(state.local_batch)
        else:
            client.drained(-1)
        shared.take_over()
        if isinstance(optimizer, APMSqueeze):
            optimizer.take_back()
        state.global_step, state.position = step, result.position
        source.forget(result.position)
        self._leaving = state.mode, began, quiesced
        self._dead = result.dead
        return result.ended

    def _first_rows(self, source: BatchSource) -> int:
        """Returns the local batch, from the next batch of the source; 0 where data loaders read."""
        if not isinstance(source, LocalSource):
            return 0
        first, second = (source.read(self._state.position + ahead) for ahead in (0, 1))
        rows = len(first) if first is not None else 0
        if second is None and isinstance(self._state.mode, Gba):  # A single batch is a whole step, whatever M is.
            rows = max(rows, self._state.mode.global_batch_size)
        return rows

    def _switch_servers(self) -> None:
        for server in self._connection.servers:
            server.switch(self._state.mode, self._connection.generation, self._state.global_step)

    def _entered(self) -> None:
        """Records the switch, if the phase that begins now has another mode than the one before."""
        state = self._state
        self._served = state.mode
        if self._leaving is None:
            return
        (before, stopped, quiesced), self._leaving = self._leaving, None
        if before == state.mode:
            return
        done = ModeSwitch(state.global_step, before, state.mode, quiesced - stopped, time.monotonic() - quiesced)
        self.switches.append(done)
        if self._connection.rank == 0:
            LOG.info(
                "Step %d: from %s to %s. Draining took %.3f s, the hand-over %.3f s.",
                done.step, before, state.mode, done.drain_seconds, done.seconds,
            )  # fmt: skip

    @property
    def _tokens(self) -> Tokens:
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
