"""A mode that is not part of persia, as a user would write one: gradients are applied by twos."""

from persia.modes import Arrival, Asynchronous, Decision, RowLimit, Sync, hold_until_full, register

ASKED: list[str] = []
"""The functions that this process has asked, in order; threads append."""


@register
class EveryOther(Asynchronous, frozen=True, tag="every_other"):
    """Applies any two gradients together; those that are more than `limit` steps old count for no row."""

    limit: int = 100

    def group(self, nn_workers: int, local_batch: int) -> int:
        return 2

    def arrive(self, arrival: Arrival) -> Decision:
        ASKED.append("arrive")
        return hold_until_full(arrival)

    def row_limit(self, step: int, token: int) -> RowLimit:
        ASKED.append("row_limit")
        return RowLimit(token + self.limit, step)


@register
class CountedSync(Sync, frozen=True, tag="counted_sync"):
    """Sync, and counts who asks."""

    def arrive(self, arrival: Arrival) -> Decision:
        ASKED.append("arrive")
        return super().arrive(arrival)

    def row_limit(self, step: int, token: int) -> RowLimit:
        ASKED.append("row_limit")
        return super().row_limit(step, token)
