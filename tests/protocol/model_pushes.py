"""Pushes: what NN workers, their embedding workers and PSs do with gradients."""

from __future__ import annotations

from protocol.model_checker import Action, State
from protocol.model_layout import ARRIVES, DEAD, EMPTY, IDLE, MIXED, PUSHING, TRAINING, TWICE, Actions, Layout

__all__ = ["Pushes"]


class Pushes(Layout):
    """The actions of a step."""

    def _ranks(self, s: State, out: Actions) -> None:
        current = {s[field] for field in self.MAP}
        for rank in self.ranks:
            known, doing, sent = s[self.KNOWN[rank]], s[self.DOING[rank]], s[self.SENT[rank]]
            for m in current:
                if self.versions[m] > self.versions[known]:
                    n = list(s)
                    n[self.KNOWN[rank]] = m
                    out.append((("learn", rank, m), tuple(n)))
            if doing == IDLE:
                if s[self.NN] == TRAINING and s[self.SEQ[rank]] < self.case.pushes and self._looks_up(s, known):
                    self._push(s, out, rank, PUSHING, "push")
                if sent and known + 1 != sent and self._sorts_again(s, rank):
                    self._push(s, out, rank, IDLE, "sort again")
            elif sent and not ~s[self.ANSWERS[rank]] & sum(1 << ps for ps in self.maps[sent - 1].servers):
                self._return(s, out, rank)
            elif doing == EMPTY and sent != known + 1:
                self._push(s, out, rank, EMPTY, "push empty")
            elif doing == PUSHING and sent != known + 1 and self._sorts_again(s, rank):
                self._push(s, out, rank, PUSHING, "sort again")

    def _looks_up(self, s: State, m: int) -> bool:
        """Returns whether all PSs answer a lookup by a map, if there is one."""
        version = self.versions[m]
        return not self.case.lookups or all(
            self.versions[s[self.MAP[ps]]] == version and not s[self.SEALED[ps]] for ps in self.maps[m].servers
        )

    def _sorts_again(self, s: State, rank: int) -> bool:
        """Returns whether an embedding worker may send a push by another map."""
        servers = sum(1 << ps for ps in self.maps[s[self.SENT[rank]] - 1].servers)
        return not self.rules.sorts_refused or s[self.REFUSED[rank]] == servers

    def _push(self, s: State, out: Actions, rank: int, doing: int, name: str) -> None:
        """Adds the sending of a push; with `IDLE`, of one whose NN worker has died, which its embedding worker has."""
        known = s[self.KNOWN[rank]]
        new = name == "push" or doing == EMPTY
        update = self.updates[s[self.GEN], rank, s[self.SEQ[rank]]] if new else s[self.UPDATE[rank]]
        generation, _, seq = self.names[update]
        n = list(s)
        n[self.DOING[rank]], n[self.UPDATE[rank]], n[self.SENT[rank]] = doing, update, known + 1
        n[self.ANSWERS[rank]] = n[self.REFUSED[rank]] = 0
        for ps in self.maps[known].servers:
            n[self.PUSHES] |= self.push_bits[update, ps, known, int(doing != EMPTY)]
        if new and s[self.MODE]:
            n[self.LATER] |= 1 << update
        out.append(((name, rank, seq, generation, known), tuple(n)))

    def _return(self, s: State, out: Actions, rank: int) -> None:
        seq = s[self.SEQ[rank]]
        update = self.updates[s[self.GEN], rank, seq]
        n = list(s)
        if s[self.DOING[rank]] == PUSHING:
            n[self.ACKED] |= 1 << update
        n[self.DOING[rank]] = IDLE
        self._forget(n, rank)
        n[self.SEQ[rank]] += 1
        for ps in self.pss:  # All PSs have recorded its number.
            n[self.PUSHES] &= ~self.pushes_of[update, ps]
        out.append((("return", rank, seq), tuple(n)))

    def _deliver_pushes(self, s: State, out: Actions) -> None:
        rules = self.rules
        for number in self._bits(s[self.PUSHES]):
            update, ps, m, full = self.push_of[number]
            generation, rank, seq = self.names[update]
            log = self.LOG[ps]
            if self.versions[s[self.MAP[ps]]] != self.versions[m] or s[self.SEALED[ps]]:
                self._refuse(s, out, number)
                continue
            if generation < s[self.TERM[ps]] // self.terms and (rules.fences_pushes or self.case.combined):
                continue
            live = generation == s[self.GEN] and s[self.NN] != DEAD and s[self.SEQ[rank]] == seq
            awaited = (
                live
                and s[self.SENT[rank]] == m + 1
                and s[self.DOING[rank]] == (PUSHING if full else EMPTY)
                and not s[self.ANSWERS[rank]] >> ps & 1
            )
            n = list(s)
            what = "applied before"
            if not s[log] >> update & 1:
                what = self._apply(n, ps, m, update, full)
                if not what:
                    continue
                if not live and self.case.lookups:  # Else its embedding worker may still wait for answers.
                    n[self.PUSHES] &= ~self.pushes_of[update, ps]
                out.append((self._applied(number, what, 0, live), tuple(n)))
            if awaited and n[log] >> update & 1:
                n[self.ANSWERS[rank]] |= 1 << ps
                out.append((self._applied(number, what, 1), tuple(n)))

    def _refuse(self, s: State, out: Actions, number: int) -> None:
        """A push by another map arrives; its embedding worker is told of a newer one."""
        update, ps, m, full = self.push_of[number]
        _, rank, _ = self.names[update]
        n = list(s)
        if not self.rules.refuses_first:
            n[self.LOG[ps]] |= 1 << update
        newer = self.versions[s[self.MAP[ps]]] > self.versions[m]
        if newer and full and (s[self.SENT[rank]], s[self.UPDATE[rank]]) == (m + 1, update):
            n[self.REFUSED[rank]] |= 1 << ps
        if (refused := tuple(n)) != s:
            live = s[self.DOING[rank]] != IDLE
            out.append((self._applied(number, "refused", 1, live), refused))

    def _forget(self, n: list[int], rank: int) -> None:
        """An embedding worker forgets a push."""
        n[self.UPDATE[rank]] = n[self.SENT[rank]] = n[self.ANSWERS[rank]] = n[self.REFUSED[rank]] = 0

    def _applied(self, number: int, what: str, arrives: int, live: bool = True) -> Action:
        update, ps, m, full = self.push_of[number]
        generation, rank, seq = self.names[update]
        kind = what if full else f"without gradient, {what}"
        return ("apply" if live else "late apply", ps, seq, rank, generation, m, kind, f"the answer {ARRIVES[arrives]}")

    def _apply(self, n: list[int], ps: int, m: int, update: int, full: int) -> str:
        """Applies a push, or holds it until those of all NN workers have arrived; empty if it is held already."""
        applied = [(update, full)]
        if self.case.combined:
            generation, rank, seq = self.names[update]
            held = n[self.HELD[ps]]
            if held >> 2 * rank & 3:
                return ""
            held |= 1 << 2 * rank + full
            n[self.HELD[ps]] = held
            if not all(held >> 2 * r & 3 for r in self.ranks):
                return "held"
            n[self.HELD[ps]] = 0
            applied = [(self.updates[generation, r, seq], held >> 2 * r + 1 & 1) for r in self.ranks]
        for each, has_gradient in applied:
            n[self.LOG[ps]] |= 1 << each
            if n[self.PHASE[ps]] != n[self.LATER] >> each & 1:
                n[self.BAD] = MIXED
            if has_gradient:
                self._change_rows(n, ps, m, 1 << each)
        return "applied"

    def _change_rows(self, n: list[int], ps: int, m: int, bit: int) -> None:
        """Adds an update to the rows of a PS; `written` concerns bucket 0 alone."""
        for bucket in self.buckets:
            if self.maps[m].owners[bucket] == ps and (bit != self.written or bucket == 0):
                row = self.ROW[ps][bucket]
                if (n[row] | n[self.GONE[bucket]]) & bit:
                    n[self.BAD] = TWICE
                n[row] |= bit
                n[self.CHANGED[ps]] |= n[self.NOTED[ps]] & 1 << bucket
