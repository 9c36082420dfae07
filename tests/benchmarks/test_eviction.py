"""The simulations of eviction policies against slower ones that follow the definitions word by word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import eviction

STREAMS = st.lists(st.integers(0, 12), max_size=120)
CAPACITIES = st.integers(1, 14)


def lru(ids, capacity):
    hits = 0
    for number, each in enumerate(ids):
        last = max((place for place in range(number) if ids[place] == each), default=None)
        hits += last is not None and len(set(ids[last + 1 : number])) < capacity
    return hits


def midpoint(ids, capacity):
    old = max(1, capacity * 3 // 8)
    order, place, hits = [], 0, 0  # oldest first; new ids enter at the place
    for each in ids:
        if each in order:
            place -= order.index(each) < place
            order.remove(each)
            order.append(each)
            place += len(order) - place > capacity - old
            hits += 1
            continue
        if len(order) == capacity:
            order.pop(0)
            place -= place > 0
        order.insert(place, each)
        place += 1
    return hits


def clock(ids, capacity):
    """The hand stays, the ring turns: a queue whose first entry gets a second chance at its end."""
    queue, hits = [], 0
    for each in ids:
        entry = next((entry for entry in queue if entry[0] == each), None)
        if entry:
            entry[1], hits = True, hits + 1
            continue
        if len(queue) == capacity:
            while queue[0][1]:
                queue.append([queue.pop(0)[0], False])
            queue.pop(0)
        queue.append([each, False])
    return hits


def sieve(ids, capacity):
    queue, hand, hits = [], 0, 0  # oldest first
    for each in ids:
        entry = next((entry for entry in queue if entry[0] == each), None)
        if entry:
            entry[1], hits = True, hits + 1
            continue
        if len(queue) == capacity:
            hand %= capacity
            while queue[hand][1]:
                queue[hand][1] = False
                hand = (hand + 1) % capacity
            queue.pop(hand)
            if hand == len(queue):  # the newest has gone: begin at the oldest, not at what enters now
                hand = 0
        queue.append([each, False])
    return hits


def s3_fifo(ids, capacity):
    small, main, ghost, hits = [], [], [], 0  # oldest first; [id, uses]
    share = max(1, capacity // 10)
    rest = capacity - share

    def evict_main():
        evicted = False
        while not evicted and main:
            each, uses = main.pop(0)
            if uses > 0:
                main.append([each, uses - 1])
            else:
                evicted = True

    def evict_small():
        evicted = False
        while not evicted and small:
            each, uses = small.pop(0)
            if uses > 1 and rest:
                if len(main) == rest:
                    evict_main()
                main.append([each, uses])
            else:
                ghost.append(each)
                del ghost[: max(0, len(ghost) - rest)]
                evicted = True

    for each in ids:
        entry = next((entry for entry in small + main if entry[0] == each), None)
        if entry:
            entry[1], hits = min(3, entry[1] + 1), hits + 1
            continue
        while len(small) + len(main) == capacity:
            evict_small() if len(small) >= share else evict_main()
        if each in ghost:
            ghost.remove(each)
            main.append([each, 0])
        else:
            small.append([each, 0])
    return hits


def tiny_lfu(ids, capacity):
    window, main, counts, hits = [], [], {}, 0  # oldest first
    for number, each in enumerate(ids, 1):
        counts[each] = counts.get(each, 0) + 1
        if number % (10 * capacity) == 0:
            counts = {met: count // 2 for met, count in counts.items()}
        part = main if each in main else window
        if each in part:
            part.remove(each)
            part.append(each)
            hits += 1
            continue
        window.append(each)
        if len(window) > max(1, capacity // 100):
            candidate = window.pop(0)
            if len(main) + len(window) == capacity and main and counts[candidate] > counts[main[0]]:
                main.pop(0)
            if len(main) + len(window) < capacity:
                main.append(candidate)
    return hits


def optimum(ids, capacity):
    cache, hits = set(), 0
    for number, each in enumerate(ids):
        hits += each in cache
        if each not in cache and len(cache) == capacity:
            rest = ids[number:]
            cache.remove(max(cache, key=lambda kept: (rest.index(kept) if kept in rest else len(ids), kept)))
        cache.add(each)
    return hits


BRUTE = {
    "lru": lru,
    "midpoint": midpoint,
    "clock": clock,
    "sieve": sieve,
    "s3_fifo": s3_fifo,
    "tiny_lfu": tiny_lfu,
    "optimum": optimum,
}


@pytest.mark.parametrize("name", eviction.POLICIES)
@given(ids=STREAMS, capacity=CAPACITIES)
def test_a_policy_is_as_defined(name, ids, capacity):
    assert eviction.POLICIES[name](ids, capacity) == BRUTE[name](ids, capacity)


@pytest.mark.parametrize("name", eviction.POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_a_policy_is_as_defined_on_long_skewed_streams(name, seed):
    # Long enough for counts to be halved and for ids to leave the ghost queue.
    random = np.random.default_rng(seed)
    ids = (30 * random.random(400) ** (1 + seed)).astype(int).tolist()
    for capacity in (2, 3, 4, 11):
        assert eviction.POLICIES[name](ids, capacity) == BRUTE[name](ids, capacity)


@pytest.mark.parametrize("name", eviction.POLICIES)
@given(ids=STREAMS, capacity=CAPACITIES)
def test_no_policy_is_better_than_the_optimum(name, ids, capacity):
    assert eviction.POLICIES[name](ids, capacity) <= eviction.optimum(ids, capacity) <= len(ids) - len(set(ids))


@pytest.mark.parametrize("name", ["lru", "midpoint", "clock", "sieve", "s3_fifo", "optimum"])
@given(ids=STREAMS)
def test_with_room_for_all_ids_each_misses_once(name, ids):
    assert eviction.POLICIES[name](ids, 13) == len(ids) - len(set(ids))


@pytest.mark.parametrize(
    ("ids", "capacity", "hits"),
    [
        # Both 1 and 2 were used. LRU evicts 2 for 3; the others clear both bits and evict 1, which came first.
        ([1, 2, 2, 1, 3, 1], 2, {"lru": 3, "clock": 2, "sieve": 2}),
        # After 1, 3 and 4, the hand of SIEVE goes on to 5; that of CLOCK is at 2 again, whose bit it has cleared.
        ([1, 2, 3, 2, 4, 5, 6, 7, 2], 3, {"lru": 1, "clock": 1, "sieve": 2}),
        # 1 was evicted a moment ago, so S3-FIFO puts it into its main queue, which 5, 6 and 7 do not reach.
        ([1, 2, 3, 4, 1, 5, 6, 7, 1], 3, {"lru": 0, "s3_fifo": 1}),
        # 3, 4 and 5 were met once, 2 as well, so TinyLFU does not evict 2 for them.
        ([1, 2, 3, 1, 4, 5, 6, 2, 1], 3, {"lru": 1, "tiny_lfu": 3}),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 2, {"lru": 0, "optimum": 3}),
        # 1 and 2 came twice, so 3 to 6 only take the place of one another.
        ([1, 2, 1, 2, 3, 4, 5, 6, 1, 2], 3, {"lru": 2, "midpoint": 4}),
    ],
)
def test_examples_by_hand(ids, capacity, hits):
    assert {name: eviction.POLICIES[name](ids, capacity) for name in hits} == hits
