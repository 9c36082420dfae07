"""Data list, token list, and the order of arrivals (GBA paper, section 4.1; docs/reference/protocol.md, section 12)."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable

from persia.coordinator.policy import SwitchPolicy
from persia.coordinator.recording import RecordedArrivals
from persia.coordinator.scheduler_state import SchedulerState, WorkerState
from persia.coordinator.store import StateFile
from persia.errors import ConfigError, DeadlineError, PersiaError, RoleDiedError, StalePushError
from persia.modes import Action, Arrival, Auto, AutoEvidence, Mode
from persia.services import TrainingPhase
from persia.types import (
    ArrivalRecord,
    Caller,
    PushHeader,
    QuiesceResult,
    StepTiming,
    Ticket,
    Token,
    TokenReport,
)

__all__ = ["TokenScheduler"]

LOG = logging.getLogger("persia.modes")


class TokenScheduler(RecordedArrivals):
    """See `persia.services.Tokens`. Safe to call from several threads; `draw`, `rest` and `settled` wait for others.

    Args:
        timeout: seconds that a call waits.
        path: file that the state is kept in, and taken from if it is there; None to forget it.
        clock: seconds, for rates.
    """

    def __init__(
        self,
        timeout: float = 600.0,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = timeout
        self._file = StateFile(path, SchedulerState)
        self._clock = clock
        self._policy: SwitchPolicy | None = None
        self._choosing = False
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        """Ranks whose draw waits for the gate."""
        self._taking: set[int] = set()
        """Ranks that wait for whether the segment needs another batch."""
        self._state = self._file.load() or SchedulerState()
        segment = self._state.segment
        self._mode: Mode | None = segment.mode if segment is not None else None

    # --- a segment --------------------------------------------------------------------------------------------

    def begin(self, segment: TrainingPhase) -> None:
        """Begins a segment; see `persia.services.Tokens`."""
        group = segment.mode.group(segment.nn_workers, segment.local_batch or 1)
        with self._changed:
            state, old = self._state, self._state.segment
            if old is not None and segment[:2] <= old[:2]:
                if segment == old:
                    return
                raise StalePushError(f"Segment {segment.number} of generation {segment.generation} is over.")
            if old is not None and segment.generation == old.generation and state.settled is None:
                raise PersiaError(f"Segment {old.number} is not at rest yet, so {segment.number} cannot begin.")
            # NN workers that start anew may begin earlier than that: what follows is handed out in any case.
            same_pass = old is not None and old.epoch == segment.epoch
            returned = [n for n in state.returned if n < segment.position] if same_pass else []
            state.report.lost_batches += len(state.returned) - len(returned)
            # Whoever is dead stays so until NN workers start anew, which makes another generation.
            same = state.accounts if old is not None and segment.generation == old.generation else {}
            dead = {rank for rank, account in same.items() if not account.alive}
            self._state = SchedulerState(
                segment=segment,
                settled=None,
                group=group if segment.local_batch else 0,
                step=segment.step,
                following=segment.position,
                returned=returned,
                accounts={r: WorkerState(alive=r not in dead, ended=r in dead) for r in range(segment.nn_workers)},
                report=state.report,
                wanted=state.wanted,
                stopped=state.wanted is not None,
                nn_workers=segment.nn_workers,
                local_batch=segment.local_batch,
            )
            self._state.tokens = segment.step * self._state.group
            self._state.report.begin(self._clock())
            self._mode = segment.mode
            self._save()

    def take(self, caller: Caller, request: int) -> int | None:
        """The next batch of the pass; see `persia.services.Tokens`."""
        with self._changed:
            account = self._enter(caller)
            if request <= account.requests:
                return account.answer
            self._taking.add(caller.rank)
            self._changed.notify_all()
            try:
                known = self._changed.wait_for(
                    lambda: (
                        self._state.may_take(self._known_mode())
                        or self._over(caller)
                        or not account.alive
                        or request <= account.requests
                    ),
                    self._timeout,
                )
            finally:
                self._taking.discard(caller.rank)
            account, state = self._enter(caller), self._current(caller)  # It may be dead by now.
            if request <= account.requests:  # It has come twice, and the other call was earlier.
                return account.answer
            if not known:
                busy = [rank for rank, a in state.accounts.items() if a.taken or a.drawn]
                raise DeadlineError(
                    f"NN worker {caller.rank} waited {self._timeout:g} s to know whether the segment needs another "
                    f"batch. Late: the NN workers {', '.join(map(str, busy))}, with the batches that they have.",
                    late=busy,
                    timeout=self._timeout,
                )
            account.requests, account.answer = request, state.next_number()
            if account.answer is None:
                account.ended = True
            else:
                account.taken.append(account.answer)
            self._save()
            return account.answer

    def end(self, caller: Caller, number: int) -> None:
        """The pass has no batch `number`; see `persia.services.Tokens`."""
        with self._changed:
            account = self._enter(caller)
            state = self._state
            state.end = number if state.end is None else min(state.end, number)
            if number in account.taken:
                account.taken.remove(number)
            account.ended = True
            self._save()

    def stop(self) -> None:
        """No more batches in this segment; see `persia.services.Tokens`."""
        with self._changed:
            self._state.stopped = True
            self._save()

    def draw(self, caller: Caller, sequence: int, number: int, rows: int, done: int, filled: int) -> Token:
        """A batch's token; see `persia.services.Tokens`."""
        with self._changed:
            account = self._enter(caller)
            self._state.confirm(account, done, filled)
            if account.came(sequence):
                return account.token_of(sequence)
            mode = self._known_mode()
            if not self._state.group:
                self._state.set_group(mode.group(self._state.current.nn_workers, rows))
                self._state.local_batch = rows
            orphans = self._state.orphans_for(account)
            if not orphans and not self._gate(caller.rank):
                self._waiting.add(caller.rank)
                self._changed.notify_all()
                try:
                    opened = self._changed.wait_for(
                        lambda: (
                            self._gate(caller.rank)
                            or self._state.orphans
                            or self._over(caller)
                            or account.came(sequence)
                        ),
                        self._timeout,
                    )
                finally:
                    self._waiting.discard(caller.rank)
                account = self._enter(caller)
                if account.came(sequence):  # Twice, and the other call was earlier.
                    return account.token_of(sequence)
                orphans = self._state.orphans_for(account)
                if not opened:
                    raise self._shut(caller.rank)
            if orphans:
                self._save()
                return Token(None, 0, orphans)
            drawn = self._state.draw(mode, account, number)
            account.drawn[sequence] = drawn
            if number in account.taken:
                account.taken.remove(number)
            self._save()
            return Token(drawn.value, drawn.least, [])

    def arrive(self, caller: Caller, sequence: int, rows: int, version: int) -> Ticket:
        """What becomes of a gradient; see `persia.services.Tokens`."""
        with self._changed:
            account = self._enter(caller)
            if account.ticket is not None and account.ticket.header.sequence == sequence:
                return account.ticket
            drawn = account.drawn.pop(sequence, None)
            if drawn is None:
                raise StalePushError(f"NN worker {caller.rank} has no token for its push {sequence}.", rank=caller.rank)
            state = self._state
            step, held = state.step, state.held
            decision = self._known_mode().arrive(Arrival(step, held, drawn.value, state.group))
            dropped = decision.action is Action.DROP
            header = PushHeader(
                caller.generation,
                caller.rank,
                sequence,
                step,
                rows,
                slot=-1 if dropped else held,
                group=state.group,
                token=drawn.value,
            )
            account.ticket = Ticket(dropped, header, decision.weight)
            account.finished += 1
            if not dropped:
                account.slots[sequence] = header
                state.held += 1
                if decision.action is Action.APPLY:
                    state.step, state.held = step + 1, 0
                    account.least = step + 1
            if self.record is not None:
                self.record.arrivals.append(
                    ArrivalRecord(
                        caller.rank, drawn.number, rows, drawn.value, version, step, header.slot, decision.weight
                    )
                )
            state.report.count(caller.rank, account.ticket, version, self._clock())
            self._save()
            return account.ticket

    def orphans(self, caller: Caller, filled: int) -> list[PushHeader]:
        """Slots to be filled; see `persia.services.Tokens`."""
        with self._changed:
            account = self._enter(caller)
            self._state.confirm(account, 0, filled)
            found = self._state.orphans_for(account)
            self._save()
            return found

    def rest(self, caller: Caller, done: int, filled: int) -> QuiesceResult:
        """Waits until all are done; see `persia.services.Tokens`."""
        with self._changed:
            account = self._enter(caller)
            self._state.confirm(account, done, filled)
            account.ended = account.resting = True
            account.taken.clear()
            self._save()
            came = self._changed.wait_for(
                lambda: self._state.at_rest() or self._state.orphans or self._over(caller), self._timeout
            )
            account = self._enter(caller)
            orphans = self._state.orphans_for(account)
            if orphans:
                self._save()
            elif not came:
                late = [r for r, a in self._state.accounts.items() if a.alive and not a.resting]
                raise DeadlineError(
                    f"The NN workers {', '.join(map(str, late))} are not done with the segment within "
                    f"{self._timeout:g} s. See what holds them up, or raise `timeout`.",
                    late=late,
                    timeout=self._timeout,
                )
            state = self._state
            trained = state.following if state.end is None else min(state.following, state.end)
            if not orphans and (state.leader is None or not state.accounts[state.leader].alive):
                state.leader = min(rank for rank, a in state.accounts.items() if a.alive)
                self._save()
            dead = sorted(rank for rank, a in state.accounts.items() if not a.alive)
            # Batches of dead NN workers are trained in another segment of the pass.
            ended = state.end is not None and trained >= state.end and not state.returned
            return QuiesceResult(state.leader or 0, state.step, state.held, trained, ended, orphans, dead)

    def settled(self, caller: Caller, step: int) -> int:
        """The PSs are drained; see `persia.services.Tokens`."""
        with self._changed:
            self._enter(caller)
            if step >= 0:
                self._state.settled = self._state.step = step
                self._state.held = 0
                self._state.report.rest(self._clock())
                self._save()
            elif not self._changed.wait_for(
                lambda: self._state.settled is not None or self._over(caller) or self._state.leaderless(), self._timeout
            ):
                raise DeadlineError(
                    f"The PSs were not drained within {self._timeout:g} s by the NN worker that leads.",
                    timeout=self._timeout,
                )
            state = self._current(caller)
            if state.settled is None:
                raise RoleDiedError(
                    f"NN worker {state.leader} died before it had drained the PSs.", role="nn_worker", rank=state.leader
                )
            return state.settled

    # --- a change of mode ---------------------------------------------------------------------------------------

    def announce(self, nn_workers: int, local_batch: int) -> None:
        """A segment without tokens begins; see `persia.services.Tokens`."""
        with self._changed:
            self._state.nn_workers, self._state.local_batch = nn_workers, local_batch
            self._save()

    def request(self, mode: Mode) -> None:
        """Requests another mode at the next boundary; see `persia.services.Tokens`."""
        with self._changed:
            state = self._state
            if state.wanted == mode:
                return
            if state.wanted is not None:
                raise PersiaError(
                    f"A switch to {state.wanted} is under way; wait for it before you request {mode}.",
                    mode=str(state.wanted),
                )
            state.want(mode)
            self._save()
            if self._choosing:
                LOG.info("A mode was requested; it is no longer chosen by %s.", self._policy and self._policy.auto)
                self._choosing = False

    def requested(self) -> Mode | None:
        """Returns the mode that was requested."""
        with self._changed:
            return self._state.wanted

    def resolve(self, mode: Mode) -> None:
        """Clears a request; see `persia.services.Tokens`."""
        with self._changed:
            if self._state.wanted == mode:
                self._state.wanted = None
                self._save()

    def begin_auto(self, auto: Auto, nn_workers: int, strained: bool) -> None:
        """Chooses the mode by step times; see `persia.services.Tokens`."""
        with self._changed:
            if self._policy is None or self._policy.auto != auto:
                self._policy, self._choosing = SwitchPolicy(auto, nn_workers, strained), True
            # While a switch is pending, the policy is ahead of the mode.
            self._policy.begin(strained if self._state.wanted is None else self._policy.strained)

    def timed(self, rank: int, laps: list[StepTiming]) -> bool:
        """Step times of an NN worker; see `persia.services.Tokens`."""
        with self._changed:
            if self._policy is None:
                return False
            if not self._choosing or self._state.wanted is not None:
                return True
            verdict = self._policy.add(rank, laps, self._clock())
            if verdict is not None:
                rule = self._policy.auto
                try:
                    self._state.want(rule.asynchronous if verdict.strained else rule.sync)
                    self._save()
                except ConfigError as error:
                    LOG.error("Mode switch rejected; the mode is no longer chosen automatically: %s", error)
                    self._choosing = False
            return True

    def evidence(self) -> AutoEvidence:
        """Returns what was decided, and by what."""
        with self._changed:
            return self._policy.evidence() if self._policy is not None else AutoEvidence()

    # --- what else happens ------------------------------------------------------------------------------------

    def cancel(self, generation: int, rank: int) -> bool:
        """An NN worker is dead; see `persia.services.Tokens`."""
        with self._changed:
            state = self._state
            if state.segment is None or state.segment.generation != generation or state.settled is not None:
                return False
            account = state.accounts.get(rank)
            if account is None:
                return False
            unknown = state.leader is None
            if not account.alive:
                return unknown
            account.alive = False
            account.ended = True
            lost = list(account.drawn.values())
            state.spare += len(lost)
            state.report.lost_tokens += len(lost)
            state.returned = sorted([*state.returned, *account.taken, *(drawn.number for drawn in lost)])
            state.orphans += [*account.slots.values(), *account.handed[account.filled :]]
            account.taken, account.drawn, account.slots, account.handed = [], {}, {}, []
            state.report.orphans += len(state.orphans)
            self._save()
            return unknown

    def summary(self) -> TokenReport:
        """Returns a copy of the counts so far."""
        with self._changed:
            return copy.deepcopy(self._state.report)

    # --- under the lock ---------------------------------------------------------------------------------------

    def _known_mode(self) -> Mode:
        assert self._mode is not None
        return self._mode

    def _enter(self, caller: Caller) -> WorkerState:
        """The account of the caller, once its segment has begun."""
        begun = self._changed.wait_for(lambda: self._over(caller) or self._begun(caller), self._timeout)
        state = self._current(caller)
        if not begun or state.segment is None:
            raise DeadlineError(
                f"Segment {caller.segment} has not begun within {self._timeout:g} s: NN worker 0 is late.",
                segment=caller.segment,
                timeout=self._timeout,
            )
        account = state.accounts.get(caller.rank)
        if account is None or not account.alive:
            raise StalePushError(
                f"NN worker {caller.rank} is taken for dead, or never was one of {len(state.accounts)}.",
                rank=caller.rank,
            )
        return account

    def _begun(self, caller: Caller) -> bool:
        segment = self._state.segment
        return segment is not None and (segment.generation, segment.number) == caller[:2]

    def _over(self, caller: Caller) -> bool:
        segment = self._state.segment
        return segment is not None and (segment.generation, segment.number) > caller[:2]

    def _current(self, caller: Caller) -> SchedulerState:
        if self._over(caller):
            raise StalePushError(
                f"Segment {caller.segment} of generation {caller.generation} is over.", segment=caller.segment
            )
        return self._state

    def _gate(self, rank: int) -> bool:
        mode = self._known_mode()
        taking = () if self._state.may_take(mode) else self._taking  # Else they have just not noticed.
        return self._state.gate(mode, rank, self._waiting, taking)

    def _shut(self, rank: int) -> DeadlineError:
        least = min(a.finished for a in self._state.accounts.values() if a.alive)
        slow = [r for r, a in self._state.accounts.items() if a.alive and a.finished == least and r != rank]
        return DeadlineError(
            f"NN worker {rank} could not go on within {self._timeout:g} s: the mode lets nobody get further ahead. "
            f"Slowest: NN workers {', '.join(map(str, slow))}.",
            rank=rank,
            slowest=slow,
            timeout=self._timeout,
        )

    def _save(self) -> None:
        self._file.save(self._state)
        self._changed.notify_all()
