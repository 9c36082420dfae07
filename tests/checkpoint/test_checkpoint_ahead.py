"""Items are made by another thread, at most one ahead; errors and an early end reach both sides."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from persia.checkpoint.storage import ahead

DEADLINE = 30.0


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "persia-checkpoint-rows"]


def test_all_items_in_order() -> None:
    assert list(ahead(iter(range(1000)))) == list(range(1000))
    assert list(ahead(iter(()))) == []
    assert not threads()


def test_at_most_one_is_made_ahead() -> None:
    begun = [threading.Event() for _ in range(4)]

    def items():
        for i, event in enumerate(begun):
            event.set()
            yield i

    with closing(ahead(items())) as made:
        assert next(made) == 0
        assert begun[1].wait(DEADLINE)
        assert not begun[2].is_set()
        assert next(made) == 1
        assert begun[2].wait(DEADLINE)
        assert not begun[3].is_set()
    assert not threads()


def test_an_error_comes_after_what_was_made_before() -> None:
    def items():
        yield 1
        raise KeyError("gone")

    seen = []
    with pytest.raises(KeyError, match="gone"):
        for item in ahead(items()):
            seen.append(item)
    assert seen == [1]
    assert not threads()


def test_an_early_end_ends_the_thread() -> None:
    with closing(ahead(iter(range(10**9)))) as made:
        assert next(made) == 0
    assert not threads()
