"""An NN worker that stalls after it has drawn a token: the others go on, and nothing is lost or counted twice."""

import pytest

from persia.modes import Async, Bsp, Gba, HopBs
from support.stalls import PLACES, ROWS, train_beside_stall

BATCHES = 20


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [Async(), Bsp(3), HopBs(BATCHES), Gba(3 * ROWS, tolerance=1)], ids=str)
def test_a_stall_delays_nobody_else(mode, place):
    group = mode.group(3, ROWS)
    run = train_beside_stall(mode, place, BATCHES)
    assert run.made == 2 * BATCHES
    assert run.versions == [(2 * BATCHES + (place == PLACES[2] and number == 1)) // group for number in range(2)]
    assert (run.end.step, run.end.held) == divmod(2 * BATCHES + 1, group)
    if group == 1:
        assert run.changes == pytest.approx({0: BATCHES, 1: BATCHES, 2: 1})
    else:  # The last step has two gradients, and divides by two. Row 2 is new, so its gradient counts in Gba.
        assert sum(run.changes.values()) == pytest.approx(13 + 1)
        assert run.changes[2] == pytest.approx(1 / 2 if place in PLACES[:2] else 1 / 3)
