"""The proxy repeats, reorders, holds up and loses messages, and cuts connections; calls get their answers anyway."""

from __future__ import annotations

import time
from collections.abc import Iterator

import chaos_proxy
import pytest
from chaos_proxy import STALL_SECONDS, Proxy

from persia import rpc


class Numbers:
    """Notes the numbers that it is called with."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @rpc.inline
    def note(self, number: int) -> int:
        """Returns the number."""
        self.seen.append(number)
        return number


class Case:
    """A service behind a proxy, and a stub of it."""

    def __init__(self) -> None:
        self.service = Numbers()
        self.server = rpc.serve(self.service)
        self.proxy = Proxy(self.server.address, "tcp://127.0.0.1:0")
        self.stub = rpc.connect(self.proxy.address, Numbers)
        self.stub.note(0)


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    rpc.close(made.stub)
    made.server.close()


def test_a_request_comes_twice(case):
    case.proxy.spoil("duplicate")
    assert case.stub.note(1) == 1
    assert case.stub.note(2) == 2
    assert sorted(case.service.seen) == [0, 1, 1, 2]
    assert rpc.statistics(case.stub)["late_replies"] == 1


def test_requests_come_in_another_order(case, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(chaos_proxy, "HOLD_SECONDS", 20.0)  # The second one comes, if late.
        case.proxy.spoil("reorder")
        calls = [rpc.start(case.stub.note, number) for number in (1, 2)]
        assert [call.result() for call in calls] == [1, 2]
    assert case.service.seen == [0, 2, 1]
    case.proxy.spoil("reorder")
    assert case.stub.note(3) == 3  # None overtakes it.


def test_a_reply_is_held_up(case):
    case.proxy.spoil("stall")
    began = time.monotonic()
    assert case.stub.note(1) == 1
    assert time.monotonic() - began >= STALL_SECONDS


@pytest.mark.parametrize("kind", ["lost_reply", "cut"])
def test_a_connection_ends(kind, case):
    case.proxy.spoil(kind)
    assert case.stub.note(1) == 1
    assert case.stub.note(2) == 2
    assert set(case.service.seen) == {0, 1, 2}
    assert rpc.statistics(case.stub)["connects"] == 2
