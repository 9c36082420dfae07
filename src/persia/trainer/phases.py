"""Training in segments, one mode each, and changes of mode between them (docs/reference/protocol.md, section 12)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple

from persia.batching.batch import Batch
from persia.coordinator import TokenReport
from persia.dense import SharedNetwork
from persia.errors import ConfigError, NNWorkersDiedError
from persia.modes import Dense, Gba, Mode, ModeChoice
from persia.nn.step_timings import StepTimings
from persia.nn.token_client import TokenClient
from persia.optim import APMSqueeze
from persia.optim.averaged import Averaged
from persia.services import DenseMaker, ProcessCluster, TrainingPhase
from persia.trainer.recording import ScheduleRecorder
from persia.trainer.sources import LocalSource, declared_batch_size, largest_batch
from persia.types import Caller, FedBatch

if TYPE_CHECKING:
    from persia.trainer import Trainer
    from persia.trainer.progress import FitProgress

__all__ = ["ModeSwitch", "Phases", "check_mode", "scheduled"]

LOG = logging.getLogger("persia.modes")

REPORTS = 8
"""Reports of step times per NN worker in one window of Auto."""

LOOK_SECONDS = 0.1
"""How often an all-reduce segment looks whether a switch is wanted."""


class ModeSwitch(NamedTuple):
    """A change of mode.

    Attributes:
        step: global step at which it happened.
        before: the mode until then.
        after: the mode from then on.
        drain_seconds: until all NN workers were at rest.
        seconds: for all the rest: hand-over of the network both ways, on Ray also a snapshot.
    """

    step: int
    before: Mode
    after: Mode
    drain_seconds: float
    seconds: float


class Phases:
    """Runs the segments of a trainer, and changes its mode between them.

    Args:
        trainer: of one NN worker.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._state = trainer.state
        self._served: Mode | None = None
        """The mode that the PSs are in, as far as this trainer has told them."""
        self._number = 0
        self._shared: SharedNetwork | None = None
        self._again = False
        self._dead: list[int] = []
        """NN workers that died in the last segment, while the others went on."""
        self.switches: list[ModeSwitch] = []
        self._leaving: tuple[Mode, float, float] | None = None
        self._recording = ScheduleRecorder(trainer.options.record_dir, trainer.state, trainer.step, trainer.embeddings)

    def report(self) -> TokenReport | None:
        """Returns the report of asynchronous modes; None if there were none."""
        tokens = self._trainer.embeddings.connection.tokens
        if tokens is None:
            return None
        report = tokens.summary()
        return report if report.workers else None

    def begin(self, data: Iterable[Batch] | None, anew: bool) -> None:
        """A call of `fit` begins.

        Args:
            data: see `Trainer.fit`.
            anew: whether the data may be others than before.
        """
        if data is not None:
            known = declared_batch_size(data) or (0 if anew else self._state.local_batch)
            self._state.local_batch = known or largest_batch(data, self._trainer.mode)

    # --- Auto ---------------------------------------------------------------------------------------------------

    def begin_auto(self) -> None:
        """Step times are told from now on, if they decide the mode."""
        trainer = self._trainer
        auto, connection = trainer.auto, trainer.embeddings.connection
        tokens = connection.tokens
        if auto is None or tokens is None:
            return

        def begin() -> None:
            if trainer.mode in (auto.sync, auto.asynchronous):  # Else it has been chosen by hand.
                tokens.begin_auto(auto, connection.nn_workers, trainer.mode == auto.asynchronous)

        trainer.embeddings.step_timings = StepTimings(tokens, connection.rank, auto.seconds / REPORTS, begin)
        trainer.step.replicas.run_on_rank0(begin, NoneType)

    def mode_choices(self) -> list[ModeChoice]:
        """Returns the decisions of Auto so far; the first NN worker writes their evidence to `log_dir`. All call it."""
        if self._trainer.auto is None:
            return []
        return self._trainer.step.replicas.run_on_rank0(self._logged, list[ModeChoice])

    def _logged(self) -> list[ModeChoice]:
        tokens = self._trainer.embeddings.connection.tokens
        assert tokens is not None
        evidence = tokens.evidence()
        if self._trainer.options.log_dir is not None:
            evidence.save(Path(self._trainer.options.log_dir) / "auto.json")
        return evidence.choices

    # --- changes of mode ----------------------------------------------------------------------------------------

    def follow(self, run: FitProgress) -> bool:
        """At rest: takes over the mode that was asked for, or that the schedule has for this step; whether it did."""
        trainer = self._trainer
        entry = scheduled(trainer.options.mode_schedule, trainer.global_step)
        due, self._state.schedule_entry = entry != self._state.schedule_entry, entry
        wanted = trainer.step.replicas.run_on_rank0(
            lambda: self._requested() or (entry[1] if due and entry else None), Mode | None
        )
        if wanted is not None:
            self._change(wanted)
        trainer.step.replicas.stop = False
        run.next_switch = next((s for s, _ in trainer.options.mode_schedule if s > trainer.global_step), None)
        return wanted is not None

    def _requested(self) -> Mode | None:
        """Returns the mode that was requested, if this trainer can run it."""
        trainer = self._trainer
        tokens = trainer.embeddings.connection.tokens
        mode = tokens.requested() if tokens is not None else None
        if tokens is not None and mode is not None:
            try:
                check_mode(trainer, mode, self._state.local_batch)
            except ConfigError as error:
                LOG.error("Mode switch rejected: %s", error)
                tokens.resolve(mode)
                return None
        return mode

    def followed(self) -> None:
        """The mode that was asked for is in force, also for those who begin anew after a death."""
        tokens = self._trainer.embeddings.connection.tokens
        mode = self._trainer.mode

        def resolve() -> None:
            if tokens is not None:
                tokens.resolve(mode)

        self._trainer.step.replicas.run_on_rank0(resolve, NoneType)

    def _change(self, mode: Mode) -> None:
        if mode == self._state.mode:
            return
        if self._leaving is None:
            now = time.monotonic()
            self._leaving = self._state.mode, now, now
        self._state.change_mode(mode)

    def _entered(self) -> None:
        """The segment of the new mode begins now."""
        self._served = self._trainer.mode
        if self._leaving is None:
            return
        (before, stopped, rested), self._leaving = self._leaving, None
        trainer = self._trainer
        if before == trainer.mode:
            return
        done = ModeSwitch(trainer.global_step, before, trainer.mode, rested - stopped, time.monotonic() - rested)
        self.switches.append(done)
        if trainer.embeddings.connection.rank == 0:
            LOG.info(
                "Step %d: from %s to %s. Draining took %.3f s, the hand-over %.3f s.",
                done.step, before, trainer.mode, done.drain_seconds, done.seconds,
            )  # fmt: skip

    def _left(self, stopped: float) -> None:
        self._leaving = self._trainer.mode, stopped, time.monotonic()

    # --- segments -----------------------------------------------------------------------------------------------

    def train(self, run: FitProgress) -> bool:
        """Trains to the next rest. Returns whether the pass has ended."""
        self._number += 1
        on_demand = self._trainer.mode.dense() is Dense.SERVER
        self._trainer.source.arrange(on_demand, self._again)
        self._again = False
        if on_demand:
            return self._on_dense_servers(run)
        return self._in_replicas(run)

    def check_others(self) -> None:
        """Raises NNWorkersDiedError if NN workers have died in the segment, and nothing can be agreed on without them.

        So it is where torch.distributed joins the replicas.
        """
        if self._dead and self._trainer.embeddings.connection.replicas is None:
            ranks = ", ".join(map(str, self._dead))
            raise NNWorkersDiedError(f"NN workers {ranks} have died.", ranks=self._dead)

    def _in_replicas(self, run: FitProgress) -> bool:
        trainer = self._trainer
        embeddings, replicas = trainer.embeddings, trainer.step.replicas
        connection = embeddings.connection
        if self._served != trainer.mode:
            replicas.run_on_rank0(self._switch_servers, NoneType)
        self._recording.begin(None)
        if connection.tokens is not None and connection.rank == 0:
            connection.tokens.announce(connection.nn_workers, self._state.local_batch)
        self._entered()
        wanted = run.batches_to_boundary()
        drawn, looked = 0, time.monotonic()
        whole = stopped = False
        began = 0.0
        try:
            prefetched = embeddings.prefetch(self._in_turn(wanted), replicas, start=self._state.position)
            with contextlib.closing(prefetched) as batches:  # type: ignore[type-var]
                for batch in batches:
                    step = trainer.global_step + 1
                    self._state.local_batch = max(self._state.local_batch, batch.weight)
                    logits, loss = trainer.step.train(batch, embeddings(batch))
                    drawn += 1
                    self._state.position += replicas.nn_workers
                    trainer.source.forget(self._state.position)
                    run.trained(step, batch, logits, loss)
                    replicas.stop = replicas.stop or trainer.stopping
                    if connection.tokens is not None and connection.rank == 0:
                        now = time.monotonic()
                        if now - looked > LOOK_SECONDS:
                            looked = now
                            replicas.stop = replicas.stop or connection.tokens.requested() is not None
                    if drawn % trainer.options.accumulation_steps == 0 and replicas.stopping():
                        stopped, began = True, time.monotonic()
                        break
            whole = True
        finally:
            # Also after an error: the embeddings have applied what was computed, the network does likewise. Not so with
            # several NN workers: the others do not know of the error, and would not take part.
            if whole or replicas.nn_workers == 1:
                trainer.step.finish()
            run.score_rest()
        self._recording.end(self._state.local_batch)
        if stopped:
            self._again = True
            self._left(began)
            return False
        return wanted is None or drawn < wanted

    def _in_turn(self, wanted: int | None) -> Iterator[Batch | FedBatch]:
        """This NN worker's batches: every so many-th."""
        trainer = self._trainer
        connection = trainer.embeddings.connection
        number = trainer.position + connection.rank
        left = wanted
        while left is None or left > 0:
            batch = trainer.source.read(number)
            if batch is None:
                return
            yield batch
            number += connection.nn_workers
            left = left - 1 if left is not None else None

    def _switch_servers(self) -> None:
        trainer = self._trainer
        connection = trainer.embeddings.connection
        for server in connection.servers:
            server.switch(trainer.mode, connection.generation, trainer.global_step)

    def _on_dense_servers(self, run: FitProgress) -> bool:
        trainer = self._trainer
        embeddings, connection = trainer.embeddings, trainer.embeddings.connection
        tokens = connection.tokens
        assert tokens is not None
        optimizer = trainer.step.optimizer
        averaged = optimizer.hand_over() if isinstance(optimizer, APMSqueeze) else None
        shared = self._shared = self._shared or self._share(averaged)
        caller = Caller(connection.generation, self._number, connection.rank)
        steps = run.steps_to_boundary()

        def begin() -> int:
            self._state.local_batch = self._state.local_batch or self._first_rows()
            self._advise()
            shared.load(connection.generation, trainer.global_step)
            self._switch_servers()
            tokens.begin(
                TrainingPhase(
                    connection.generation,
                    self._number,
                    trainer.mode,
                    connection.nn_workers,
                    trainer.epoch,
                    trainer.position,
                    trainer.global_step,
                    steps,
                    self._state.local_batch,
                )
            )
            return self._state.local_batch

        self._state.local_batch = trainer.step.replicas.run_on_rank0(begin, int)
        self._recording.begin(shared)
        self._entered()
        client = TokenClient(tokens, caller, connection.worker, shared, embeddings.pushes)
        prefetched = embeddings.prefetch(client.batches(trainer.source.read), tokens=client)
        try:
            with contextlib.closing(prefetched) as batches:  # type: ignore[type-var]
                for batch in batches:
                    step = trainer.global_step + 1
                    known, self._state.local_batch = self._state.local_batch, max(self._state.local_batch, batch.weight)
                    if not known and connection.rank == 0:
                        self._advise()
                    logits, loss = trainer.step.compute(batch, embeddings(batch))
                    run.trained(step, batch, logits, loss)
                    if trainer.stopping:
                        tokens.stop()
        finally:
            run.score_rest()
        began = time.monotonic()
        rest = client.quiesce()
        rested = time.monotonic()
        step = rest.step + (rest.held > 0)
        if connection.rank == rest.leader:
            for server in connection.servers:
                server.drain(connection.generation, rest.step, rest.held)
            shared.drain(connection.generation, rest.step, rest.held)
            client.drained(step)
            self._recording.write(self._state.local_batch)
        else:
            client.drained(-1)
        shared.take_over()
        if isinstance(optimizer, APMSqueeze):
            optimizer.take_back()
        self._state.global_step = step
        self._state.position = rest.position
        trainer.source.forget(rest.position)
        self._leaving = trainer.mode, began, rested
        self._dead = rest.dead
        return rest.ended

    def _first_rows(self) -> int:
        """The local batch, as the next batch of the source tells it; 0 where data loaders read."""
        trainer = self._trainer
        if not isinstance(trainer.source, LocalSource):
            return 0
        first, second = (trainer.source.read(trainer.position + ahead) for ahead in (0, 1))
        rows = len(first) if first is not None else 0
        if second is None and isinstance(trainer.mode, Gba):  # By itself it makes a step, whatever M is.
            rows = max(rows, trainer.mode.global_batch_size)
        return rows

    def _share(self, averaged: Averaged | None) -> SharedNetwork:
        """The dense PSs; `averaged` stands for APMSqueeze there."""
        trainer = self._trainer
        connection = trainer.embeddings.connection
        options = trainer.options
        assert connection.dense is not None
        maker = DenseMaker(trainer.optimizer_factory, options.schedule, options.clip_norm)
        optimizer = trainer.step.optimizer
        if isinstance(optimizer, APMSqueeze) and averaged is not None:
            make = averaged.maker([p for p in trainer.model.parameters() if p.requires_grad])
            maker = DenseMaker(make, options.schedule, optimizer.options.clip_norm)
        servers = connection.dense(maker)
        return SharedNetwork(trainer.model, averaged or optimizer, trainer.step.scheduler, servers, options.timeout)

    def _advise(self) -> None:
        mode = self._trainer.mode
        if isinstance(mode, Gba) and self._state.local_batch:
            advice = mode.advice(self._trainer.embeddings.connection.nn_workers, self._state.local_batch)
            if advice is not None:
                LOG.warning("%s", advice)


def check_mode(trainer: Trainer, mode: Mode, local_batch: int) -> None:
    """Raises ConfigError if this trainer, on its cluster, cannot run a mode."""
    connection = trainer.embeddings.connection
    options = trainer.options
    name = type(mode).__name__
    if not isinstance(trainer.cluster, ProcessCluster):  # There, this process is none of the NN workers.
        mode.group(connection.nn_workers, local_batch or 1)
    if mode.dense() is not Dense.SERVER:
        return
    if connection.tokens is None or connection.dense is None:
        raise ConfigError(f"This cluster has no dense PSs, which the mode {name} needs.", field="mode")
    if options.accumulation_steps > 1:
        raise ConfigError(
            f"accumulation_steps = {options.accumulation_steps} does not go with the mode {name}. Leave it at 1: how "
            "many gradients make a step is the mode's, Gba's `global_batch_size` for example.",
            field="accumulation_steps",
        )
    if options.precision == "fp16":
        raise ConfigError(
            f'precision = "fp16" does not go with the mode {name}: the loss scale would follow a step that is made '
            'elsewhere. Use "bf16" or "float32".',
            field="precision",
        )


def scheduled(schedule: Sequence[tuple[int, Mode]], step: int) -> tuple[int, Mode] | None:
    """The entry of a schedule that is in force at a step."""
    past = [entry for entry in schedule if entry[0] <= step]
    return max(past, key=lambda entry: entry[0]) if past else None
