"""The NN worker's side of the token scheduler: draws batches and tokens, reports arrivals, and quiesces.

docs/reference/protocol.md, section 12, has the order of the calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from persia.errors import DeadlineError
from persia.nn.draw_time import DrawTime
from persia.services import EmbeddingWorker, TokenService
from persia.types import Caller, Contribution, Losses, PushHeader, PushId, QuiesceResult, Ticket, UpdateCounts

__all__ = ["DenseParameters", "DrawnToken", "TokenClient"]

T = TypeVar("T")


class DenseParameters(Protocol):
    """The network of an NN worker whose parameters are on dense PSs: :class:`persia.dense.SharedNetwork`."""

    @property
    def version(self) -> int:
        """Version of the parameters in the network."""

    @property
    def versions(self) -> list[int]:
        """The same, by dense PS."""

    def pull(self, least: int, still_wanted: Callable[[], bool], after: PushId | None) -> Callable[[], None]:
        """Pulls parameters; the returned function puts them into the network."""

    def gradients(self) -> Callable[[PushHeader, float], None]:
        """Takes the gradients off the network; the returned function pushes them."""

    def push_empty(self, header: PushHeader) -> None:
        """Fills a slot that has no gradient."""


class DrawnToken(NamedTuple):
    """A token that this NN worker holds.

    Attributes:
        sequence: sequence number of its push.
        number: of its batch, within the pass.
        adopt: puts the dense parameters that were pulled with it into the network.
    """

    sequence: int
    number: int
    adopt: Callable[[], None]


class TokenClient:
    """Draws batches and tokens for one NN worker in one phase, and pushes its gradients.

    Its reading, lookup, training and push threads use it.

    Args:
        tokens: the token scheduler.
        caller: identifies this NN worker and the phase.
        worker: the embedding workers.
        dense: the network.
        sequence: sequence number of the last push of this NN worker.
        idle: whether some NN worker waits for data that may come at any time; the others then wait for it without a
            deadline.
        losses: returns the batches that this NN worker has lost since it started.
    """

    def __init__(
        self,
        tokens: TokenService,
        caller: Caller,
        worker: EmbeddingWorker,
        dense: DenseParameters,
        sequence: int,
        idle: Callable[[], bool] = lambda: False,
        losses: Callable[[], Losses] = Losses,
    ) -> None:
        self._losses = losses
        self._idle = idle
        self._tokens = tokens
        self._caller = caller
        self._worker = worker
        self.dense = dense
        self.sequence = sequence
        self._requests = 0
        """Number of the last request for a batch, from 1."""
        self._following: tuple[int, int | None] = 0, None
        """The last request that a token has answered, and its answer."""
        self._numbers: deque[int] = deque()
        """Numbers of batches that were read and have no token yet."""
        self._done = sequence
        """Sequence number of the last push that returned."""
        self._filled = 0
        """Number of abandoned pushes of other NN workers that were filled."""
        self._changed = threading.Condition()
        self._wanted = 0
        """Batches that the training thread has asked for, less those that were drawn; -1: one was drawn ahead."""
        self._computing_since: float | None = None
        self._draw_time = DrawTime()
        self._granted_at = self._drawing_took = 0.0
        self._closed = False
        self._open: list[int] = []
        """Tokens that were drawn, and whose gradients have not arrived."""

    # --- reading and lookup threads ---------------------------------------------------------------------------

    def batches(self, read: Callable[[int], T | None]) -> Iterator[T]:
        """Yields the batches that the token scheduler hands out to this NN worker. For the reading thread.

        Args:
            read: returns the batch of a number; None if the pass has none of this number, nor a higher one.
        """
        while not self._closed:
            number = self._next_number()
            if number is None:
                return
            batch = read(number)
            if batch is None:
                self._tokens.end(self._caller, number)
                return
            self._numbers.append(number)
            yield batch

    def _next_number(self) -> int | None:
        """Returns the number of the next batch: as the last token has brought it, or else by a call."""
        request = self._requests + 1
        brought, number = self._following
        if brought != request:
            number = self._retried_while_idle(lambda: self._tokens.take(self._caller, request))
        self._requests = request  # Only now: a token that is drawn meanwhile asks for this batch, not the one after it.
        return number

    def pass_lookup(self, *, ahead: bool = False) -> bool:
        """Blocks until the next token may be drawn; False when closed instead.

        Args:
            ahead: whether it is drawn while the network computes, just in time, so that two tokens may be open. Else it
                is drawn when the training thread wants a batch, and the gradient before it has arrived.
        """
        with self._changed:
            while not self._closed and (seconds := self._seconds_until_draw(ahead)) != 0.0:
                self._changed.wait(seconds)
            self._wanted -= not self._closed
            return not self._closed

    def _seconds_until_draw(self, ahead: bool) -> float | None:
        """Returns the seconds until a token may be drawn; None if something has to change before."""
        if len(self._open) > ahead:
            return None
        if self._wanted > 0:
            return 0.0
        delay = self._draw_time.delay
        if not ahead or self._wanted < 0 or self._computing_since is None or delay is None:
            return None
        return max(0.0, self._computing_since + delay - time.monotonic())

    def ready(self) -> None:
        """Notes that the batch that was drawn last has its parameters and rows."""
        with self._changed:
            seconds = time.monotonic() - self._granted_at
            # A draw that took longer than all that follows has waited at the gate, or filled abandoned pushes.
            self._draw_time.drew(seconds + min(seconds, self._drawing_took))

    def draw(self, rows: int) -> DrawnToken:
        """Draws the token of the next batch, which has `rows` rows, and pulls the parameters for it. Blocks."""
        number, sequence, request = self._numbers.popleft(), self.sequence + 1, self._requests + 1
        began = time.monotonic()
        while True:
            token = self._retried_while_idle(
                lambda: self._tokens.draw(self._caller, sequence, number, rows, *self._outcome(), request)
            )
            if token.value is not None:
                break
            self._fill(token.abandoned)
        self._following = token.request, token.following
        with self._changed:
            self.sequence = sequence
            self._open.append(sequence)
            self._granted_at = time.monotonic()
            self._drawing_took = self._granted_at - began
        return DrawnToken(sequence, number, self.dense.pull(token.least, self._still_wanted, token.after))

    def _outcome(self) -> tuple[int, int, Losses]:
        """Returns the last push that returned, the number of pushes that were filled, and then the losses."""
        return self._done, self._filled, self._losses()

    def _retried_while_idle(self, call: Callable[[], T], *, closed: bool = False) -> T:
        """Makes a call that waits for other NN workers; again, while one of them waits for data.

        Args:
            call: may be repeated.
            closed: whether it is made after `close`, which ends other calls.
        """
        while True:
            try:
                return call()
            except DeadlineError:
                if self._closed > closed or not self._idle():
                    raise

    def _still_wanted(self) -> bool:
        """Fills abandoned pushes while a pull waits, as the awaited version may lack just these."""
        if not self._closed:
            self._fill(self._tokens.abandoned(self._caller, self._filled))
        return not self._closed

    def _fill(self, abandoned: Sequence[PushHeader]) -> None:
        """Pushes empty gradients in the places of abandoned pushes.

        Their rows stay in the header: PSs that have the gradient and PSs that lack it divide the step alike.
        """
        for header in abandoned:
            self._worker.push(header, [])
            self.dense.push_empty(header)
            self._filled += 1

    # --- training thread ----------------------------------------------------------------------------------------

    def want(self) -> None:
        """Announces that the training thread is about to draw a batch."""
        with self._changed:
            self._wanted += 1
            if self._computing_since is not None:
                self._draw_time.computed(time.monotonic() - self._computing_since)
                self._computing_since = None
            self._changed.notify_all()

    def computing(self) -> None:
        """Announces that the training thread has a batch and begins to compute."""
        with self._changed:
            self._computing_since = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends `batches`, and makes a blocked `pass_lookup` return False."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Pushes tokens without a batch, so that no step waits for them; after `close`, when all threads have ended."""
        for sequence in list(self._open):
            self.push(sequence, 0, self.dense.version, [], None)

    def stop(self) -> None:
        """Ends the phase for all NN workers, once the batches in flight are trained."""
        self._tokens.stop()

    def quiesce(self) -> QuiesceResult:
        """Waits until all NN workers are done with the phase."""
        while True:
            result = self._retried_while_idle(lambda: self._tokens.quiesce(self._caller, *self._outcome()), closed=True)
            if not result.abandoned:
                return result
            self._fill(result.abandoned)

    def report_drained(self, step: int) -> None:
        """Reports that all PSs are drained and at `step`. The leader calls it, see `QuiesceResult`."""
        self._tokens.drained(self._caller, step)

    def await_drained(self) -> None:
        """Waits until the leader has drained all PSs. The other NN workers call it."""
        self._tokens.drained(self._caller, -1)

    # --- push thread --------------------------------------------------------------------------------------------

    def push(
        self,
        sequence: int,
        rows: int,
        version: int,
        contributions: Sequence[Contribution],
        dense: Callable[[PushHeader, float], None] | None,
    ) -> tuple[Ticket, dict[str, UpdateCounts]]:
        """Reports a computed gradient to the token scheduler, and pushes it to the place that it gets.

        Args:
            sequence: sequence number of the token.
            rows: of the batch.
            version: of the parameters that it was computed with.
            contributions: the gradient of its rows.
            dense: pushes the gradient of the network; None without one.
        """
        ticket = self._tokens.arrive(self._caller, sequence, rows if contributions else 0, version)
        with self._changed:
            self._open.remove(sequence)
            self._changed.notify_all()
        counts: dict[str, UpdateCounts] = {}
        if ticket.dropped:
            for contribution in contributions:
                self._worker.release(contribution.batch_id)
        else:
            # Rows first: an NN worker that pulls the new version of the dense parameters then finds its rows too.
            counts = self._worker.push(ticket.header, contributions)
            if dense is None:
                self.dense.push_empty(ticket.header)
            else:
                dense(ticket.header, ticket.decay)
        self._done = sequence
        return ticket, counts
