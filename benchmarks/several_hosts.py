"""What sending rows and gradients as fp16 gains between hosts.

    python -m benchmarks rpc.several_hosts [--preset smoke|laptop|full] [--json FILE]

Two hosts of this machine, which network namespaces keep apart, and a link of 1 Gbit/s between them: embedding PSs and
embedding workers on one, the NN worker on the other, with keys. The roles are plain processes, without Ray. There are a
PS and an embedding worker for each form, and the NN worker trains by turns with either.

Both hosts share the processors of this machine, so the gain is smaller than where each has its own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.baselines.step_torch import generate
from benchmarks.elsewhere import tests_support
from benchmarks.step import ROUNDS, STEPS, WORK, Persia
from persia import IdFeature, Schema, rpc
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Hybrid
from persia.ps import EmbeddingServer
from persia.schema import Adagrad
from persia.services import Connection, EmbeddingPS, EmbeddingWorker
from persia.worker import Worker, WorkerOptions

GBITS = 1.0
TIMEOUT = 120.0
FORMS = ("none", "fp16")
MODE = Hybrid(4, warmup=0)


class Remote:
    """The cluster of one NN worker: stubs of a PS and of an embedding worker on another host."""

    def __init__(self, server: str, worker: str) -> None:
        self._server, self._worker = server, worker

    def connect(self, *_: Any) -> Connection:
        stub = rpc.connect(self._worker, EmbeddingWorker, timeout=TIMEOUT)
        workers: Directory[EmbeddingWorker] = Directory.fixed("embedding_worker", [stub])
        return Connection(EmbeddingWorkers(workers, TIMEOUT), [rpc.connect(self._server, EmbeddingPS, timeout=TIMEOUT)])


def serve(host: str, preset: str) -> None:
    """Serves the roles of each form until the input ends; prints their addresses."""
    work = WORK[preset]
    features = [IdFeature(f"f{number}", dim=work.dim) for number in range(work.features)]
    schema = Schema(features, [f"d{number}" for number in range(work.dense)])
    with contextlib.ExitStack() as served:
        addresses = {}
        for form in FORMS:
            ps = EmbeddingServer(schema.resolved_tables(), Adagrad(lr=0.05), MODE, 0, 2)
            server = served.enter_context(rpc.serve(ps, f"tcp://{host}:*", protocol=EmbeddingPS))
            stub = rpc.connect(server.address, EmbeddingPS, timeout=TIMEOUT)
            role = Worker(schema, [stub], 2, options=WorkerOptions(form))  # type: ignore[arg-type]
            worker = served.enter_context(rpc.serve(role, f"tcp://{host}:*", protocol=EmbeddingWorker))
            addresses[form] = (server.address, worker.address)
        print(json.dumps(addresses), flush=True)
        sys.stdin.read()


def train(addresses: str, preset: str) -> None:
    """Makes as many steps of a form as each line of the input says, and prints their seconds."""
    work = WORK[preset]
    data = generate(work)
    variants = {
        form: Persia(work, data, Adagrad(lr=0.05), Remote(*of_form), mode=MODE)
        for form, of_form in json.loads(addresses).items()
    }
    for line in sys.stdin:
        form, steps = line.split()
        print(variants[form].time(int(steps)), flush=True)


@contextlib.contextmanager
def roles_on(hosts: Any, preset: str) -> Iterator[Callable[[str, int], float]]:
    """Starts the roles on two hosts; yields a function that trains: form and number of steps to seconds."""
    with tempfile.TemporaryDirectory() as folder:
        keys = str(Path(folder) / "keys")
        rpc.make_keys(keys)
        program = [sys.executable, "-m", "benchmarks.several_hosts"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {"PERSIA_CURVE_KEYS": keys}
        serving = hosts.start(0, *program, "serve", hosts.addresses[0], preset, env=environment, **pipes)
        addresses = serving.stdout.readline().strip()
        training = hosts.start(1, *program, "train", addresses, preset, env=environment, **pipes)

        def seconds(form: str, steps: int) -> float:
            training.stdin.write(f"{form} {steps}\n")
            training.stdin.flush()
            return float(training.stdout.readline())

        try:
            yield seconds
        finally:
            hosts.close()
            for process in (serving, training):
                process.communicate()


@runner.measures("rpc.several_hosts")
def several_hosts(preset: str) -> runner.Measure | None:
    """Steps/s with fp16 between hosts over steps/s without, over a link of 1 Gbit/s with keys."""
    steps = STEPS[preset]
    support = tests_support("hosts")
    try:
        hosts = support.Hosts(2, GBITS)
    except support.UnavailableError as reason:
        print(f"rpc.several_hosts is skipped: {reason}", file=sys.stderr)
        return None
    with hosts, roles_on(hosts, preset) as seconds:
        moved: dict[str, list[tuple[int, int]]] = {form: [] for form in FORMS}
        for form in FORMS:  # Every id of the batches gets its row.
            seconds(form, WORK[preset].batches)

        def rate(form: str) -> float:
            sent, received = hosts.moved(1)
            taken = seconds(form, steps)
            now = hosts.moved(1)
            moved[form].append((now[0] - sent, now[1] - received))
            return steps / taken

        measure = runner.ratio(
            "rpc.several_hosts",
            ours=lambda: rate("fp16"),
            theirs=lambda: rate("none"),
            of="steps/s",
            rounds=ROUNDS[preset],
            at_least=1.3,
        )
    for form in FORMS:
        sent, received = (sum(column) / len(column) for column in zip(*moved[form], strict=True))
        measure.details[form] = {"sent_bytes": sent / steps, "received_bytes": received / steps}  # type: ignore[index]
    return measure


if __name__ == "__main__":
    {"serve": serve, "train": train}[sys.argv[1]](*sys.argv[2:])
