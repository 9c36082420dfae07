"""Trains over the hosts of Ray until its input ends; prints one line of JSON each second, and the result.

With the argument `metrics`, roles listen for Prometheus.

The input line `scale` adds an embedding worker, which may run on a host that has just joined.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from typing import Any

import ray
import torch

import persia
from persia.cluster import Ray, RayOptions

BATCH = 512
REPORT_SECONDS = 1.0


def main(folder: str, *extras: str) -> None:
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    reader = persia.data.synthetic(
        1 << 40, id_features=8, ids_per_feature=20_000, dense_features=4, batch_size=BATCH, dim=16
    )
    options = RayOptions(threads=1, timeout=180.0, prometheus_port=0 if "metrics" in extras else None)
    # With a placement, so that a new process goes to the host with the fewest: the one that has joined.
    with Ray(2, 2, 1, 2, options, {"embedding_worker": {"strategy": "spread"}}) as cluster:
        torch.manual_seed(0)
        trainer = persia.Trainer(
            persia.nn.models.FFNN(reader.schema, hidden=(32,)),
            reader.schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            mode=persia.modes.Hybrid(4, warmup=0),
            cluster=cluster,
            options=persia.TrainerOptions(
                progress=False,
                timeout=60.0,
                checkpoint_dir=folder,
                checkpoint_every_seconds=4.0,
                recovery_point_every_seconds=2.0,
            ),
        )
        results: list[Any] = []

        def train() -> None:
            try:
                results.append(trainer.fit(reader))
            except Exception:
                _send(failed=traceback.format_exc())

        training = threading.Thread(target=train)
        training.start()
        threading.Thread(target=_report_lookups, args=(cluster, training), daemon=True).start()
        for line in sys.stdin:
            if line.strip() == "scale":
                cluster.scale(embedding_workers=3)
                _send(scaled=roles_by_host(cluster))
        trainer.stop()
        training.join()
        if results:
            (result,) = results
            _send(
                result={
                    "rows": result.rows,
                    "steps": result.steps,
                    "failures": result.failures,
                    "lost_batches": result.lost_batches,
                    "auc": result.progressive.auc,
                    "stored_rows": result.stored_rows,
                }
            )
    ray.shutdown()


def _report_lookups(cluster: Ray, training: threading.Thread) -> None:
    while training.is_alive():
        time.sleep(REPORT_SECONDS)
        try:
            counters = cluster.statistics().items()
        except persia.PersiaError:  # A role has just died.
            continue
        looked_up = {name: values.get("looked_up", 0.0) for name, values in counters if "embedding_worker" in name}
        _send(looked_up=looked_up, hosts=roles_by_host(cluster))


def roles_by_host(cluster: Ray) -> dict[str, list[str]]:
    """Returns the roles on each host, by address."""
    assert cluster._roles.processes is not None
    hosts: dict[str, list[str]] = {}
    for process in cluster._roles.processes.all():
        if process.info is not None:
            hosts.setdefault(process.info.host, []).append(f"{process.role}-{process.rank}")
    return hosts


def _send(**values: Any) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")  # In one call: two threads send.
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
