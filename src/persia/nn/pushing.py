"""How gradients of a training pass leave an NN worker: by global step, or by token.

`EmbeddingCollection` chooses one :class:`Pusher` for a training pass and asks it everything that depends on the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from persia.errors import PersiaError
from persia.nn.gate import StalenessGate
from persia.nn.outbox import Gradient, Outbox
from persia.nn.prepared import PreparedBatch
from persia.nn.reading_thread import READ_AHEAD
from persia.nn.token_client import DrawnToken, TokenClient
from persia.nn.transfer import Ready
from persia.types import FedBatch, PushHeader

__all__ = ["MOST_PUSHES", "LookUp", "Pusher", "StepPusher", "TokenPusher", "named"]

MOST_PUSHES = 4
"""Pushes that an NN worker has in flight at most, in modes whose PSs combine the pushes of all NN workers.

A PS then holds at most this many steps, also in `Hybrid(None)`. More would hide hardly any more of their latency.
"""

LookUp = Callable[[FedBatch], tuple[PreparedBatch, Ready]]
"""Looks up the rows of a registered batch."""


class Pusher(Protocol):
    """The decisions of a training pass that depend on the order in which gradients are applied."""

    read_ahead: int
    """Maximum number of batches to read before they are needed; 0: one, which is read when its lookup is next."""
    equal_steps: bool
    """Whether all NN workers make the same number of steps."""

    @property
    def most_pushes(self) -> int:
        """Maximum number of pushes in flight."""

    @property
    def combined(self) -> bool:
        """Whether a push returns only after pushes of all NN workers."""

    @property
    def sequence(self) -> int:
        """Sequence number of the last push. It continues from pass to pass, whatever the pusher."""

    def open(self, start: int) -> None:
        """Begins a training pass, with nothing in flight.

        Args:
            start: number of the batch, within the pass over the data, at which all NN workers begin.
        """

    def want(self) -> None:
        """Announces that the training thread is about to draw a batch."""

    def may_look_up(self) -> bool:
        """Blocks until the next lookup is allowed; False when closed instead. For the thread that looks up."""

    def look_up(self, find: LookUp, batch: FedBatch) -> tuple[PreparedBatch, Ready]:
        """Looks up a batch. The second result makes it ready, in the training thread."""

    def drawn(self, lead: float) -> None:
        """Notes that the training thread has drawn a batch; see `StalenessGate.drawn`."""

    def computed(self, gradient: Gradient) -> None:
        """Takes the gradient of a batch, and those of the network, at the end of the backward pass."""

    def skipped(self, batch: PreparedBatch) -> None:
        """Takes note of a batch without a gradient: a dummy, or one that was never back-propagated."""

    def end(self, complete: bool, left: PreparedBatch | None) -> None:
        """Ends the pass, while the threads still run.

        Args:
            complete: whether all batches were drawn.
            left: the batch that was drawn last, if the loop was left before the next draw.
        """

    def close(self) -> None:
        """Makes a blocked `may_look_up` return False. For any thread."""

    def abandon(self) -> None:
        """Releases open tokens, so that no step waits for them.

        Called after the threads have ended, unless the pass has failed.
        """


class StepPusher:
    """Pushes the gradients of each global step together, steps in order: for modes whose replicas make equal steps.

    Args:
        outbox: the pushes of this NN worker.
        gate: bounds how far lookups run ahead.
        accumulation_steps: number of batches per step.
    """

    read_ahead = READ_AHEAD
    equal_steps = True

    def __init__(self, outbox: Outbox, gate: StalenessGate, accumulation_steps: int) -> None:
        self.sequence = 0
        self._outbox = outbox
        self._gate = gate
        self._accumulation = accumulation_steps
        self._number = 0
        """Number of the next batch that is looked up."""
        self._group: list[Gradient] = []
        self._batches = 0
        """Batches since the last push, with or without a gradient."""
        self._passes = 0
        self._not_applied: set[int] = set()

    @property
    def not_applied(self) -> list[int]:
        """Steps whose push has not returned, although PSs wait for it: still in flight, dropped, or failed."""
        return sorted(self._not_applied)

    def forget_not_applied(self) -> None:
        """Takes note that PSs do not wait for steps of earlier passes any more."""
        self._not_applied.clear()

    @property
    def most_pushes(self) -> int:
        """One if PSs apply each push by itself, in order of arrival. Else the gate bounds it too: in Sync to one."""
        return MOST_PUSHES if self.combined else 1

    @property
    def combined(self) -> bool:
        """Whether PSs hold a step until all NN workers have pushed, including those without gradients."""
        return self._gate.mode.group(self._outbox.connection.nn_workers, 1) > 1

    def open(self, start: int) -> None:
        """Opens the gate."""
        self._passes += 1
        self._gate.open(self._outbox.global_step)
        self._number = start + self._outbox.connection.rank

    def check_applied(self) -> None:
        """Raises PersiaError if PSs wait for a step of an earlier pass."""
        if missing := self.not_applied:
            raise PersiaError(
                f"A training pass has failed before its pushes of {named(missing)} had returned, and PSs apply no "
                "later step before these. A `Trainer` continues with its next `fit`, without their gradients. A loop "
                "of your own may try again, as pushes may still return; else start the NN workers and their cluster "
                "anew.",
                steps=missing,
            )

    def want(self) -> None:
        """No-op: lookups run ahead of the draws."""

    def may_look_up(self) -> bool:
        """Waits at the gate."""
        return self._gate.pass_lookup()

    def look_up(self, find: LookUp, batch: FedBatch) -> tuple[PreparedBatch, Ready]:
        """Looks up and numbers a batch."""
        prepared, ready = find(batch)
        prepared.number, self._number = self._number, self._number + self._outbox.connection.nn_workers
        return prepared, ready

    def drawn(self, lead: float) -> None:
        """Tells the gate, which may adapt its depth."""
        self._gate.drawn(lead)

    def computed(self, gradient: Gradient) -> None:
        """Adds a gradient to its step; the last one of the step pushes it."""
        self._group.append(gradient)
        self.skipped(gradient[0])

    def skipped(self, batch: PreparedBatch) -> None:
        """Counts a batch of the step."""
        self._batches += 1
        if self._batches >= self._accumulation:
            self.flush()

    def flush(self) -> None:
        """Pushes an incomplete step."""
        group, batches = self._group, self._batches
        self._group, self._batches = [], 0
        if batches:
            step, of_pass = self._outbox.global_step, self._passes
            self._outbox.global_step = step + 1
            # Numbered here: several push threads may run, and PSs expect push and step to rise together.
            combined = self.combined
            self.sequence += bool(group) or combined
            sequence = self.sequence
            if combined:
                self._not_applied.add(step)

            def push() -> None:
                if group or combined:
                    self._push(group, sequence, step)
                self._not_applied.discard(step)
                if of_pass == self._passes:  # Else it was left behind by a pass that has failed.
                    self._gate.done(batches)

            self._outbox.submit(push)

    def end(self, complete: bool, left: PreparedBatch | None) -> None:
        """Pushes an incomplete step, unless PSs would wait for other NN workers to push it too."""
        if left is not None and left.dummy:  # An abandoned batch is no step; a dummy batch is the others' step.
            self.skipped(left)
        if complete or not self.combined:
            self.flush()
        else:  # Whether the others push this step is not known here.
            self._group, self._batches = [], 0

    def close(self) -> None:
        """Closes the gate."""
        self._gate.close()

    def abandon(self) -> None:
        """No-op: a batch that was only looked up is no step."""

    def _push(self, group: Sequence[Gradient], sequence: int, step: int) -> None:
        connection = self._outbox.connection
        with self._outbox.tracer.span("push", step + 1), self._outbox.pushing(group):
            contributions, rows = self._outbox.contributions(group, sequence, [step])
            header = PushHeader(connection.generation, connection.rank, sequence, step, rows)
            counts = connection.worker.push(header, contributions)
            self._outbox.pushed(counts, step + 1, group, contributions)


class TokenPusher:
    """Pushes each gradient on its own, in the place that its token gets: for asynchronous modes.

    Args:
        outbox: the pushes of this NN worker.
        client: draws tokens, and pushes.
    """

    read_ahead = 0  # Batches that a slow NN worker has read ahead are lost to the others.
    equal_steps = False
    most_pushes = 1  # The token scheduler numbers them as they arrive.
    combined = False

    def __init__(self, outbox: Outbox, client: TokenClient) -> None:
        self._outbox = outbox
        self._client = client

    @property
    def sequence(self) -> int:
        """Sequence number of the last token."""
        return self._client.sequence

    def open(self, start: int) -> None:
        """No-op: the token scheduler has begun the phase."""

    def want(self) -> None:
        """Lets the client draw a token."""
        self._client.want()

    def may_look_up(self) -> bool:
        """Waits until a batch is wanted and the gradient before it has arrived."""
        return self._client.pass_lookup()

    def look_up(self, find: LookUp, batch: FedBatch) -> tuple[PreparedBatch, Ready]:
        """Draws the token of a batch and pulls the dense parameters, then looks up its rows.

        Rows are pushed before dense gradients, so the rows are at least as new as the parameters.
        """
        with self._outbox.tracer.span("gate", batch=batch.batch_id):
            token = self._client.draw(len(batch.labels))
        prepared, ready = find(batch)
        prepared.number, prepared.token = token.number, token

        def adopt() -> None:
            token.adopt()
            ready()

        return prepared, adopt

    def drawn(self, lead: float) -> None:
        """No-op: no token is drawn ahead, so there is no depth to adapt."""

    def computed(self, gradient: Gradient) -> None:
        """Pushes a gradient together with those of the network."""
        self._submit(gradient[0].token, [gradient], self._client.dense.gradients())

    def skipped(self, batch: PreparedBatch) -> None:
        """Pushes the token of a batch without a gradient, so that its place in the step is filled."""
        self._submit(batch.token, [], None)

    def end(self, complete: bool, left: PreparedBatch | None) -> None:
        """No-op: each gradient was pushed when it was computed."""

    def close(self) -> None:
        """Wakes the lookup thread."""
        self._client.close()

    def abandon(self) -> None:
        """Pushes the tokens of batches that were never used."""
        self._client.abandon()

    def _submit(
        self,
        token: DrawnToken | None,
        group: Sequence[Gradient],
        dense: Callable[[PushHeader, float], None] | None,
    ) -> None:
        assert token is not None
        # Here, not in the push thread: the gradient was computed with these parameters.
        version, versions = self._client.dense.version, self._client.dense.versions

        batch_id = (group[0][0].batch_id if group else None) or 0

        def push() -> None:
            with self._outbox.tracer.span("push", batch=batch_id), self._outbox.pushing(group):
                contributions, rows = self._outbox.contributions(group, token.sequence, versions)
                ticket, counts = self._client.push(token.sequence, rows, version, contributions, dense)
            self._outbox.pushed(counts, ticket.header.step + 1, group, contributions)
            self._outbox.global_step = max(self._outbox.global_step, ticket.header.step)

        self._outbox.submit(push)


def named(steps: Sequence[int]) -> str:
    """Returns "step 4", or "steps 4 to 7"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
