"""Simulations of eviction policies: the number of hits of a stream of ids in a cache of bounded capacity.

Written to be read and to be compared with each other, not for speed (a few million ids per second at best). All of them
keep an id that misses, as a store does that has to train its row; `tiny_lfu` may drop it from its window soon after.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

__all__ = ["POLICIES", "clock", "lru", "midpoint", "optimum", "s3_fifo", "sieve", "tiny_lfu"]


def lru(ids: Sequence[int], capacity: int) -> int:
    """Least recently used, exact."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for each in ids:
        if each in cache:
            cache.move_to_end(each)
            hits += 1
        else:
            if len(cache) == capacity:
                cache.popitem(last=False)
            cache[each] = None
    return hits


def midpoint(ids: Sequence[int], capacity: int) -> int:
    """LRU in which a new id enters at three eighths of the list, as a page in InnoDB's buffer pool."""
    old_capacity = max(1, capacity * 3 // 8)
    old: OrderedDict[int, None] = OrderedDict()
    young: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for each in ids:
        if each in young:
            young.move_to_end(each)
            hits += 1
        elif each in old:
            del old[each]
            young[each] = None
            hits += 1
            if len(young) > capacity - old_capacity:
                old[young.popitem(last=False)[0]] = None
        else:
            if len(old) + len(young) == capacity:
                (old or young).popitem(last=False)
            old[each] = None
    return hits


def clock(ids: Sequence[int], capacity: int) -> int:
    """CLOCK: a hand goes around the slots, clears bits of ids that were used, and evicts the first that was not."""
    slot_of: dict[int, int] = {}
    slots: list[int] = []
    used: list[bool] = []
    hand = hits = 0
    for each in ids:
        slot = slot_of.get(each)
        if slot is not None:
            used[slot] = True
            hits += 1
        elif len(slots) < capacity:
            slot_of[each] = len(slots)
            slots.append(each)
            used.append(False)
        else:
            while used[hand]:
                used[hand] = False
                hand = (hand + 1) % capacity
            del slot_of[slots[hand]]
            slots[hand], slot_of[each] = each, hand
            hand = (hand + 1) % capacity
    return hits


def sieve(ids: Sequence[int], capacity: int) -> int:
    """SIEVE (Zhang et al., NSDI 2024, algorithm 1): as CLOCK, but new ids enter at the head, not where the hand is."""
    newer: dict[int, int | None] = {}
    older: dict[int, int | None] = {}
    used: dict[int, bool] = {}
    head: int | None = None
    tail: int | None = None
    hand: int | None = None
    hits = 0
    for each in ids:
        if each in used:
            used[each] = True
            hits += 1
            continue
        if len(used) == capacity:
            victim = tail if hand is None else hand
            assert victim is not None
            while used[victim]:
                used[victim] = False
                following = newer[victim]
                victim = tail if following is None else following
                assert victim is not None
            del used[victim]
            hand, before = newer.pop(victim), older.pop(victim)
            if hand is None:
                head = before
            else:
                older[hand] = before
            if before is None:
                tail = hand
            else:
                newer[before] = hand
        used[each], newer[each], older[each] = False, None, head
        if head is None:
            tail = each
        else:
            newer[head] = each
        head = each
    return hits


def s3_fifo(ids: Sequence[int], capacity: int) -> int:
    """S3-FIFO (Yang et al., SOSP 2023, algorithm 1): a small queue of a tenth, a main queue, a ghost queue of ids."""
    small_capacity = max(1, capacity // 10)
    main_capacity = capacity - small_capacity
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: OrderedDict[int, None] = OrderedDict()
    uses: dict[int, int] = {}
    hits = 0

    def evict_main() -> None:
        while main:
            oldest = main.popleft()
            if not uses[oldest]:
                del uses[oldest]
                return
            uses[oldest] -= 1
            main.append(oldest)

    def evict_small() -> None:
        while small:
            oldest = small.popleft()
            if uses[oldest] > 1 and main_capacity:
                if len(main) >= main_capacity:
                    evict_main()
                main.append(oldest)
            else:
                del uses[oldest]
                ghost[oldest] = None
                if len(ghost) > main_capacity:
                    ghost.popitem(last=False)
                return

    for each in ids:
        if each in uses:
            uses[each] = min(uses[each] + 1, 3)
            hits += 1
            continue
        while len(uses) >= capacity:
            if len(small) >= small_capacity:
                evict_small()
            else:
                evict_main()
        if each in ghost:
            del ghost[each]
            main.append(each)
        else:
            small.append(each)
        uses[each] = 0
    return hits


def tiny_lfu(ids: Sequence[int], capacity: int) -> int:
    """W-TinyLFU (Einziger et al., TOS 2017) with exact counts: an LRU window of 1 %, and an LRU main part.

    What leaves the window replaces the oldest id of the main part if it was met more often. Counts are halved every
    10 * capacity ids. The paper counts in a sketch, and its main part is a segmented LRU.
    """
    window_capacity = max(1, capacity // 100)
    main_capacity = capacity - window_capacity
    window: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    counts: dict[int, int] = {}
    hits = 0
    for number, each in enumerate(ids, 1):
        counts[each] = counts.get(each, 0) + 1
        if number % (10 * capacity) == 0:
            counts = {met: count // 2 for met, count in counts.items() if count > 1}
        if each in main:
            main.move_to_end(each)
            hits += 1
        elif each in window:
            window.move_to_end(each)
            hits += 1
        else:
            window[each] = None
            if len(window) > window_capacity:
                candidate, _ = window.popitem(last=False)
                if len(main) < main_capacity:
                    main[candidate] = None
                elif main and counts.get(candidate, 0) > counts.get(next(iter(main)), 0):
                    main.popitem(last=False)
                    main[candidate] = None
    return hits


def optimum(ids: Sequence[int], capacity: int) -> int:
    """Belady's MIN, which knows the future: evicts the id whose next use is farthest away. No policy has more hits."""
    following = [len(ids)] * len(ids)
    next_use: dict[int, int] = {}
    for number in range(len(ids) - 1, -1, -1):
        following[number] = next_use.get(ids[number], len(ids))
        next_use[ids[number]] = number
    cache: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for each, use in zip(ids, following, strict=True):
        if each in cache:
            hits += 1
        elif len(cache) == capacity:
            while True:
                when, victim = heapq.heappop(farthest)
                if cache.get(victim) == -when:
                    break
            del cache[victim]
        cache[each] = use
        heapq.heappush(farthest, (-use, each))
    return hits


POLICIES: dict[str, Callable[[Sequence[int], int], int]] = {
    "lru": lru,
    "midpoint": midpoint,
    "clock": clock,
    "sieve": sieve,
    "s3_fifo": s3_fifo,
    "tiny_lfu": tiny_lfu,
    "optimum": optimum,
}
"""By the name in the details of `store.hit_rates.*`."""
