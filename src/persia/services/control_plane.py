"""The coordinator: membership and progress, and the token scheduler of asynchronous modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from persia import rpc
from persia.modes import Auto, AutoEvidence, Mode
from persia.services.moving import BucketMaps
from persia.services.recording import RecordableTokens
from persia.services.streams import StreamLog
from persia.telemetry.metrics import Health
from persia.telemetry.tracing import ProcessTrace
from persia.types import (
    NO_LOSSES,
    Caller,
    Losses,
    Member,
    Membership,
    PushHeader,
    QuiesceResult,
    StepTiming,
    Ticket,
    Token,
    TokenReport,
)

__all__ = ["ControlPlane", "Coordinator", "Observable", "TokenService", "TrainingPhase"]


class TrainingPhase(NamedTuple):
    """A phase of training in one asynchronous mode. All roles are quiescent before and after it.

    Attributes:
        generation: generation of the NN workers.
        number: number of the phase within the generation, from 1.
        mode: mode of the phase.
        nn_workers: number of NN workers.
        epoch: pass over the data.
        position: number of already trained batches of the pass.
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
    """The control plane: membership, progress of training and reports. No data passes through it."""

    def join(self, role: str, rank: int, address: str) -> Member:
        """Adds a started process. Returns it with its incarnation. An earlier process of its rank counts as dead."""

    def depart(self, role: str, rank: int, incarnation: int, reason: str = "") -> None:
        """Marks a process as dead. An empty reason means that it ended as requested, and does not return."""

    def retire(self, role: str, rank: int) -> None:
        """Requests an embedding worker or a data loader to finish its work and leave."""

    def regenerate(self, nn_workers: int) -> int:
        """Starts a new generation of `nn_workers` NN workers. Returns its number."""

    @rpc.waits
    def membership(self, newer_than: int = 0, timeout: float = 0.0) -> Membership:
        """Returns all members; waits up to `timeout` seconds for a version above `newer_than`."""

    def report(self, role: str, rank: int, counters: Mapping[str, float]) -> None:
        """Records a heartbeat with counters; NN workers include `step`, `epoch`, `position` and `ended`."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """Returns the last report of every member by "role-rank", with its `age` in seconds."""


class TokenService(Protocol):
    """The token scheduler: hands out batches and tokens, and counts gradients (GBA paper, section 4.1).

    docs/reference/protocol.md, section 12.
    """

    def begin(self, phase: TrainingPhase) -> None:
        """Starts a phase. Calls of later phases wait for this.

        Raises:
            PersiaError: the previous phase is not quiesced.
            ConfigError: the mode cannot run with this number of NN workers.
        """

    @rpc.waits
    def take(self, caller: Caller, request: int) -> int | None:
        """Returns the number of the next batch of this NN worker; None if the phase has no more batches.

        Waits while open batches of other NN workers determine whether the phase has another batch.

        Args:
            caller: the NN worker.
            request: number of the request within the phase, from 1.
        """

    def end(self, caller: Caller, number: int) -> None:
        """Reports that the pass has no batch of this number or a later one."""

    def stop(self) -> None:
        """Stops handing out batches in this phase."""

    @rpc.waits
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
        """Draws the token of a batch, just before its lookup. Waits while the gate of the mode is closed.

        With `request`, it also hands out the next batch, as `take` would, unless that has to wait.

        Args:
            caller: the NN worker.
            sequence: number of the push of this batch.
            number: number of the batch.
            rows: rows of the batch.
            done: sequence number up to which all pushes have returned.
            filled: number of abandoned pushes that it has filled in this phase, in the order of receipt.
            lost: its losses since it started, including losses of pushes up to `done`.
            request: number of the request for the next batch; 0 for none. If `Token.request` is less, call `take`.

        Raises:
            ConfigError: the mode cannot run with batches of this size.
            DeadlineError: the gate did not open in time; the error names the slowest NN workers.
        """

    def arrive(self, caller: Caller, sequence: int, rows: int, version: int) -> Ticket:
        """Decides whether a computed gradient is used, and counts it.

        Args:
            caller: the NN worker.
            sequence: sequence number with which the token was drawn.
            rows: rows of the batch; 0 if the gradient is empty.
            version: version of the dense parameters from which it was computed.
        """

    def abandoned(self, caller: Caller, filled: int) -> list[PushHeader]:
        """Returns the pushes of dead NN workers that this NN worker must fill while it waits for a version."""

    @rpc.waits
    def quiesce(self, caller: Caller, done: int, filled: int, lost: Losses = NO_LOSSES) -> QuiesceResult:
        """Ends the phase for this NN worker; waits until all NN workers have ended it.

        Raises:
            DeadlineError: an NN worker was late; the error names all late ones.
        """

    @rpc.waits
    def drained(self, caller: Caller, step: int) -> int:
        """Reports, as the leader, that all PSs are drained and at `step`; others pass -1 and wait. Returns the step."""

    def announce(self, nn_workers: int, local_batch: int) -> None:
        """Reports the sizes of a phase with all-reduce, by which `request` checks a mode."""

    def request(self, mode: Mode) -> None:
        """Requests another mode from the next boundary on.

        Raises:
            ConfigError: the mode cannot run with these NN workers or batches.
            PersiaError: another switch is in progress.
        """

    def requested(self) -> Mode | None:
        """Returns the requested mode; None if no request is pending."""

    def resolve(self, mode: Mode) -> None:
        """Clears a request that was executed or rejected. No-op if another mode has been requested since.

        Args:
            mode: the mode that `requested` returned.
        """

    def begin_auto(self, auto: Auto, nn_workers: int, asynchronous: bool) -> None:
        """Chooses the mode by step times from now on, until a mode is requested.

        Call it when training starts or continues.

        Args:
            auto: the rule.
            nn_workers: number of NN workers.
            asynchronous: whether the asynchronous mode is active.
        """

    def report_timings(self, rank: int, timings: list[StepTiming]) -> bool:
        """Records an NN worker's step timings since its last report; may request a switch.

        Returns:
            False if the coordinator has no rule because it has restarted; call `begin_auto` again.
        """

    def evidence(self) -> AutoEvidence:
        """Returns the mode choices of `begin_auto` so far, and the step times behind them."""

    def cancel(self, generation: int, rank: int) -> bool:
        """Cancels a dead NN worker: its tokens are drawn again, and its batches are handed out again.

        Returns:
            Whether the others continue and get the death from `quiesce`. They do not continue once quiesced, nor in
            all-reduce modes.
        """

    def summary(self) -> TokenReport:
        """Returns the counts of all asynchronous phases so far."""


class ControlPlane(Coordinator, BucketMaps, TokenService, RecordableTokens, StreamLog, Protocol):
    """All calls that the process of the coordinator serves."""


class Observable(Protocol):
    """A process of any role. It answers these calls even while the role is busy."""

    def health(self) -> Health:
        """Returns its start time, counters and latencies."""

    @rpc.inline
    def clock(self) -> float:
        """Returns its monotonic clock in seconds. Traces of other processes are related to the coordinator's."""

    def start_trace(self, seconds: float) -> None:
        """Starts to record spans, for at most `seconds`. Discards spans of an earlier trace."""

    def trace(self) -> ProcessTrace:
        """Stops recording and returns the spans. Blocks to measure the offset to the coordinator's clock."""
