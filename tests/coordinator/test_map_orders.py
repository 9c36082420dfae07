"""The bucket map at the coordinator: what it commits, what it refuses, and what outlives its process."""

import threading

import pytest

from persia import rpc
from persia.coordinator import CoordinatorServer
from persia.errors import ConfigError, PersiaError, StaleMapError
from persia.services import BucketMaps, MapState, MoveProgress, Round, ScaleRequest
from persia.types import BucketMap

DEADLINE = 20.0
FIRST = BucketMap.even(2)
NEXT = FIRST.moved(3)


class Run:
    """A coordinator that can be restarted."""

    def __init__(self, path):
        self.path = path
        self.restart()

    def restart(self):
        self.now = CoordinatorServer(path=self.path, buckets=FIRST)


@pytest.fixture(params=[False, True], ids=["one process", "restarts"])
def run(request, tmp_path):
    """Whatever is asked of it; with restarts, by a process that has just begun."""

    class Asked(Run):
        def __getattr__(self, name):
            if request.param:
                self.restart()
            return getattr(self.now, name)

    return Asked(str(tmp_path / "members"))


def test_a_map_is_ordered_and_committed_once(run):
    assert run.map_state() == MapState(FIRST, None, 0, MoveProgress())
    generation = run.regenerate(1)
    number = Round(generation, 1)
    assert not run.commit_map(number, NEXT)  # It is not ordered.
    number = Round(generation, 2)
    run.order_map(NEXT)
    run.order_map(NEXT)
    assert run.map_state().ordered == NEXT
    for _ in range(2):
        assert run.commit_map(number, NEXT)
        assert run.map_state()[:3] == (NEXT, None, 0)
    run.order_map(NEXT)  # A late repetition.
    assert run.map_state().ordered is None
    run.map_adopted(generation, 1)
    assert run.map_state().adopted == 1
    run.map_adopted(generation, 0)
    run.map_adopted(generation, 2)  # Never committed.
    assert run.map_state().adopted == 1


def test_only_the_current_generation_commits(run):
    first = run.regenerate(1)
    run.order_map(NEXT)
    second = run.regenerate(1)
    for late in (first, second + 1):
        assert not run.commit_map(Round(late, 1), NEXT)
        run.map_adopted(late, 1)
    assert run.map_state()[:3] == (FIRST, NEXT, 0)
    assert run.commit_map(Round(second, 1), NEXT)


def test_a_map_that_does_not_follow_is_refused(run):
    with pytest.raises(StaleMapError, match="Bucket map 2 does not follow bucket map 0 of this run"):
        run.order_map(NEXT.moved(4))
    run.order_map(NEXT)
    with pytest.raises(PersiaError, match="Rows are already moving"):
        run.order_map(FIRST.moved(4))
    number = Round(run.regenerate(1), 1)
    assert not run.commit_map(number, FIRST.moved(4))
    assert run.map_state()[:2] == (FIRST, NEXT)


def test_an_order_that_is_withdrawn_is_not_committed_by_a_late_call(run):
    generation = run.regenerate(1)
    run.order_map(NEXT)
    assert run.withdraw_map(NEXT)
    assert run.map_state().ordered is None
    assert not run.commit_map(Round(generation, 3), NEXT)
    run.order_map(NEXT)
    assert not run.commit_map(Round(generation, 3), NEXT)  # The same call, which came twice.
    assert run.commit_map(Round(generation, 4), NEXT)
    assert not run.withdraw_map(NEXT)
    assert run.map_state()[:2] == (NEXT, None)


def test_a_request_is_answered_once():
    coordinator = CoordinatorServer()
    with rpc.serve(coordinator, protocol=BucketMaps) as server:
        stub = rpc.connect(server.address, BucketMaps, timeout=DEADLINE)
        assert stub.scale_request() is None
        found = []
        waiting = threading.Thread(target=lambda: found.append(stub.scale_request(DEADLINE)))
        waiting.start()
        assert stub.request_scale("a", {"ps": 3}) == ScaleRequest("a", {"ps": 3})
        waiting.join(DEADLINE)
        assert found == [ScaleRequest("a", {"ps": 3})]
        assert not stub.request_scale("a", {"ps": 3}).answered
        with pytest.raises(PersiaError, match="The run still changes its numbers of processes to ps=3"):
            stub.request_scale("b", {"ps": 4})
        stub.answer_scale("b", "unknown")
        stub.answer_scale("a", "no host")
        for _ in range(2):
            assert stub.request_scale("a", {"ps": 3}) == ScaleRequest("a", {"ps": 3}, True, "no host")
        assert stub.request_scale("b", {"ps": 4}) == ScaleRequest("b", {"ps": 4})
        for wrong in ({}, {"nn": 3}):
            with pytest.raises(ConfigError, match="expected any of: ps, embedding_workers, data_loaders"):
                stub.request_scale("c", wrong)
        rpc.close(stub)


def test_one_that_has_left_does_not_return(run):
    run.join("embedding_ps", 2, "tcp://127.0.0.1:1")
    run.depart("embedding_ps", 2, 1, "killed")
    run.depart("embedding_ps", 2, 1)
    assert [(m.state, m.reason) for m in run.membership().members] == [("dead", "")]
    version = run.membership().version
    run.depart("embedding_ps", 2, 1, "killed")
    run.depart("embedding_ps", 2, 1)
    assert run.membership().version == version
