"""A cluster on two nodes of Ray, simulated on this machine; prints what it found as one line of JSON."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import ray
from ray.cluster_utils import Cluster

import persia
from persia.cluster import Ray
from persia.errors import ConfigError, RoleDiedError


def main() -> None:
    from support.cluster_samples import make_trainer, options, pids, reader

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    found: dict[str, object] = {}
    try:
        keys = os.environ.pop("PERSIA_CURVE_KEYS")
        with Ray(options=options()) as cluster:
            try:
                cluster.run(lambda: 0)
            except ConfigError as error:
                found["without_keys"] = error.message
        os.environ["PERSIA_CURVE_KEYS"] = keys
        with Ray(4, 2, 2, 2, options(restarts=0)) as cluster:  # A death is told of, not made good.
            trainer = make_trainer(cluster, persia.modes.Hybrid(2, warmup=0))
            assert cluster._roles.plan is not None
            assert cluster._roles.processes is not None
            found["loopback"] = cluster._roles.plan.loopback
            found["rows"] = trainer.fit(reader(40)).rows
            cluster.scale(embedding_workers=1, data_loaders=1)
            assert trainer.fit(reader(40), again=True).lost_batches == 0
            places = Counter(p.info.node for p in cluster._roles.processes.of("embedding_ps") if p.info is not None)
            found["servers"] = list(places.values())
            found["nn_workers"] = len(
                {p.info.node for p in cluster._roles.processes.of("nn_worker") if p.info is not None}
            )
            os.kill(pids(cluster, "embedding_ps")[0], signal.SIGKILL)
            try:
                trainer.fit(reader(100_000))
            except RoleDiedError as error:
                found["died"] = error.message
    finally:
        ray.shutdown()
        nodes.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
