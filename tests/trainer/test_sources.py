"""Batches by number: forward, kept until they are trained, and from the beginning again."""

import pytest

from persia.errors import DataError
from persia.trainer.sources import LocalSource

BATCHES = list("abcdefgh")


def source(position=0):
    return LocalSource(lambda n: iter(BATCHES[n:]), iter(BATCHES[position:]), position)


def test_any_numbers_from_any_position():
    own = source(2)
    assert [own.read(n) for n in (2, 5, 4, 0, 7, 8)] == ["c", "f", "e", "a", "h", None]


def test_an_iterator_gives_again_what_is_not_trained():
    own = LocalSource(None, iter(BATCHES), 0)
    assert [own.read(n) for n in range(4)] == list("abcd")
    own.forget(2)
    assert [own.read(n) for n in (2, 3, 4)] == list("cde")
    with pytest.raises(DataError, match="Cannot rewind to batch 1"):
        own.read(1)
