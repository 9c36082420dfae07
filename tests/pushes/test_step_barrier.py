"""Holding a step until all NN workers have pushed: order, repetition, deadlines, generations."""

import collections
import functools
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import batching
from persia.errors import DeadlineError, StalePushError, StoreError
from persia.modes import Action, Arrival, Decision, Hybrid, Sync
from persia.modes.base import hold_until_full
from persia.optim import SGD, Adagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.pushes.accumulator import average_step
from persia.pushes.step_barrier import MOST_OPEN, MOST_REPEATED, ArrivedPush, StepBarrier
from persia.retry import Deadline
from persia.schema import Table
from persia.types import Gradients, PushHeader, UpdateCounts
from support.examples import examples
from support.twins.pushes import average_step as readable_average_step

TIMEOUT = 20.0
TABLES = {"user": Table("user", dim=3), "item": Table("item", dim=20)}


def header(rank, step=7, generation=1, rows=4, part=0, parts=1, first=0):
    """The header of a push of NN workers that began at step `first`."""
    return PushHeader(generation, rank, step - first + 1, step, rows, part, parts)


def steps_of(ranks, timeout=TIMEOUT, first=7):
    """A barrier whose first step is `first`, and the headers that it has applied, by step."""
    applied = []

    def apply(arrived):
        applied.append([a.header for a in arrived])
        return {"user": UpdateCounts(applied=len(applied))}

    return StepBarrier(range(ranks), timeout, hold_until_full, apply, applied=(1, first - 1)), applied


def until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.001)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_the_mode_is_asked_once_for_each_nn_worker_and_decides(threads):
    asked = []

    def arrive(arrival):
        asked.append(arrival)
        return Decision(Action.APPLY if arrival.held == 1 else Action.HOLD)  # Two of three are enough.

    def apply(arrived):
        return {"user": UpdateCounts(applied=len(arrived))}

    held = StepBarrier(range(3), TIMEOUT, arrive, apply, applied=(1, 6))
    parts = [threads.submit(held.push, 7, ArrivedPush(header(0, part=part, parts=2), {})) for part in range(2)]
    until(lambda: len(asked) == 1)
    again = threads.submit(held.push, 7, ArrivedPush(header(0, parts=2), {}))  # A repetition.
    held.push(7, ArrivedPush(header(2), {}))
    assert [push.result(TIMEOUT) for push in (*parts, again)].count({"user": UpdateCounts(applied=3)}) == 2
    assert asked == [Arrival(7, 0, 7, 3), Arrival(7, 1, 7, 3)]
    assert held.push(7, ArrivedPush(header(1), {})) == {}  # It came after its step.


def test_who_waits_for_nn_workers_of_before_is_told(threads):
    ps = server(Sync(), nn_workers=2)
    waiting = threads.submit(ps.push, header(0), {})
    until(lambda: ps._barriers[0].open_steps)
    ps.switch(Sync(), 2, 5)
    with pytest.raises(StalePushError, match="generation 2"):
        waiting.result(TIMEOUT)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_step_is_applied_once_in_rank_order(order, threads):
    held, applied = steps_of(3)
    calls = {rank: threads.submit(held.push, 7, ArrivedPush(header(rank), {})) for rank in order}
    counts = {rank: call.result(TIMEOUT) for rank, call in calls.items()}
    assert [[h.rank for h in step] for step in applied] == [[0, 1, 2]]
    # Counted once, whoever adds the counts up.
    assert counts == {0: {"user": UpdateCounts(applied=1)}, 1: {}, 2: {}}


def test_a_push_waits_for_the_others(threads):
    held, applied = steps_of(2)
    first = threads.submit(held.push, 7, ArrivedPush(header(1), {}))
    with pytest.raises(TimeoutError):
        first.result(0.05)
    assert not applied
    held.push(7, ArrivedPush(header(0), {}))
    first.result(TIMEOUT)
    assert len(applied) == 1


def test_repetitions_count_once_and_the_first_one_counts(threads):
    held, applied = steps_of(2)
    calls = [threads.submit(held.push, 7, ArrivedPush(header(1, rows=5), {}))]
    until(lambda: held.open_steps)
    calls += [threads.submit(held.push, 7, ArrivedPush(header(1, rows=9), {})) for _ in range(4)]
    counts = held.push(7, ArrivedPush(header(0), {}))
    for call in calls:
        assert call.result(TIMEOUT) == {}
    assert [[(h.rank, h.rows) for h in step] for step in applied] == [[(0, 4), (1, 5)]]
    # After the step too: a lost reply is repeated, with the same answer.
    assert held.push(7, ArrivedPush(header(0), {})) == counts != {}
    assert held.push(7, ArrivedPush(header(1), {})) == {}
    assert len(applied) == 1


def test_the_deadline_names_the_ranks_that_are_missing(threads):
    held, applied = steps_of(4, timeout=0.05)
    calls = [threads.submit(held.push, 7, ArrivedPush(header(rank), {})) for rank in (0, 2)]
    for call in calls:
        with pytest.raises(DeadlineError, match=r"Step 7 \(generation 1\).*NN workers .*1.*3") as failure:
            call.result(TIMEOUT)
        assert {1, 3} <= set(failure.value.fields["missing"])
    # What came stays held: the late ones, and repetitions, complete the step.
    held._timeout = TIMEOUT
    calls = [threads.submit(held.push, 7, ArrivedPush(header(rank), {})) for rank in (0, 1, 2, 3)]
    for call in calls:
        call.result(TIMEOUT)
    assert len(applied) == 1


def test_a_repeated_held_push_has_the_deadline_of_its_call(threads):
    found = []

    def apply(arrived):
        found.extend(a.deadline for a in arrived)
        return {}

    held = StepBarrier(range(2), 0.05, hold_until_full, apply, applied=(1, 6))
    with pytest.raises(DeadlineError):
        held.push(7, ArrivedPush(header(0), {}, Deadline(0.05)))
    held._timeout = TIMEOUT
    later = Deadline(TIMEOUT)
    call = threads.submit(held.push, 7, ArrivedPush(header(0), {}, later))
    until(lambda: held._open[7].arrived[0, 0].deadline is later)
    held.push(7, ArrivedPush(header(1), {}, later))
    call.result(TIMEOUT)
    assert found == [later, later]


def test_a_new_generation_voids_what_the_old_one_had_under_way(threads):
    held, applied = steps_of(2, first=957)
    old = threads.submit(held.push, 957, ArrivedPush(header(0, step=957), {}))
    until(lambda: held.open_steps)
    begins = header(0, step=900, generation=2, first=900)
    new = threads.submit(held.push, 900, ArrivedPush(begins, {}))
    with pytest.raises(StalePushError, match="have restarted"):
        old.result(TIMEOUT)
    held.push(900, ArrivedPush(begins._replace(rank=1), {}))
    new.result(TIMEOUT)
    with pytest.raises(StalePushError, match="generation 1"):
        held.push(957, ArrivedPush(header(1, step=957), {}))
    assert [[h.generation for h in step] for step in applied] == [[2, 2]]


def test_a_late_push_of_an_nn_worker_that_the_generation_lacks_is_stale():
    """It is no error of the numbers of NN workers: a survivor of a death may send it, and continues."""
    fewer = StepBarrier(range(2), TIMEOUT, hold_until_full, lambda pushes: {}, applied=(2, 6))
    with pytest.raises(StalePushError, match="generation 1 of the NN workers arrived after generation 2"):
        fewer.push(7, ArrivedPush(header(2), {}))
    with pytest.raises(StoreError, match=r"a step has the NN workers \[0, 1\]"):
        fewer.push(7, ArrivedPush(header(2, generation=2), {}))


def test_a_step_being_applied_at_a_restart_is_of_the_old_workers(threads):
    goes_on, applied = threading.Event(), []

    def apply(arrived):
        applied.append(arrived[0].header.step)
        assert arrived[0].header.generation == 2 or goes_on.wait(TIMEOUT)
        return {}

    held = StepBarrier([0], TIMEOUT, hold_until_full, apply, applied=(1, 956))
    old = threads.submit(held.push, 957, ArrivedPush(header(0, 957), {}))
    until(lambda: applied)
    held.renew(2, 900)
    goes_on.set()
    old.result(TIMEOUT)
    for step in (900, 901):
        held.push(step, ArrivedPush(header(0, step, generation=2, first=900), {}))
    assert applied == [957, 900, 901]


def test_a_step_is_applied_after_those_before_it(threads):
    held, applied = steps_of(2)
    later = [threads.submit(held.push, step, ArrivedPush(header(rank, step), {})) for step in (8, 9) for rank in (1, 0)]
    first = threads.submit(held.push, 7, ArrivedPush(header(1), {}))
    until(lambda: held.open_steps == [7, 8, 9])
    with pytest.raises(TimeoutError):
        later[0].result(0.05)
    held.push(7, ArrivedPush(header(0), {}))
    for call in (first, *later):
        call.result(TIMEOUT)
    assert [step[0].step for step in applied] == [7, 8, 9]


def test_only_the_last_pushes_of_an_nn_worker_may_be_repeated():
    """One that begins again, with another collection, must not be answered as if its steps were applied."""
    held, applied = steps_of(1)
    last = 7 + MOST_REPEATED
    counts = [held.push(step, ArrivedPush(header(0, step), {})) for step in range(7, last + 1)]
    assert held.push(8, ArrivedPush(header(0, 8), {})) == counts[1] != {}
    with pytest.raises(StalePushError, match=rf"step 7 again, after it had pushed step {last} .*one EmbeddingColl"):
        held.push(7, ArrivedPush(header(0, 7), {}))
    assert len(applied) == len(counts)


def test_a_step_that_another_process_applied_is_applied():
    held, applied = steps_of(2, first=100)
    assert held.push(98, ArrivedPush(header(0, 98), {})) == {}
    assert not applied


def test_a_slow_nn_worker_may_come_long_after_others_steps():
    """A mode may apply a step without all NN workers."""
    held = StepBarrier(range(2), TIMEOUT, lambda arrival: Decision(Action.APPLY), lambda arrived: {}, applied=(1, 6))
    for rank in range(2):
        for step in range(7, 7 + 3 * MOST_REPEATED):
            held.push(step, ArrivedPush(header(rank, step), {}))


def test_an_nn_worker_that_leaves_out_a_step_is_refused(threads):
    held, applied = steps_of(2)
    first = threads.submit(held.push, 7, ArrivedPush(header(0), {}))
    until(lambda: held.open_steps)
    for step in (6, 8):  # Numbered as the push of step 7.
        with pytest.raises(StalePushError, match=r"step 7 was due.*set the same `global_step` on all before"):
            held.push(step, ArrivedPush(header(0, step)._replace(sequence=8), {}))
    with pytest.raises(StalePushError, match=f"step {7 + MOST_OPEN} more than {MOST_OPEN} steps ahead of step 7"):
        held.push(7 + MOST_OPEN, ArrivedPush(header(1, 7 + MOST_OPEN), {}))
    held.push(7, ArrivedPush(header(1), {}))
    first.result(TIMEOUT)
    assert len(applied) == 1


def test_the_first_push_of_a_generation_tells_where_it_began(threads):
    """An NN worker that is ahead may come first."""
    held, applied = steps_of(2)
    sent = [PushHeader(3, rank, step - 899, step, 4) for step in (901, 900) for rank in (1, 0)]
    calls = [threads.submit(held.push, h.step, ArrivedPush(h, {})) for h in sent]
    for call in calls:
        call.result(TIMEOUT)
    assert [[(h.step, h.rank) for h in step] for step in applied] == [[(n, r) for r in range(2)] for n in (900, 901)]


@pytest.mark.parametrize(("first", "second"), [((1, 900), (0, 0)), ((0, 0), (1, 900))])
def test_nn_workers_that_begin_at_different_steps_are_refused(first, second, threads):
    held, applied = steps_of(2)
    waiting = threads.submit(held.push, first[1], ArrivedPush(PushHeader(3, first[0], 1, first[1], 4), {}))
    until(lambda: held.open_steps)
    for ahead in range(2):
        with pytest.raises(StalePushError, match=f"step {first[1] + ahead} was due.*the same `global_step` on all"):
            held.push(second[1] + ahead, ArrivedPush(PushHeader(3, second[0], 1 + ahead, second[1] + ahead, 4), {}))
    assert not applied
    held.push(first[1], ArrivedPush(PushHeader(3, second[0], 1, first[1], 4), {}))
    assert waiting.result(TIMEOUT) is not None


def test_a_phase_may_begin_with_another_push_on_each_nn_worker(threads):
    """After an asynchronous phase NN workers have pushed unequally often."""
    held, applied = steps_of(2)
    held.renew(3, 900)
    sent = [PushHeader(3, rank, sequence, 900, 4) for rank, sequence in ((0, 17), (1, 12))]
    for call in [threads.submit(held.push, 900, ArrivedPush(h, {})) for h in sent]:
        call.result(TIMEOUT)
    assert len(applied) == 1


def test_a_late_step_of_before_is_named_by_its_own_generation(threads):
    applying, goes_on = threading.Event(), threading.Event()

    def apply(_):
        applying.set()
        assert goes_on.wait(TIMEOUT)
        return {}

    held = StepBarrier(range(2), TIMEOUT, hold_until_full, apply, applied=(1, 956))
    for rank in range(2):
        threads.submit(held.push, 957, ArrivedPush(header(rank, 957), {}))
    assert applying.wait(TIMEOUT)
    changed, waiting = held._open[957].changed, threading.Event()
    wait_for, held._timeout = changed.wait_for, 0.1
    changed.wait_for = lambda *arguments: waiting.set() or wait_for(*arguments)
    again = threads.submit(held.push, 957, ArrivedPush(header(0, 957), {}))  # A repetition.
    assert waiting.wait(TIMEOUT)
    held.renew(2, 900)
    with pytest.raises(DeadlineError, match=r"^Step 957 \(generation 1\) was not complete .*: it is being") as failure:
        again.result(TIMEOUT)
    assert failure.value.fields["missing"] == []
    goes_on.set()


def test_pushes_that_wait_for_an_earlier_step_say_so(threads):
    held, _ = steps_of(3, timeout=0.05)
    first = threads.submit(held.push, 7, ArrivedPush(header(0, 7), {}))
    until(lambda: held.open_steps)  # It stays, also when the call has ended.
    second = threads.submit(held.push, 8, ArrivedPush(header(0, 8), {}))
    with pytest.raises(DeadlineError, match=r"Step 7 \(generation 1\) was not complete.* 1, 2 have not pushed"):
        first.result(TIMEOUT)
    with pytest.raises(DeadlineError, match=r"Step 7 .*, which step 8 waits for, was not") as failure:
        second.result(TIMEOUT)
    assert failure.value.fields["missing"] == [1, 2]


def test_a_barrier_of_one_nn_worker_takes_gaps(threads):
    """It gets those pushes that have several parts."""
    applied = []
    gaps = StepBarrier([1], TIMEOUT, hold_until_full, lambda pushes: applied.append(len(pushes)) or {}, gaps=True)
    for sequence in (3, 4, 300):
        parts = [header(1, sequence - 1, part=part, parts=2) for part in range(2)]
        calls = [threads.submit(gaps.push, sequence, ArrivedPush(part, {})) for part in parts]
        for call in calls:
            call.result(TIMEOUT)
    assert applied == [2, 2, 2]


@pytest.mark.parametrize("bad", [header(2), header(-1), header(0, part=2, parts=2), header(0, rows=-1)])
def test_pushes_that_fit_no_step_are_refused(bad):
    with pytest.raises(StoreError):
        steps_of(2)[0].push(7, ArrivedPush(bad, {}))


def test_parts_of_a_push_complete_it(threads):
    held, applied = steps_of(2)
    sent = [header(1, part=1, parts=2), header(0), header(1, part=0, parts=2)]
    for call in [threads.submit(held.push, 7, ArrivedPush(h, {})) for h in sent]:
        call.result(TIMEOUT)
    assert [[(h.rank, h.part) for h in step] for step in applied] == [[(0, 0), (1, 0), (1, 1)]]


def test_an_error_reaches_all_and_the_step_may_be_repeated(threads):
    failures = [StoreError("disk full", table="user")]

    def apply(arrived):
        if failures:
            raise failures.pop()
        return {}

    held = StepBarrier(range(2), TIMEOUT, hold_until_full, apply, applied=(1, 6))
    for attempt in range(2):
        calls = [threads.submit(held.push, 7, ArrivedPush(header(rank), {})) for rank in range(2)]
        for call in calls:
            if attempt == 0:
                with pytest.raises(StoreError, match="disk full"):
                    call.result(TIMEOUT)
            else:
                call.result(TIMEOUT)


# --- any order of events --------------------------------------------------------------------------------------------


class Dead(Exception):  # noqa: N818 - the connection to a PS that has died
    """Raised to the caller of a PS that has died."""


class Rehearsal:
    """A PS whose barrier does not outlive its process, and what is applied does."""

    def __init__(self, ranks, first, fails, draw):
        self.ranks, self.fails, self.draw = ranks, fails, draw
        self.last = (1, first - 1)
        self.applied = []
        self.lock = threading.Lock()
        self.start()

    def start(self):
        self.dead = dead = threading.Event()
        self.barrier = StepBarrier(
            range(self.ranks), TIMEOUT, hold_until_full, functools.partial(self.apply, dead), applied=self.last
        )

    def kill(self):
        """Calls that wait get no answer: they fail with `Dead`."""
        with self.lock:
            self.dead.set()
            before = self.barrier
            self.start()
        before.renew(10, 0)

    def apply(self, dead, arrived):
        with self.lock:
            if dead.is_set():
                raise Dead
            if self.fails and self.draw.random() < self.fails:
                raise StoreError("disk full", table="user")
            headers = [push.header for push in arrived]
            assert {h.step for h in headers} == {self.last[1] + 1}  # One step, in order.
            sent = [(h.rank, part) for h in headers if h.part == 0 for part in range(h.parts)]
            assert [(h.rank, h.part) for h in headers] == sent  # All of it, in order.
            assert {rank for rank, _ in sent} == set(range(self.ranks))
            self.last = (1, headers[0].step)
            self.applied.append(headers[0].step)
            return {"user": UpdateCounts(applied=1)}

    def push(self, turn, arrived):
        with self.lock:
            dead, barrier = self.dead, self.barrier
        try:
            counts = barrier.push(turn, arrived)
        except StalePushError:
            assert dead.is_set()
        if dead.is_set():  # The answer is lost with it.
            raise Dead
        return counts


@settings(deadline=None, max_examples=examples(60))
@given(
    ranks=st.integers(1, 4),
    window=st.integers(1, 5),
    steps=st.integers(1, 12),
    first=st.sampled_from([0, 900]),
    fails=st.sampled_from([0.0, 0.1]),
    deaths=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_steps_are_applied_once_in_order_whatever_happens(ranks, window, steps, first, fails, deaths, seed):
    """Several pushes in flight per NN worker, in any order, repeated, in parts; steps that fail, a PS that dies."""
    ps = Rehearsal(ranks, first, fails, random.Random(seed))
    total = [0]
    adding = threading.Lock()

    def call(step, rank, part, parts, draw):
        sent = ArrivedPush(header(rank, step, part=part, parts=parts, first=first), {})
        counts = None
        for _ in range(1 + (draw.random() < 0.3)):  # The first answer may be lost.
            while True:
                time.sleep(draw.random() * 0.003 * (draw.random() < 0.3))
                try:
                    found = ps.push(step, sent)
                    break
                except (StoreError, Dead):
                    continue
            counts = found if counts is None else counts
        with adding:
            total[0] += sum(count.applied for count in counts.values())

    def nn_worker(rank):
        draw = random.Random(seed + rank)
        with ThreadPoolExecutor(2 * window) as pool:
            open_ = collections.deque()
            for step in range(first, first + steps):
                parts = draw.choice([1, 1, 2])
                of_step = [(step, rank, part, parts, random.Random(draw.random())) for part in range(parts)]
                open_.append([pool.submit(call, *one) for one in of_step])
                if len(open_) >= window:
                    for pushed in open_.popleft():
                        pushed.result(TIMEOUT)
            for pushed in itertools.chain(*open_):
                pushed.result(TIMEOUT)

    with ThreadPoolExecutor(ranks) as pool:
        workers = [pool.submit(nn_worker, rank) for rank in range(ranks)]
        draw = random.Random(seed - 1)
        for _ in range(deaths):
            time.sleep(draw.random() * 0.01)
            ps.kill()
        for worker in workers:
            worker.result(TIMEOUT)
    assert ps.applied == list(range(first, first + steps))
    # Each outcome was counted once; one that died with the PS, not at all.
    assert total[0] == steps or (deaths and total[0] < steps)


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(0, 2**32))
def test_generations_never_mix(seed):
    """NN workers die with several pushes in flight; the next ones begin earlier, and what waited fails."""
    draw = random.Random(seed)
    ranks, applied, stale = 3, [], []
    barrier = StepBarrier(
        range(ranks), TIMEOUT, hold_until_full, lambda a: applied.append([p.header for p in a]) or {}, applied=(1, 6)
    )

    def push(sent):
        try:
            barrier.push(sent.step, ArrivedPush(sent, {}))
        except StalePushError:
            stale.append(sent)

    old = [header(rank, step, first=7) for step in range(7, 11) for rank in range(ranks) if (step, rank) != (8, 2)]
    new = [header(rank, step, generation=2, first=5) for step in (5, 6, 7) for rank in range(ranks)]
    with ThreadPoolExecutor(len(old) + len(new)) as pool:
        calls = [pool.submit(push, sent) for sent in draw.sample(old, len(old))]
        until(lambda: applied)
        calls += [pool.submit(push, sent) for sent in draw.sample(new, len(new))]
        for call in calls:
            call.result(TIMEOUT)
    assert [[(h.generation, h.step) for h in step] for step in applied] == [
        [key] * ranks for key in ((1, 7), (2, 5), (2, 6), (2, 7))
    ]
    assert sorted(stale) == sorted(sent for sent in old if sent.step > 7)


# --- reduction ------------------------------------------------------------------------------------------------------


@st.composite
def a_step(draw):
    """What 1 to 4 NN workers push, in 1 to 3 parts each; some parts, ids and tables missing."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrived = []
    for rank in range(draw(st.integers(1, 4))):
        parts = draw(st.integers(1, 3))
        for part in range(parts):
            gradients = {}
            for name, table in TABLES.items():
                ids = np.array(draw(st.lists(st.integers(0, 12), unique=True, max_size=10)), np.uint64)
                if draw(st.booleans()):
                    values = random.normal(size=(len(ids), table.dim)).astype(np.float32)
                    gradients[name] = Gradients(ids, values)
            arrived.append(ArrivedPush(header(rank, rows=draw(st.integers(0, 5)), part=part, parts=parts), gradients))
    return arrived


@given(a_step(), st.sampled_from(["per_id", "global"]))
def test_reduction_equals_its_readable_twin(arrived, reduction):
    found = average_step(arrived, reduction, batching.ThreadPool(2), batching.Scratch())
    expected = readable_average_step(arrived, reduction)
    assert {name: set(g.ids.tolist()) for name, g in found.items() if len(g.ids)} == {
        name: set(rows) for name, rows in expected.items()
    }
    for name, (ids, values) in found.items():
        for id_, value in zip(ids.tolist(), values, strict=True):
            np.testing.assert_array_equal(value, expected[name][id_])


def test_global_averages_one_batch_and_per_id_those_with_the_id():
    one, two = np.uint64([1]), np.uint64([1, 2])
    arrived = [
        ArrivedPush(header(0, rows=1), {"user": Gradients(one, np.float32([[4, 4, 4]]))}),
        ArrivedPush(header(1, rows=3), {"user": Gradients(two, np.float32([[8, 8, 8], [2, 2, 2]]))}),
    ]
    pool, scratch = batching.ThreadPool(1), batching.Scratch()
    per_id = average_step(arrived, "per_id", pool, scratch)["user"]
    total = average_step(arrived, "global", pool, scratch)["user"]
    assert per_id.values[:, 0].tolist() == [7.0, 2.0]
    assert total.values[:, 0].tolist() == [7.0, 1.5]
    silent = [ArrivedPush(a.header._replace(rows=0), a.gradients) for a in arrived]
    assert average_step(silent, "global", pool, scratch) == {}


# --- the server -----------------------------------------------------------------------------------------------------


def server(mode, nn_workers=1, optimizer=None):
    hold = ServerOptions(nn_workers=nn_workers, timeout=TIMEOUT)
    return EmbeddingServer(TABLES, optimizer or Adagrad(lr=0.1), mode, seed=3, threads=2, options=hold)


def pushes(random, ranks, step):
    sent = []
    for rank in range(ranks):
        gradients = {}
        for name, table in TABLES.items():
            ids = random.choice(40, 25, replace=False).astype(np.uint64)
            gradients[name] = Gradients(ids, random.normal(size=(25, table.dim)).astype(np.float32))
        sent.append((header(rank, step=step, rows=int(random.integers(0, 5))), gradients))
    return sent


def rows_of(ps):
    every = np.arange(40, dtype=np.uint64)
    return {name: rows.copy() for name, rows in ps.lookup(dict.fromkeys(TABLES, every), train=False).items()}


@pytest.mark.parametrize("reduction", ["per_id", "global"])
def test_rows_are_bit_identical_in_any_order_of_arrival(reduction, threads):
    results = []
    for seed in range(4):
        ps = server(Sync(reduction), nn_workers=3)
        ps.lookup(dict.fromkeys(TABLES, np.arange(40, dtype=np.uint64)), train=True)
        random, order = np.random.default_rng(0), np.random.default_rng(seed)
        for step in range(5):
            sent = pushes(random, 3, step)
            twice = [sent[i] for i in order.permutation([0, 1, 2, *order.integers(0, 3, 2)])]
            for call in [threads.submit(ps.push, *push) for push in twice]:
                call.result(TIMEOUT)
        results.append(rows_of(ps))
        assert sum(s["duplicates"] for s in ps.statistics().values()) == 0
    for name in TABLES:
        for rows in results[1:]:
            np.testing.assert_array_equal(rows[name], results[0][name])


@pytest.mark.parametrize("mode", [Sync("per_id"), Sync("global"), Hybrid(4)])
def test_with_one_nn_worker_a_gradient_is_applied_as_it_is(mode):
    ps, plain = server(mode), server(Hybrid(4))
    for one in (ps, plain):
        one.lookup(dict.fromkeys(TABLES, np.arange(40, dtype=np.uint64)), train=True)
    for step in range(3):
        ((h, gradients),) = pushes(np.random.default_rng(step), 1, step)
        assert ps.push(h, gradients) == plain.push(h._replace(rows=1), gradients)
        counts = ps.push(h, gradients)  # The reply was lost.
        assert all(c == UpdateCounts(duplicate=25) for c in counts.values())
    for name in TABLES:
        np.testing.assert_array_equal(rows_of(ps)[name], rows_of(plain)[name])


@pytest.mark.parametrize("mode", [Hybrid(4), Sync()])
def test_parts_of_one_nn_worker_are_one_update(mode, threads):
    ps, whole = server(mode, optimizer=SGD(lr=1.0)), server(mode, optimizer=SGD(lr=1.0))
    for one in (ps, whole):
        one.lookup(dict.fromkeys(TABLES, np.arange(40, dtype=np.uint64)), train=True)
    (_, a), (_, b) = pushes(np.random.default_rng(1), 2, 7)
    merged = {name: Gradients(*batching.merge_gradients([a[name], b[name]])) for name in TABLES}
    whole.push(header(0), merged)
    calls = [threads.submit(ps.push, header(0, part=i, parts=2), part) for i, part in ((1, b), (0, a))]
    for call in calls:
        call.result(TIMEOUT)
    for name in TABLES:
        np.testing.assert_array_equal(rows_of(ps)[name], rows_of(whole)[name])
        assert ps._store.export_rows(ps._index[name], 0)[0].update_count.max() == 1


def test_a_bad_push_fails_alone(threads):
    ps = server(Sync(), nn_workers=2)
    good = threads.submit(ps.push, header(0, first=7), {})
    for bad in (
        {"users": Gradients(np.uint64([1]), np.zeros((1, 3), np.float32))},
        {"user": Gradients(np.uint64([1]), np.zeros((1, 4), np.float32))},
        {"user": Gradients(np.uint64([1]), np.zeros((1, 3), np.float64))},
    ):
        with pytest.raises(StoreError, match="user"):
            ps.push(header(1, first=7), bad)
    ps.push(header(1, first=7), {})
    good.result(TIMEOUT)


def test_a_held_push_holds_up_no_lookup():
    ps = server(Sync(), nn_workers=2)
    blocked = threading.Thread(target=ps.push, args=(header(0, first=7), {}))
    blocked.start()
    assert ps.lookup({"user": np.uint64([1])}, train=True)["user"].shape == (1, 3)
    ps.push(header(1, first=7), {})
    blocked.join(TIMEOUT)
    assert not blocked.is_alive()
