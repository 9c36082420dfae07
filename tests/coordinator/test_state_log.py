"""The log of the token scheduler's state: a process may die at any point of a write, and a disk may be full."""

import errno
import os
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.coordinator import TokenScheduler, state_log
from persia.coordinator.scheduler_state import SchedulerState, StateChange, apply_change
from persia.coordinator.state_log import StateLog
from persia.errors import DeadlineError, PersiaError
from persia.modes import Async, Bsp, Gba, HopBs, HopBw
from persia.services import TrainingPhase
from persia.types import Caller, Losses
from support.examples import examples

DEADLINE = 10.0
ROWS = 8


def loaded(path):
    """The state that a process would find, without what is only a bound."""
    state = StateLog(str(path), SchedulerState, StateChange, apply_change).load()
    return msgspec.msgpack.encode(msgspec.structs.replace(state, slowest=0))


def current(tokens):
    return msgspec.msgpack.encode(msgspec.structs.replace(tokens._state, slowest=0))


class Calls:
    """Random calls of NN workers that never wait, against a token scheduler.

    Args:
        data: of hypothesis.
        tokens: the token scheduler.
        nn_workers: number of NN workers.
    """

    def __init__(self, data, tokens, nn_workers):
        self.data = data
        self.tokens = tokens
        self.alive = list(range(nn_workers))
        self.requests = dict.fromkeys(self.alive, 0)
        self.sequence = dict.fromkeys(self.alive, 0)
        self.filled = dict.fromkeys(self.alive, 0)
        self.taken = {rank: [] for rank in self.alive}
        self.drawn = dict.fromkeys(self.alive)

    def next(self):
        """Returns a function that makes one call. It may be called again, on another scheduler."""
        rank = self.data.draw(st.sampled_from(self.alive), "rank")
        caller = Caller(1, 1, rank)
        kind = self.data.draw(st.sampled_from(["train", "train", "train", "take", "cancel", "abandoned"]), "kind")
        if kind == "cancel" and len(self.alive) > 1:
            self.alive.remove(rank)
            return lambda tokens: tokens.cancel(1, rank) and None
        if kind == "abandoned":
            filled = self.filled[rank]
            return lambda tokens: tokens.abandoned(caller, filled)
        if self.drawn[rank] is not None:
            sequence, self.drawn[rank] = self.drawn[rank], None
            rows = self.data.draw(st.sampled_from([0, ROWS]), "rows")
            return lambda tokens: tokens.arrive(caller, sequence, rows, 0)
        if not self.taken[rank] or kind == "take":
            self.requests[rank] += 1
            request = self.requests[rank]
            return lambda tokens: self._took(rank, tokens.take(caller, request))
        number, sequence, filled = self.taken[rank][0], self.sequence[rank] + 1, self.filled[rank]
        lost = Losses(self.data.draw(st.integers(0, 2), "lost"), 0, 0)
        request = self.requests[rank] + 1 if self.data.draw(st.booleans(), "asks for the next batch") else 0
        asked = (sequence, number, ROWS, sequence - 1, filled, lost, request)
        return lambda tokens: self._drew(rank, number, sequence, tokens.draw(caller, *asked))

    def _took(self, rank, number):
        if number is not None and number not in self.taken[rank]:
            self.taken[rank].append(number)
        return number

    def _drew(self, rank, number, sequence, token):
        if token.value is None:
            self.filled[rank] += len(token.abandoned)
        elif self.sequence[rank] < sequence:
            self.taken[rank].remove(number)
            self.sequence[rank] = self.drawn[rank] = sequence
            if token.request > self.requests[rank]:
                self.requests[rank] = token.request
                self._took(rank, token.following)
        return token


MODES = [Gba(3 * ROWS, tolerance=1), Bsp(2), Async(), HopBs(10**6), HopBw(0)]


def begun(path, mode, nn_workers, steps=None):
    tokens = TokenScheduler(DEADLINE, path if path is None else str(path), clock=lambda: 5.0)
    tokens.begin(TrainingPhase(1, 1, mode, nn_workers, 0, 0, 0, steps, ROWS))
    return tokens


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_a_process_that_dies_at_any_byte_answers_no_call_twice(tmp_path_factory, data):
    """After each call, the file has the state of the memory; cut anywhere in the last write, that of the call before.

    A repetition of the call that was not answered then gets the answer, and the same state, as if nothing had happened.
    """
    path = tmp_path_factory.mktemp("log") / "tokens"
    nn_workers = data.draw(st.integers(1, 3), "NN workers")
    mode = data.draw(st.sampled_from(MODES[:4]), "mode")
    tokens = begun(path, mode, nn_workers)
    calls = Calls(data, tokens, nn_workers)
    for _ in range(data.draw(st.integers(1, 25), "calls")):
        call = calls.next()
        before, written = current(tokens), path.read_bytes()
        answer = call(tokens)
        assert loaded(path) == current(tokens)
        whole = path.read_bytes()
        if whole != written and whole.startswith(written):  # Else it is a new file, which is replaced at once.
            cut = data.draw(st.integers(len(written), len(whole) - 1), "cut")
            path.write_bytes(whole[:cut])
            assert loaded(path) == before
            restarted = TokenScheduler(DEADLINE, str(path), clock=lambda: 5.0)
            assert call(restarted) == answer
            assert current(restarted) == current(tokens) == loaded(path)
            tokens = calls.tokens = restarted


def test_records_do_not_grow_with_the_pushes_that_were_filled(tmp_path):
    path, nn_workers = tmp_path / "tokens", 12
    tokens, sizes = begun(path, Async(), nn_workers), []
    filler = Caller(1, 1, 0)
    for filled, rank in enumerate(range(1, nn_workers)):
        dead = Caller(1, 1, rank)
        tokens.draw(dead, 1, tokens.take(dead, 1), ROWS, 0, 0)
        header = tokens.arrive(dead, 1, ROWS, 0).header
        tokens.cancel(1, rank)
        assert tokens.abandoned(filler, filled) == [header]
        before = path.stat().st_size
        assert tokens.abandoned(filler, filled + 1) == []
        sizes.append(path.stat().st_size - before)
    assert len(set(sizes)) == 1
    assert tokens.abandoned(filler, 3) == []  # A late repetition.
    assert loaded(path) == current(tokens)


def slow_gate(state, mode, rank):
    """`SchedulerState.gate` while no NN worker waits, over all NN workers."""
    worker = state.workers[rank]
    in_step = sum(header.step == state.step for header in worker.pushes.values()) if state.held else 0
    active = {r: w for r, w in state.workers.items() if w.alive and (not w.ended or w.taken or w.drawn)}
    begun = worker.finished + len(worker.drawn)
    ahead = max(0, begun - min((w.finished for w in active.values()), default=begun))
    if mode.gate(len(worker.drawn) + in_step, mode.initial_depth(), ahead):
        return True
    return not ahead and all(other == rank for other in active)


def slow_lacking(state):
    """`SchedulerState.lacking`, over all NN workers."""
    out = sum(len(w.taken) + len(w.drawn) for w in state.workers.values())
    return max(0, (state.phase.step + state.phase.steps - state.step) * state.group - state.held - out)


@pytest.mark.parametrize("mode", [*MODES[:3], HopBs(1), HopBs(3), HopBw(0), HopBw(1)], ids=str)
def test_it_answers_as_one_that_asks_all_nn_workers(mode):
    """The scheduler keeps sums and a bound, where the reference goes over all NN workers."""

    @settings(max_examples=examples(40), deadline=None)
    @given(st.data())
    def check(data):
        nn_workers = data.draw(st.integers(2, 4), "NN workers")
        tokens = begun(None, mode, nn_workers, steps=data.draw(st.integers(1, 30), "steps"))
        tokens._timeout = 0.0  # Some calls would wait.
        calls, state = Calls(data, tokens, nn_workers), tokens._state
        for _ in range(data.draw(st.integers(1, 40), "calls")):
            call = calls.next()
            try:
                call(tokens)
            except DeadlineError:
                break
            assert state.lacking() == slow_lacking(state)
            for rank in calls.alive:
                assert state.gate(mode, rank, (), ()) == slow_gate(state, mode, rank)

    check()


def test_a_long_log_is_replaced_by_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(state_log, "LONGEST", 2_000)
    path = tmp_path / "tokens"
    tokens = begun(path, Async(), 1)
    sizes = []
    for sequence in range(1, 200):
        number = tokens.take(Caller(1, 1, 0), sequence)
        tokens.draw(Caller(1, 1, 0), sequence, number, ROWS, sequence - 1, 0)
        tokens.arrive(Caller(1, 1, 0), sequence, ROWS, 0)
        sizes.append(path.stat().st_size)
    assert max(sizes) < 4_000
    assert loaded(path) == current(tokens)
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("replaced", [False, True], ids=["before", "after"])
def test_a_process_that_dies_around_the_replacement_of_the_file(replaced, tmp_path, monkeypatch):
    path = tmp_path / "tokens"
    tokens = begun(path, Async(), 1)
    number = tokens.take(Caller(1, 1, 0), 1)
    before = current(tokens)

    def replace(source, target):
        if replaced:
            os.rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(state_log.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        tokens.stop()
    monkeypatch.undo()
    assert loaded(path) == (current(tokens) if replaced else before)
    restarted = TokenScheduler(DEADLINE, str(path))
    restarted.stop()
    assert restarted.take(Caller(1, 1, 0), 1) == number
    assert restarted.take(Caller(1, 1, 0), 2) is None


def test_a_full_disk_loses_no_answer(tmp_path, monkeypatch):
    """The write is cut short and repeated; if it fails for good, no call is answered before the state is saved."""
    monkeypatch.setattr("persia.coordinator.store.FULL_SECONDS", 0.5)
    path = tmp_path / "tokens"
    tokens = begun(path, Gba(2 * ROWS), 2)
    write, lengths = os.write, iter([10, 0])

    def short(descriptor, data):
        length = next(lengths, len(data))
        if not length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:length])

    monkeypatch.setattr(state_log.os, "write", short)
    assert tokens.take(Caller(1, 1, 0), 1) == 0
    assert loaded(path) == current(tokens)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state_log.os, "write", full)
    with pytest.raises(PersiaError, match="cannot be written"):
        tokens.take(Caller(1, 1, 0), 2)
    assert loaded(path) != current(tokens)
    assert tokens.take(Caller(1, 1, 0), 2) == 1  # The repetition writes a snapshot.
    assert loaded(path) == current(tokens)


def test_a_damaged_log_is_refused(tmp_path):
    path = tmp_path / "tokens"
    tokens = begun(path, Async(), 1)
    tokens.take(Caller(1, 1, 0), 1)
    whole = path.read_bytes()
    for at in (12, len(whole) - 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with pytest.raises(PersiaError, match="is not the state of a coordinator: wrong checksum"):
            TokenScheduler(DEADLINE, str(path))
    path.write_bytes(b"")
    with pytest.raises(PersiaError, match="is not the state of a coordinator: its snapshot is incomplete"):
        TokenScheduler(DEADLINE, str(path))


def test_a_call_writes_its_own_change_only(tmp_path):
    """However many NN workers there are."""
    sizes = []
    for nn_workers in (2, 400):
        path = tmp_path / str(nn_workers)
        tokens = begun(path, Gba(nn_workers * ROWS), nn_workers)
        length = path.stat().st_size
        tokens.take(Caller(1, 1, 0), 1)
        tokens.draw(Caller(1, 1, 0), 1, 0, ROWS, 0, 0)
        tokens.arrive(Caller(1, 1, 0), 1, ROWS, 0)
        sizes.append(path.stat().st_size - length)
    assert abs(sizes[1] - sizes[0]) < 20
    assert sizes[0] < 1_000


def test_calls_of_many_threads_are_all_in_the_file(tmp_path):
    path = tmp_path / "tokens"
    tokens = begun(path, Bsp(4), 8)

    def work(rank):
        caller = Caller(1, 1, rank)
        for sequence in range(1, 30):
            number = tokens.take(caller, sequence)
            tokens.draw(caller, sequence, number, ROWS, sequence - 1, 0)
            tokens.arrive(caller, sequence, ROWS, 0)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert loaded(path) == current(tokens)
    assert tokens.summary().batches == 8 * 29
