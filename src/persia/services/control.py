"""The coordinator, as others see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from persia.modes import Auto, AutoEvidence, Mode
from persia.telemetry.metrics import Health
from persia.types import (
    ArrivalRecord,
    Caller,
    Member,
    Membership,
    PushHeader,
    QuiesceResult,
    ReadRecord,
    StepTiming,
    Ticket,
    Token,
    TokenReport,
)

__all__ = ["ControlPlane", "Coordinator", "Observable", "Tokens", "TrainingPhase"]


class TrainingPhase(NamedTuple):
    """A phase of training in one asynchronous mode. All roles are quiescent before and after it.

    Attributes:
        generation: generation of the NN workers.
        number: number of the phase within the generation, from 1.
        mode: mode of the phase.
        nn_workers: number of NN workers.
        epoch: pass over the data.
        position: number of batches of the pass that are trained already.
        step: first global step.
        steps: maximum number of global steps; None for all data.
        local_batch: rows of a batch; 0 if unknown before the first one.
    """

    generation: int
    number: int
    mode: Mode
    nn_workers: int
    epoch: int
    position: int
    step: int
    steps: int | None
    local_batch: int = 0


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

    def begin(self, segment: TrainingPhase) -> None:
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

    def rest(self, caller: Caller, done: int, filled: int) -> QuiesceResult:
        """This NN worker is done with the segment; waits until all are.

        Raises:
            DeadlineError: it names those that are not.
        """

    def settled(self, caller: Caller, step: int) -> int:
        """The leader has drained all PSs, which are at `step` now. Others give -1 and wait for it. Returns the step."""

    def announce(self, nn_workers: int, local_batch: int) -> None:
        """A segment of an all-reduce mode begins; what is known of it serves to check requests."""

    def request(self, mode: Mode) -> None:
        """Requests another mode from the next boundary on.

        Raises:
            ConfigError: there is no such mode, or it cannot run with these NN workers or batches.
            PersiaError: another switch is under way.
        """

    def requested(self) -> Mode | None:
        """Returns the requested mode; None if no request is pending."""

    def resolve(self, mode: Mode) -> None:
        """Clears a request that was carried out or rejected. No-op if another mode has been requested since.

        Args:
            mode: the mode that `requested` returned.
        """

    def begin_auto(self, auto: Auto, nn_workers: int, strained: bool) -> None:
        """Chooses the mode by step times from now on, until somebody requests a mode.

        Call it when training begins, and when it continues after a pause.

        Args:
            auto: the rule.
            nn_workers: number of NN workers.
            strained: whether the asynchronous mode is in force.
        """

    def timed(self, rank: int, laps: list[StepTiming]) -> bool:
        """What an NN worker has computed since its last report; now and then a switch follows.

        Returns:
            False if no rule is known here: the coordinator has started anew, and should be told it again.
        """

    def evidence(self) -> AutoEvidence:
        """Returns the mode choices of `begin_auto` so far, and the step times behind them."""

    def cancel(self, generation: int, rank: int) -> bool:
        """An NN worker is dead: its tokens are drawn again, its batches go back to the list.

        Returns:
            Whether the others train on, and will hear of it when they rest: not at rest, nor in all-reduce modes.
        """

    def summary(self) -> TokenReport:
        """Returns the counts of all asynchronous phases so far."""

    def record(self) -> None:
        """Keeps arrivals and reads from now on, and forgets those before."""

    def note(self, read: ReadRecord) -> None:
        """What the gradient of a push was computed from; told before the push."""

    def schedule(self) -> list[ArrivalRecord]:
        """Every arrival so far, in order, if they are recorded."""

    def reads(self) -> list[ReadRecord]:
        """Everything that was noted, if it is recorded."""


class ControlPlane(Coordinator, Tokens, Protocol):
    """What the process of the coordinator serves."""


class Observable(Protocol):
    """A process of any role; it answers this beside what its role does, also while it is busy."""

    def health(self) -> Health:
        """How it is: since when it runs, its counters, and how long things took."""
