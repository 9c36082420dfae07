"""The count of pushes at a parameter server. `tests/ps` and `tests/dense` test it within them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import PersiaError
from persia.pushes.sequencer import PushSequencer
from persia.types import PushHeader, PushId
from support.examples import examples

TIMEOUT = 20.0


def header(rank, sequence, group=2, generation=1, step=0):
    return PushHeader(generation, rank, sequence, step, 4, slot=0, group=group)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_each_push_counts_once_in_the_order_in_which_it_comes(data):
    """Against a list: pushes of each NN worker in order, repeated at any time, in phases of one generation."""
    group = data.draw(st.integers(1, 3))
    sequencer, expected, done, sequences = PushSequencer(), [], [], {}
    sequencer.begin(1, 0)
    step, held = 0, 0
    for _ in range(data.draw(st.integers(1, 30))):
        rank = data.draw(st.integers(0, 2))
        repeats = data.draw(st.booleans()) and rank in sequences
        if not repeats:
            sequences[rank] = sequences.get(rank, 0) + data.draw(st.integers(1, 2))  # The one between was dropped.
            expected.append((rank, sequences[rank], step, held + 1 == group))
            step, held = divmod(step * group + held + 1, group)
        sequence = sequences[rank] - (data.draw(st.integers(0, 2)) if repeats else 0)

        def work(at, last, rank=rank, sequence=sequence):
            done.append((rank, sequence, at, last))
            return rank

        at = step if repeats else expected[-1][2]
        assert sequencer.push(header(rank, sequence, group, step=at), work) == (None if repeats else rank)
        assert sequencer.step == step
        if data.draw(st.integers(0, 5)) == 0:
            sequencer.drain(1, step, held, lambda: None)
            sequencer.drain(1, step, held, lambda: None)
            step, held = step + bool(held), 0
            sequencer.begin(1, step)
    assert done == expected


def test_a_push_of_an_earlier_phase_is_a_repetition_to_a_new_process():
    sequencer = PushSequencer()
    sequencer.begin(1, 5)
    assert sequencer.push(header(0, 9, step=4), lambda step, _: step) is None
    assert sequencer.push(header(0, 9, step=5), lambda step, _: step) == 5


def test_no_push_waits_for_another():
    """The NN worker of slot 0 stalls before its push."""
    sequencer = PushSequencer()
    sequencer.begin(1, 0)
    steps = [sequencer.push(header(1, n)._replace(slot=(n + 1) % 2), lambda step, _: step) for n in range(1, 201)]
    assert steps == [n // 2 for n in range(200)]
    assert sequencer.push(header(0, 1), lambda step, _: step) == 100


def test_a_push_repeated_while_it_is_done_is_done_once():
    """A connection was cut, or another NN worker fills the push of a dead one."""
    sequencer = PushSequencer()
    sequencer.begin(1, 0)
    begun, ends = threading.Event(), threading.Event()
    done = []

    def work(step, last):
        begun.set()
        assert ends.wait(TIMEOUT)
        done.append(step)
        return step

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(sequencer.push, header(0, 1), work)
        assert begun.wait(TIMEOUT)
        second = threads.submit(sequencer.push, header(0, 1), work)
        ends.set()
        assert (first.result(TIMEOUT), second.result(TIMEOUT)) == (0, None)
    assert done == [0]


def test_a_wait_ends_with_its_push_its_step_or_a_failure():
    sequencer = PushSequencer()
    sequencer.begin(1, 0)
    assert not sequencer.await_push(0, PushId(0, 1), 0.0)
    assert sequencer.await_push(0, None, 0.0)
    with ThreadPoolExecutor(2) as threads:
        push = threads.submit(sequencer.await_push, 0, PushId(0, 1), TIMEOUT)
        step = threads.submit(sequencer.await_push, 1, None, TIMEOUT)
        sequencer.push(header(0, 1), lambda *_: None)
        assert push.result(TIMEOUT)
        sequencer.push(header(1, 1), lambda *_: None)
        assert step.result(TIMEOUT)

        def fails(*_):
            raise ValueError("full")

        late = threads.submit(sequencer.await_push, 0, PushId(0, 2), TIMEOUT)
        with pytest.raises(ValueError, match="full"):
            sequencer.push(header(0, 2), fails)
        with pytest.raises(PersiaError, match="failed in step 1"):
            late.result(TIMEOUT)
    with pytest.raises(PersiaError, match="failed in step 1"):
        sequencer.push(header(1, 2), lambda *_: None)


def test_a_new_generation_counts_from_one():
    sequencer = PushSequencer()
    sequencer.begin(1, 0)
    for sequence in range(1, 4):
        assert sequencer.push(header(0, sequence), lambda *_: True)
    sequencer.begin(2, 1)
    assert sequencer.push(header(0, 1, generation=2, step=1), lambda *_: True)
    assert sequencer.push(header(0, 1, generation=2, step=1), lambda *_: True) is None
