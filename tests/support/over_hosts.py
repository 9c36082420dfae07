"""A training by Ray over the hosts that have joined it; prints what came of it as one line of JSON."""

from __future__ import annotations

import json

import ray

from persia.cluster import Ray
from persia.modes import Hybrid

BATCHES = 60


def main() -> None:
    from support.cluster_samples import make_trainer, options, reader

    ray.init(address="auto", log_to_driver=False, logging_level="error")
    found: dict[str, object] = {}
    with Ray(3, 2, 1, 2, options(compression="auto", pool_at="auto")) as cluster:
        trainer = make_trainer(cluster, Hybrid(2, warmup=0))
        result = trainer.fit(reader(BATCHES))
        assert cluster._roles.processes is not None
        assert cluster._roles.plan is not None
        processes = [process for process in cluster._roles.processes.all() if process.info is not None]
        found["rows"], found["steps"], found["lost"] = result.rows, result.steps, result.lost_batches
        found["rows_in_store"] = result.stored_rows
        found["auc"] = trainer.evaluate(reader(20)).auc
        found["progressive"] = result.progressive.auc
        found["compression"] = cluster._roles.plan.compression
        found["hosts"] = {
            role: sorted(process.info.host for process in processes if process.role == role and process.info)
            for role in {process.role for process in processes}
        }
    ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
