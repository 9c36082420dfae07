"""Trains over the hosts of Ray until a line comes, and then checks every row: what `chaos_network` runs on a host.

    python -m chaos_network_training FOLDER MODE [scale]

Prints one line of JSON each second, with the number of batches that were looked up and where each process is, and at
the end what does not hold. The folder has the folder `regions`, which may be another file system on each host.

The input line `scale ROLE COUNT` begins a change of the number of processes, for which no table has a declared
capacity; `stop DEATHS` ends the training, in which so many embedding PSs were killed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from chaos_checks import Course, check_rows
from chaos_hosts import recorded
from chaos_invariants import rows_of
from chaos_run import Dropped
from chaos_training import make_data, make_trainer

import persia
from persia.cluster.ray import roles as on_ray
from persia.errors import DeadlineError, RoleDiedError

PS = 3
NN_WORKERS = 2
TIMEOUT = 150.0
REPORT_SECONDS = 1.0
SCALE_SECONDS = TIMEOUT + 60.0
"""Within which changes of the numbers of processes must have ended once nothing fails any more."""
LEAST_COMPARED = 2_000
"""Rows whose values must have been compared, so that a run of a few steps proves nothing."""
NUMBERS = {"embedding_ps": "ps", "nn_worker": "nn_workers"}
"""Arguments of `persia.cluster.Ray.scale` by role."""


class Scaling:
    """Changes the numbers of processes, one after another, in a thread of its own.

    Args:
        scale: `persia.cluster.Ray.scale`.
    """

    def __init__(self, scale: Callable[..., None]) -> None:
        self._scale = scale
        self._thread = ThreadPoolExecutor(1)
        self._changes: list[Future[None]] = []
        self.seconds: list[float] = []
        """That each change took which was made."""
        self.refused: list[str] = []
        """Why others were not made: their deadline has passed, or a process that joined has died."""
        self.wrong: list[str] = []

    def begin(self, role: str, count: int) -> None:
        """Lets a role have so many processes. Returns at once."""
        self._changes.append(self._thread.submit(self._change, role, count))

    @property
    def changes(self) -> int:
        """How many were asked for."""
        return len(self._changes)

    def finish(self, seconds: float) -> None:
        """Waits until all changes have ended, at most some seconds."""
        self._thread.shutdown(wait=False)
        _, late = wait(self._changes, seconds)
        if late:
            self.wrong.append(f"{len(late)} changes of the numbers of processes have not ended within {seconds:g} s")

    def _change(self, role: str, count: int) -> None:
        began = time.monotonic()
        try:
            self._scale(**{NUMBERS[role]: count})
            self.seconds.append(round(time.monotonic() - began, 1))
        except (DeadlineError, RoleDiedError) as error:
            self.refused.append(f"{count} {role}: {error}")
        except Exception:
            self.wrong.append(f"{count} {role}: {traceback.format_exc()}")


def main(folder: Path, mode: str, scales: bool) -> None:
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    pushes = folder / "pushes"
    pushes.mkdir()
    ps = recorded(on_ray.EmbeddingServerHost, str(pushes))
    options = persia.cluster.RayOptions(
        log_level="info", threads=1, timeout=TIMEOUT, restarts=1000, regions=str(folder / "regions")
    )
    with (
        mock.patch.object(on_ray, "EmbeddingServerHost", ps),
        persia.cluster.Ray(PS, 2, 1, NN_WORKERS, options) as cluster,
    ):
        trainer = make_trainer(cluster, mode, None, bounded=not scales)
        results: list[Any] = []

        def train() -> None:
            try:
                results.append(trainer.fit(make_data(not scales)))
            except Exception:
                _send(failed=traceback.format_exc())

        training = threading.Thread(target=train)
        training.start()
        threading.Thread(target=_report, args=(cluster, training), daemon=True).start()
        scaling, most, deaths = Scaling(cluster.scale), NN_WORKERS, 0
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "stop":
                deaths = int(arguments[0])
                break
            role, count = arguments[0], int(arguments[1])
            most = max(most, count) if role == "nn_worker" else most
            scaling.begin(role, count)
        scaling.finish(SCALE_SECONDS)
        trainer.stop()
        training.join()
        if results:
            (result,) = results
            servers = trainer.embeddings.connection.servers
            dropped = Dropped()
            dropped.add(servers)
            course = Course(mode, most, result.failures + deaths, scaling.changes, dropped.rows, LEAST_COMPARED)
            checked = check_rows(rows_of(servers), pushes, course)
            _send(
                outcome={
                    "wrong": scaling.wrong + checked.wrong,
                    "compared": checked.compared,
                    "counted": checked.counted,
                    "differ": checked.differ,
                    "steps": result.steps,
                    "failures": result.failures,
                    "scaled": scaling.seconds,
                    "not_scaled": scaling.refused,
                }
            )
    ray.shutdown()


def _report(cluster: Any, training: threading.Thread) -> None:
    while training.is_alive():
        time.sleep(REPORT_SECONDS)
        try:
            counters = cluster.statistics().items()
        except (persia.PersiaError, ray.exceptions.RayError):  # A role has just died, or does not answer.
            continue
        looked_up = {name: values.get("looked_up", 0.0) for name, values in counters if "embedding_worker" in name}
        running = [p for p in cluster._roles.processes.all() if p.info is not None]
        _send(
            at=time.monotonic(),
            looked_up=looked_up,
            processes=[{"role": p.role, "rank": p.rank, "pid": p.info.pid, "host": p.info.host} for p in running],
        )


def _send(**values: Any) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")  # In one call: two threads send.
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "scale" in sys.argv[3:])
