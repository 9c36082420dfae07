"""The lists of asynchronous modes: order, accounting, crashes, restarts; here and over rpc."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import rpc, services
from persia.coordinator import TokenScheduler
from persia.errors import ConfigError, DeadlineError, PersiaError, RoleDiedError, StalePushError
from persia.modes import Async, Auto, Bsp, Gba, HopBs, HopBw
from persia.services import TrainingPhase
from persia.types import NO_LOSSES, Caller, Losses, StepTiming
from support.examples import examples

DEADLINE = 10.0
ROWS = 8


def phase(mode, nn_workers=2, number=1, position=0, step=0, steps=None, generation=1):
    return TrainingPhase(generation, number, mode, nn_workers, 0, position, step, steps, ROWS)


class Worker:
    """An NN worker without a network."""

    def __init__(self, tokens, rank, number=1, sequence=0, generation=1):
        self.tokens = tokens
        self.caller = Caller(generation, number, rank)
        self.sequence = sequence
        self.requests = self.filled = 0
        self.taken = []

    def take(self):
        self.requests += 1
        number = self.tokens.take(self.caller, self.requests)
        if number is not None:
            self.taken.append(number)
        return number

    def draw(self):
        self.sequence += 1
        number = self.taken.pop(0)
        token = self.tokens.draw(self.caller, self.sequence, number, ROWS, self.sequence - 1, self.filled)
        while token.value is None:
            self.filled += len(token.abandoned)
            token = self.tokens.draw(self.caller, self.sequence, number, ROWS, self.sequence - 1, self.filled)
        return token

    def start(self):
        """Takes a batch, and draws its token."""
        self.take()
        return self.draw()

    def arrive(self, rows=ROWS, version=0):
        return self.tokens.arrive(self.caller, self.sequence, rows, version)

    def train(self):
        """One batch; None if there is none."""
        if self.take() is None:
            return None
        self.draw()
        return self.arrive()

    def quiesce(self):
        end = self.tokens.quiesce(self.caller, self.sequence, self.filled)
        while end.abandoned:
            self.filled += len(end.abandoned)
            end = self.tokens.quiesce(self.caller, self.sequence, self.filled)
        return end


def two(tokens):
    return Worker(tokens, 0), Worker(tokens, 1)


@pytest.fixture(params=["here", "rpc", "file"])
def tokens(request, tmp_path):
    made = TokenScheduler(DEADLINE, str(tmp_path / "tokens") if request.param == "file" else None)
    if request.param != "rpc":
        yield made
        return
    with ExitStack() as stack:
        server = stack.enter_context(rpc.serve(made, protocol=services.TokenService))
        stub = rpc.connect(server.address, services.TokenService, peer="tokens", timeout=DEADLINE)
        stack.callback(rpc.close, stub)
        yield stub


def report(tokens):
    return tokens.summary()


def test_values_are_those_of_the_paper_and_slots_are_in_order(tokens):
    tokens.begin(phase(Gba(3 * ROWS)))
    a, b = two(tokens)
    seen = []
    for worker in (a, b, a, a, b, b, a):
        token = worker.start()
        ticket = worker.arrive()
        seen.append((token.value, ticket.header.step, ticket.header.slot, ticket.decay))
    assert seen == [(n // 3, n // 3, n % 3, 1.0) for n in range(7)]


def test_a_straggler_beyond_the_tolerance_weighs_nothing(tokens):
    tokens.begin(phase(Gba(2 * ROWS, tolerance=1)))
    fast, slow = two(tokens)
    assert slow.start().value == 0
    for _ in range(4):
        fast.train()
    assert slow.arrive().decay == 0.0
    assert report(tokens).dropped_batches == 1
    slow.start()
    assert slow.arrive().decay == 1.0


def test_repetitions_change_nothing(tokens):
    tokens.begin(phase(Gba(2 * ROWS)))
    tokens.begin(phase(Gba(2 * ROWS)))
    worker = Worker(tokens, 0)
    number = worker.take()
    assert tokens.take(worker.caller, 1) == number
    token = worker.draw()
    assert tokens.draw(worker.caller, 1, number, ROWS, 0, 0) == token
    assert worker.arrive() == worker.arrive()
    assert worker.train().header.slot == 1


def draw_and_take(worker, sequence, number, request):
    return worker.tokens.draw(worker.caller, sequence, number, ROWS, sequence - 1, 0, NO_LOSSES, request)


def test_a_token_brings_the_next_batch(tokens):
    tokens.begin(phase(Gba(2 * ROWS), steps=2))
    a, b = two(tokens)
    assert a.take() == 0
    first = draw_and_take(a, 1, 0, 2)
    assert (first.value, first.request, first.following) == (0, 2, 1)
    assert draw_and_take(a, 1, 0, 2) == first  # A repetition.
    assert tokens.take(a.caller, 2) == 1  # It was asked for in either way.
    assert b.take() == 2
    other = draw_and_take(b, 1, 2, 3)  # Its request 2 is on its way, and would get the same number.
    assert (other.request, other.following) == (1, 2)
    tokens.arrive(a.caller, 1, ROWS, 0)
    second = draw_and_take(a, 2, 1, 3)
    assert (second.value, second.request, second.following) == (1, 3, 3)
    tokens.arrive(a.caller, 2, ROWS, 0)
    last = draw_and_take(a, 3, 3, 4)
    assert (last.request, last.following) == (4, None)  # Two steps of two batches.
    assert tokens.take(a.caller, 4) is None


def test_a_token_does_not_wait_for_the_next_batch(tokens):
    """HopBw may drop a batch that is open, and its step then needs another one."""
    tokens.begin(phase(HopBw(0), steps=1))
    a, b = two(tokens)
    assert [a.take(), b.take()] == [0, 1]
    token = draw_and_take(a, 1, 0, 2)
    assert (token.value, token.request, token.following) == (0, 1, 0)
    tokens.arrive(a.caller, 1, ROWS, 0)
    b.draw()
    b.arrive()
    assert tokens.take(a.caller, 2) is None


def test_a_batch_that_came_with_a_token_is_handed_out_again(tokens):
    tokens.begin(phase(Async()))
    a, dead = two(tokens)
    dead.take()
    assert draw_and_take(dead, 1, 0, 2).following == 1
    tokens.cancel(1, 1)
    assert [a.take(), a.take(), a.take()] == [0, 1, 2]


def test_so_many_steps_and_no_more(tokens):
    tokens.begin(phase(Gba(3 * ROWS), steps=2))
    a, b = two(tokens)
    tickets = []
    while (ticket := a.train()) is not None:
        tickets.append(ticket)
    assert len(tickets) == 6
    assert b.take() is None
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda w: w.quiesce(), (a, b))
    assert first == second
    assert (first.step, first.held, first.position, first.leader, first.ended) == (2, 0, 6, 0, False)


def test_a_remainder_and_the_next_phase(tokens):
    tokens.begin(phase(Gba(4 * ROWS), nn_workers=1))
    a = Worker(tokens, 0)
    for _ in range(6):
        a.train()
    tokens.end(a.caller, a.take())
    end = a.quiesce()
    assert (end.step, end.held, end.position, end.ended) == (1, 2, 6, True)
    with pytest.raises(PersiaError, match="not quiesced"):
        tokens.begin(phase(Async(), nn_workers=1, number=2))
    assert tokens.drained(a.caller, 2) == 2
    tokens.begin(phase(Gba(2 * ROWS), nn_workers=1, number=2, step=2, position=6))
    with pytest.raises(StalePushError, match="Phase 1 of generation 1 has ended"):
        a.take()
    b = Worker(tokens, 0, number=2, sequence=6)
    assert b.take() == 6
    assert b.draw().value == 2


def test_hop_bs_keeps_the_fastest_near_the_slowest(tokens):
    tokens.begin(phase(HopBs(2)))
    fast, slow = two(tokens)
    slow.start()
    fast.train()
    fast.train()
    fast.take()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fast.draw)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        slow.arrive()
        assert waiting.result(DEADLINE).value == 3


def test_hop_bw_drops_who_is_late(tokens):
    tokens.begin(phase(HopBw(1), nn_workers=3))
    a, b, slow = (Worker(tokens, rank) for rank in range(3))
    for worker in (a, b, slow):
        worker.start()
    a.arrive()
    b.arrive()
    ticket = slow.arrive()
    assert ticket.dropped
    assert report(tokens).dropped_rows == ROWS
    assert slow.train().header.step == 1


def quiesce_both(first, second):
    """Both quiesce; returns the result of the first."""
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(first.quiesce)
        second.quiesce()
        return pending.result(DEADLINE)


def test_nobody_waits_for_those_without_data(tokens):
    tokens.begin(phase(HopBw(0), nn_workers=2))
    a, b = two(tokens)
    a.start()
    tokens.end(b.caller, b.take())
    a.arrive()
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(b.quiesce)
        a.taken = [1]  # Read before the end was known.
        assert a.draw().value == 0
        assert a.arrive().header.slot == 1
        a.quiesce()
        assert pending.result(DEADLINE).step == 1


def test_an_nn_worker_twice_as_fast_takes_a_phases_last_batch(tokens):
    """The mode lets it contribute once to a step, and there is no batch left for the other one."""
    tokens.begin(phase(HopBw(0), nn_workers=2, steps=1))
    fast, slow = two(tokens)
    fast.train()
    assert fast.take() == 1
    with ThreadPoolExecutor(2) as threads:
        drawing, taking = threads.submit(fast.draw), threads.submit(slow.take)
        assert drawing.result(DEADLINE).value == 0
        assert fast.arrive().header.slot == 1
        assert taking.result(DEADLINE) is None
    assert quiesce_both(slow, fast).step == 1


def test_a_call_that_comes_twice_while_it_waits_counts_once(tokens):
    """A connection was cut, and the client has called again."""
    tokens.begin(phase(HopBw(0), nn_workers=2, steps=2))
    a, b = two(tokens)
    a.train()
    b.start()
    number = a.take()
    with ThreadPoolExecutor(2) as threads:
        a.sequence += 1
        twice = [threads.submit(tokens.draw, a.caller, a.sequence, number, ROWS, 1, 0) for _ in range(2)]
        time.sleep(0.1)  # Both wait for b.
        assert not any(call.done() for call in twice)
        b.arrive()
        assert {call.result(DEADLINE).value for call in twice} == {1}
    assert a.arrive().header.slot == 0
    with pytest.raises(StalePushError, match="Token 2 is already used"):  # A third one, late.
        tokens.draw(a.caller, a.sequence, number, ROWS, 1, 0)
    assert b.train().header[:4] == (1, 1, 2, 1)  # Its step and slot are those of b's second batch.
    assert quiesce_both(a, b).step == 2


def test_a_dead_nn_worker(tokens):
    """Its token is drawn again, its batch is handed out again, its slot is filled by another."""
    tokens.begin(phase(Gba(3 * ROWS), nn_workers=3))
    a, b, dead = (Worker(tokens, rank) for rank in range(3))
    for worker in (dead, a, b):
        worker.start()
    slot = dead.arrive().header
    assert dead.start().value == 1
    dead.take()
    a.arrive()
    tokens.cancel(1, 2)
    tokens.cancel(1, 2)
    with pytest.raises(StalePushError, match="not an active member"):
        dead.arrive()
    assert [a.take(), b.take()] == [3, 4]
    assert b.arrive().header[:1] == (1,)
    first = tokens.draw(b.caller, 2, 4, ROWS, 1, 0)
    assert (first.value, first.abandoned) == (None, [slot])
    assert tokens.draw(b.caller, 2, 4, ROWS, 1, 0) == first  # Until it has pushed it.
    assert tokens.draw(b.caller, 2, 4, ROWS, 1, 1).value == 1
    assert a.draw().value == 1
    assert report(tokens).lost_tokens == 1


def test_a_redrawn_token_has_the_current_value_not_the_next(tokens):
    """The lost token and its copy count once: M tokens have each value, so tokens and steps stay aligned."""
    tokens.begin(phase(Gba(2 * ROWS), nn_workers=3))
    a, b, dead = (Worker(tokens, rank) for rank in range(3))
    assert [dead.start().value, a.start().value] == [0, 0]
    tokens.cancel(1, 2)
    assert b.start().value == 0
    for worker in (a, b):
        worker.arrive()
    values = []
    for _ in range(4):
        for worker in (a, b):
            values.append(worker.start().value)
            worker.arrive()
    assert values == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_others_hear_of_a_death_when_they_quiesce(tokens):
    assert not tokens.cancel(1, 0)  # There is no phase.
    tokens.begin(phase(Gba(2 * ROWS), nn_workers=3))
    a, b, dead = (Worker(tokens, rank) for rank in range(3))
    dead.take()
    assert tokens.cancel(1, 2)
    assert not tokens.cancel(2, 1)  # Of other NN workers.
    tokens.stop()
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(a.quiesce)
        end = b.quiesce()
        assert pending.result(DEADLINE) == end
    assert (end.leader, end.dead, end.ended) == (0, [2], False)
    assert not tokens.cancel(1, 1)  # Now they are quiesced, and need each other.
    # Its batch is handed out in the next phase of the pass, though all NN workers are others.
    tokens.begin(phase(Gba(2 * ROWS), position=1, generation=2))
    assert tokens.take(Caller(2, 1, 0), 1) == 0
    assert tokens.take(Caller(2, 1, 0), 2) == 1


def test_the_dead_stay_dead_in_the_next_phase(tokens):
    tokens.begin(phase(Gba(2 * ROWS)))
    a, dead = two(tokens)
    dead.take()
    tokens.cancel(1, 1)
    tokens.stop()
    assert a.quiesce().dead == [1]
    assert tokens.drained(a.caller, 0) == 0
    tokens.begin(phase(Gba(2 * ROWS), number=2, position=1))
    again = Worker(tokens, 0, number=2)
    assert again.take() == 0
    again.draw()
    again.arrive()
    tokens.stop()
    assert again.quiesce().dead == [1]


def test_batches_of_the_dead_are_left_or_counted_after_a_restart(tokens):
    """Of the batches 0, 1 and 2, NN worker 1 dies with all; then a PS dies while 0 has arrived and 1 is drawn."""
    tokens.begin(phase(Gba(8 * ROWS)))
    a, dead = two(tokens)
    assert [dead.take() for _ in range(3)] == [0, 1, 2]
    assert tokens.cancel(1, 1)
    tokens.stop()
    assert a.quiesce().position == 3
    tokens.drained(a.caller, 0)
    assert tokens.summary().lost_batches == 0
    tokens.begin(phase(Gba(8 * ROWS), position=3, generation=2))
    b = Worker(tokens, 0, generation=2)
    b.train()
    assert [b.take(), b.take(), b.take()] == [1, 2, 3]
    b.draw()
    tokens.begin(phase(Gba(8 * ROWS), position=3, generation=3))  # Not quiesced: from the recovery point.
    assert tokens.summary().lost_batches == 1  # Its gradient may have been lost with the PS.
    c = Worker(tokens, 0, generation=3)
    assert [c.take(), c.take(), c.take()] == [1, 2, 3]
    assert tokens.cancel(3, 0)
    tokens.begin(phase(Gba(8 * ROWS), position=1, generation=4))  # From an older one: 1 and 2 are read again.
    assert Worker(tokens, 1, generation=4).take() == 1
    assert tokens.summary().lost_batches == 1


def test_what_a_dead_nn_worker_had_lost_is_told_to_the_others(tokens):
    """What it lost after its last call is in pushes that are abandoned. Losses are those since it started."""
    tokens.begin(phase(Async()))
    a, dead = two(tokens)
    for worker in (a, dead):
        worker.take()
    tokens.draw(dead.caller, 1, 1, ROWS, 0, 0, Losses(2, 16, 1))
    assert tokens.arrive(dead.caller, 1, 0, 0).header.step == 0
    assert tokens.draw(a.caller, 1, 0, ROWS, 0, 0, Losses(8, 64, 8)).value is not None
    tokens.arrive(a.caller, 1, ROWS, 0)
    tokens.stop()
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(tokens.quiesce, dead.caller, 1, 0, Losses(3, 24, 1))
        assert tokens.quiesce(a.caller, 1, 0).lost == pending.result(DEADLINE).lost == NO_LOSSES  # Nobody has died.
    tokens.drained(a.caller, 2)
    tokens.begin(phase(Async(), number=2, position=2, step=2))
    assert tokens.cancel(1, 1)
    tokens.stop()
    end = tokens.quiesce(Caller(1, 2, 0), 1, 0, Losses(8, 64, 8))
    assert (end.dead, end.lost) == ([1], Losses(3, 24, 1))


def test_a_dead_nn_worker_that_was_waiting_for_a_batch_gets_none(tokens):
    tokens.begin(phase(HopBw(1), nn_workers=3, steps=2))
    a, b, dead = (Worker(tokens, rank) for rank in range(3))
    for worker in (a, b, a, b):
        worker.take()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(dead.take)  # Until it is known whether the steps need more.
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        tokens.cancel(1, 2)
        with pytest.raises(StalePushError, match="not an active member"):
            waiting.result(DEADLINE)


def test_a_restart_at_an_earlier_position_gets_no_batch_twice(tokens):
    tokens.begin(phase(Gba(2 * ROWS)))
    a, b = Worker(tokens, 0), Worker(tokens, 1)
    a.train()
    b.take()
    tokens.cancel(1, 1)
    tokens.begin(phase(Gba(2 * ROWS), position=0, generation=2))
    assert [tokens.take(Caller(2, 1, 0), request) for request in (1, 2, 3)] == [0, 1, 2]


def test_nobody_waits_for_a_dead_leader():
    tokens = TokenScheduler(DEADLINE)
    tokens.begin(phase(Gba(2 * ROWS)))
    tokens.stop()
    a, b = Worker(tokens, 0), Worker(tokens, 1)
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(a.quiesce)
        assert b.quiesce().leader == pending.result(DEADLINE).leader == 0
        waiting = threads.submit(tokens.drained, b.caller, -1)
        tokens.cancel(1, 0)
        with pytest.raises(RoleDiedError, match="NN worker 0 died"):
            waiting.result(DEADLINE)


def test_an_abandoned_push_is_abandoned_again(tokens):
    """Who was to fill a slot dies too."""
    tokens.begin(phase(Bsp(2), nn_workers=3))
    a, b, c = (Worker(tokens, rank) for rank in range(3))
    for worker in (a, b, c):
        worker.take()
    c.draw()
    slot = c.arrive().header
    tokens.cancel(1, 2)
    b.sequence += 1
    assert tokens.draw(b.caller, 1, 1, ROWS, 0, 0).abandoned == [slot]
    tokens.cancel(1, 1)
    a.sequence += 1
    assert tokens.draw(a.caller, 1, 0, ROWS, 0, 0).abandoned == [slot]
    assert tokens.draw(a.caller, 1, 0, ROWS, 0, 1).value == 0
    assert tokens.summary().abandoned == 1


def test_a_switch_is_asked_for_once_and_checked(tokens):
    tokens.announce(2, ROWS)
    with pytest.raises(ConfigError, match="no multiple"):
        tokens.request(Gba(ROWS + 1))
    tokens.request(Gba(2 * ROWS))
    tokens.request(Gba(2 * ROWS))
    with pytest.raises(PersiaError, match="in progress"):
        tokens.request(Async())
    assert tokens.requested() == Gba(2 * ROWS)
    tokens.resolve(Gba(4 * ROWS))  # Of a request before this one.
    assert tokens.requested() == Gba(2 * ROWS)
    for _ in range(2):  # Its answer may be lost.
        tokens.resolve(Gba(2 * ROWS))
        assert tokens.requested() is None


def test_step_times_ask_for_a_switch(tokens):
    tokens.announce(2, ROWS)
    auto = Auto(Gba(2 * ROWS), windows=2, seconds=0.02)
    tokens.begin_auto(auto, 2, False)
    end = time.monotonic() + DEADLINE
    while not tokens.requested():
        assert time.monotonic() < end
        tokens.report_timings(0, [StepTiming(0.001, 0.001)])
        tokens.report_timings(1, [StepTiming(0.009, 0.009)])
    tokens.resolve(auto.asynchronous)
    evidence = tokens.evidence()
    assert [v.switch for v in evidence.choices][-2:] == [False, True]
    assert {step.worker for step in evidence.steps} == {0, 1}


def test_state_survives_a_restart(tmp_path):
    path = str(tmp_path / "tokens")
    first = TokenScheduler(DEADLINE, path)
    first.begin(phase(Gba(3 * ROWS)))
    a, b = Worker(first, 0), Worker(first, 1)
    for worker in (a, b, a):
        worker.train()
    token = b.start()
    a.tokens = b.tokens = second = TokenScheduler(DEADLINE, path)
    assert second.draw(b.caller, 2, 3, ROWS, 1, 0) == token
    assert b.arrive().header[3:4] == (1,)
    assert a.train().header.slot == 1
    assert report(second).batches == 5


def test_who_is_late_is_named():
    tokens = TokenScheduler(0.05)
    with pytest.raises(DeadlineError, match="Phase 1 has not begun"):
        tokens.take(Caller(1, 1, 0), 1)
    tokens.begin(phase(HopBs(1)))
    fast, slow = two(tokens)
    slow.start()
    fast.train()
    fast.take()
    with pytest.raises(DeadlineError, match="Slowest: NN workers 1"):
        fast.draw()
    with pytest.raises(DeadlineError, match="NN workers 1 have not finished phase 1"):
        fast.quiesce()


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_order_and_any_crash(data):
    """Slots are numbered without a gap, no batch is lost or handed out twice, tokens and steps stay aligned."""
    nn_workers = data.draw(st.integers(1, 4))
    group = data.draw(st.integers(1, 5))
    mode = data.draw(st.sampled_from([Gba(group * ROWS), Bsp(group), Async(), HopBs(2)]))
    tokens = TokenScheduler(DEADLINE)
    tokens.begin_recording()
    tokens.begin(phase(mode, nn_workers))
    workers = [Worker(tokens, rank) for rank in range(nn_workers)]
    alive, busy, arrived, out = set(range(nn_workers)), {}, [], {}
    dead_tokens = 0
    for _ in range(data.draw(st.integers(1, 40))):
        rank = data.draw(st.sampled_from(sorted(alive)))
        worker = workers[rank]
        if len(alive) > 1 and data.draw(st.integers(0, 9)) == 0:
            tokens.cancel(1, rank)
            alive.discard(rank)
            dead_tokens += rank in busy
            busy.pop(rank, None)
            out.pop(rank, None)
        elif rank in busy:
            arrived.append((busy.pop(rank), worker.arrive().header))
            out.pop(rank)
        elif not (
            isinstance(mode, HopBs) and worker.sequence - min(workers[r].sequence - (r in busy) for r in alive) >= 2
        ):
            out[rank] = worker.take()
            number = worker.taken[0]
            worker.draw()
            busy[rank] = number
    size = mode.group(nn_workers, ROWS)
    assert [(h.step, h.slot) for _, h in arrived] == [divmod(n, size) for n in range(len(arrived))]
    numbers = [n for n, _ in arrived]
    assert len(set(numbers)) == len(numbers)
    assert len(tokens.end_recording().arrivals) == len(arrived)
    assert report(tokens).lost_tokens == dead_tokens
    if isinstance(mode, Gba):
        assert all(h.token <= n // size + nn_workers for n, (_, h) in enumerate(arrived))


def test_several_threads_at_once():
    tokens = TokenScheduler(DEADLINE)
    tokens.begin(phase(HopBw(2), nn_workers=6, steps=20))
    barrier = threading.Barrier(6)

    def work(rank):
        worker = Worker(tokens, rank)
        barrier.wait(DEADLINE)
        trained = []
        while (ticket := worker.train()) is not None:
            trained.append(ticket)
        return trained, worker.quiesce()

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(work, range(6)))
    kept = sorted((t.header.step, t.header.slot) for trained, _ in found for t in trained if not t.dropped)
    assert kept == [divmod(n, 4) for n in range(80)]
    assert {end for _, end in [(0, tuple(r)[:5]) for _, r in found]} == {(0, 20, 0, found[0][1].position, False)}


def test_nn_workers_waiting_for_the_first_batch_do_not_block_it():
    """More of them than the coordinator has threads: how many batches there are follows from the first draw."""
    nn_workers = 5
    tokens = TokenScheduler(DEADLINE)
    with ExitStack() as open_:
        server = open_.enter_context(rpc.serve(tokens, protocol=services.TokenService, limits=rpc.Limits(threads=2)))
        stub = rpc.connect(server.address, services.TokenService, timeout=DEADLINE / 2)
        open_.callback(rpc.close, stub)
        stub.begin(phase(Gba(ROWS), nn_workers, steps=3)._replace(local_batch=0))
        first = Worker(stub, 0)
        assert first.take() == 0
        calls = [rpc.start(stub.take, Caller(1, 1, rank), 1) for rank in range(1, nn_workers)]
        end = time.monotonic() + DEADLINE / 10
        while len(tokens._taking) < nn_workers - 1 and time.monotonic() < end:
            time.sleep(0.002)
        first.draw()
        first.arrive()
        assert sorted(call.result() for call in calls if call.result() is not None) == [1, 2]
