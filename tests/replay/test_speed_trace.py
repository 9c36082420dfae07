"""Traces of slow-downs: where work ends, their files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import ConfigError
from persia.replay import Slowdown, Trace, alternating, load_trace, phases, stalls, steady

factors = st.sampled_from([0.5, 1.0, 2.0, 4.0])


@given(
    st.lists(st.tuples(st.integers(1, 6), factors), min_size=1, max_size=6),
    st.integers(0, 80),
    st.integers(0, 40),
)
def test_work_ends_when_the_integral_of_speed_is_the_work(parts, start, work):
    """In quarters of a second, so that sums are exact."""
    rows, at = [], 0.0
    for length, factor in parts:
        rows.append(Slowdown(at / 4, factor))
        at += length
    trace = Trace([rows], at / 4)
    end = trace.finish(0, start / 4, work / 4)
    steps = round((end - start / 4) * 1024)
    done = sum(1 / trace.factor(0, start / 4 + (i + 0.5) / 1024) for i in range(steps)) / 1024
    assert done == pytest.approx(work / 4, abs=1e-6)


def test_phases_are_slow_for_their_share_of_the_time():
    trace = phases(8, length=0.5, factor=4.0, share=0.25, count=64, seed=1)
    for worker in range(8):
        slow = sum(trace.factor(worker, 0.25 + 0.5 * i) == 4.0 for i in range(64))
        assert slow == 16
    assert len({tuple(parts) for parts in trace.workers}) == 8


def test_stalls_hit_single_batches():
    trace = stalls(4, length=0.5, chance=0.02, low=8.0, high=50.0, seed=1)
    assert trace.period == 2048.0
    factors = [part.factor for parts in trace.workers for part in parts]
    found = [factor for factor in factors if factor != 1.0]
    assert all(8 <= factor <= 50 for factor in found)
    assert np.log(found).mean() == pytest.approx(np.log([8, 50]).mean(), rel=0.05)
    stalled = total = 0
    for worker in range(4):
        time = 0.0
        while time < trace.period:
            end = trace.finish(worker, time, 0.5)
            stalled += end - time > 3.9
            total, time = total + 1, end
    assert stalled / total == pytest.approx(0.02, rel=0.25)
    assert stalled == pytest.approx(len(found), abs=2)


def test_alternating():
    trace = alternating([1, 4], quiet=10, strained=5)
    assert [trace.factor(1, t) for t in (0, 9.9, 10, 14.9, 15)] == [1, 1, 4, 4, 1]
    assert trace.workers[0] == [Slowdown(0.0, 1.0)]


def test_a_file_keeps_the_trace(tmp_path):
    (tmp_path / "day.json").write_text('{"period": 60.0, "workers": [[[0.0, 1.0], [30.0, 4.0]], [[0.0, 1.0]]]}')
    trace = load_trace(tmp_path / "day.json")
    assert trace.finish(0, 20.0, 12.0) == 38.0
    assert trace.finish(1, 20.0, 12.0) == 32.0
    with pytest.raises(ConfigError, match=r"other\.json"):
        load_trace(tmp_path / "other.json")
    (tmp_path / "bad.json").write_text('{"period": 60.0, "workers": [[[5.0, 1.0]]]}')
    with pytest.raises(ConfigError, match="first 0"):
        load_trace(tmp_path / "bad.json")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_factors(bad):
    with pytest.raises(ConfigError, match=r"workers\[1\]"):
        steady([1.0, bad])
