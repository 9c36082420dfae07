"""Which hosts the processes of a cluster get; without Ray."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.cluster import RayOptions
from persia.cluster.ray.layout import REGIONS, HostLayout, RayNode, demands_of
from persia.cluster.ray.placement import read_place
from persia.errors import ConfigError

GB = 1e9


def node(name, cpu=16.0, memory=100 * GB, gpu=0.0, labels=None, free=None, **resources):
    total = {"CPU": cpu, "memory": memory, "GPU": gpu, REGIONS: memory, f"node:{name}": 1.0, **resources}
    return RayNode(name, f"10.0.0.{name}", total, {**total, **(free or {})}, labels or {})


def laid_out(nodes, place, ps=1, embedding_worker=0, data_loader=0, nn_worker=0, **options):
    counts = {
        "embedding_ps": ps,
        "embedding_worker": embedding_worker,
        "data_loader": data_loader,
        "nn_worker": nn_worker,
    }
    return HostLayout(demands_of(read_place(place), counts, RayOptions(**options)), nodes)


def hosts(layout, role, count):
    return "".join(layout.node_of(role, rank) or "-" for rank in range(count))


def test_the_roles_of_the_paper():
    """Figure 4: PSs on hosts with memory, NN workers on hosts with GPUs, embedding workers on the others."""
    nodes = [node("a", memory=800 * GB), node("b", memory=800 * GB), node("c"), node("g", 96, gpu=8), node("h", gpu=8)]
    place = {"ps": {"memory": "400GB"}, "embedding_worker": {"CPU": 8}, "nn_worker": {"GPU": 1}}
    layout = laid_out(nodes, place, ps=4, embedding_worker=6, data_loader=3, nn_worker=16)
    assert hosts(layout, "embedding_ps", 4) == "abab"
    assert Counter(hosts(layout, "embedding_worker", 6)) == dict.fromkeys("abc", 2)
    assert sorted(hosts(layout, "data_loader", 3)) == ["a", "b", "c"]
    assert Counter(hosts(layout, "nn_worker", 16)) == {"g": 8, "h": 8}


def test_others_keep_their_hosts_when_ranks_change():
    """NN workers that join have reserved theirs while others close up."""
    layout = laid_out([node(name, gpu=1) for name in "abcd"], {"nn_worker": {"GPU": 1}}, nn_worker=4)
    before = hosts(layout, "nn_worker", 4)
    layout.renumber("nn_worker", [0, 2], [3])
    assert hosts(layout, "nn_worker", 4) == f"{before[0]}{before[2]}-{before[3]}"


def test_equal_hosts_get_ps_in_turn():
    assert hosts(laid_out([node(name) for name in "cab"], {"ps": {}}, ps=7), "embedding_ps", 7) == "abcabca"


def test_ps_go_where_the_memory_of_each_is_largest():
    nodes = [node("a", memory=400 * GB), node("b", memory=100 * GB), node("c", memory=150 * GB)]
    assert hosts(laid_out(nodes, {"ps": {}}, ps=4), "embedding_ps", 4) == "aaca"
    assert hosts(laid_out(nodes, {"ps": {"memory": "60GB"}}, ps=7), "embedding_ps", 7) == "aacabaa"


def test_regions_with_little_space_get_fewer_ps():
    """Ray counts memory that /dev/shm does not have."""
    nodes = [node("a", memory=400 * GB), node("b", memory=200 * GB)]
    small = nodes[0]._replace(free={**nodes[0].free, REGIONS: 70 * GB})
    assert hosts(laid_out([small, nodes[1]], {"ps": {"memory": "60GB"}}, ps=4), "embedding_ps", 4) == "bbab"
    with pytest.raises(ConfigError, match=r"embedding PS 4 .of 5. cannot be placed.* memory of regions 60 GB"):
        laid_out([small, nodes[1]], {"ps": {"memory": "60GB"}}, ps=5)
    laid_out([small, nodes[1]], {"ps": {"memory": "60GB"}}, ps=5, overcommit=True)


def test_pack_fills_hosts_before_others():
    nodes = [node("a", gpu=2), node("b", gpu=4), node("c", gpu=4)]
    packed = laid_out(nodes, {"nn_worker": {"GPU": 1, "strategy": "pack"}}, nn_worker=6)
    assert hosts(packed, "nn_worker", 6) == "bbbbcc"
    spread = laid_out(nodes, {"nn_worker": {"GPU": 1}}, nn_worker=6)
    assert Counter(hosts(spread, "nn_worker", 6)) == dict.fromkeys("abc", 2)


def test_labels_and_resources_choose_hosts():
    nodes = [node("a", labels={"pool": "x"}), node("b", labels={"pool": "y"}), node("c", ssd=1.0), node("d")]
    place = {"ps": {"labels": {"pool": "y"}}, "embedding_worker": {"resources": {"ssd": 0.5}}}
    layout = laid_out(nodes, place, ps=2, embedding_worker=2)
    assert hosts(layout, "embedding_ps", 2) == "bb"
    assert hosts(layout, "embedding_worker", 2) == "cc"
    with pytest.raises(
        ConfigError, match=r"no host has label pool=z for it(.|\n)*10\.0\.0\.b: .*; label pool is not z"
    ):
        laid_out(nodes, {"ps": {"labels": {"pool": "z"}}})


def test_a_host_without_cpus_is_left_out_unless_it_is_named():
    nodes = [node("a", cpu=0.0, labels={"pool": "head"}), node("b")]
    assert hosts(laid_out(nodes, {"ps": {}}, ps=2), "embedding_ps", 2) == "bb"
    assert hosts(laid_out(nodes, {"ps": {"labels": {"pool": "head"}}}, ps=2), "embedding_ps", 2) == "aa"
    assert hosts(laid_out(nodes[:1], {"ps": {}}), "embedding_ps", 1) == "a"  # There is no other.


def test_roles_with_fewer_hosts_choose_first():
    """Each of the others would take the CPUs of the first host."""
    nodes = [node("a", cpu=8.0, memory=800 * GB), node("b", cpu=8.0)]
    place = {"embedding_worker": {"CPU": 4}, "ps": {"memory": "300GB", "CPU": 4}}
    layout = laid_out(nodes, place, ps=2, embedding_worker=2)
    assert hosts(layout, "embedding_ps", 2) == "aa"
    assert hosts(layout, "embedding_worker", 2) == "bb"
    nodes = [node("a", cpu=8.0, labels={"pool": "x"}), node("b", cpu=8.0)]
    layout = laid_out(nodes, {"ps": {"CPU": 8}, "nn_worker": {"CPU": 8, "labels": {"pool": "x"}}}, nn_worker=1)
    assert hosts(layout, "embedding_ps", 1) + hosts(layout, "nn_worker", 1) == "ba"


def test_what_cannot_be_had_is_refused_with_what_hosts_have():
    nodes = [
        node("a", 8.0, 200 * GB, free={"memory": 150 * GB}),
        node("b", 8.0, 60 * GB, gpu=1.0, labels={"ray.io/node-id": "7", "zone": "east"}),
    ]
    with pytest.raises(ConfigError) as raised:
        laid_out(nodes, {"ps": {"memory": "100GB"}, "nn_worker": {"GPU": 1}}, ps=2, nn_worker=1)
    assert raised.value.message == (
        "embedding PS 1 (of 2) cannot be placed: no host has memory 100 GB, memory of regions 100 GB for it. The hosts "
        "of Ray, with the resources that this cluster leaves:\n"
        "    10.0.0.a: CPU 8 of 8, GPU 0 of 0, memory 50 GB of 200 GB, memory of regions 100 GB of 200 GB; "
        "has 1 embedding PS; too little memory\n"
        "    10.0.0.b: CPU 8 of 8, GPU 1 of 1, memory 60 GB of 60 GB, memory of regions 60 GB of 60 GB, "
        "label zone=east; too little memory\n"
        "Ask for less in place['ps'], use fewer processes, or add hosts to Ray."
    )
    fields = pickle.loads(pickle.dumps(raised.value)).fields
    assert (fields["field"], fields["role"], fields["rank"]) == ("place.ps", "embedding_ps", 1)
    assert [host["free"]["memory"] for host in fields["hosts"]] == [50 * GB, 60 * GB]


def test_an_nn_worker_never_gets_a_host_without_its_gpu():
    with pytest.raises(ConfigError, match=r"NN worker 1 .of 2. cannot be placed(.|\n)*; no GPU left"):
        laid_out([node("a"), node("g", gpu=1.0)], {"nn_worker": {"GPU": 1}}, nn_worker=2)


def test_hosts_alike_share_a_line():
    with pytest.raises(ConfigError, match=r"\n    10\.0\.0\.a.* and 2 others: CPU 16 of 16.*; too little memory\nAsk"):
        laid_out([node(name) for name in "abcdefghij"], {"ps": {"memory": "1TB"}})


def test_a_lost_host_is_replaced_and_the_others_stay():
    nodes = [node(name) for name in "abc"]
    layout = laid_out(nodes, {"ps": {"memory": "60GB"}}, ps=2)
    assert hosts(layout, "embedding_ps", 2) == "ab"
    layout.update(nodes)
    layout.place("embedding_ps", [0, 1])
    assert hosts(layout, "embedding_ps", 2) == "ab"  # As before: their rows are there.
    layout.update(nodes[1:])
    assert not layout.placed("embedding_ps", [0])
    layout.place("embedding_ps", [0])
    assert hosts(layout, "embedding_ps", 2) == "cb"
    layout.update(nodes[1:2])
    with pytest.raises(ConfigError, match="embedding PS 0"):
        layout.place("embedding_ps", [0])
    layout.update([nodes[1], node("d")])
    layout.place("embedding_ps", [0])
    assert hosts(layout, "embedding_ps", 2) == "db"


def test_ranks_are_placed_together_or_not_at_all():
    layout = laid_out([node("a", cpu=4.0)], {"embedding_worker": {"CPU": 1}}, embedding_worker=1)
    with pytest.raises(ConfigError, match="embedding worker 4 "):
        layout.place("embedding_worker", [1, 2, 3, 4])
    assert hosts(layout, "embedding_worker", 5) == "a----"
    layout.place("embedding_worker", [1, 2, 3])
    layout.release("embedding_worker", [1])
    layout.place("embedding_worker", [4])
    assert hosts(layout, "embedding_worker", 5) == "a-aaa"


def test_what_others_release_becomes_free():
    """What Ray reports with a delay, after the processes of this cluster have started, takes nothing away."""
    busy = node("a", cpu=4.0, free={"CPU": 1.0})
    layout = laid_out([busy], {"embedding_worker": {"CPU": 1}}, embedding_worker=1)
    layout.update([node("a", cpu=4.0, free={"CPU": 0.0})])
    with pytest.raises(ConfigError):
        layout.place("embedding_worker", [1])
    layout.update([node("a", cpu=4.0, free={"CPU": 3.0})])
    layout.place("embedding_worker", [1])
    layout.update([node("a", cpu=4.0, free={"CPU": 1.0})])  # As two have started; there is room for a third.
    layout.place("embedding_worker", [2])
    with pytest.raises(ConfigError):
        layout.place("embedding_worker", [3])


@given(
    memory=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    gpus=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    ps=st.integers(1, 8),
    nn_workers=st.integers(0, 8),
    size=st.integers(1, 200),
    strategy=st.sampled_from(["spread", "pack"]),
)
def test_no_host_gives_more_than_it_has(memory, gpus, ps, nn_workers, size, strategy):
    nodes = [node("abcdef"[i], memory=m * GB, gpu=float(gpus[i])) for i, m in enumerate(memory)]
    place = {"ps": {"memory": f"{size}GB", "strategy": strategy}, "nn_worker": {"GPU": 1, "strategy": strategy}}
    enough = sum(m // size for m in memory) >= ps and sum(gpus[: len(nodes)]) >= nn_workers
    try:
        layout = laid_out(nodes, place, ps=ps, nn_worker=nn_workers)
    except ConfigError:
        assert not enough
        return
    assert enough  # The roles do not compete, so nothing that can be had is refused.
    for role, count, resource, amount in (
        ("embedding_ps", ps, "memory", size * GB),
        ("nn_worker", nn_workers, "GPU", 1),
    ):
        for name, number in Counter(hosts(layout, role, count)).items():
            assert number * amount <= next(n for n in nodes if n.id == name).total[resource]


def test_demands_of_roles_without_a_placement_follow_the_options():
    counts = {"embedding_ps": 2, "nn_worker": 3}
    demands = demands_of(read_place({"ps": {"memory": 10}}), counts, RayOptions(cpus=2, gpus=1))
    assert demands["nn_worker"].amounts == {"CPU": 2, "GPU": 1}
    assert demands["embedding_ps"].amounts == {"memory": 10, "CPU": 2, REGIONS: 10}
    assert demands["dense_ps"].number == 0
