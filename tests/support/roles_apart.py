"""Roles in processes of their own, without Ray: `serve ADDRESS` prints where they listen, `train` prints losses."""

from __future__ import annotations

import json
import sys
from typing import Any

from persia import rpc
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.services import Connection, EmbeddingPS, EmbeddingWorker
from persia.worker import Worker

TIMEOUT = 60.0


class Apart:
    """The cluster of one NN worker: stubs of a PS and of an embedding worker elsewhere."""

    def __init__(self, server: str, worker: str) -> None:
        self.server, self.worker = server, worker

    def connect(self, *_: Any) -> Connection:
        stub = rpc.connect(self.worker, EmbeddingWorker, timeout=TIMEOUT)
        workers: Directory[EmbeddingWorker] = Directory.fixed("embedding_worker", [stub])
        servers = [rpc.connect(self.server, EmbeddingPS, timeout=TIMEOUT)]
        return Connection(EmbeddingWorkers(workers, TIMEOUT), servers)


def main(command: str, *arguments: str) -> None:
    from support.cluster_samples import losses, reader

    if command == "train":
        print(json.dumps(losses(Apart(*arguments[0].split()), 10)))
        return
    from persia.modes import Sync

    (address,) = arguments
    schema = reader(1).schema
    ps = EmbeddingServer(schema.resolved_tables(), Adagrad(lr=0.05), Sync(), 0, 1)
    with rpc.serve(ps, f"tcp://{address}:*", protocol=EmbeddingPS) as server:
        stub = rpc.connect(server.address, EmbeddingPS, timeout=TIMEOUT)
        with rpc.serve(Worker(schema, [stub]), f"tcp://{address}:*", protocol=EmbeddingWorker) as worker:
            print(server.address, worker.address, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
