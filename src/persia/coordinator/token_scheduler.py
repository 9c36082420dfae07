"""The token scheduler: batches, tokens and the order of arrivals (GBA paper, section 4.1; protocol, section 12)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

from persia.coordinator.policy import SwitchPolicy
from persia.coordinator.recorded_arrivals import RecordedArrivals
from persia.coordinator.scheduler_state import SchedulerState, StateChange, WorkerState, apply_change
from persia.coordinator.state_log import StateLog
from persia.errors import ConfigError, DeadlineError, PersiaError, RoleDiedError, StalePushError
from persia.modes import Auto, AutoEvidence, Mode
from persia.services import TrainingPhase
from persia.telemetry.logs import get_logger
from persia.types import (
    NO_LOSSES,
    ArrivalRecord,
    Caller,
    Losses,
    PushHeader,
    QuiesceResult,
    StepTiming,
    Ticket,
    Token,
    TokenReport,
)

__all__ = ["TokenScheduler"]

LOG = get_logger("persia.modes")


class TokenScheduler(RecordedArrivals):
    """Implements `persia.services.TokenService`. Thread-safe; some calls wait for other NN workers.

    Args:
        timeout: maximum number of seconds that a call waits.
        path: file to which the state is saved, and from which it is restored if the file exists; None for no file.
        clock: clock in seconds, for rates.
    """

    def __init__(
        self,
        timeout: float = 600.0,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = timeout
        self._log = StateLog(path, SchedulerState, StateChange, apply_change)
        self._clock = clock
        self._policy: SwitchPolicy | None = None
        self._choosing = False
        self._policy_began = 0.0
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        """Ranks that wait in `draw` for the gate."""
        self._taking: set[int] = set()
        """Ranks that wait in `take` for the decision whether the phase needs another batch."""
        self._state = self._log.load() or SchedulerState()
        phase = self._state.phase
        self._mode: Mode | None = phase.mode if phase is not None else None

    # --- a phase ----------------------------------------------------------------------------------------------

    def begin(self, phase: TrainingPhase) -> None:
        """Begins a phase; see `persia.services.TokenService`."""
        group = phase.mode.group(phase.nn_workers, phase.local_batch or 1)
        with self._changed:
            state, old = self._state, self._state.phase
            if old is not None and phase[:2] <= old[:2]:
                if phase == old:
                    return
                raise StalePushError(f"Phase {phase.number} of generation {phase.generation} has ended.")
            same_generation = old is not None and phase.generation == old.generation
            if old is not None and same_generation and state.quiesced is None:
                raise PersiaError(f"Phase {phase.number} cannot begin: phase {old.number} is not quiesced.")
            if old is not None and old.epoch == phase.epoch:
                returned, lost = state.untrained(phase.position)
            else:
                returned, lost = [], len(state.returned)
            state.report.lost_batches += lost
            # A dead NN worker stays dead until all restart as another generation.
            before = state.workers if same_generation else {}
            workers = {}
            for rank in range(phase.nn_workers):
                previous = before.get(rank, WorkerState())
                workers[rank] = WorkerState(alive=previous.alive, ended=not previous.alive, lost=previous.lost)
            self._state = SchedulerState(
                phase=phase,
                quiesced=None,
                group=group if phase.local_batch else 0,
                step=phase.step,
                following=phase.position,
                returned=returned,
                workers=workers,
                report=state.report,
                requested=state.requested,
                stopped=state.requested is not None,
                nn_workers=phase.nn_workers,
                local_batch=phase.local_batch,
            )
            self._state.tokens = phase.step * self._state.group
            self._state.report.begin(self._clock())
            self._mode = phase.mode
            self._save()

    def take(self, caller: Caller, request: int) -> int | None:
        """Hands out the next batch of the pass; see `persia.services.TokenService`."""
        with self._changed:
            worker = self._enter(caller)
            if request <= worker.requests:
                return worker.answer
            self._taking.add(caller.rank)
            self._changed.notify_all()
            try:
                known = self._changed.wait_for(
                    lambda: (
                        self._state.may_take(self._known_mode())
                        or self._over(caller)
                        or not worker.alive
                        or request <= worker.requests
                    ),
                    self._timeout,
                )
            finally:
                self._taking.discard(caller.rank)
            worker, state = self._enter(caller), self._current(caller)  # The NN worker may have died during the wait.
            if request <= worker.requests:  # A repeated call was faster.
                return worker.answer
            if not known:
                busy = [rank for rank, w in state.workers.items() if w.taken or w.drawn]
                raise DeadlineError(
                    f"NN worker {caller.rank} waited {self._timeout:g} s for its next batch. "
                    f"Late with their open batches: NN workers {', '.join(map(str, busy))}.",
                    late=busy,
                    timeout=self._timeout,
                )
            state.take(worker, request)
            self._append(caller.rank)
            return worker.answer

    def end(self, caller: Caller, number: int) -> None:
        """Sets the end of the pass; see `persia.services.TokenService`."""
        with self._changed:
            worker = self._enter(caller)
            state = self._state
            state.end = number if state.end is None else min(state.end, number)
            if number in worker.taken:
                state.untake(worker, [number])
            worker.ended = True
            self._save()

    def stop(self) -> None:
        """Stops handing out batches in this phase; see `persia.services.TokenService`."""
        with self._changed:
            self._state.stopped = True
            self._save()

    def draw(
        self,
        caller: Caller,
        sequence: int,
        number: int,
        rows: int,
        done: int,
        filled: int,
        lost: Losses = NO_LOSSES,
        request: int = 0,
    ) -> Token:
        """Draws the token of a batch, and may hand out the next batch; see `persia.services.TokenService`."""
        with self._changed:
            worker = self._enter(caller)
            self._state.confirm(worker, done, filled, lost)
            if worker.has_drawn(sequence):
                return worker.token_of(sequence)
            mode = self._known_mode()
            if not self._state.group:
                self._state.set_group(mode.group(self._state.current.nn_workers, rows))
                self._state.local_batch = rows
            abandoned = self._state.assign(worker)
            if not abandoned and not self._gate(caller.rank):
                self._waiting.add(caller.rank)
                self._changed.notify_all()
                try:
                    opened = self._changed.wait_for(
                        lambda: (
                            self._gate(caller.rank)
                            or self._state.abandoned
                            or self._over(caller)
                            or worker.has_drawn(sequence)
                        ),
                        self._timeout,
                    )
                finally:
                    self._waiting.discard(caller.rank)
                worker = self._enter(caller)
                if worker.has_drawn(sequence):  # A repeated call was faster.
                    return worker.token_of(sequence)
                abandoned = self._state.assign(worker)
                if not opened:
                    raise self._gate_closed(caller.rank)
            if abandoned:
                self._append(caller.rank)
                return Token(None, 0, None, abandoned)
            self._state.draw(mode, worker, sequence, number)
            if request == worker.requests + 1 and self._state.may_take(mode):  # A call of `take` may be in flight.
                self._state.take(worker, request)
            self._append(caller.rank)
            return worker.token_of(sequence)

    def arrive(self, caller: Caller, sequence: int, rows: int, version: int) -> Ticket:
        """Decides what happens to a gradient; see `persia.services.TokenService`."""
        with self._changed:
            worker = self._enter(caller)
            if worker.ticket is not None and worker.ticket.header.sequence == sequence:
                return worker.ticket
            ticket, drawn = self._state.arrive(self._known_mode(), caller.rank, sequence, rows)
            if self.record is not None:
                step, slot = ticket.header.step, ticket.header.slot
                self.record.arrivals.append(
                    ArrivalRecord(caller.rank, drawn.number, rows, drawn.value, version, step, slot, ticket.decay)
                )
            self._state.report.count(caller.rank, ticket, version, self._clock())
            self._append(caller.rank, counted=True)
            return ticket

    def abandoned(self, caller: Caller, filled: int) -> list[PushHeader]:
        """Returns abandoned pushes to fill; see `persia.services.TokenService`."""
        with self._changed:
            worker = self._enter(caller)
            self._state.confirm(worker, 0, filled)
            assigned = self._state.assign(worker)
            self._append(caller.rank)
            return assigned

    def quiesce(self, caller: Caller, done: int, filled: int, lost: Losses = NO_LOSSES) -> QuiesceResult:
        """Waits until all NN workers have finished the phase; see `persia.services.TokenService`."""
        with self._changed:
            worker = self._enter(caller)
            self._state.confirm(worker, done, filled, lost)
            worker.ended = worker.waiting = True
            self._state.untake(worker, list(worker.taken))
            self._save()
            complete = self._changed.wait_for(
                lambda: self._state.all_waiting() or self._state.abandoned or self._over(caller), self._timeout
            )
            worker = self._enter(caller)
            abandoned = self._state.assign(worker)
            if abandoned:
                self._save()
            elif not complete:
                late = [r for r, w in self._state.workers.items() if w.alive and not w.waiting]
                raise DeadlineError(
                    f"NN workers {', '.join(map(str, late))} have not finished phase {caller.phase} within "
                    f"{self._timeout:g} s. Check what delays them, or raise `timeout`.",
                    late=late,
                    timeout=self._timeout,
                )
            state = self._state
            trained = state.following if state.end is None else min(state.following, state.end)
            if not abandoned and (state.leader is None or state.leaderless()):
                state.leader = min(rank for rank, w in state.workers.items() if w.alive)
                self._save()
            dead = sorted(rank for rank, w in state.workers.items() if not w.alive)
            # Batches of dead NN workers are trained in another phase of the pass.
            ended = state.end is not None and trained >= state.end and not state.returned
            return QuiesceResult(
                state.leader or 0, state.step, state.held, trained, ended, abandoned, dead, state.lost_by_dead()
            )

    def drained(self, caller: Caller, step: int) -> int:
        """Ends a phase; see `persia.services.TokenService`."""
        with self._changed:
            self._enter(caller)
            if step >= 0:
                self._state.quiesced = self._state.step = step
                self._state.held = 0
                self._state.report.end(self._clock())
                self._save()
            elif not self._changed.wait_for(
                lambda: self._state.quiesced is not None or self._over(caller) or self._state.leaderless(),
                self._timeout,
            ):
                raise DeadlineError(
                    f"NN worker {self._state.leader} has not drained the PSs within {self._timeout:g} s. Check what "
                    "delays it, or raise `timeout`.",
                    timeout=self._timeout,
                )
            state = self._current(caller)
            if state.quiesced is None:
                raise RoleDiedError(
                    f"NN worker {state.leader} died before draining the PSs.", role="nn_worker", rank=state.leader
                )
            return state.quiesced

    # --- mode switches ------------------------------------------------------------------------------------------

    def announce(self, nn_workers: int, local_batch: int) -> None:
        """Records the sizes of a phase without tokens; see `persia.services.TokenService`."""
        with self._changed:
            self._state.nn_workers, self._state.local_batch = nn_workers, local_batch
            self._save()

    def request(self, mode: Mode) -> None:
        """Requests another mode at the next boundary; see `persia.services.TokenService`."""
        with self._changed:
            state = self._state
            if state.requested == mode:
                return
            if state.requested is not None:
                raise PersiaError(
                    f"Cannot switch to {mode}: a switch to {state.requested} is in progress. Wait until it completes.",
                    mode=str(state.requested),
                )
            state.request(mode)
            self._save()
            if self._policy is not None and self._choosing:
                LOG.info("Mode %s was requested manually; %s no longer applies.", mode, self._policy.auto)
            self._choosing = False

    def requested(self) -> Mode | None:
        """Returns the requested mode."""
        with self._changed:
            return self._state.requested

    def resolve(self, mode: Mode) -> None:
        """Clears a request; see `persia.services.TokenService`."""
        with self._changed:
            if self._state.requested == mode:
                self._state.requested = None
                self._save()

    def begin_auto(self, auto: Auto, nn_workers: int, asynchronous: bool) -> None:
        """Chooses the mode by step times; see `persia.services.TokenService`."""
        with self._changed:
            if self._policy is None or self._policy.auto != auto:
                self._policy, self._choosing = SwitchPolicy(auto, nn_workers, asynchronous), True
                self._policy_began = self._clock()
            self._policy.nn_workers = nn_workers
            # While a switch is pending, the policy is ahead of the mode.
            self._policy.begin(asynchronous if self._state.requested is None else self._policy.asynchronous)

    def report_timings(self, rank: int, timings: list[StepTiming]) -> bool:
        """Records step timings of an NN worker; see `persia.services.TokenService`."""
        with self._changed:
            if self._policy is None:
                return False
            if not self._choosing or self._state.requested is not None:
                return True
            choice = self._policy.add(rank, timings, self._clock() - self._policy_began)
            if choice is not None:
                auto = self._policy.auto
                try:
                    self._state.request(auto.asynchronous if choice.asynchronous else auto.sync)
                    self._save()
                except ConfigError as error:
                    LOG.error("Mode switch rejected; %s no longer applies: %s", auto, error)
                    self._choosing = False
            return True

    def evidence(self) -> AutoEvidence:
        """Returns the mode choices so far, and the step times behind them."""
        with self._changed:
            return self._policy.evidence() if self._policy is not None else AutoEvidence()

    # --- deaths and counts ------------------------------------------------------------------------------------

    def cancel(self, generation: int, rank: int) -> bool:
        """Cancels a dead NN worker; see `persia.services.TokenService`."""
        with self._changed:
            state = self._state
            if state.phase is None or state.phase.generation != generation or state.quiesced is not None:
                return False
            worker = state.workers.get(rank)
            if worker is None:
                return False
            others_continue = state.leader is None
            if not worker.alive:
                return others_continue
            state.cancel(rank)
            self._save()
            return others_continue

    def summary(self) -> TokenReport:
        """Returns a copy of the counts so far."""
        with self._changed:
            return copy.deepcopy(self._state.report)

    # --- under the lock ---------------------------------------------------------------------------------------

    def _known_mode(self) -> Mode:
        assert self._mode is not None
        return self._mode

    def _enter(self, caller: Caller) -> WorkerState:
        """Returns the state of the caller, once its phase has begun."""
        ready = self._changed.wait_for(lambda: self._over(caller) or self._has_begun(caller), self._timeout)
        state = self._current(caller)
        if not ready or state.phase is None:
            raise DeadlineError(
                f"Phase {caller.phase} has not begun within {self._timeout:g} s: NN worker 0 is late.",
                phase=caller.phase,
                timeout=self._timeout,
            )
        worker = state.workers.get(caller.rank)
        self._log.catch_up(state)
        if worker is None or not worker.alive:
            raise StalePushError(
                f"NN worker {caller.rank} of {len(state.workers)} is not an active member.", rank=caller.rank
            )
        return worker

    def _has_begun(self, caller: Caller) -> bool:
        phase = self._state.phase
        return phase is not None and (phase.generation, phase.number) == caller[:2]

    def _over(self, caller: Caller) -> bool:
        phase = self._state.phase
        return phase is not None and (phase.generation, phase.number) > caller[:2]

    def _current(self, caller: Caller) -> SchedulerState:
        if self._over(caller):
            raise StalePushError(
                f"Phase {caller.phase} of generation {caller.generation} has ended.", phase=caller.phase
            )
        return self._state

    def _gate(self, rank: int) -> bool:
        mode = self._known_mode()
        # If `take` may answer, the workers that wait in it have been woken and will take a batch.
        taking = () if self._state.may_take(mode) else self._taking
        return self._state.gate(mode, rank, self._waiting, taking)

    def _gate_closed(self, rank: int) -> DeadlineError:
        least = min(w.finished for w in self._state.workers.values() if w.alive)
        slow = [r for r, w in self._state.workers.items() if w.alive and w.finished == least and r != rank]
        return DeadlineError(
            f"NN worker {rank} waited {self._timeout:g} s at the closed gate of {self._mode}. "
            f"Slowest: NN workers {', '.join(map(str, slow))}.",
            rank=rank,
            slowest=slow,
            timeout=self._timeout,
        )

    def _save(self) -> None:
        self._log.save(self._state)
        self._changed.notify_all()

    def _append(self, rank: int, *, counted: bool = False) -> None:
        """Saves the outcome of a call of an NN worker for a batch; `counted` says whether the report has changed."""
        self._log.append(StateChange.of(self._state, rank, counted=counted), self._state)
        self._changed.notify_all()
