"""A training pass in an asynchronous mode: each gradient is pushed by itself, in the place that its token gets.

Each batch goes through the methods of :class:`TokenPass` from top to bottom:

1. `register`: its ids go to the embedding worker, which routes them; its rows are found, while the network computes the
   batch before.
2. `may_look_up`: the network will soon be free, so that what it reads next is as new as possible.
3. `look_up`: its token is drawn, the dense parameters are pulled, and its rows are brought up to date.
4. `drawn`: the training thread has it; the network computes.
5. `end_of_backward`: its gradients are collected, with the gradients of the network.
6. `push`: the token scheduler places them; they go to the PSs.

GBA, section 4, has the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from persia.batching.batch import Batch
from persia.nn.prepared import PreparedBatch
from persia.nn.push_log import Gradient
from persia.nn.staging import Ready
from persia.nn.token_client import DrawnToken, TokenClient
from persia.nn.training_pass import PassContext, PassData, TrainingPass
from persia.nn.transfer import Encoded
from persia.types import PushHeader, RegisteredBatch

__all__ = ["TokenPass"]


class _Found(NamedTuple):
    """A batch whose rows were found before its token, and the function that makes it ready."""

    batch: PreparedBatch
    make_ready: Ready


class TokenPass(TrainingPass):
    """A training pass in `Async`, `Bsp`, `HopBs`, `HopBw` or `Gba`. NN workers make unequal numbers of steps.

    Args:
        context: what passes share.
        data: what is read: the batches of `client`.
        client: draws tokens, and pushes.
        finds: whether rows are found before the token, and brought up to date after it; else they are looked up then.
            The token is drawn while the network computes the batch before, if the mode allows two batches in flight.
    """

    read_ahead = 0  # Batches that a slow NN worker has read ahead are lost to the others.

    def __init__(self, context: PassContext, data: PassData, client: TokenClient, *, finds: bool) -> None:
        self._client = client
        self._finds = finds
        mode = context.gate.mode
        self._draws_ahead = finds and mode.gate(1, mode.initial_depth(), 1)
        self._found: _Found | None = None
        """The rows of the batch that was registered last; None if they are to be looked up."""
        super().__init__(context, data, None, None)

    def register(self, batch: Batch | RegisteredBatch) -> RegisteredBatch:
        """Registers a batch, unless a data loader has, and finds its rows."""
        registered = super().register(batch)
        if self._finds:
            self._found = _Found(*self._lookup.look_up(registered, self.end_of_backward, refreshed=True, final=False))
        return registered

    def may_look_up(self) -> bool:
        """Waits until a batch will soon be wanted; without drawing ahead, until the gradient before it has arrived."""
        return self._client.pass_lookup(ahead=self._draws_ahead)

    def look_up(self, batch: RegisteredBatch) -> tuple[PreparedBatch, Ready]:
        """Draws the token of a batch and pulls the dense parameters, then reads its rows, or those that have changed.

        Rows are pushed before dense gradients, so the rows are at least as new as the parameters.
        """
        with self._log.tracer.span("gate", batch=batch.batch_id):
            token = self._client.draw(len(batch.labels))
        found, self._found = self._found, None
        if found is None:
            prepared, make_ready = self._lookup.look_up(batch, self.end_of_backward)
        else:
            prepared, make_ready = found
            if not prepared.dummy:
                self._lookup.refresh(prepared)()
        prepared.number, prepared.token = token.number, token
        self._client.ready()

        def adopt() -> None:
            token.adopt()
            make_ready()
            prepared.finish_refresh()

        return prepared, adopt

    def drawn(self, lead: float, *, inline: bool) -> None:
        """No-op: these modes have no depth to adapt."""

    def _computed(self, batch: PreparedBatch, gradients: Callable[[], Encoded]) -> None:
        """Pushes the gradients of a batch together with the gradients of the network."""
        self._push(batch.token, [(batch, gradients)], self._client.dense.gradients())

    def _skipped(self, batch: PreparedBatch) -> None:
        """Pushes the token of a batch without a gradient, so that its place in the step is filled."""
        self._push(batch.token, [], None)

    def _push(
        self,
        token: DrawnToken | None,
        group: Sequence[Gradient],
        dense: Callable[[PushHeader, float], None] | None,
    ) -> None:
        """Pushes a gradient, after those before it."""
        assert token is not None
        log, client = self._log, self._client
        # Here, not in the push thread: the gradient was computed with these parameters.
        version, versions = client.dense.version, client.dense.versions
        batch_id = (group[0][0].batch_id if group else None) or 0

        def push() -> None:
            with log.tracer.span("push", batch=batch_id), log.pushing(group):
                contributions, rows = log.contributions(group, token.sequence, versions)
                ticket, counts = client.push(token.sequence, rows, version, contributions, dense)
            log.pushed(counts, ticket.header.step + 1, group, contributions)
            log.global_step = max(log.global_step, ticket.header.step)

        self.submit(push)

    def close(self) -> None:
        """Wakes the lookup thread."""
        self._client.close()

    @property
    def _waits_for_others(self) -> bool:
        return False

    def _drawn_batch(self) -> PreparedBatch:
        self._client.want()
        batch = super()._drawn_batch()
        if not batch.dummy:  # Nothing is computed for a lost batch.
            self._client.computing()
        return batch

    def _end_steps(self, left: PreparedBatch | None, *, complete: bool) -> None:
        """No-op: each gradient was pushed when it was computed."""

    def _abandon(self) -> None:
        """Pushes the tokens of batches that were never used."""
        self._client.abandon()

    def _end(self, left: PreparedBatch | None, *, complete: bool, failure: BaseException | None) -> None:
        try:
            super()._end(left, complete=complete, failure=failure)
        finally:
            self._log.sequence = self._client.sequence
            self._found = None  # A cycle would keep the rows of a Trainer that is dropped.
