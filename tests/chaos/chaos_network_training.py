"""Trains over the hosts of Ray until a line comes, and then checks every row: what `chaos_network` runs on a host.

    python -m chaos_network_training FOLDER MODE

Prints one line of JSON each second, with the number of batches that were looked up and where each process is, and at
the end what does not hold. The folder has the folder `regions`, which may be another file system on each host.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from chaos_hosts import recorded
from chaos_invariants import counts, rows_of, stale, values
from chaos_records import collect
from chaos_run import Dropped
from chaos_training import BATCH, LEARNING_RATE, MODES, make_data, make_schema, make_trainer

import persia
from persia.cluster.ray import roles as on_ray

NN_WORKERS = 2
TIMEOUT = 150.0
REPORT_SECONDS = 1.0
LEAST_COMPARED = 2_000
"""Rows whose values must have been compared, so that a run of a few steps proves nothing."""


def main(folder: Path, mode: str) -> None:
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    pushes = folder / "pushes"
    pushes.mkdir()
    ps = recorded(on_ray.EmbeddingServerHost, str(pushes))
    options = persia.cluster.RayOptions(
        log_level="info", threads=1, timeout=TIMEOUT, restarts=1000, regions=str(folder / "regions")
    )
    with (
        mock.patch.object(on_ray, "EmbeddingServerHost", ps),
        persia.cluster.Ray(3, 2, 1, NN_WORKERS, options) as cluster,
    ):
        trainer = make_trainer(cluster, mode, None)
        results: list[Any] = []

        def train() -> None:
            try:
                results.append(trainer.fit(make_data()))
            except Exception:
                _send(failed=traceback.format_exc())

        training = threading.Thread(target=train)
        training.start()
        threading.Thread(target=_report, args=(cluster, training), daemon=True).start()
        sys.stdin.readline()
        trainer.stop()
        training.join()
        if results:
            (result,) = results
            dropped = Dropped()
            dropped.add(trainer.embeddings.connection.servers)
            rows = rows_of(trainer.embeddings.connection.servers)
            wrong, compared = _check(rows, pushes, mode, dropped.rows, result.failures)
            _send(outcome={"wrong": wrong, "compared": compared, "steps": result.steps, "failures": result.failures})
    ray.shutdown()


def _check(rows: Any, folder: Path, mode: str, dropped: int, failures: int) -> tuple[list[str], dict[str, int]]:
    """Returns the invariants that do not hold, and the number of rows whose values were compared, by table."""
    if mode == "gba":  # It weighs gradients by their age, and its answers precede updates; see `chaos_run`.
        pushes = collect(folder, by_step=False)
        rows_of_a_batch = BATCH * len(make_schema().id_features)
        late = stale(dropped, failures, MODES[mode].tolerance, NN_WORKERS, rows_of_a_batch)
        return counts(rows, pushes, acknowledged=False) + late, {}
    pushes = collect(folder, by_step=True)
    wrong, compared = values(rows, pushes, LEARNING_RATE, seed=0, least=LEAST_COMPARED)
    return counts(rows, pushes) + wrong, compared


def _report(cluster: Any, training: threading.Thread) -> None:
    while training.is_alive():
        time.sleep(REPORT_SECONDS)
        try:
            counters = cluster.statistics().items()
        except persia.PersiaError:  # A role has just died, or does not answer.
            continue
        looked_up = {name: values.get("looked_up", 0.0) for name, values in counters if "embedding_worker" in name}
        running = [p for p in cluster._roles.processes.all() if p.info is not None]
        _send(
            looked_up=looked_up,
            processes=[{"role": p.role, "rank": p.rank, "pid": p.info.pid, "host": p.info.host} for p in running],
        )


def _send(**values: Any) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")  # In one call: two threads send.
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
