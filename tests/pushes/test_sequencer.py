"""The order of pushes that is agreed for all parameter servers. `tests/ps` and `tests/dense` test it within them."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from persia.pushes.sequencer import MOST_QUEUED, PushSequencer
from persia.types import PushHeader

TIMEOUT = 20.0
GROUP = MOST_QUEUED + 36


def test_a_push_repeated_while_it_waits_for_space_is_done_once():
    """A connection was cut, or another NN worker fills the slot of a dead one."""
    turns = PushSequencer(TIMEOUT)
    turns.begin(1, 0)
    done = []

    def push(slot):
        turns.push(PushHeader(1, 0, slot + 1, 0, 4, slot=slot, group=GROUP), lambda _: done.append(slot))

    for slot in range(1, MOST_QUEUED + 1):
        push(slot)
    waiting = threading.Semaphore(0)
    wait_for = turns._changed.wait_for

    def told(*arguments):
        waiting.release()
        return wait_for(*arguments)

    turns._changed.wait_for = told
    with ThreadPoolExecutor(2) as threads:
        twice = [threads.submit(push, MOST_QUEUED + 1) for _ in range(2)]
        for _ in twice:
            assert waiting.acquire(timeout=TIMEOUT)
        push(0)
        for call in twice:
            call.result(TIMEOUT)
    assert done == list(range(MOST_QUEUED + 2))
    turns.drain(1, 0, MOST_QUEUED + 2, lambda: None)  # Nothing is left that nobody would ever call for.


def test_each_result_is_returned_by_the_call_that_did_the_work():
    turns = PushSequencer(TIMEOUT)
    turns.begin(1, 0)

    def push(number):
        step, slot = divmod(number, 2)
        header = PushHeader(1, 0, number + 1, step, 4, slot=slot, group=2)
        return turns.push(header, lambda last: (number, last))

    assert push(1) == []
    assert push(2) == []
    assert push(0) == [(0, False), (1, True), (2, False)]
    assert push(0) == []  # A repetition.
    numbers = list(range(3, 3 + 2 * MOST_QUEUED // 3))
    random.Random(1).shuffle(numbers)
    with ThreadPoolExecutor(8) as threads:
        results = [result for results in threads.map(push, numbers) for result in results]
    assert sorted(results) == [(number, number % 2 == 1) for number in sorted(numbers)]
