"""Moves of buckets: what receivers, donors, the coordinator and NN worker 0 do."""

from __future__ import annotations

from protocol.model_checker import State
from protocol.model_layout import (
    ADOPTING,
    ARRIVES,
    COMMITTING,
    DEAD,
    FINISHING,
    IDLE,
    NOT_WRITTEN,
    READING,
    TRAINING,
    UNKNOWN,
    WRITTEN,
    Actions,
)
from protocol.model_pushes import Pushes

__all__ = ["Moves"]


class Moves(Pushes):
    """The actions of rounds and moves."""

    # --- coordinator and NN worker 0 --------------------------------------------------------------------------------

    def _coordinator(self, s: State, out: Actions) -> None:
        decided, wanted = s[self.DECIDED], s[self.WANTED]
        for m in self.maps[decided].following:
            if m != wanted and (wanted < 0 or self.case.replans):
                n = list(s)
                n[self.WANTED] = m
                out.append((("plan", m), tuple(n)))
        if s[self.LOGGED] != decided:
            n = list(s)
            n[self.LOGGED] = decided
            out.append((("log",), tuple(n)))

    def _nn_worker(self, s: State, out: Actions) -> None:
        nn, rules = s[self.NN], self.rules
        n = list(s)
        if nn == TRAINING:
            self._boundary(s, out)
        elif nn == FINISHING:
            receivers = {to for to in self.pss if self._moving(s[self.NOW], s[self.NEXT], to)}
            if s[self.ACKS] == sum(1 << to for to in receivers):
                n[self.NN] = COMMITTING
                n[self.ORDERS] |= self.order_bits["commit", s[self.GEN], -1, s[self.NEXT], 0]
                if not rules.commits_first:
                    n[self.NOW] = s[self.NEXT]
                    self._order_adoption(n)
                out.append((("commit", s[self.NEXT]), tuple(n)))
        elif nn == ADOPTING:
            if s[self.ACKS] == (1 << self.case.pss) - 1 or not rules.adopts_everywhere:
                n[self.NN], n[self.ACKS] = TRAINING, 0
                out.append((("train",), tuple(n)))
        elif nn == DEAD and s[self.GEN] < self.case.generations:
            n[self.NN], n[self.ROUND] = READING, 0
            n[self.GEN] += 1
            for seq in self.SEQ:
                n[seq] = 0
            if rules.fences_commit:
                n[self.ORDERS] &= ~self.commits
            if not rules.reads_after_regenerate:
                self._order_adoption(n)
            out.append((("regenerate", n[self.GEN]), tuple(n)))
        elif nn == READING:
            n[self.NOW] = s[self.DECIDED]
            self._order_adoption(n)
            if not rules.adopts_at_start:
                n[self.NN] = TRAINING
            out.append((("read", n[self.NOW]), tuple(n)))
        if nn == FINISHING or (nn == COMMITTING and not rules.awaits_outcome):
            n = list(s)
            self._order_adoption(n)
            unwanted = nn == FINISHING and s[self.WANTED] != s[self.NEXT]
            out.append((("withdraw" if unwanted else "give up",), tuple(n)))

    def _boundary(self, s: State, out: Actions) -> None:
        """Adds what NN worker 0 may do when training is quiesced."""
        if s[self.ROUND] == self.case.rounds or (self.rules.quiesces and any(s[d] != IDLE for d in self.DOING)):
            return
        wanted = s[self.WANTED]
        if wanted in self.maps[s[self.NOW]].following:
            n = list(s)
            n[self.NN], n[self.NEXT] = FINISHING, wanted
            n[self.ROUND] += 1
            for to in self.pss:
                if self._moving(s[self.NOW], wanted, to):
                    n[self.ORDERS] |= self.order_bits["finish", self._term(n), to, wanted, 0]
            out.append((("finish", wanted, n[self.ROUND]), tuple(n)))
        if self.case.phases and not s[self.MODE]:
            n = list(s)
            n[self.MODE] = 1
            n[self.ROUND] += 1
            self._order_adoption(n)
            out.append((("change mode", n[self.ROUND]), tuple(n)))

    def _order_adoption(self, n: list[int]) -> None:
        """NN worker 0 orders all PSs to adopt its map and mode."""
        n[self.NN], n[self.NEXT], n[self.ACKS] = ADOPTING, 0, 0
        for ps in self.pss:
            n[self.ORDERS] |= self.order_bits["adopt", self._term(n), ps, n[self.NOW], n[self.MODE]]

    # --- donors and receivers ---------------------------------------------------------------------------------------

    def _follow(self, s: State, ps: int, out: Actions) -> None:
        """Adds what a PS does by itself: it follows the donors of its next buckets, and drops rows of others."""
        now, wanted = s[self.MAP[ps]], s[self.WANTED]
        if wanted in self.maps[now].following and not s[self.COMPLETE[ps]]:
            follows = s[self.FOLLOWS[ps]] if s[self.FOLLOWED[ps]] == wanted + 1 else 0
            for donor, bucket in self._moving(now, wanted, ps):
                if s[self.MAP[donor]] == now:
                    self._copy(s, ps, donor, bucket, follows, out)
        target = s[self.COMPLETE[ps]]
        kept = s[self.FOLLOWS[ps]]
        n = list(s)
        for bucket, row in enumerate(self.ROW[ps]):
            complete = target and self.maps[target - 1].owners[bucket] == ps
            if self.maps[now].owners[bucket] != ps and not complete and not kept >> bucket & 1:
                n[row] = 0
        if (dropped := tuple(n)) != s:
            out.append((("drop", ps), dropped))

    def _copy(self, s: State, ps: int, donor: int, bucket: int, follows: int, out: Actions) -> None:
        bit, rules = 1 << bucket, self.rules
        noted, changed = s[self.NOTED[donor]] & bit, s[self.CHANGED[donor]] & bit
        row, source = self.ROW[ps][bucket], s[self.ROW[donor][bucket]]
        n = list(s)
        if not follows & bit or (not noted and rules.marks_before_copying and rules.ends_feed):
            n[self.FOLLOWED[ps]], n[self.FOLLOWS[ps]] = s[self.WANTED] + 1, follows | bit
            n[self.GOT[ps]] &= ~bit
            if rules.clears_before_following:
                n[row] = 0
            if rules.marks_before_copying:
                n[self.NOTED[donor]] |= bit
                n[self.CHANGED[donor]] = s[self.CHANGED[donor]] & ~bit | (bit if source else 0)
            else:
                n[row] = source
            out.append((("subscribe", ps, donor, bucket), tuple(n)))
        elif not noted and not rules.marks_before_copying:
            n[self.NOTED[donor]] |= bit
            n[self.CHANGED[donor]] &= ~bit
            out.append((("note", ps, donor, bucket), tuple(n)))
        elif changed:
            n[self.CHANGED[donor]] &= ~bit
            if not rules.clears_when_received:
                out.append((("copy lost", ps, donor, bucket), tuple(n)))
            n[row] = source
            out.append((("copy", ps, donor, bucket), tuple(n)))

    def _deliver_orders(self, s: State, out: Actions) -> None:
        for number in self._bits(s[self.ORDERS]):
            kind, term, ps, m, more = self.orders[number]
            if kind == "adopt":
                self._adopt(s, term, ps, m, more, out)
            elif kind == "finish":
                self._finish(s, term, ps, m, out)
            elif kind == "seal":
                self._seal(s, term, ps, m, more, out)
            elif kind == "commit":
                self._commit(s, number, term, m, out)
            else:
                self._write(s, number, ps, m, out)

    def _takes_part(self, s: State, term: int, ps: int, m: int) -> bool:
        """Returns whether a PS obeys an order of a move in this term."""
        if m not in self.maps[s[self.MAP[ps]]].following:
            return False
        if not self.rules.fences_rounds or term > s[self.TERM[ps]]:
            return True
        return term == s[self.TERM[ps]] and m + 1 in (s[self.SEALED[ps]], s[self.COMPLETE[ps]])

    def _finish(self, s: State, term: int, ps: int, m: int, out: Actions) -> None:
        """A receiver gets the order to get the last differences, or answers that it has them."""
        if not self._takes_part(s, term, ps, m):
            return
        n = list(s)
        complete = s[self.COMPLETE[ps]] == m + 1 or (not self.rules.separate_marks and s[self.SEALED[ps]] == m + 1)
        if complete and s[self.TERM[ps]] == term:
            if s[self.NN] == FINISHING and self._term(s) == term and not s[self.ACKS] >> ps & 1:
                n[self.ACKS] |= 1 << ps
                out.append((("complete", ps, m), tuple(n)))
            return
        moving = self._moving(s[self.MAP[ps]], m, ps)
        if s[self.FOLLOWED[ps]] != m + 1 or any(not s[self.FOLLOWS[ps]] >> b & 1 for _, b in moving):
            return
        if not self.rules.last_difference:
            n[self.COMPLETE[ps]], n[self.TERM[ps]] = m + 1, term
            out.append((("complete early", ps, m), tuple(n)))
            return
        n[self.ASKED[ps]] = term
        donors = sorted({donor for donor, _ in moving})
        for donor in donors:
            n[self.ORDERS] |= self.order_bits["seal", term, donor, m, ps]
        if (asked := tuple(n)) != s:
            live = s[self.NN] == FINISHING and self._term(s) == term
            out.append((("ask" if live else "late ask", ps, ", ".join(map(str, donors))), asked))

    def _seal(self, s: State, term: int, ps: int, m: int, to: int, out: Actions) -> None:
        """A donor refuses requests from now on, and sends its last difference."""
        rules = self.rules
        if not self._takes_part(s, term, ps, m):
            return
        moving = self._moving(s[self.MAP[ps]], m, to)
        own = sum(1 << b for donor, b in moving if donor == ps)
        if own & ~s[self.NOTED[ps]] and rules.ends_feed:
            return
        n = list(s)
        if rules.seals:
            n[self.SEALED[ps]], n[self.TERM[ps]] = m + 1, term
        rows = [s[row] for row in self.ROW[ps]]
        if not rules.keeps_rows:
            for bucket in self._bits(own):
                n[self.ROW[ps][bucket]] = 0
        how = "seals itself" if rules.seals else "does not seal itself"
        if (lost := tuple(n)) != s:
            live = s[self.ASKED[to]] == term
            out.append((("seal" if live else "late seal", ps, to, how, f"which {ARRIVES[0]}"), lost))
        awaited = s[self.ASKED[to]] == term and s[self.FOLLOWED[to]] == m + 1 and not own & ~s[self.FOLLOWS[to]]
        if not awaited or s[self.COMPLETE[to]] or not own & ~s[self.GOT[to]]:
            return
        for bucket in self._bits(own & s[self.CHANGED[ps]]):
            n[self.ROW[to][bucket]] = rows[bucket]
        n[self.GOT[to]] |= own
        if not sum(1 << b for _, b in moving) & ~n[self.GOT[to]]:
            n[self.COMPLETE[to]], n[self.TERM[to]] = m + 1, term
            n[self.ASKED[to]] = n[self.GOT[to]] = 0
        out.append((("seal", ps, to, how, f"which {ARRIVES[1]}"), tuple(n)))

    def _commit(self, s: State, number: int, generation: int, m: int, out: Actions) -> None:
        n = list(s)
        if s[self.DECIDED] != m:
            fenced = self.rules.fences_commit and generation != s[self.GEN]
            if fenced or m not in self.maps[s[self.DECIDED]].following:
                return
            n[self.DECIDED], n[self.WANTED] = m, -1
            if self.rules.logs_commit:
                n[self.LOGGED] = m
            live = s[self.NN] == COMMITTING and generation == s[self.GEN]
            out.append((("committed" if live else "late committed", m, ARRIVES[0]), tuple(n)))
        if s[self.NN] == COMMITTING and generation == s[self.GEN] and s[self.NEXT] == m:
            n[self.NOW] = m
            n[self.ORDERS] &= ~(1 << number)
            self._order_adoption(n)
            out.append((("committed", m, ARRIVES[1]), tuple(n)))

    def _adopt(self, s: State, term: int, ps: int, m: int, mode: int, out: Actions) -> None:
        """A PS adopts a map and a mode, which also ends a round."""
        rules, before = self.rules, s[self.MAP[ps]]
        if rules.fences_rounds and term < s[self.TERM[ps]]:
            return
        n = list(s)
        if s[self.TERM[ps]] // self.terms < term // self.terms:
            n[self.HELD[ps]] = 0
        n[self.TERM[ps]], n[self.PHASE[ps]] = term, mode
        n[self.SEALED[ps]] = n[self.COMPLETE[ps]] = n[self.ASKED[ps]] = n[self.GOT[ps]] = 0
        if m != before:
            n[self.MAP[ps]] = m
            n[self.FOLLOWED[ps]] = n[self.FOLLOWS[ps]] = n[self.NOTED[ps]] = n[self.CHANGED[ps]] = 0
        if rules.fences_rounds and rules.stores_round:
            n[self.ORDERS] &= ~self.stale_orders[ps, term]
            if rules.refuses_first and self.case.lookups:
                n[self.PUSHES] &= ~self.stale_pushes[ps, term // self.terms, n[self.MAP[ps]]]
        live = s[self.NN] == ADOPTING and self._term(s) == term
        if (lost := tuple(n)) != s:
            out.append((("adopt" if live else "late adopt", ps, m, term % self.terms, ARRIVES[0]), lost))
        if live and not s[self.ACKS] >> ps & 1:
            n[self.ACKS] |= 1 << ps
            out.append((("adopt", ps, m, term % self.terms, ARRIVES[1]), tuple(n)))

    def _write(self, s: State, number: int, ps: int, m: int, out: Actions) -> None:
        n = list(s)
        n[self.ORDERS] &= ~(1 << number)
        if self.versions[s[self.MAP[ps]]] != self.versions[m] or s[self.SEALED[ps]]:
            n[self.WROTE] = NOT_WRITTEN
            out.append((("refused", ps), tuple(n)))
            return
        self._change_rows(n, ps, m, self.written)
        n[self.WROTE] = UNKNOWN
        out.append((("written", ps, ARRIVES[0]), tuple(n)))
        n[self.WROTE] = WRITTEN
        n[self.ACKED] |= self.written
        out.append((("written", ps, ARRIVES[1]), tuple(n)))
