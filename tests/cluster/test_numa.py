"""Placing a parameter server on a NUMA node, with made-up descriptions of nodes."""

import os
import threading
from types import SimpleNamespace

import pytest

from persia.cluster import numa
from persia.types import BucketMap


@pytest.fixture
def affinity(monkeypatch):
    """Processors of a made-up host; what is pinned replaces them."""
    state = {"allowed": set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(state["allowed"]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: state.update(allowed=set(processors)))
    return state


def described(folder, *lists):
    for number, processors in enumerate(lists):
        node = folder / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(processors + "\n")
    return folder


def test_processes_take_turns_among_nodes(affinity, tmp_path):
    nodes = described(tmp_path, "0-3,8-11", "4-7,12-15")
    for position, expected in (
        (0, {0, 1, 2, 3, 8, 9, 10, 11}),
        (1, {4, 5, 6, 7, 12, 13, 14, 15}),
        (2, {0, 1, 2, 3, 8, 9, 10, 11}),
    ):
        affinity["allowed"] = set(range(16))
        assert numa.pin(position, 8, nodes)
        assert affinity["allowed"] == expected


def test_processors_that_are_not_allowed_are_left_alone(affinity, tmp_path):
    affinity["allowed"] = {2, 3, 4}
    nodes = described(tmp_path, "0-3", "4-7", "8-15", "")
    assert numa.processors_of_nodes(nodes) == [{2, 3}, {4}]
    assert numa.pin(1, 1, nodes)
    assert affinity["allowed"] == {4}


@pytest.mark.parametrize("lists", [[], ["0-15"], ["0-15", ""], ["0-3", "4-15"]])
def test_nothing_happens_on_one_node_or_without_room(affinity, tmp_path, lists):
    assert not numa.pin(0, 8, described(tmp_path, *lists))
    assert affinity["allowed"] == set(range(16))


def test_nodes_are_in_the_order_of_their_numbers(affinity, tmp_path):
    nodes = described(tmp_path, *map(str, range(12)))
    assert numa.processors_of_nodes(nodes) == [{number} for number in range(12)]


def test_this_machine_is_described(monkeypatch):
    every = numa.processors_of_nodes()
    assert set().union(*every) == os.sched_getaffinity(0)


def test_threads_that_start_later_are_pinned_too():
    """Threads inherit from the one that starts them, and others stay where they were."""
    before = os.sched_getaffinity(0)
    found = []

    def pinned():
        os.sched_setaffinity(0, {min(before)})
        child = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        child.start()
        child.join(10)

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join(10)
    assert found == [{min(before)}]
    assert os.sched_getaffinity(0) == before


def test_a_ps_is_pinned_before_it_starts_threads(monkeypatch):
    """Its own seat, and as many threads as it will have; a thread that is there already would stay where it is."""
    hosts = pytest.importorskip("persia.cluster.ray.server_host", reason="Ray is not installed")
    from persia.cluster.ray.process_plan import ServerSeat

    done = []
    monkeypatch.setattr(hosts.Host, "__init__", lambda self, plan, rank: vars(self).update(plan=plan, rank=rank))
    monkeypatch.setattr(hosts.EmbeddingServerHost, "_predecessor", lambda self: ("", False, BucketMap.even(3)))
    monkeypatch.setattr(hosts.EmbeddingServerHost, "serve", lambda self, *_: done.append("serves"))
    monkeypatch.setattr(hosts.EmbeddingServerHost, "join", lambda self, *_: None)
    monkeypatch.setattr(hosts, "cores", lambda _: 3)
    monkeypatch.setattr(hosts.numa, "pin", lambda position, threads: done.append(("pinned", position, threads)))
    monkeypatch.setattr(hosts, "EmbeddingServer", lambda *arguments: done.append(("made", arguments[4])))
    options = SimpleNamespace(regions=None, overcommit=False, timeout=1.0)
    schema = SimpleNamespace(resolved_tables=dict)
    hosts.EmbeddingServerHost(
        SimpleNamespace(options=options, nn_workers=1, servers=3, name="job"),
        2,
        (schema, None, '{"kind": "sync"}', 0),
        hosts.Shares({}, {}),
        0,
        ServerSeat(neighbours=2, position=1),
    )
    assert done == [("pinned", 1, 3), ("made", 3), "serves"]
