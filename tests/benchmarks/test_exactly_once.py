"""The accounting of `online.exactly_once` finds a click that is missing, or trained twice, unless it is counted."""

from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.exactly_once_count import Deviations, Repeat, deviations, lost_batches

from persia.coordinator import TokenReport
from persia.modes import Async, HopBw

PARTITIONS = np.array([0, 1, 0, 1])
OFFSETS = np.array([0, 0, 1, 1])


def found(change=None, repeats=(), lost=0):
    """The deviations of four batches of three clicks that are trained once but for a change."""
    times = np.ones((4, 3), np.uint32)
    for place, count in (change or {}).items():
        times[place] = count
    return deviations(times, PARTITIONS, OFFSETS, list(repeats), lost)


def test_clicks_that_are_trained_once_are_no_deviations():
    assert found() == Deviations(0, 0, 0, 0, 0)


def test_a_missing_click_is_found_unless_its_batch_is_counted():
    assert found({(2, 1): 0}) == Deviations(1, 1, 0, 0, 1)
    assert found({(2, 1): 0}, lost=1) == Deviations(1, 0, 0, 0, 1)
    # A counted batch explains the clicks of one batch, not as many clicks of several.
    assert found({(2, 1): 0, (3, 1): 0, 0: 0}, lost=2) == Deviations(5, 3, 0, 0, 3)


@pytest.mark.parametrize("place", [(2, 1), (1, 0)])
def test_a_click_trained_twice_is_found_unless_it_is_repeated(place):
    repeat = Repeat({0: 1}, {0: 2, 1: 1})  # Offset 1 of partition 0, offset 0 of partition 1.
    assert found({place: 2}) == Deviations(0, 0, 1, 1, 0)
    assert found({place: 2}, [repeat]) == Deviations(0, 0, 1, 0, 0)
    assert found({place: 3}, [repeat]) == Deviations(0, 0, 2, 1, 0)
    assert found({place: 3}, [repeat, repeat]) == Deviations(0, 0, 2, 0, 0)


@pytest.mark.parametrize("place", [(0, 0), (3, 2)])
def test_a_restart_explains_only_what_it_repeats(place):
    """Batch 0 is before the recovery point, batch 3 was not read yet when training restarted."""
    assert found({place: 2}, [Repeat({0: 1}, {0: 2, 1: 1})]) == Deviations(0, 0, 1, 1, 0)


def test_a_lost_batch_explains_no_click_that_is_trained_twice():
    assert found({(0, 0): 2}, lost=4).twice == 1


def test_gradients_that_hop_bw_drops_are_counted():
    report = TokenReport(dropped_batches=5, lost_batches=2, abandoned=1)
    result = SimpleNamespace(lost_batches=10, lost_gradients=20, asynchronous=report)
    assert lost_batches(result, Async()) == 33
    assert lost_batches(result, HopBw(1)) == 38
    assert lost_batches(SimpleNamespace(lost_batches=1, lost_gradients=2, asynchronous=None), Async()) == 3


def test_a_trained_click_that_is_not_served_raises_the_figure(monkeypatch):
    pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia-recsys[kafka]"')
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    from benchmarks import exactly_once

    monkeypatch.setattr(exactly_once, "SERVED_SECONDS", 0.0)
    times = np.ones((4, 3), np.int64)
    times[1, 2] = 0  # Counted as lost.
    served = np.ones(12, np.bool_)

    def measured():
        client = SimpleNamespace(embeddings=lambda table, ids: SimpleNamespace(found=served[ids]))
        server = SimpleNamespace(client=client, answered=1, unanswered=0)
        result = SimpleNamespace(asynchronous=None, lost_batches=1, lost_gradients=0, failures=0)
        counted = deviations(times, PARTITIONS, OFFSETS, [], 1)
        return exactly_once._measure("sync", counted, SimpleNamespace(made=[]), server, (result, result), 1, times, 0)

    served[5] = False  # The lost one is not to be served.
    assert measured().value == 0
    served[7:9] = False
    assert (measured().value, measured().details["unserved"], measured().holds) == (2, 2, False)


def test_each_fault_comes_once_in_a_round():
    pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia-recsys[kafka]"')
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    from benchmarks.exactly_once_faults import KINDS, draw

    faults = draw(1, 2 * len(KINDS), KINDS)
    assert faults == draw(1, 2 * len(KINDS), KINDS) != draw(2, 2 * len(KINDS), KINDS)
    assert sorted(faults[: len(KINDS)]) == sorted(faults[len(KINDS) :]) == sorted(KINDS)
