"""The state of the protocol as a tuple of integers, and its messages as the bits of two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from protocol.model_checker import Action, State
from protocol.model_rules import Case, Rules

__all__ = [
    "ADOPTING",
    "ARRIVES",
    "COMMITTING",
    "DEAD",
    "EMPTY",
    "FINISHING",
    "IDLE",
    "MIXED",
    "NOT_WRITTEN",
    "PUSHING",
    "READING",
    "TRAINING",
    "TWICE",
    "UNKNOWN",
    "WRITING",
    "WRITTEN",
    "Actions",
    "Layout",
]

Actions = list[tuple[Action, State]]
"""Actions that are possible in a state, and where they lead."""

DEAD, READING, ADOPTING, TRAINING, FINISHING, COMMITTING = range(6)
"""States of NN worker 0, which acts for all when training is quiesced."""

IDLE, PUSHING, EMPTY = range(3)
"""An NN worker has no push in flight; one with its gradient; or one without, as its embedding worker has died."""

NOT_WRITTEN, WRITING, WRITTEN, UNKNOWN = range(4)
"""A row is not set by id yet; the request is sent; it was answered; its answer was lost."""

TWICE, MIXED = 1, 2
"""What can be wrong with an update."""

ARRIVES = ("is lost", "arrives")


class Layout:
    """The fields of the state of one case; each attribute in capitals is the index of a field, or a list of indices.

    Args:
        case: what is explored.
        rules: the rules; all of them by default.
    """

    def __init__(self, case: Case, rules: Rules | None = None) -> None:
        self.case = case
        self.rules = rules or Rules()
        self.maps = case.maps
        self.versions = [m.version for m in case.maps]
        self.pss = range(case.pss)
        self.buckets = range(len(case.maps[0].owners))
        self.ranks = range(case.nn_workers)
        self._size = 0
        # The coordinator.
        self.GEN, self.DECIDED, self.LOGGED, self.WANTED = (self._field() for _ in range(4))
        # NN workers and their embedding workers.
        self.NN, self.ROUND, self.NOW, self.NEXT, self.ACKS, self.MODE = (self._field() for _ in range(6))
        self.SEQ, self.DOING, self.KNOWN, self.UPDATE, self.SENT, self.ANSWERS, self.REFUSED = (
            self._fields(case.nn_workers) for _ in range(7)
        )
        # In the regions of each PS.
        self.TERM, self.MAP, self.PHASE, self.SEALED, self.COMPLETE, self.LOG = (
            self._fields(case.pss) for _ in range(6)
        )
        self.ROW = [self._fields(len(self.buckets)) for _ in self.pss]
        # In the memory of each PS: what it follows, and of whose rows it notes changes.
        self.FOLLOWED, self.FOLLOWS, self.ASKED, self.GOT, self.NOTED, self.CHANGED, self.HELD = (
            self._fields(case.pss) for _ in range(7)
        )
        # Messages, and what observers know.
        self.PUSHES, self.ORDERS, self.ACKED, self.LATER, self.WROTE, self.WROTE_BY, self.BAD = (
            self._field() for _ in range(7)
        )
        self.GONE = self._fields(len(self.buckets))
        self.CRASHES, self.EVICTIONS = (self._field() for _ in range(2))
        self.terms = case.rounds + 1
        """Rounds of a generation, with the one that it begins with. A term numbers the rounds of all generations."""
        self._number_messages()

    def _field(self) -> int:
        self._size += 1
        return self._size - 1

    def _fields(self, count: int) -> list[int]:
        return [self._field() for _ in range(count)]

    def _number_messages(self) -> None:
        """Numbers all messages that there can be: a set of them is an integer."""
        case, maps = self.case, range(len(self.maps))
        self.push_bits: dict[tuple[int, int, int, int], int] = {}
        """By update, PS, map, and whether the push has its gradient."""
        names = [(g, r, s) for g in range(1, case.generations + 1) for r in self.ranks for s in range(case.pushes)]
        self.updates = {name: 1 + number for number, name in enumerate(names)}
        self.names = {number: name for name, number in self.updates.items()}
        self.written = 1 << (1 + len(names))
        for update in self.names:
            for ps in self.pss:
                for m in maps:
                    for full in (0, 1):
                        self.push_bits[update, ps, m, full] = 1 << len(self.push_bits)
        self.push_of = list(self.push_bits)
        self.pushes_of = {
            (update, ps): self._sum(b for (u, p, _, _), b in self.push_bits.items() if (u, p) == (update, ps))
            for update in self.names
            for ps in self.pss
        }
        self.orders: list[tuple[str, int, int, int, int]] = []
        """Kind, term, PS, map, and mode or receiver."""
        terms = range(self.terms, (case.generations + 1) * self.terms)
        for term in terms:
            for m in maps:
                self.orders += [("adopt", term, ps, m, mode) for ps in self.pss for mode in range(1 + case.phases)]
                self.orders += [("finish", term, ps, m, 0) for ps in self.pss]
                self.orders += [("seal", term, ps, m, to) for ps in self.pss for to in self.pss if to != ps]
        self.orders += [("commit", g, -1, m, 0) for g in range(1, case.generations + 1) for m in maps]
        self.orders += [("write", 0, ps, m, 0) for ps in self.pss for m in maps]
        self.order_bits = {order: 1 << number for number, order in enumerate(self.orders)}
        self.stale_orders = {
            (ps, term): self._sum(
                bit
                for (kind, t, p, _, _), bit in self.order_bits.items()
                if p == ps and kind in ("adopt", "finish", "seal") and t < term + (kind != "adopt")
            )
            for ps in self.pss
            for term in terms
        }
        """Orders that a PS refuses once a round has ended there."""
        self.stale_pushes = {
            (ps, generation, m): self._sum(
                bit
                for (update, p, routed, _), bit in self.push_bits.items()
                if p == ps
                and (
                    self.maps[routed].version < self.maps[m].version
                    or ((self.rules.fences_pushes or case.combined) and self.names[update][0] < generation)
                )
            )
            for ps in self.pss
            for generation in range(1, case.generations + 1)
            for m in maps
        }
        self.commits = self._sum(bit for (kind, *_), bit in self.order_bits.items() if kind == "commit")

    @staticmethod
    def _sum(bits: Iterable[int]) -> int:
        return sum(bits)

    def initial(self) -> State:
        """Returns the state in which generation 1 trains by the first map."""
        s = [0] * self._size
        s[self.GEN], s[self.NN] = 1, TRAINING
        for ps in self.pss:
            s[self.TERM[ps]] = self.terms
            for bucket in self.buckets:
                s[self.ROW[ps][bucket]] = int(self.maps[0].owners[bucket] == ps)
        s[self.ACKED] = 1
        s[self.WANTED] = -1
        s[self.CRASHES], s[self.EVICTIONS] = self.case.crashes, self.case.evictions
        return tuple(s)

    @staticmethod
    def _bits(messages: int) -> Iterator[int]:
        """Yields the numbers of the messages in a set."""
        while messages:
            lowest = messages & -messages
            yield lowest.bit_length() - 1
            messages ^= lowest

    def _term(self, s: State | list[int]) -> int:
        """Returns the term of NN worker 0."""
        return s[self.GEN] * self.terms + s[self.ROUND]

    def _moving(self, before: int, after: int, to: int) -> list[tuple[int, int]]:
        """Returns donor and bucket of each bucket that a PS gets with the next map."""
        old, new = self.maps[before].owners, self.maps[after].owners
        return [(old[b], b) for b in self.buckets if new[b] == to != old[b]]
