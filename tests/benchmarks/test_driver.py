"""What the benchmark of the driver's death counts as lost, doubled, and trained again by the rules."""

import numpy as np
import pytest
from benchmarks.driver import ROWS, Life, compare


def life(position, *batches):
    """Updates of each row, given those of each batch."""
    return Life(position, np.repeat(np.asarray(batches, np.int64), ROWS))


@pytest.mark.parametrize(
    ("lives", "lost", "doubled", "again"),
    [
        pytest.param([life(0), life(2, 1, 1, 1), life(4, 1, 1, 2, 1)], 0, 0, 1, id="one kill"),
        pytest.param([life(0), life(0), life(1, 1)], 0, 0, 0, id="killed before it trained"),
        pytest.param([life(0), life(2, 1, 0)], 1, 0, 0, id="a batch is missing"),
        pytest.param([life(0), life(3, 1, 1)], 1, 0, 0, id="so is one without rows"),
        pytest.param([life(1, 1), life(2, 2, 1)], 0, 1, 0, id="one from before the recovery point"),
        pytest.param([life(0), life(1, 2)], 0, 1, 0, id="twice by one driver"),
        pytest.param([life(1, 1, 1), life(1, 1, 0)], 1, 0, 0, id="an update is undone"),
    ],
)
def test_rows_that_break_the_rules_are_counted(lives, lost, doubled, again):
    assert compare(lives) == (lost * ROWS, doubled * ROWS, again * ROWS)
