"""The channel between the threads of a pipeline: what is read on demand is read when it is waited for."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from persia.nn.channel import Channel, Closed, get_or_idle

DEADLINE = 10.0


def test_there_is_demand_while_a_consumer_waits_for_an_item():
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


def test_whoever_waits_has_something_to_do_meanwhile(monkeypatch):
    monkeypatch.setattr("persia.nn.channel.IDLE_SECONDS", 0.01)
    channel = Channel(1)
    calls = []

    def idle():
        calls.append(len(channel))
        if len(calls) == 3:
            channel.put("item")

    assert get_or_idle(channel.get, DEADLINE, idle) == "item"
    assert calls == [0, 0, 0]
    channel.put("at once")
    assert get_or_idle(channel.get, DEADLINE, idle) == "at once"
    assert len(calls) == 3
    with pytest.raises(TimeoutError):
        get_or_idle(channel.get, 0.03, calls.clear)
    with pytest.raises(TimeoutError):
        get_or_idle(channel.get, 0.01, None)
    channel.close()
    with pytest.raises(Closed):
        get_or_idle(channel.get, DEADLINE, idle)
