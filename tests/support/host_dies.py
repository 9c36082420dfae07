"""A cluster on two nodes of Ray, of which one dies while it trains; prints what came of it as one line of JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading

import ray
from ray.cluster_utils import Cluster

from persia.cluster import Ray
from persia.modes import Hybrid

BATCHES = 2000


class Told(logging.Handler):
    """What the driver has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(folder: str) -> None:
    from support.cluster_samples import eventually, make_trainer, options, reader

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    other = nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    found: dict[str, object] = {}
    try:
        with Ray(2, 2, 1, 2, options()) as cluster:
            trainer = make_trainer(
                cluster,
                Hybrid(2, warmup=0),
                checkpoint_dir=folder,
                checkpoint_every_steps=50,
                recovery_point_every_seconds=1.0,
            )
            trainer.fit(reader(100))
            told = Told()
            logging.getLogger("persia.cluster").addHandler(told)
            results = []
            thread = threading.Thread(target=lambda: results.append(trainer.fit(reader(BATCHES))))
            thread.start()

            def pushes() -> float:
                return sum(c.get("rpc.calls", 0.0) for n, c in cluster.statistics().items() if "embedding_ps" in n)

            before = pushes()
            eventually(lambda: pushes() > before + 100, "it trains", 60.0)
            nodes.remove_node(other, allow_graceful=False)
            thread.join(200)
            (result,) = results
            found["rows"], found["failures"], found["steps"] = result.rows, result.failures, result.steps
            found["finished"] = trainer.finished
            found["auc"] = trainer.evaluate(reader(20)).auc  # This process has found the PSs again.
            found["progressive"] = result.progressive.auc
            found["rows_in_store"] = result.stored_rows
            found["told"] = told.lines
            assert cluster._roles.processes is not None
            found["hosts"] = len({p.info.node for p in cluster._roles.processes.all() if p.info is not None})
    finally:
        ray.shutdown()
        nodes.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
