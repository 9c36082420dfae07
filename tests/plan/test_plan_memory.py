"""A plan and the PSs that it places divide memory alike."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from persia import IdFeature, Schema
from persia.errors import ConfigError
from persia.memory import Memory
from persia.plan import HostKind, PlanRequest, Rates, Topology, cluster_file, place_of, plan_deployment, planned_tables
from persia.plan.rates import (
    BatchShape,
    CheckpointRate,
    DiskRate,
    RateSource,
    RowRate,
    StepRate,
    WireRate,
    WorkloadRate,
)
from persia.ps.shares import Shares, divide_tables
from persia.schema import Adagrad, Table

ADAGRAD = Adagrad(0.05)
DIMS = (4, 16, 64)
NO_ROW = RowRate(1e-7, 1e-7, 1000)
RATES = Rates(
    1, [RateSource("test", 8, "0", "", "", "")], {f"{dim}/float32/adagrad": NO_ROW for dim in DIMS},
    wire=WireRate(0.0, 0.0, 1e9), checkpoint=CheckpointRate(1e8, 1e8, 0.5), disk=DiskRate("/ssd", 1e5, 1e9),
)  # fmt: skip


def planned(tables, rows, kind, servers, rate=None):
    schema = Schema([IdFeature(table.name) for table in tables], tables=tables)
    ids = {table.name: 100.0 for table in tables}
    work = WorkloadRate("", BatchShape(100, ids, ids, {}, 0.0, 0), 1e-6, 1e-6, 1e-6, StepRate("cpu", 0.01, 0.01))
    counts = {"embedding_ps": servers, "embedding_worker": 1, "data_loader": 1, "nn_worker": 1}
    return plan_deployment(PlanRequest(
        planned_tables(schema, ADAGRAD, rows, False), [kind], RATES, work, Topology(counts), samples_per_second=rate
    ))  # fmt: skip


def servers_of(plan):
    return next(role.processes for role in plan.roles if role.role == "embedding_ps")


def configured(tables, plan):
    """The tables, with what the plan says that they must set."""
    return {
        table.name: msgspec.structs.replace(table, spill="/ssd", capacity=plan.added[table.name])
        if table.name in plan.added
        else table
        for table in tables
    }


def started(tables, plan, kind, placed):
    """Rows in memory by table, as PSs of a cluster on Ray divide them."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    from persia.cluster.ray import capacities
    from persia.cluster.ray.options import RayOptions
    from persia.cluster.ray.process_plan import Service

    servers = servers_of(plan)
    nodes = [f"n{rank % min(servers, plan.hosts[0].number)}" for rank in range(servers)]
    schema = Schema([IdFeature(name) for name in tables], tables=list(tables.values()))
    host = Memory(kind.memory, kind.memory, "the memory of the host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacities, "run_on_all", lambda of, *_: dict.fromkeys(of, host))
        reserved = place_of(plan)["ps"]["memory"] if placed else None
        shares = capacities.server_capacities(Service(schema, ADAGRAD, "", 0), nodes, RayOptions(), reserved)
    return {
        name: sum(share.memory_rows[name] for share in shares)
        for name, table in tables.items()
        if table.spill is not None
    }


@st.composite
def cases(draw):
    tables, rows = [], {}
    for number in range(draw(st.integers(1, 4))):
        name, count = f"t{number}", draw(st.integers(1, 5_000_000))
        capacity = draw(st.none() | st.integers(count, 2 * count))
        spill = draw(st.none() | st.just("/ssd"))
        memory_rows = draw(st.none() | st.integers(1, count)) if spill and capacity else None
        tables.append(Table(name, draw(st.sampled_from(DIMS)), capacity=capacity, spill=spill, memory_rows=memory_rows))
        rows[name] = count
    count = draw(st.integers(1, 3))
    kind = HostKind("host", 8, draw(st.integers(10**8, 10**9)), count=count, disk=10**13, network=1e9)
    return tables, rows, kind, draw(st.integers(1, 5)), draw(st.sampled_from([None, 1000.0]))


@given(cases())
def test_pss_have_the_rows_in_memory_that_a_plan_states(case):
    tables, rows, kind, servers, rate = case
    try:
        plan = planned(tables, rows, kind, servers, rate)
    except ConfigError:
        assume(False)
    stated = {table.name: table.memory_rows for table in plan.tables}
    found = configured(tables, plan)
    # With `place`, to the row. Each host has the memory that its PSs reserve.
    assert {name: min(count, rows[name]) for name, count in started(found, plan, kind, True).items()} == {
        name: stated[name] for name, table in found.items() if table.spill is not None
    }
    of_host = -(-servers_of(plan) // min(servers_of(plan), kind.count))
    assert place_of(plan)["ps"]["memory"] * of_host <= 0.9 * kind.memory
    # Without it, PSs find the same memory, if each host has as many.
    if servers_of(plan) % kind.count == 0:
        for name, count in started(found, plan, kind, False).items():
            assert min(count, rows[name]) == pytest.approx(stated[name], abs=servers_of(plan))


def test_small_tables_are_wholly_in_memory():
    """As PSs divide it: in equal parts, but no more than a table needs."""
    kind = HostKind("host", 8, 10**9, count=1, disk=10**12)
    tables = [Table("large", 16), Table("small", 16)]
    rows = {"large": 20_000_000, "small": 100_000}
    plan = planned(tables, rows, kind, 1)
    large, small = plan.tables
    assert (small.memory_rows, small.disk) == (100_000, 0)
    own = 164 - 12
    assert large.memory_rows == pytest.approx((0.9e9 - 20.1e6 * 12 - 100_000 * own) / own, abs=2)
    assert plan.added == rows
    text = cluster_file(plan, "persia plan run.toml")
    assert f"# table 'large': {large.memory_rows:,} of 20,000,000 rows in memory; set spill" in text
    assert "capacity = 20000000" in text


def test_a_table_without_capacity_leaves_half_for_its_index():
    kind = HostKind("host", 8, 10**9, count=1, disk=10**12)
    plan = planned([Table("item", 16, spill="/ssd")], {"item": 20_000_000}, kind, 1)
    assert plan.tables[0].memory_rows == pytest.approx(0.9e9 / 2 / 164, abs=1)
    assert not plan.added


def test_the_same_memory_is_divided_whoever_says_how_much():
    item = {"item": Table("item", 16, spill="/ssd", capacity=10_000_000)}
    host = Memory(10**9, 10**9, "")
    assert divide_tables(item, ADAGRAD, [host]) == divide_tables(
        item, ADAGRAD, [Memory(9 * 10**8, 9 * 10**8, "", for_rows=True)]
    )
    assert divide_tables(item, ADAGRAD, [host]) != [Shares({"item": 10_000_000}, {"item": 10_000_000})]


def test_rows_on_ssd_need_hosts_that_have_one():
    item = Table("item", 16, spill="/ssd", capacity=1_000_000, memory_rows=100_000)
    with pytest.raises(
        ConfigError, match=r"'item' has 900,000 of 1,000,000 rows on SSD, but hosts of kind 'host' have"
    ):
        planned([item], {}, HostKind("host", 8, 10**9, count=1), 1)


def test_a_ps_is_on_one_host():
    kind = HostKind("host", 8, 10**9)
    with pytest.raises(ConfigError, match=r"memory of 4 hosts of kind 'host', but there are 1 embedding PSs"):
        planned([Table("item", 16)], {"item": 20_000_000}, kind, 1)
    plan = planned([Table("item", 16)], {"item": 20_000_000}, kind, 1, rate=1000.0)
    assert (plan.hosts[0].number, servers_of(plan)) == (4, 4)
    # Two of five PSs are on one host, which needs memory for both.
    tight = planned([Table("item", 16)], {"item": 11_000_000}, HostKind("host", 8, 10**9), 3)
    assert tight.hosts[0].number == 3


def test_pss_that_ask_for_declared_rows_get_their_memory():
    """A row of a small dim takes less than a PS asks for."""
    item = Table("item", 4, capacity=10_000_000)
    plan = planned([item], {}, HostKind("host", 8, 10**9, count=1), 2)
    memory = place_of(plan)["ps"]["memory"]
    assert 2 * memory > plan.tables[0].memory
    shares = divide_tables({"item": item}, ADAGRAD, [Memory(memory, memory, "", for_rows=True)] * 2)
    assert [share.capacities["item"] for share in shares] == [5_000_000] * 2
