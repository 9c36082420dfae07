"""Running sums against the slow ones; memory that does not grow with the number of gradients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.pushes.accumulator import GradientAccumulator
from persia.types import Gradients
from support.examples import examples
from support.twins.pushes import ReferenceAccumulator


def batch(random, universe, dim, share_of_stale):
    ids = random.choice(universe, random.integers(0, len(universe) + 1), replace=False)
    values = random.normal(size=(len(ids), dim)).astype(np.float32)
    weights = (random.random(len(ids)) >= share_of_stale).astype(np.float32)
    return Gradients(ids, values), weights


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_any_gradients(data):
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    reduction = data.draw(st.sampled_from(["per_id", "global"]))
    stale = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    universe = np.unique(random.integers(0, 2**64, data.draw(st.integers(1, 30)), dtype=np.uint64))
    fast, slow = GradientAccumulator(reduction), ReferenceAccumulator(reduction)
    for _ in range(2):  # Two steps: nothing is left of the first.
        for _ in range(data.draw(st.integers(0, 6))):
            tables = data.draw(st.sets(st.sampled_from(["a", "b"])))
            gradients = {table: batch(random, universe, 3 if table == "a" else 5, stale) for table in tables}
            rows = data.draw(st.sampled_from([0, 4, 4, 7]))
            fast.add(gradients, rows)
            slow.add(gradients, rows)
        mine, theirs = fast.take(), slow.take()
        for table in ("a", "b"):
            ids, values = mine.get(table, Gradients(np.empty(0, np.uint64), np.empty((0, 0), np.float32)))
            expected = theirs.get(table, {})
            assert sorted(ids.tolist()) == sorted(expected)
            for id_, value in zip(ids.tolist(), values, strict=True):
                np.testing.assert_allclose(value, expected[id_], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("reduction", ["per_id", "global"])
def test_a_gradient_alone_is_its_own_mean_to_the_bit(reduction):
    sums = GradientAccumulator(reduction)
    ids, values = np.arange(4, dtype=np.uint64), np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    sums.add({"t": (Gradients(ids, values), np.ones(4, np.float32))}, 37)
    (mean,) = sums.take().values()
    assert np.array_equal(mean.values, values)


def test_a_stale_gradient_that_is_not_finite_does_no_harm():
    sums = GradientAccumulator("per_id")
    ids = np.array([1, 2], np.uint64)
    ones, bad = np.ones((2, 2), np.float32), np.full((2, 2), np.nan, np.float32)
    sums.add({"t": (Gradients(ids, ones), np.ones(2, np.float32))}, 4)
    sums.add({"t": (Gradients(ids, bad), np.array([0, 1], np.float32))}, 4)
    values = sums.take()["t"].values
    assert values[0].tolist() == [0.5, 0.5]
    assert np.isnan(values[1]).all()  # The store drops it, and counts.


def test_memory_does_not_grow_with_the_number_of_gradients():
    sums = GradientAccumulator("per_id")
    ids, values = np.arange(100, dtype=np.uint64), np.ones((100, 4), np.float32)
    for _ in range(500):
        sums.add({"t": (Gradients(ids, values), np.ones(100, np.float32))}, 4)
    assert sums.nbytes < 100 * (8 + 4 * 6) + 4 * 1024
    np.testing.assert_allclose(sums.take()["t"].values, values)
