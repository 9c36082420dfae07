"""The simulation, where the answer is known."""

import math

import pytest

from persia.errors import ConfigError
from persia.plan.load import BatchTraffic
from persia.plan.queue_simulation import BatchCosts, SimulatedCluster, SimulatedHosts, SimulatedMode, simulate_training

NOTHING = BatchTraffic(0, 0, 0, 0, 0, 0, 0, 0)
COSTS = BatchCosts(100, NOTHING, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0)
ROLES = ("embedding_ps", "embedding_worker", "data_loader", "nn_worker")


def cluster(nn_workers=1, servers=1, network=None, cores=64, **changes):
    hosts = {role: SimulatedHosts(1, cores, network) for role in ROLES}
    counts = {"embedding_ps": servers, "embedding_worker": 1, "data_loader": nn_workers, "nn_worker": nn_workers}
    return SimulatedCluster(hosts, {role: role for role in ROLES}, counts)._replace(**changes)


def test_steps_alone():
    result = simulate_training(COSTS, cluster(), SimulatedMode(4))
    assert result.samples_per_second == pytest.approx(100 / 0.01)
    assert result.bottleneck == "NN workers"
    assert simulate_training(COSTS, cluster(4), SimulatedMode(4)).samples_per_second == pytest.approx(400 / 0.01)


def test_sync_is_the_sum_of_the_way_and_hybrid_hides_it():
    costs = COSTS._replace(worker=0.008, request=0.002, lookup=0.006, update=0.004)
    way = 0.01 + 0.008 + 0.002 + (0.006 + 0.004) / 2
    found = [simulate_training(costs, cluster(servers=2), SimulatedMode(depth)) for depth in (0, 1, 4)]
    assert found[0].step_seconds == pytest.approx(way)
    assert found[0].bottleneck == "latency"
    assert found[1].step_seconds == pytest.approx(way / 2)
    assert found[2].step_seconds == pytest.approx(0.01)
    assert found[0].lookup_seconds == pytest.approx(0.004 + 0.001 + 0.003)


@pytest.mark.parametrize("field", ["rows", "answers", "pushed", "gradients"])
def test_networks_limit(field):
    costs = COSTS._replace(traffic=NOTHING._replace(**{field: 50e6}))
    result = simulate_training(costs, cluster(network=1e9), SimulatedMode(8), 150)
    assert result.step_seconds == pytest.approx(0.05, rel=0.08)
    assert "coming" in result.bottleneck or "going" in result.bottleneck


def test_processes_of_one_host_use_no_network():
    costs = COSTS._replace(traffic=NOTHING._replace(pushed=50e6))
    one = SimulatedCluster({"here": SimulatedHosts(1, 64)}, dict.fromkeys(ROLES, "here"), dict.fromkeys(ROLES, 1))
    assert simulate_training(costs, one, SimulatedMode(4)).step_seconds == pytest.approx(0.01)


def test_cores_of_one_host_are_shared():
    costs = COSTS._replace(worker=0.01, lookup=0.01, reader=0.01)
    one = SimulatedCluster(
        {"here": SimulatedHosts(1, 2)}, dict.fromkeys(ROLES, "here"), dict.fromkeys(ROLES, 1), gpus=False
    )
    result = simulate_training(costs, one, SimulatedMode(8), 90)
    assert result.step_seconds == pytest.approx(0.04 / 2, rel=0.02)
    assert result.bottleneck == "here cores"


def test_costs_of_messages_count_on_both_sides():
    # A way of ten messages: the batch's ids, keys, rows, answer; gradients twice. The first is not on the way.
    sync = simulate_training(COSTS._replace(call=0.004), cluster(), SimulatedMode(0)).step_seconds
    assert sync == pytest.approx(0.01 + 5 * 0.004 / 2)
    costs = COSTS._replace(byte=1e-9, traffic=NOTHING._replace(answers=4e6))
    assert simulate_training(costs, cluster(), SimulatedMode(0)).step_seconds == pytest.approx(0.014)


def test_disks_limit():
    disk = cluster()
    disk.hosts["embedding_ps"] = SimulatedHosts(1, 64, None, 100_000)
    result = simulate_training(COSTS._replace(misses=5000), disk, SimulatedMode(8), 60)
    assert result.step_seconds == pytest.approx(0.05, rel=0.01)
    assert result.bottleneck == "embedding_ps disk"
    busy = simulate_training(COSTS._replace(misses=5000, miss=1e-3), disk, SimulatedMode(8), 60)
    assert busy.busy["embedding_ps cores"] == pytest.approx(5.0 / 64 / busy.step_seconds, rel=0.2)


def test_a_step_has_its_all_reduce_and_waits_for_the_slowest():
    costs = COSTS._replace(traffic=NOTHING._replace(reduced=5e6))
    assert simulate_training(costs, cluster(2, network=1e9), SimulatedMode(4)).step_seconds == pytest.approx(0.015)
    # A single NN worker averages nothing, and without a barrier nobody does.
    assert simulate_training(costs, cluster(1, network=1e9), SimulatedMode(4)).step_seconds == pytest.approx(0.01)
    apart = simulate_training(costs, cluster(2, network=1e9), SimulatedMode(4, False))
    assert apart.step_seconds == pytest.approx(0.01)
    waits = [simulate_training(COSTS, cluster(16), SimulatedMode(4, b), 60, 0.3).step_seconds for b in (True, False)]
    assert waits[0] > 1.3 * waits[1]
    assert math.isclose(waits[1], 0.01, rel_tol=0.05)


def test_runs_are_reproducible():
    runs = [simulate_training(COSTS, cluster(4), SimulatedMode(4), spread=0.2, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    with pytest.raises(ConfigError, match="expected at least 6"):
        simulate_training(COSTS, cluster(), SimulatedMode(4), 5)
