"""Plans: processes and hosts for a rate, what limits it, and what is refused."""

import math
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

import persia
from persia import IdFeature, Schema
from persia.cluster.ray.layout import REGIONS, HostLayout, RayNode, demands_of
from persia.cluster.ray.placement import read_place
from persia.errors import ConfigError
from persia.plan import (
    ENLARGE_REGIONS,
    HostKind,
    PlanRequest,
    Rates,
    Topology,
    cluster_file,
    place_of,
    plan_deployment,
    planned_tables,
    share_a_host,
    this_host,
)
from persia.plan.load import batch_traffic
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
from persia.plan.ray_launcher import PLACE_ROLES
from persia.plan.table_bytes import PAGE_BYTES
from persia.schema import Adagrad

ONE = {"embedding_ps": 1, "embedding_worker": 1, "data_loader": 1, "nn_worker": 1}
MACHINE = RateSource("test", 8, "0", "", "", "rates.json")
ROW = RowRate(1e-7, 3e-7, 1000)
CHECKPOINT = CheckpointRate(1e8, 2e8, 0.5)
DISK = DiskRate("/ssd", 100_000.0, 1e9)
BATCH = BatchShape(1000, {"item": 5000.0}, {"item": 4000.0}, {}, 8000.0, 1_000_000)
WORK = WorkloadRate("run.toml", BATCH, 0.002, 0.004, 0.0001, StepRate("cpu", 0.01, 0.01))


def request(rows=1_000_000, hosts=None, counts=ONE, rate=None, **changes):
    schema = Schema([IdFeature("item", dim=16)])
    tables = planned_tables(schema, Adagrad(0.05), {"item": rows}, False)
    rates = Rates(1, [MACHINE], {"16/float32/adagrad": ROW}, {}, WireRate(0.0, 0.0, 1e9), CHECKPOINT, DISK)
    hosts = hosts or [HostKind("host", 8, 10**10, network=1e9)]
    plan = PlanRequest(tables, hosts, rates, WORK, Topology(counts), samples_per_second=rate)
    return plan._replace(**changes)


def limits(plan):
    return {limit.resource: limit.samples_per_second for limit in plan.limits}


@pytest.mark.parametrize(
    ("device", "apart", "steps", "cores"),
    [("cpu", True, 1.5, 1.5), ("cuda", True, 1.0, 1.5), ("cpu", False, 1.0, 1.0)],
)
def test_processes_that_share_a_machine_cost_more(device, apart, steps, cores):
    workload = structs.replace(WORK, step=StepRate(device, 0.01, 0.01))
    alone = request(workload=workload, topology=Topology(ONE, apart))
    shared = alone._replace(rates=structs.replace(alone.rates, sharing=1.5))
    before, after = limits(plan_deployment(alone)), limits(plan_deployment(shared))
    assert before["steps of NN workers"] / after["steps of NN workers"] == pytest.approx(steps)
    assert before["cores of host"] / after["cores of host"] == pytest.approx(cores)


def test_the_rate_of_the_processes_in_the_configuration():
    plan = plan_deployment(request())
    found = limits(plan)
    assert found["steps of NN workers"] == pytest.approx(1000 / 0.01)
    assert found["threads of data_loader processes"] == pytest.approx(1000 / 0.002)
    # 4,000 rows at 0.4 us, and 0.1 ms for the requests; 8 threads.
    assert found["threads of embedding_ps processes"] == pytest.approx(8 * 1000 / (4000 * 4e-7 + 1e-4))
    assert found["cores of host"] == pytest.approx(8 * 1000 / (0.002 + 0.004 + 0.01 + 0.0017))
    # The embedding worker gets ids, rows and gradients; the PS keys twice and gradients.
    received = 5000 * 8 + 4000 * 64 * 2 + (4000 * 16 + 4000 * 64) + (8000 + 4000 * 64 + 5000 * 2)
    assert found["network of host, in"] == pytest.approx(1e9 * 1000 / received)
    assert plan.bottleneck.resource == "steps of NN workers"
    assert plan.samples_per_second == pytest.approx(1e5)
    assert plan.checkpoint_seconds == pytest.approx(1_000_000 * 148 / 1e8)
    assert plan.restore_seconds == pytest.approx(1_000_000 * 148 / 2e8)


def test_processes_and_hosts_for_a_rate():
    gpu = HostKind("gpu", 96, 10**12, ("nn_worker",), network=12.5e9, gpus=8)
    rest = HostKind("rest", 8, 10**9, network=1e9)
    plan = plan_deployment(request(30_000_000, [gpu, rest], rate=2_000_000))
    assert plan.samples_per_second == 2_000_000
    assert plan.bottleneck.samples_per_second >= 2_000_000
    roles = {role.role: role for role in plan.roles}
    assert roles["nn_worker"].processes == math.ceil(2000 * 0.01 / 0.8) == 25
    assert roles["data_loader"].processes == 5
    hosts = {host.kind.name: host for host in plan.hosts}
    assert hosts["gpu"].number == 4
    assert hosts["gpu"].needed_for == "GPUs"
    assert hosts["rest"].needed_for == "memory"
    assert hosts["rest"].number == pytest.approx(30e6 * 156 / 0.9e9, abs=1)
    assert roles["embedding_ps"].processes == hosts["rest"].number
    assert roles["nn_worker"].cores == pytest.approx(20, rel=0.01)
    # The hosts of the PSs write and read at the same time.
    assert plan.checkpoint_seconds == pytest.approx(30_000_000 * 148 / (hosts["rest"].number * 1e8))
    assert plan.restore_seconds == pytest.approx(30_000_000 * 148 / (hosts["rest"].number * 2e8))


def test_checkpoints_are_written_at_most_at_the_rate_of_the_network():
    plan = plan_deployment(request(hosts=[HostKind("host", 8, 10**10, network=5e7)]))
    assert plan.checkpoint_seconds == plan.restore_seconds == pytest.approx(1_000_000 * 148 / 5e7)


def test_a_lack_of_hosts_is_refused():
    with pytest.raises(ConfigError, match=r"needs 2 hosts of kind 'host' for their memory, but there are 1"):
        plan_deployment(request(hosts=[HostKind("host", 8, 10**8, count=1)]))
    with pytest.raises(ConfigError, match="lower --samples-per-second"):
        plan_deployment(request(hosts=[HostKind("host", 2, 10**10, count=1)], rate=1_000_000))


def test_rows_that_do_not_fit_go_to_the_disk():
    few = HostKind("host", 8, 2 * 10**8, count=1, disk=10**11)
    plan = plan_deployment(request(2_000_000, [few]))
    (table,) = plan.tables
    assert table.memory - 8 * 2 * PAGE_BYTES <= 0.9 * 2e8  # The last pages of shards are of the rest.
    assert table.memory > 0.85 * 2e8
    assert 0 < table.memory_rows < 2_000_000
    assert table.disk > 0
    uniform = limits(plan)["disk reads of host"]
    missing = 1 - table.memory_rows / 2_000_000
    assert uniform == pytest.approx(1e5 * 1000 / (4000 * missing), rel=0.05)
    # A record of 152 bytes for each missing row, and two that compaction rewrites.
    assert limits(plan)["disk writes of host"] == pytest.approx(1e9 * 1000 / (4000 * missing * 152 * 3), rel=0.05)
    skewed = limits(plan_deployment(request(2_000_000, [few], zipf=1.05)))["disk reads of host"]
    assert skewed > 2 * uniform
    chosen = plan_deployment(request(2_000_000, [few], memory_rows={"item": 100_000}))
    assert chosen.tables[0].memory_rows == 100_000


def test_rows_that_come_from_disk_cost_their_ps_time():
    few = HostKind("host", 8, 2 * 10**8, count=1, disk=10**11)
    plain = request(2_000_000, [few])
    disk = DiskRate("/ssd", 100_000.0, 1e9, 1e-5)
    slow = plain._replace(rates=msgspec.structs.replace(plain.rates, disk=disk))
    first, second = plan_deployment(plain), plan_deployment(slow)
    (table,) = second.tables
    more = [plan.roles[2].load.core_seconds for plan in (first, second)]
    assert second.roles[2].role == "embedding_ps"
    assert more[1] - more[0] == pytest.approx(4000 * (1 - table.memory_rows / 2_000_000) * 1e-5, rel=0.05)
    assert limits(second)["threads of embedding_ps processes"] < limits(first)["threads of embedding_ps processes"]


def test_a_restart_takes_longer_with_more_rows():
    plain = request(counts={**ONE, "embedding_ps": 2})
    checkpoint = CheckpointRate(1e8, 2e8, 0.5, 1e-6)
    assert plan_deployment(plain).restart_seconds == 0.5
    attaching = plain._replace(rates=msgspec.structs.replace(plain.rates, checkpoint=checkpoint))
    assert plan_deployment(attaching).restart_seconds == pytest.approx(0.5 + 500_000 * 1e-6)


def test_a_disk_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="for their disk"):
        plan_deployment(request(2_000_000, [HostKind("host", 8, 2 * 10**8, count=1, disk=10**7)]))


def test_missing_rates_are_refused():
    full = request(2_000_000, [HostKind("host", 8, 2 * 10**8, count=1, disk=10**11)])
    fields = {"disk": r"--disk DIR --save", "checkpoint": "speed of checkpoints", "wire": "calls between processes"}
    for field, message in fields.items():
        rates = Rates(**{name: getattr(full.rates, name) for name in Rates.__struct_fields__} | {field: None})
        with pytest.raises(ConfigError, match=message):
            plan_deployment(full._replace(rates=rates))
    with pytest.raises(ConfigError, match="rows '16/float32/adagrad' of table 'item'"):
        plan_deployment(full._replace(rates=Rates(1, [MACHINE], checkpoint=CHECKPOINT, wire=WireRate(0, 0, 1))))
    with pytest.raises(ConfigError, match="this configuration's data, network"):
        full.rates.workload("unknown")


def test_a_bounded_depth_shows_latency():
    other = 0.004 + 0.0017
    sync = limits(plan_deployment(request(depth=0)))["steps of NN workers"]
    assert sync == pytest.approx(1000 / (0.01 + other))
    assert limits(plan_deployment(request(depth=1)))["steps of NN workers"] == pytest.approx(1e5)


def test_roles_in_one_process_have_no_calls():
    plan = plan_deployment(request(topology=Topology(ONE, apart=False)))
    assert {name.split(" ")[0] for name in limits(plan)} == {"steps", "cores"}
    assert all(role.received == role.sent == 0 for role in plan.roles)


def test_each_ps_has_its_requests():
    plan = plan_deployment(request(counts={**ONE, "embedding_ps": 3}))
    load = next(role.load for role in plan.roles if role.role == "embedding_ps")
    assert load.core_seconds == pytest.approx(4000 * 4e-7 + 3 * 1e-4)
    assert load.calls == 6


def test_messages_cost_their_sender_and_their_receiver():
    plain, rates = request(), request().rates
    wire = Rates(
        **{name: getattr(rates, name) for name in Rates.__struct_fields__} | {"wire": WireRate(0.001, 2e-9, 1)}
    )
    first, second = (
        {role.role: role.load for role in plan_deployment(asked).roles} for asked in (plain, plain._replace(rates=wire))
    )
    more = {role: second[role].core_seconds - first[role].core_seconds for role in first}
    assert more["embedding_ps"] == pytest.approx(2 * 0.001 / 2 + (4000 * 80 + 4000 * 64) * 2e-9 / 2)
    # What one side receives, another one has sent, and both were charged a half.
    moved = sum(load.sent for load in first.values())
    assert sum(load.received for load in first.values()) == pytest.approx(moved)
    assert sum(more.values()) == pytest.approx(moved * 2e-9 + sum(load.calls for load in first.values()) * 0.001 / 2)


def test_compression_and_several_nn_workers_change_traffic():
    counts = {**ONE, "nn_worker": 4}
    plain = {role.role: role.load for role in plan_deployment(request(counts=counts)).roles}
    short = {
        role.role: role.load for role in plan_deployment(request(topology=Topology(counts, compressed=True))).roles
    }
    reduced = 2 * 3 / 4 * 4 * 1_000_000
    assert plain["nn_worker"].sent == pytest.approx(4000 * 64 + reduced)
    assert short["nn_worker"].sent == pytest.approx(4000 * 36 + reduced)
    assert short["nn_worker"].received == pytest.approx(8000 + 4000 * 36 + 5000 * 2 + reduced)
    assert short["embedding_ps"] == plain["embedding_ps"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("pool_at", "pooling", "of_values"),
    [
        ("nn_worker", "sum", False),
        ("auto", "sum", True),
        ("auto", None, False),
        ("embedding_worker", "sum", True),
        ("embedding_worker", None, False),
    ],
)
def test_values_of_pooled_features_take_the_place_of_rows(compressed, pool_at, pooling, of_values):
    """1,000 samples of two features on one table, with 5,000 ids of which 4,000 are distinct."""
    features = [IdFeature("item", dim=16), IdFeature("history", dim=16, table="item", pooling=pooling, max_length=5)]
    tables = planned_tables(Schema(features), Adagrad(0.05), {"item": 1_000_000}, False)
    batch = structs.replace(BATCH, offsets={"item": 8008.0})
    found = batch_traffic(tables, batch, Topology(ONE, compressed=compressed, pool_at=pool_at))
    value = 36 if compressed else 64
    assert found.pushed == (2000 if of_values else 4000) * value
    assert found.answers == (2000 * value if of_values else 4000 * value + 5000 * 2 + 8008)
    # Embedding PSs and data loaders send and receive the same.
    assert (found.rows, found.gradients, found.keys) == (4000 * 64, 4000 * 64, 4000 * 8)
    assert found.ids == 5000 * 8 + 8008


@pytest.mark.parametrize(("distinct", "of_values"), [(1700.0, False), (1900.0, False), (1960.0, True)])
def test_features_are_pooled_where_that_sends_fewer_bytes(distinct, of_values):
    """2,000 values and their gradients, against rows and gradients of the distinct ids, and 5,000 indices."""
    features = [IdFeature("item", dim=16), IdFeature("last", dim=16, table="item")]
    tables = planned_tables(Schema(features), Adagrad(0.05), {"item": 1_000_000}, False)
    found = batch_traffic(tables, structs.replace(BATCH, unique={"item": distinct}), Topology(ONE, pool_at="auto"))
    assert (found.pushed == 2000 * 64) == of_values
    assert found.answers + found.pushed == min(4000 * 64, 2 * distinct * 64 + 5000 * 2)


GPU = HostKind("gpu", 96, 10**12, ("nn_worker",), network=12.5e9, gpus=8)


@pytest.mark.parametrize(
    ("kinds", "shared"),
    [
        ([this_host()], True),
        ([HostKind("host", 8, 10**9, network=1e9)], False),
        ([HostKind("host", 8, 10**9, network=1e9, count=1)], True),
        ([GPU, HostKind("rest", 8, 10**9)], False),
        ([HostKind("rest", 8, 10**9, ("embedding_ps",)), HostKind("all", 8, 10**9)], True),
    ],
)
def test_roles_that_share_a_host(kinds, shared):
    assert share_a_host(kinds, "embedding_worker", "nn_worker") is shared


def test_the_cluster_file_fits_the_schema_of_ray_up():
    import importlib.util
    import json

    yaml = pytest.importorskip("yaml")
    jsonschema = pytest.importorskip("jsonschema")
    if (ray := importlib.util.find_spec("ray")) is None:
        pytest.skip('Ray is not installed: pip install "persia-recsys[ray]"')
    plan = plan_deployment(request(30_000_000, [GPU, HostKind("rest", 8, 10**9, network=1e9)], rate=2_000_000))
    config = yaml.safe_load(cluster_file(plan, "persia plan run.toml"))
    jsonschema.validate(config, json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text()))
    kinds = config["available_node_types"]
    assert sum(kind.get("min_workers", 0) for kind in kinds.values()) == config["max_workers"]
    place = place_of(plan)
    assert place["nn_worker"] == {"resources": {"gpu": 0.001}, "GPU": 1}
    assert read_place(place).keys() == place.keys()
    # What the processes of a host ask for, it has.
    processes = next(role.processes for role in plan.roles if role.role == "embedding_ps")
    hosts = kinds["rest"]["min_workers"]
    assert place["ps"]["memory"] * processes <= hosts * kinds["rest"]["resources"]["memory"]
    assert place["ps"].keys() == {"resources", "memory"}


def launched(text):
    """The hosts that `ray up` starts with a cluster file; `/dev/shm` has half of the memory, unless the file says."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(text)
    enlarged = re.findall(r"mount -o remount,size=(\d+)% /dev/shm", "\n".join(config["worker_start_ray_commands"]))
    share = int(enlarged[0]) / 100 if enlarged else 0.5
    nodes = []
    for name, kind in config["available_node_types"].items():
        resources = {**kind["resources"], REGIONS: share * kind["resources"].get("memory", 10**10)}
        for i in range(kind.get("min_workers", 1)):
            nodes.append(RayNode(f"{name}/{i:03}", f"{name}/{i:03}", resources, resources, {}))
    return nodes


def written_cluster(text):
    """The cluster in a comment of a cluster file."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    (program,) = re.findall(r"^# (persia\.cluster\.Ray\(.*\))$", text, re.MULTILINE)
    return eval(program, {"persia": persia}), dict(re.findall(r"(\w+s)=(\d+)", program))


@pytest.mark.parametrize(
    ("rows", "hosts", "changes", "expected"),
    [
        # Rows take three quarters of a host.
        (30_000_000, [GPU, HostKind("rest", 8, 10**9, network=1e9)], {"rate": 2_000_000}, {"gpu": 4, "rest": 6}),
        # Two PSs on each host, and all roles beside them.
        (20_000_000, [HostKind("on", 8, 2 * 10**9, count=2)], {"counts": {**ONE, "embedding_ps": 4}}, {"on": 2}),
        # Rows beyond memory: PSs reserve all that there is for rows.
        (2_000_000, [HostKind("yes", 8, 2 * 10**8, count=1, disk=10**11)], {}, {"yes": 1}),
        # Hosts for rows alone.
        (1_000_000, [HostKind("null", 8, 10**9, ("embedding_ps",)), HostKind("y", 8, 10**9)], {}, {"null": 1, "y": 1}),
    ],
)
def test_roles_of_a_plan_are_on_hosts_of_its_cluster_file(rows, hosts, changes, expected):
    plan = plan_deployment(request(rows, hosts, **changes))
    text = cluster_file(plan, "persia plan run.toml")
    nodes = launched(text)
    cluster, counts = written_cluster(text)
    assert counts == {PLACE_ROLES[role.role]: str(role.processes) for role in plan.roles}
    assert cluster.place == read_place(place_of(plan))
    processes = {role.role: role.processes for role in plan.roles}
    layout = HostLayout(demands_of(cluster.place, processes, cluster.options), nodes)
    for host in plan.hosts:
        assert host.number == expected[host.kind.name]
        for role in host.roles:
            chosen = Counter(layout.node_of(role, rank) for rank in range(processes[role]))
            assert {node.split("/")[0] for node in chosen} == {host.kind.name}
            assert max(chosen.values()) <= math.ceil(processes[role] / host.number)


def test_hosts_of_the_cluster_file_start_as_those_of_the_guide():
    yaml = pytest.importorskip("yaml")
    guide = Path(__file__).resolve().parents[2] / "docs" / "guide" / "deploy.md"
    blocks = re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.DOTALL)
    (launcher,) = [config for config in map(yaml.safe_load, blocks) if "cluster_name" in config]
    config = yaml.safe_load(cluster_file(plan_deployment(request()), "persia plan run.toml"))
    for key in ("file_mounts", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        assert config[key] == launcher[key], key
    (keys,) = config["file_mounts"]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert f"export PERSIA_CURVE_KEYS={keys};" in config[key][-1]
    assert ENLARGE_REGIONS in config["worker_start_ray_commands"]


@pytest.mark.parametrize("regions", ["", "/mnt/ssd/persia", "/dev/shm/a"])
def test_the_cluster_file_has_the_regions_of_the_plan(regions):
    yaml = pytest.importorskip("yaml")
    text = cluster_file(plan_deployment(request()), "persia plan run.toml", regions)
    assert f'RayOptions(address="auto", regions="{regions}"))' in text
    commands = yaml.safe_load(text)["worker_start_ray_commands"]
    assert (ENLARGE_REGIONS in commands) == (regions == "/dev/shm/a")
    assert commands[-1].endswith("ray start --address=$RAY_HEAD_IP:6379")
