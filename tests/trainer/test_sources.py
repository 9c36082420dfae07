"""Batches by number: forward, kept until they are trained, and from the beginning again."""

from types import SimpleNamespace

import numpy as np
import pytest

from persia import Batch
from persia.errors import DataError
from persia.trainer.sources import LocalSource, source_of

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


def test_an_item_that_is_no_batch_is_refused_after_rewinding_too():
    batch = Batch({}, np.zeros((2, 0), np.float32), np.zeros((2, 1), np.float32))
    state, connection = SimpleNamespace(epoch=0, position=1), SimpleNamespace(loader=None)
    own = source_of([batch, batch, batch, None], state, connection, None)
    assert own.read(2) is batch
    own.forget(3)
    assert own.read(1) is batch
    with pytest.raises(DataError, match="The data yielded None at position 3"):
        own.read(3)


def test_what_ends_the_data_ends_every_phase_that_comes_there():
    """A generator that has raised ends, and a pass would end with it as if it had no more data."""

    def broken():
        yield "a"
        raise OSError("disk")

    own = LocalSource(lambda n: iter(BATCHES[n:]), broken(), 0)
    for number in (2, 1, 3):
        with pytest.raises(OSError, match="disk"):
            own.read(number)
    assert [own.read(0), own.read(3)] == ["a", "d"]  # It is opened again.
