"""The protocol of pushes, phases and moves of buckets, as a transition system; see docs/reference/moves.md.

What is left out: data loaders and lookups (a reader would find what every PS would answer: that is an invariant), and
what rows consist of. The value of a row is the set of updates that it has. Requests are never taken from the network:
each may arrive at any time, never, or repeatedly. Answers arrive at once or never.
"""

from __future__ import annotations

from protocol.model_checker import Action, State
from protocol.model_layout import DEAD, EMPTY, IDLE, MIXED, NOT_WRITTEN, TRAINING, TWICE, WRITING, Actions
from protocol.model_moves import Moves

__all__ = ["Protocol"]

LATE = "late "
"""Before the name of an action that nobody waits for: progress must not depend on it."""

WRONG = {TWICE: "an update was applied twice", MIXED: "a push was applied in another phase"}

TEXTS = {
    "plan": "coordinator: logs that map {0} is wanted",
    "subscribe": "PS {0}: follows PS {1} for bucket {2}; changes of all its rows are noted",
    "copy": "PS {0}: gets what changed in bucket {2} from PS {1}",
    "copy lost": "PS {1}: sends what changed in bucket {2} to PS {0}, and the answer is lost",
    "learn": "embedding worker {0}: gets map {1} from a PS",
    "push": "NN worker {0}: push {1} of generation {2}; its embedding worker sends it by map {3}",
    "push empty": "NN worker {0}: push {1} of generation {2} again, without gradient, as its embedding worker has died",
    "sort again": "embedding worker {0}: sorts push {1} of generation {2} again, and sends it by map {3}",
    "apply": "PS {0}: push {1} of NN worker {2}, generation {3}, sent by map {4}: {5}, {6}",
    "return": "NN worker {0}: push {1} has returned",
    "finish": "NN worker 0: all are quiesced; asks receivers of map {0} for the last difference (round {1})",
    "change mode": "NN worker 0: all are quiesced; changes the mode (round {0})",
    "note": "PS {1}: notes changes of bucket {2} for PS {0} from now on",
    "ask": "PS {0}: asks PS {1} for the last difference",
    "complete": "PS {0}: complete for map {1}; NN worker 0 is told",
    "complete early": "PS {0}: complete for map {1}, without a last difference",
    "seal": "PS {0}: {2}; sends the last difference to PS {1}, {3}",
    "give up": "NN worker 0: gives the move up",
    "withdraw": "NN worker 0: gives the move up, as the coordinator wants another one",
    "commit": "NN worker 0: asks the coordinator to commit map {0}",
    "committed": "coordinator: commits map {0}; the answer {1}",
    "log": "coordinator: logs its map",
    "adopt": "PS {0}: adopts map {1} (round {2}); the answer {3}",
    "train": "NN worker 0: training continues",
    "drop": "PS {0}: drops rows that it does not own",
    "ps dies": "PS {0} dies, and attaches to its regions again",
    "ew dies": "embedding worker {0} dies and restarts",
    "nn dies": "the NN workers die",
    "coordinator dies": "the coordinator dies and restarts",
    "regenerate": "coordinator: generation {0} begins",
    "read": "NN worker 0: gets map {0} from the coordinator; all PSs are to adopt it",
    "evict": "PS {0}: evicts the row of bucket {1}",
    "write": "a row of bucket 0 is set by id, by map {0}",
    "written": "PS {0}: sets the row; the answer {1}",
    "refused": "PS {0}: refuses to set the row",
}


class Protocol(Moves):
    """The transition system of one case; see `Layout`."""

    faults = frozenset(
        ["ps dies", "ew dies", "nn dies", "coordinator dies", "give up", "evict", "write", "plan"]
        + [LATE + name for name in ("apply", "adopt", "ask", "seal", "committed")]
    )

    # --- the interface of the checker -------------------------------------------------------------------------------

    def done(self, state: State) -> bool:
        """Returns whether all is trained, and no move is wanted that could still be made."""
        return (
            state[self.NN] == TRAINING
            and all(state[field] == self.case.pushes for field in self.SEQ)
            and (state[self.WANTED] < 0 or state[self.ROUND] == self.case.rounds)
        )

    def explain(self, action: Action) -> str:
        """Returns an action as a sentence."""
        name = str(action[0])
        text = TEXTS[name.removeprefix(LATE)].format(*action[1:])
        return f"{text} (late)" if name.startswith(LATE) else text

    def violation(self, state: State) -> str:
        """Returns the first invariant that does not hold."""
        if state[self.BAD]:
            return WRONG[state[self.BAD]]
        decided = self.maps[state[self.DECIDED]].owners
        answered = 0
        for bucket in self.buckets:
            needed = self._needed(state, bucket)
            owner = decided[bucket]
            row = state[self.ROW[owner][bucket]]
            if needed & ~row:
                return f"PS {owner} owns bucket {bucket} by the coordinator's map and lacks an acknowledged update"
            if row & state[self.GONE[bucket]]:
                return f"PS {owner} has a row of bucket {bucket} that was evicted"
        for ps in self.pss:
            if state[self.SEALED[ps]]:
                continue
            owners = self.maps[state[self.MAP[ps]]].owners
            for bucket in self.buckets:
                if owners[bucket] == ps:
                    row = state[self.ROW[ps][bucket]]
                    if self._needed(state, bucket) & ~row or row & state[self.GONE[bucket]]:
                        return f"PS {ps} answers for bucket {bucket}, without its row or an acknowledged update"
                    if answered >> bucket & 1:
                        return f"two PSs answer for bucket {bucket}"
                    answered |= 1 << bucket
        return ""

    def _needed(self, state: State, bucket: int) -> int:
        """Returns the updates that a row must have."""
        needed = state[self.ACKED] & ~state[self.GONE[bucket]]
        return needed & ~self.written if bucket else needed

    def successors(self, state: State) -> Actions:
        """Returns all actions that are possible in a state, and where they lead."""
        out: Actions = []
        self._coordinator(state, out)
        self._nn_worker(state, out)
        self._ranks(state, out)
        for ps in self.pss:
            self._follow(state, ps, out)
        self._deliver_pushes(state, out)
        self._deliver_orders(state, out)
        self._faults(state, out)
        return out

    # --- faults -----------------------------------------------------------------------------------------------------

    def _faults(self, s: State, out: Actions) -> None:
        if s[self.CRASHES]:
            for ps in self.pss:
                self._ps_dies(s, ps, out)
            for rank in self.ranks:
                n = list(s)
                if s[self.DOING[rank]] != IDLE:
                    n[self.DOING[rank]] = EMPTY
                self._forget(n, rank)
                n[self.KNOWN[rank]] = s[self.MAP[0]]
                self._crash(s, n, ("ew dies", rank), out)
        if s[self.NN] != DEAD and s[self.GEN] < self.case.generations:
            n = list(s)
            n[self.NN], n[self.ACKS] = DEAD, 0
            if not self.rules.reads_after_regenerate:
                n[self.NOW] = s[self.DECIDED]
            for rank in self.ranks:
                if s[self.DOING[rank]] == EMPTY or self.case.lookups:
                    self._forget(n, rank)
                n[self.DOING[rank]] = IDLE
            for (update, ps), bits in self.pushes_of.items() if self.case.lookups else ():
                if s[self.LOG[ps]] >> update & 1:
                    n[self.PUSHES] &= ~bits
            out.append((("nn dies",), tuple(n)))
        n = list(s)
        n[self.DECIDED] = s[self.LOGGED]
        if not self.rules.logs_order:
            n[self.WANTED] = -1
        if (forgot := tuple(n)) != s:
            out.append((("coordinator dies",), forgot))
        if s[self.EVICTIONS]:
            self._evict(s, out)
        if self.case.writes and s[self.WROTE] == NOT_WRITTEN:
            for m in {s[field] for field in self.MAP}:
                n = list(s)
                n[self.ORDERS] |= self.order_bits["write", 0, self.maps[m].owners[0], m, 0]
                n[self.WROTE] = WRITING
                out.append((("write", m), tuple(n)))

    def _ps_dies(self, s: State, ps: int, out: Actions) -> None:
        n, rules = list(s), self.rules
        for fields in (self.FOLLOWED, self.FOLLOWS, self.ASKED, self.GOT, self.NOTED, self.CHANGED, self.HELD):
            n[fields[ps]] = 0
        if not rules.stores_seal:
            n[self.SEALED[ps]] = 0
        if not rules.stores_complete:
            n[self.COMPLETE[ps]] = 0
        if not rules.stores_round and not n[self.SEALED[ps]] and not n[self.COMPLETE[ps]]:
            n[self.TERM[ps]] = 0
        self._crash(s, n, ("ps dies", ps), out)

    def _crash(self, s: State, n: list[int], action: Action, out: Actions) -> None:
        """Adds a death, if anything is lost by it."""
        if tuple(n) != s:
            n[self.CRASHES] -= 1
            out.append((action, tuple(n)))

    def _evict(self, s: State, out: Actions) -> None:
        for ps in self.pss:
            for bucket, row in enumerate(self.ROW[ps]):
                if s[row] and self.maps[s[self.MAP[ps]]].owners[bucket] == ps and not s[self.SEALED[ps]]:
                    n = list(s)
                    n[self.GONE[bucket]] |= s[row]
                    n[row] = 0
                    n[self.CHANGED[ps]] |= n[self.NOTED[ps]] & 1 << bucket
                    n[self.EVICTIONS] -= 1
                    out.append((("evict", ps, bucket), tuple(n)))
