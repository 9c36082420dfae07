"""The channel between the threads of a pipeline: what is read on demand is read when it is waited for."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from persia.nn.channel import Channel, Closed

DEADLINE = 10.0


def test_demand_is_there_while_somebody_waits_and_nothing_is_inside():
    channel = Channel(1)
    with ThreadPoolExecutor(2) as threads:
        demand = threads.submit(channel.await_demand)
        with pytest.raises(TimeoutError):
            demand.result(0.05)
        got = threads.submit(channel.get, DEADLINE)
        demand.result(DEADLINE)
        channel.put("item")
        assert got.result(DEADLINE) == "item"
        again = threads.submit(channel.await_demand)
        with pytest.raises(TimeoutError):
            again.result(0.05)
        channel.close()
        with pytest.raises(Closed):
            again.result(DEADLINE)


def test_who_gave_up_waiting_demands_nothing():
    channel = Channel(1)
    with pytest.raises(TimeoutError):
        channel.get(0.01)
    with ThreadPoolExecutor(1) as threads:
        demand = threads.submit(channel.await_demand)
        with pytest.raises(TimeoutError):
            demand.result(0.05)
        channel.close()
        with pytest.raises(Closed):
            demand.result(DEADLINE)
