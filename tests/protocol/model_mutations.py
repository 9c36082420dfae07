"""Protocols with one mistake each, or two where a rule is implied by others."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from protocol.model_checker import STUCK
from protocol.model_rules import Rules

__all__ = ["MUTATIONS", "Mutation"]

LACKS = "PS 1 owns bucket 0 by the coordinator's map and lacks an acknowledged update"
LOST = "PS 0 owns bucket 0 by the coordinator's map and lacks an acknowledged update"
BOTH = "two PSs answer for bucket 0"
TWICE = "an update was applied twice"
MIXED = "a push was applied in another phase"


class Mutation(NamedTuple):
    """A protocol with a mistake.

    Attributes:
        off: names of the rules that are broken.
        case: name of the case in `CASES` in which it shows.
        steps: number of actions of the shortest trace.
        wrong: what goes wrong.
    """

    off: tuple[str, ...]
    case: str
    steps: int
    wrong: str

    @property
    def rules(self) -> Rules:
        """The rules without the broken ones."""
        return replace(Rules(), **dict.fromkeys(self.off, False))


MUTATIONS = {
    "a receiver adopts the map without the last difference": Mutation(("last_difference",), "one move", 7, LACKS),
    "a donor drops its rows when it sends the last difference": Mutation(("keeps_rows",), "one move", 5, LOST),
    "a donor does not seal itself": Mutation(("seals",), "one move", 9, BOTH),
    "a donor that restarts is not sealed any more": Mutation(("stores_seal",), "one move", 10, BOTH),
    "a receiver that restarts is not complete any more": Mutation(("stores_complete",), "one move", 10, LACKS),
    "sealed and complete are the same": Mutation(("separate_marks",), "swap", 9, LACKS),
    "a donor that restarts continues with no changes": Mutation(("ends_feed",), "one move", 9, LACKS),
    "changes are noted only once rows are copied": Mutation(("marks_before_copying",), "one move", 13, LACKS),
    "a donor forgets changes that it has sent": Mutation(("clears_when_received",), "one move", 9, LACKS),
    "a receiver keeps what it had of a bucket": Mutation(
        ("clears_before_following",), "evict", 12, "PS 1 has a row of bucket 0 that was evicted"
    ),
    "PSs adopt a map before it is committed": Mutation(("commits_first",), "one move", 9, LOST),
    "the coordinator answers before it logs the map": Mutation(("logs_commit",), "one move", 11, LOST),
    "a move is given up while its commit is under way": Mutation(("awaits_outcome",), "one move", 12, LACKS),
    "a commit of NN workers that have died counts": Mutation(("fences_commit",), "restart", 18, LACKS),
    "a generation gets the map before it begins": Mutation(("reads_after_regenerate",), "restart", 17, LACKS),
    "a generation begins without adopting the map": Mutation(("adopts_at_start",), "restart", 6, STUCK),
    "training continues before all PSs have the map": Mutation(
        ("adopts_everywhere",), "one push without lookup", 20, LACKS
    ),
    "training continues before all PSs have the mode": Mutation(("adopts_everywhere",), "phases", 4, MIXED),
    "PSs obey orders of earlier rounds": Mutation(("fences_rounds",), "phases", 13, MIXED),
    "a PS that restarts forgets the round": Mutation(("stores_round",), "one move", 10, STUCK),
    "a refused push is recorded": Mutation(("refuses_first",), "one push without lookup", 19, LACKS),
    "the map changes while a push is in flight": Mutation(("quiesces",), "one push without lookup", 17, TWICE),
    "a push whose answer was lost is sent by another map": Mutation(
        ("quiesces", "sorts_refused"), "one push without lookup", 14, TWICE
    ),
    "pushes of NN workers that have died are applied": Mutation(("fences_pushes",), "without lookups", 23, TWICE),
}
