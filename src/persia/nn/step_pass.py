"""A training pass in `Sync` or `Hybrid`: global steps in their order, and lookups as far ahead as the gate allows.

Each batch goes through these methods of :class:`StepPass` and its base from top to bottom:

1. `register`: its ids go to the embedding worker, which routes them.
2. `may_look_up`: the gate lets it pass once few enough earlier steps are in flight.
3. `look_up`: its rows are found, and come from the PSs.
4. `drawn`: the training thread has it, and the gate may adapt its depth. Rows that were updated since their lookup have
   been refreshed meanwhile (`RowRefresher`); the network computes.
5. `end_of_backward`: its gradients are collected in `StepPushes`; the last batch of a step completes it.
6. the push of `StepPushes`: the gradients of the step go to the PSs, which opens the gate for a later batch.

Persia, Algorithm 1 and section 4.1, has the algorithm. A lookup thread runs 1 to 3, a push thread 6; at depth 0, with
rows in memory of this process, the training thread runs all of them. So it does with `CollectionOptions.one_thread`, in
another order: see `overlapped_pass.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from persia.errors import ConfigError, PersiaError
from persia.nn.batch_counts import BatchCounts
from persia.nn.gate import LookupTime, StalenessGate
from persia.nn.inline_pass import InlinePass, uninterrupted
from persia.nn.lookahead import Refresh, crowded
from persia.nn.overlapped_pass import MOST_IN_FLIGHT, InFlight, OverlappedPass
from persia.nn.owned_tables import OwnedTables
from persia.nn.prepared import PreparedBatch
from persia.nn.push_log import Gradient, PushLog
from persia.nn.replicas import EqualSteps
from persia.nn.row_cache import RowCache
from persia.nn.row_refresher import RefreshAtUse, RowRefresher
from persia.nn.staging import Ready
from persia.nn.training_pass import PassContext, PassData, Push, TrainingPass
from persia.nn.transfer import Encoded
from persia.telemetry.logs import get_logger
from persia.types import PushHeader, RegisteredBatch

__all__ = ["MOST_PUSHES", "StepPass", "StepPushes"]

LOG = get_logger("persia.nn")

NOT_CURRENT = -1
"""Instead of a number of steps: of a batch with rows that were not read."""

MOST_PUSHES = 4
"""Maximum number of pushes that an NN worker has in flight, in modes whose PSs combine the pushes of all NN workers.

A PS then holds at most this many steps, also in `Hybrid(None)`. More would hide hardly any more of their latency.
"""


class StepPass(TrainingPass):
    """A training pass in `Sync` or `Hybrid`.

    Args:
        context: what passes share.
        data: what is read.
        steps: groups gradients by global step.
        near: whether lookups and pushes at depth 0 may run in the training thread.
        one_thread: whether they run there at any depth, next to a device, or never; None leaves it to `near`.
        refresh: how rows that were looked up ahead are brought up to date; None leaves them as they were looked up.
        cache: copies of rows on the device, or rows that it owns; None without.
        equal_steps: the replicas of the network, which make the same number of steps; None if they are not known.
        counts: of the batches of all NN workers, if these are to be compared.
    """

    def __init__(
        self,
        context: PassContext,
        data: PassData,
        steps: StepPushes,
        *,
        near: bool,
        one_thread: bool | None,
        refresh: Refresh | None,
        cache: RowCache | OwnedTables | None,
        equal_steps: EqualSteps | None,
        counts: BatchCounts | None,
    ) -> None:
        self._steps = steps
        if one_thread and context.log.connection.nn_workers > 1:
            raise ConfigError(
                f"one_thread = true trains with one NN worker, and there are {context.log.connection.nn_workers}, "
                "whose pushes wait for each other. Leave it out.",
                field="one_thread",
            )
        possible = context.gate.mode.gate(0, 0)  # With nothing in flight a lookup never waits.
        self._near = near and possible
        self._one_thread = one_thread and possible
        self._cache = cache
        self._gate = gate = context.gate
        self._refresher: RowRefresher | RefreshAtUse | None = None
        self._refresh = refresh
        self._applied_at_use = 0
        """Steps that were applied when the last batch was used: the next batch has their updates."""
        self._use_wait = 0.0
        """Seconds for which the last draw waited until rows were current."""
        gate.refreshing, gate.lookahead = refresh is not None, 0 if refresh is None else refresh.lookahead
        if self._one_thread:
            gate.lookahead = min(gate.lookahead, MOST_IN_FLIGHT)
        if refresh is not None and self._one_thread:
            self._refresher = RefreshAtUse(context.lookup.refresh, lambda: gate.applied)
        elif refresh is not None:
            self._refresher = RowRefresher(
                context.lookup.refresh,
                lambda: gate.applied,
                context.timeout,
                self._push_failure,
                data.idle,
                eager=not refresh.exact,
            )
        if self._refresher is not None:
            gate.on_applied = self._refresher.pushed
        self._number = data.start + context.log.connection.rank
        """Number of the next batch that is looked up."""
        steps.begin_pass()
        try:
            super().__init__(context, data, equal_steps, counts)
        except BaseException:
            gate.forget_refreshing()
            raise

    def may_look_up(self) -> bool:
        """Waits at the gate."""
        return self._gate.pass_lookup()

    def in_flight(self) -> InFlight:
        """Returns how many steps may be in flight next, where the training thread looks up and pushes."""
        return InFlight(*(MOST_IN_FLIGHT if n is None else min(n, MOST_IN_FLIGHT) for n in self._gate.limits))

    def look_up(self, batch: RegisteredBatch) -> tuple[PreparedBatch, Ready]:
        """Looks up and numbers a batch."""
        moment, gate = self._gate.last_lookup, self._gate
        workers = self._log.connection.nn_workers
        refresher = self._refresher if self._refreshes(moment) else None
        # If hardly an update is missing, its rows may be used as they are.
        final = refresher is None or moment.applied >= moment.step - int(refresher.eager)
        prepared, make_ready = self._lookup.look_up(
            batch,
            self.end_of_backward,
            ready=self.runner.ready,
            cache=self._cache,
            refreshed=refresher is not None,
            recent=0 if final else self._recent(moment),
            final=final,
            dummy_rows=self.rows_of_dummy,
        )
        prepared.number, self._number = self._number, self._number + workers
        if not prepared.dummy and (refresher is not None or self._one_thread):
            self._limit_lookahead(prepared)
        if refresher is None or prepared.dummy:
            if gate.refreshing:
                gate.used(moment, moment.step if prepared.dummy else moment.applied)
            return prepared, make_ready
        prepared.step, prepared.current_to, prepared.needs_step = moment.step, moment.applied, gate.needs(moment)
        if prepared.left_out is not None:
            # It cannot be used before a refresh, which is worth most if it is not earlier than necessary.
            prepared.current_to = NOT_CURRENT
            if prepared.needs_step <= moment.applied:
                prepared.needs_step = NOT_CURRENT
        refresher.offer(prepared)

        def use() -> None:
            make_ready()
            self._use_wait = refresher.take(prepared, max(gate.needs(moment), self._applied_at_use))
            self._applied_at_use = gate.applied
            gate.used(moment, prepared.current_to)

        return prepared, use

    def _refreshes(self, moment: LookupTime) -> bool:
        """Returns whether the rows of a batch that is looked up now may be refreshed."""
        return moment.in_flight > moment.limit if self._one_thread else self.ahead

    def _recent(self, moment: LookupTime) -> int:
        """Returns of how many batches before one that is looked up now the rows may be left out of it."""
        if self._refresh is None or not self._refresh.leaves_out:
            return 0
        return moment.in_flight * self._refresh.accumulation * self._log.connection.nn_workers

    def _drawn_batch(self) -> PreparedBatch:
        batch = super()._drawn_batch()
        if not batch.lost:
            return batch
        # Some of its rows were never read: nothing can be learned from it.
        assert batch.batch_id is not None
        self._log.connection.worker.release(batch.batch_id)
        self._log.lost(batch.batch_id, len(batch))
        dummy = self._lookup.dummy(self.rows_of_dummy)
        dummy.number = batch.number
        return dummy

    def _limit_lookahead(self, batch: PreparedBatch) -> None:
        """Looks up less far ahead if a table is too small for the rows of as many batches."""
        refresh, gate = self._refresh, self._gate
        if refresh is None or not (refresh.exact and gate.lookahead):
            return
        batches = (gate.lookahead + 2) * refresh.accumulation * self._log.connection.nn_workers
        if crowded(batch.id_counts(), refresh.tables, batches):
            gate.lookahead = 0

    def _push_failure(self) -> BaseException | None:
        return None if self._runner is None else self._runner.push_failure

    def end_of_backward(self, batch: PreparedBatch) -> None:
        """Takes the gradients of a batch; the device updates the rows that it owns."""
        if batch.owned is None:
            super().end_of_backward(batch)
            return
        batch.owned.step = self._log.global_step
        with uninterrupted():  # Else the rows of the device might have the step, and the others not.
            super().end_of_backward(batch)

    def drawn(self, lead: float, *, inline: bool) -> None:
        """Notes the lead of a batch at the gate, which may adapt its depth."""
        wait, self._use_wait = self._use_wait, 0.0
        self._gate.drawn(lead, inline=inline, use_wait=wait)

    def _computed(self, batch: PreparedBatch, gradients: Callable[[], Encoded]) -> None:
        self.submit(self._steps.add(batch, gradients))

    def _skipped(self, batch: PreparedBatch) -> None:
        self.submit(self._steps.skip())

    def close(self) -> None:
        """Closes the gate."""
        self._gate.close()
        if self._refresher is not None:
            self._refresher.close()

    def _end(self, left: PreparedBatch | None, *, complete: bool, failure: BaseException | None) -> None:
        try:
            super()._end(left, complete=complete, failure=failure)
        finally:
            if self._refresher is not None:
                self._refresher.close()
                self._refresher.join()
                self._refresher = None  # A cycle would keep the rows of a Trainer that is dropped.
            self._gate.forget_refreshing()

    @property
    def _waits_for_others(self) -> bool:
        return self._steps.combined

    def _end_steps(self, left: PreparedBatch | None, *, complete: bool) -> None:
        """Pushes an incomplete step, unless PSs would wait for other NN workers to push it too."""
        if left is not None and left.dummy:  # An abandoned batch is no step; a dummy batch is the others' step.
            self._skipped(left)
        if complete or not self._steps.combined:
            self.submit(self._steps.complete())
        else:  # Whether the others push this step is not known here.
            self._steps.discard()

    def _abandon(self) -> None:
        """No-op: a batch that was only looked up is no step."""

    @property
    def _most_pushes(self) -> int:
        """One if PSs apply each push by itself, in order of arrival. Else the gate bounds it too: in Sync to one."""
        return MOST_PUSHES if self._steps.combined else 1

    def _wants_ahead(self) -> bool:
        return not self._one_thread if self._one_thread is not None else not self._near or self._gate.ahead

    def _runner_in_this_thread(self, number: int) -> InlinePass:
        if not self._one_thread:
            return super()._runner_in_this_thread(number)
        data, timeout, tracer = self._data, self._context.timeout, self._log.tracer
        return OverlappedPass(self, self._reading, timeout, tracer, data.endless, number, data.idle)


class StepPushes:
    """Groups the gradients of an NN worker by global step. Continues from pass to pass.

    A step is `accumulation_steps` batches. Methods that complete one return its push, to be called once, in order.

    Args:
        log: the pushes of this NN worker.
        gate: opens for later lookups when a push has returned.
        accumulation_steps: number of batches per step.
    """

    def __init__(self, log: PushLog, gate: StalenessGate, accumulation_steps: int) -> None:
        self._log = log
        self._gate = gate
        self._accumulation = accumulation_steps
        self._group: list[Gradient] = []
        self._batches = 0
        """Batches since the last push, with or without a gradient."""
        self._passes = 0
        self._not_applied: set[int] = set()

    @property
    def combined(self) -> bool:
        """Whether PSs hold a step until all NN workers have pushed, also those without gradients."""
        return self._gate.mode.group(self._log.connection.nn_workers, 1) > 1

    @property
    def not_applied(self) -> list[int]:
        """Steps whose push has not returned, although PSs wait for it: still in flight, dropped, or failed."""
        return sorted(self._not_applied)

    def forget_not_applied(self) -> None:
        """Takes note that PSs do not wait for steps of earlier passes any more."""
        self._not_applied.clear()

    def check_applied(self) -> None:
        """Raises PersiaError if PSs wait for a step of an earlier pass."""
        if missing := self.not_applied:
            raise PersiaError(
                f"A training pass has failed before its pushes of {named(missing)} had returned, and PSs apply no "
                "later step before these. A `Trainer` continues with its next `fit`, without their gradients. A loop "
                "of your own may try again, as pushes may still return; else restart the NN workers and their cluster.",
                steps=missing,
            )

    def warn_of_not_applied(self) -> None:
        """Warns of steps of a pass that has ended whose push has not returned."""
        if missing := self.not_applied:
            LOG.warning(
                "The training pass has failed before its pushes of %s had returned. Rows may never get these "
                "gradients.",
                named(missing),
            )

    def begin_pass(self) -> None:
        """Opens the gate, with nothing in flight."""
        self._passes += 1
        self._gate.open(self._log.global_step)

    def add(self, batch: PreparedBatch, gradients: Callable[[], Encoded]) -> Push | None:
        """Adds a batch with its gradients. Returns the push of the step if it is complete."""
        self._group.append((batch, gradients))
        return self._count()

    def skip(self) -> Push | None:
        """Adds a batch without gradients. Returns the push of the step if it is complete."""
        return self._count()

    def _count(self) -> Push | None:
        self._batches += 1
        return self.complete() if self._batches >= self._accumulation else None

    def complete(self) -> Push | None:
        """Returns the push of the step so far; None if it has no batch."""
        group, batches = self._group, self._batches
        self.discard()
        if not batches:
            return None
        step, of_pass, log = self._log.global_step, self._passes, self._log
        log.global_step = step + 1
        # Numbered here: several push threads may run, and PSs expect push and step to rise together.
        combined = self.combined
        log.sequence += bool(group) or combined
        sequence = log.sequence
        if combined:
            self._not_applied.add(step)

        def push() -> None:
            if group or combined:
                self._push(group, sequence, step)
            self._not_applied.discard(step)
            if of_pass == self._passes:  # Else it was left behind by a pass that has failed.
                self._gate.done(batches)

        return push

    def discard(self) -> None:
        """Forgets the step so far."""
        self._group, self._batches = [], 0

    def _push(self, group: Sequence[Gradient], sequence: int, step: int) -> None:
        log, connection = self._log, self._log.connection
        with log.tracer.span("push", step + 1), log.pushing(group):
            contributions, rows = log.contributions(group, sequence, [step])
            header = PushHeader(connection.generation, connection.rank, sequence, step, rows)
            counts = connection.worker.push(header, contributions)
            log.pushed(counts, step + 1, group, contributions)


def named(steps: Sequence[int]) -> str:
    """Returns "step 4", or "steps 4 to 7"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
