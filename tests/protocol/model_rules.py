"""The rules of the protocol by which rows move while a run trains, and the bounds within which it is explored.

docs/reference/moves.md describes the protocol in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CASES", "LARGE", "BucketOwners", "Case", "Rules"]


@dataclass(frozen=True)
class Rules:
    """The rules. Each of them can be turned off, to see what goes wrong without it."""

    refuses_first: bool = True
    """A PS refuses a push by another map before it records the push's number."""
    quiesces: bool = True
    """The map changes only when all pushes have returned."""
    sorts_refused: bool = True
    """A push is sorted by a newer map only once all PSs that it was sent to have refused it."""
    seals: bool = True
    """A donor refuses all requests from its last difference until it adopts a map."""
    stores_seal: bool = True
    """The seal is in the donor's regions before the last difference is sent."""
    last_difference: bool = True
    """A receiver is complete only with the last difference of each donor."""
    stores_complete: bool = True
    """A receiver's regions say that it is complete before it answers."""
    separate_marks: bool = True
    """Sealed and complete are two marks, as a PS may be donor and receiver."""
    keeps_rows: bool = True
    """A donor keeps its rows until it has adopted the map that gives them away."""
    ends_feed: bool = True
    """A donor that has restarted does not continue a list of changes: rows are copied again."""
    marks_before_copying: bool = True
    """A donor notes changes of rows from before it copies the first one."""
    clears_when_received: bool = True
    """A donor forgets a change only once the receiver has it."""
    clears_before_following: bool = True
    """A receiver drops what it has of a bucket before it copies the bucket."""
    fences_commit: bool = True
    """The coordinator refuses a commit of an earlier generation."""
    awaits_outcome: bool = True
    """After it has sent a commit, NN worker 0 does not give up the move."""
    logs_commit: bool = True
    """The coordinator logs the map before it answers."""
    logs_order: bool = True
    """The coordinator logs which map is wanted."""
    commits_first: bool = True
    """PSs adopt a map only after the coordinator has logged it."""
    adopts_everywhere: bool = True
    """Training continues only once all PSs have adopted the map."""
    adopts_at_start: bool = True
    """A generation begins with the adoption of the coordinator's map by all PSs."""
    reads_after_regenerate: bool = True
    """It reads this map after the generation has begun."""
    fences_rounds: bool = True
    """A PS refuses orders of a round before its last one, or that this round has ended."""
    stores_round: bool = True
    """The number of the last round is in the regions of a PS."""
    fences_pushes: bool = True
    """A PS refuses pushes of an earlier generation, in every mode."""


class BucketOwners(NamedTuple):
    """A bucket map.

    Attributes:
        version: number of changes since the first map.
        owners: PS of each bucket.
        following: numbers of the maps that may come next.
    """

    version: int
    owners: tuple[int, ...]
    following: tuple[int, ...] = ()

    @property
    def servers(self) -> tuple[int, ...]:
        """PSs that get a part of each push."""
        return tuple(range(max(self.owners) + 1))


class Case(NamedTuple):
    """What is explored.

    Attributes:
        maps: the bucket maps; the run begins with the first one.
        pss: number of PSs.
        nn_workers: number of NN workers; each has its own embedding worker.
        lookups: whether each push follows a lookup at all PSs. Else its rows were in the memory of the NN worker, and
            its batch may be sorted by an earlier map.
        combined: whether the PSs combine the pushes of a step, as in Sync, or apply each on arrival.
        pushes: of each NN worker in a generation.
        generations: of NN workers; all but the first one follow a death.
        rounds: of NN worker 0 in a generation: moves, moves that are given up, and changes of mode.
        crashes: deaths of PSs and embedding workers.
        evictions: rows that their PS evicts.
        writes: whether a row is set by id while training.
        phases: whether the mode changes.
        replans: whether another move may be ordered before the first one is over.
    """

    maps: tuple[BucketOwners, ...]
    pss: int = 2
    nn_workers: int = 1
    lookups: bool = True
    combined: bool = False
    pushes: int = 2
    generations: int = 1
    rounds: int = 1
    crashes: int = 0
    evictions: int = 0
    writes: bool = False
    phases: bool = False
    replans: bool = False


REBALANCE = (BucketOwners(0, (0, 1), (1,)), BucketOwners(1, (1, 1)))
JOIN = (BucketOwners(0, (0, 0), (1,)), BucketOwners(1, (0, 1)))
LEAVE = (BucketOwners(0, (0, 1), (1,)), BucketOwners(1, (0, 0)))
SWAP = (BucketOwners(0, (0, 1), (1,)), BucketOwners(1, (1, 0)))
FROM_TWO = (BucketOwners(0, (0, 1), (1,)), BucketOwners(1, (2, 2)))
TO_TWO = (BucketOwners(0, (2, 2), (1,)), BucketOwners(1, (0, 1)))
THERE_AND_BACK = (BucketOwners(0, (0, 1), (1,)), BucketOwners(1, (1, 1), (2,)), BucketOwners(2, (0, 1)))
EITHER = (BucketOwners(0, (0, 1), (1, 2)), BucketOwners(1, (1, 1)), BucketOwners(1, (0, 0)))

CASES = {
    "one move": Case(REBALANCE, pushes=1, crashes=1),
    "restart": Case(REBALANCE, pushes=1, generations=2),
    "phases": Case(REBALANCE, pushes=1, generations=2, rounds=2, phases=True),
    "combined": Case(REBALANCE, nn_workers=2, combined=True, pushes=1, crashes=1),
    "two workers": Case(REBALANCE, nn_workers=2, pushes=1, crashes=1),
    "one push without lookup": Case(REBALANCE, lookups=False, pushes=1),
    "without lookups": Case(REBALANCE, lookups=False, generations=2),
    "swap": Case(SWAP, pushes=1, crashes=1),
    "write": Case(REBALANCE, pushes=1, crashes=1, writes=True),
    "either": Case(EITHER, pushes=1, rounds=1, replans=True),
    "evict": Case(REBALANCE, pushes=1, crashes=1, evictions=1),
}
"""Small cases, of seconds each."""

LARGE = {
    "join": Case(JOIN, generations=2, rounds=2, crashes=1),
    "leave": Case(LEAVE, generations=2, rounds=2, crashes=1),
    "from two": Case(FROM_TWO, pss=3, pushes=1, rounds=2, crashes=1),
    "to two": Case(TO_TWO, pss=3, pushes=1, rounds=2, crashes=1),
    "there and back": Case(THERE_AND_BACK, rounds=3, crashes=1, evictions=1),
    "phases": Case(REBALANCE, generations=2, rounds=2, phases=True),
    "three generations": Case(REBALANCE, pushes=1, generations=3, crashes=1),
    "two deaths": Case(REBALANCE, pushes=1, rounds=2, crashes=2, evictions=1),
    "combined": Case(REBALANCE, nn_workers=2, combined=True, pushes=1, generations=2, crashes=1, phases=True),
    "combined without lookups": Case(REBALANCE, nn_workers=2, lookups=False, combined=True, crashes=1),
    "join without lookups": Case(JOIN, lookups=False, generations=2, crashes=1),
    "swap": Case(SWAP, pushes=1, generations=2, rounds=2, crashes=1),
    "either": Case(EITHER, pushes=1, rounds=2, crashes=1, evictions=1, replans=True),
    "rebalance": Case(REBALANCE, generations=2, rounds=2, crashes=1, writes=True),
}
"""Cases of up to minutes each."""
