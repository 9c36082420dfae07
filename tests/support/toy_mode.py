"""A mode that is not part of persia, as a user would write one: gradients are applied by twos."""

from collections import Counter

from persia.modes import Arrival, Asynchronous, Decision, RowLimit, register
from persia.modes.base import hold_until_full

ASKED: Counter[str] = Counter()
"""How often this process has asked."""


@register
class EveryOther(Asynchronous, frozen=True, tag="every_other"):
    """Applies any two gradients together; those that are more than `limit` steps old count for no row."""

    limit: int = 100

    def group(self, nn_workers: int, local_batch: int) -> int:
        return 2

    def arrive(self, arrival: Arrival) -> Decision:
        ASKED["arrive"] += 1
        return hold_until_full(arrival)

    def row_limit(self, step: int, token: int) -> RowLimit:
        ASKED["row_limit"] += 1
        return RowLimit(token + self.limit, step)
