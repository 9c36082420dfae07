"""The NN worker's side of asynchronous modes: batches and tokens drawn, arrivals told, a rest waited for.

docs/reference/protocol.md, section 12, has the order of the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from persia.batching.batch import Batch
from persia.services import EmbeddingWorker, Tokens
from persia.types import Caller, Contribution, FedBatch, PushHeader, QuiesceResult, Ticket, UpdateCounts

__all__ = ["DenseParameters", "DrawnToken", "NumberedBatch", "TokenClient"]


class DenseParameters(Protocol):
    """The network of an NN worker while dense PSs have its truth: :class:`persia.dense.SharedNetwork`."""

    @property
    def version(self) -> int:
        """Of the parameters that are in the network."""

    @property
    def versions(self) -> list[int]:
        """The same, by dense PS."""

    def pull(self, least: int, wanted: Callable[[], bool]) -> Callable[[], None]:
        """Gets parameters; what it returns puts them into the network."""

    def gradients(self) -> Callable[[PushHeader, float], None]:
        """Takes the gradients off the network; what it returns pushes them."""

    def push_empty(self, header: PushHeader) -> None:
        """Fills a slot without a gradient."""


class NumberedBatch(NamedTuple):
    """A batch, and which one of the pass it is."""

    number: int
    batch: Batch | FedBatch


class DrawnToken(NamedTuple):
    """A token in the hands of this NN worker.

    Attributes:
        sequence: of the push that it will be.
        adopt: puts the dense parameters that were pulled with it into the network.
    """

    sequence: int
    adopt: Callable[[], None]


class TokenClient:
    """One NN worker in one segment. Its reading, lookup, training and push threads use it.

    Args:
        tokens: the lists.
        caller: this NN worker and segment.
        worker: the embedding workers.
        shared: its network.
        sequence: of its last push.
    """

    def __init__(
        self, tokens: Tokens, caller: Caller, worker: EmbeddingWorker, shared: DenseParameters, sequence: int
    ) -> None:
        self._tokens = tokens
        self._caller = caller
        self._worker = worker
        self.shared = shared
        self.sequence = sequence
        self._requests = 0
        self._done = sequence
        self._filled = 0
        self._changed = threading.Condition()
        self._wanted = 0
        self._closed = False
        self._open: list[int] = []
        """Tokens that were drawn, and whose gradients have not arrived."""

    # --- reading and lookup threads ---------------------------------------------------------------------------

    def numbers(self) -> Iterator[int]:
        """Numbers of the batches that this NN worker is to train. Data are read ahead; tokens are not drawn ahead."""
        while not self._closed:
            self._requests += 1
            number = self._tokens.take(self._caller, self._requests)
            if number is None:
                return
            yield number

    def end(self, number: int) -> None:
        """The pass has no batch of this number."""
        self._tokens.end(self._caller, number)

    def pass_lookup(self) -> bool:
        """Waits until the next batch is wanted and the one before has arrived; False when closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._wanted > 0 and not self._open))
            self._wanted -= not self._closed
            return not self._closed

    def draw(self, number: int, rows: int) -> DrawnToken:
        """Draws a batch's token and pulls the parameters to train it with. Blocks."""
        sequence = self.sequence + 1
        while True:
            token = self._tokens.draw(self._caller, sequence, number, rows, self._done, self._filled)
            if token.value is not None:
                break
            self._fill(token.abandoned)
        with self._changed:
            self.sequence = sequence
            self._open.append(sequence)
        return DrawnToken(sequence, self.shared.pull(token.least, self._still_wanted))

    def _still_wanted(self) -> bool:
        """While a pull waits: what it waits for may be the slot of a dead NN worker, which nobody else fills."""
        if not self._closed:
            self._fill(self._tokens.abandoned(self._caller, self._filled))
        return not self._closed

    def _fill(self, abandoned: Sequence[PushHeader]) -> None:
        for header in abandoned:
            empty = header._replace(weight=0)
            self._worker.push(empty, [])
            self.shared.push_empty(empty)
            self._filled += 1

    # --- training thread ----------------------------------------------------------------------------------------

    def want(self) -> None:
        """The training thread is about to draw a batch."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes whoever waits here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """After `close`, when all threads have ended: tokens without a batch arrive empty, so nobody misses them."""
        for sequence in list(self._open):
            self.push(sequence, 0, self.shared.version, [], None)

    def quiesce(self) -> QuiesceResult:
        """Waits until all NN workers have finished the phase."""
        while True:
            result = self._tokens.quiesce(self._caller, self._done, self._filled)
            if not result.abandoned:
                return result
            self._fill(result.abandoned)

    def drained(self, step: int) -> int:
        """Reports that all PSs are drained, as the leader; the others pass -1 and wait for it."""
        return self._tokens.drained(self._caller, step)

    # --- push thread --------------------------------------------------------------------------------------------

    def push(
        self,
        sequence: int,
        rows: int,
        version: int,
        contributions: Sequence[Contribution],
        dense: Callable[[PushHeader, float], None] | None,
    ) -> tuple[Ticket, dict[str, UpdateCounts]]:
        """Tells that a gradient is computed, and pushes it to where it belongs.

        Args:
            sequence: as it was drawn.
            rows: of the batch.
            version: of the parameters that it was computed with.
            contributions: the gradient of its rows.
            dense: pushes that of the network; None without any.
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
            # Rows first: whoever finds a new version of the dense parameters finds its rows too.
            counts = self._worker.push(ticket.header, contributions)
            if dense is None:
                self.shared.push_empty(ticket.header)
            else:
                dense(ticket.header, ticket.weight)
        self._done = sequence
        return ticket, counts
