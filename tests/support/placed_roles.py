"""A cluster whose roles are placed on three different nodes of Ray; prints what came of it as one line of JSON.

Two hosts with memory, and the head with an accelerator, where Ray believes in a GPU. With a folder for
checkpoints as an argument, the smaller of the hosts with memory dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import ray
from ray.cluster_utils import Cluster

import persia
from persia.cluster import Ray, RayOptions
from persia.cluster.ray.placing import ray_nodes
from persia.errors import ConfigError

BATCHES = 300
PLACE = {
    "ps": {"memory": "200MB"},
    "embedding_worker": {"CPU": 0.5, "labels": {"pool": "memory"}},
    "nn_worker": {"resources": {"accelerator": 1}},
}


def main(folder: str | None = None) -> None:
    from support.cluster_samples import eventually, make_trainer, pids, reader

    options = RayOptions(threads=1, timeout=240.0)  # Three nodes on one machine start slowly.
    head = {"num_cpus": 1, "num_gpus": 1, "memory": 10**8, "resources": {"accelerator": 2}, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    fast = nodes.head_node
    large = nodes.add_node(num_cpus=1, memory=600 * 10**6, labels={"pool": "memory"})
    small = nodes.add_node(num_cpus=1, memory=250 * 10**6, labels={"pool": "memory"})
    names = {large.node_id: "large", small.node_id: "small", fast.node_id: "fast"}
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    mode = persia.modes.Hybrid(2, warmup=0)
    found: dict[str, object] = {}

    def refused(cluster: Ray) -> str:
        try:
            cluster.run(lambda: 0)
        except ConfigError as error:
            return error.message
        return "it ran"

    def hosts(cluster: Ray) -> dict[str, list[str]]:
        assert cluster._roles.processes is not None
        by_role: dict[str, list[str]] = {}
        for process in sorted(cluster._roles.processes.all(), key=lambda p: (p.role, p.rank)):
            assert process.info is not None
            by_role.setdefault(process.role, []).append(names[process.info.node])
        return by_role

    def places() -> None:
        """Refusals, reservations, a process that joins and a PS that restarts."""
        with Ray(6, options=options, place=PLACE) as cluster:
            found["refused"], found["started"] = refused(cluster), cluster._roles.processes is not None
        with Ray(nn_workers=2, options=options, place={"nn_worker": {"GPU": 1}}) as cluster:
            found["gpus"] = refused(cluster)
        with Ray(3, options=options, place=PLACE) as cluster:
            trainer = make_trainer(cluster, mode)
            found["rows"] = trainer.fit(reader(100)).rows
            found["hosts"] = hosts(cluster)
            free = ray._private.state.available_resources_per_node()
            found["reserved"] = {
                names[node.id]: node.total[name] - free[node.id].get(name, 0.0)
                for node in ray_nodes()
                for name in ("accelerator" if node.id == fast.node_id else "memory",)
                if node.id in names
            }
            cluster.scale(embedding_workers=2)
            try:
                cluster.scale(embedding_workers=5)
            except ConfigError as error:
                found["scale"] = error.message
            found["scaled"] = len(pids(cluster, "embedding_worker"))
            os.kill(pids(cluster, "embedding_ps")[0], signal.SIGKILL)
            result = trainer.fit(reader(100), again=True)
            found["restarted"] = [result.rows, result.lost_batches, result.lost_gradients]
            found["after_restart"] = hosts(cluster)["embedding_ps"]

    def death(folder: str) -> None:
        """The smaller host with memory dies, with a PS."""
        with Ray(3, options=options, place=PLACE) as cluster:
            changes = {"checkpoint_every_steps": 20, "recovery_point_every_seconds": 1.0}
            trainer = make_trainer(cluster, mode, checkpoint_dir=folder, **changes)
            trainer.fit(reader(40))
            found["before_death"] = hosts(cluster)["embedding_ps"]
            results = []
            thread = threading.Thread(target=lambda: results.append(trainer.fit(reader(BATCHES))))
            thread.start()

            def calls() -> float:
                return sum(c.get("rpc.calls", 0.0) for n, c in cluster.statistics().items() if "embedding_ps" in n)

            before = calls()
            eventually(lambda: calls() > before + 100, "it trains", 60.0)
            nodes.remove_node(small, allow_graceful=False)
            thread.join(300)
            (result,) = results
            found["hosts"], found["rows"] = hosts(cluster), result.rows

    try:
        if folder is None:
            places()
        else:
            death(folder)
    finally:
        ray.shutdown()
        nodes.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
