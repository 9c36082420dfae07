"""A run of several NN workers over rpc, with the version of the rows that each lookup has read recorded.

The NN workers are processes with gloo between them; PS, embedding worker and data loader live in the process that calls
`train`, so that what the PS does can be written down. It is the product's own code in all of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from persia import Batch, Schema, Trainer, TrainerOptions, rpc
from persia.data import Loader
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Mode
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import EmbeddingOptimizer
from persia.services import Connection, DataLoader, EmbeddingPS, EmbeddingWorker
from persia.trainer.progress import FitResult
from persia.types import Packed
from persia.worker import Worker

TIMEOUT = 300.0


class RecordedPS:
    """An embedding PS whose journal has the number of updates that each batch has seen at its lookup.

    Args:
        server: does the work.
        batches: to recognise a lookup by its ids.
    """

    def __init__(self, server: EmbeddingServer, batches: Sequence[Batch]) -> None:
        self._server = server
        server.begin_recording(0)
        self._table = min(server.tables())
        self._batches = {_key(np.unique(batch.id_features[self._table].values)): i for i, batch in enumerate(batches)}
        if len(self._batches) != len(batches):
            raise ValueError("Two batches have the same ids; take another seed.")

    def lookup(self, ids: Mapping[str, Any], train: bool) -> Packed:
        """As the server's."""
        return self._server.recorded_lookup(ids, self._batches[_key(np.sort(ids[self._table]))])

    def versions(self) -> list[int]:
        """Returns the number of updates that each batch has seen."""
        reads = self._server.end_recording().reads
        return [reads[batch] for batch in range(len(self._batches))]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


def _key(ids: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(ids))


class Run(NamedTuple):
    """A run, and the number of steps that each batch has seen at its lookup; empty unless they were recorded."""

    result: FitResult
    versions: list[int]


MakeTrainer = Callable[[Schema, Mode, int, Any, TrainerOptions], Trainer]
"""From schema, mode, seed, cluster and options; importable."""


def train(
    schema: Schema,
    batches: Sequence[Batch],
    nn_workers: int,
    mode: Mode,
    optimizer: EmbeddingOptimizer,
    seed: int,
    make: MakeTrainer,
    *,
    record: bool = True,
) -> Run:
    """Trains once over the batches. Blocks; processes are gone afterwards."""
    server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1, ServerOptions(nn_workers, TIMEOUT))
    recorded = RecordedPS(server, batches) if record else None
    worker = Worker(schema, [recorded or server], 1)
    loader = Loader(batches, schema, Directory.fixed("embedding_worker", [worker]), timeout=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def serve(role: Any, protocol: type) -> str:
            return stack.enter_context(rpc.serve(role, "tcp://127.0.0.1:*", protocol=protocol)).address

        stack.callback(loader.end)
        addresses = [serve(server, EmbeddingPS), serve(worker, EmbeddingWorker), serve(loader, DataLoader)]
        pool = stack.enter_context(spawn.Pool(nn_workers))
        task = (nn_workers, store.port, addresses, schema, mode, seed, make)
        results = pool.map_async(_nn_worker, [(rank, *task) for rank in range(nn_workers)], chunksize=1)
        result = results.get()[0]
    return Run(result, recorded.versions() if recorded else [])


class Joined(NamedTuple):
    """The cluster, as one of its NN workers sees it."""

    rank: int
    nn_workers: int
    addresses: Sequence[str]

    def connect(self, *_: Any) -> Connection:
        """Connects to the roles, which run already."""
        ps, worker, loader = (
            rpc.connect(address, protocol, timeout=TIMEOUT)
            for address, protocol in zip(self.addresses, (EmbeddingPS, EmbeddingWorker, DataLoader), strict=True)
        )
        return Connection(
            EmbeddingWorkers(Directory.fixed("embedding_worker", [worker]), TIMEOUT, self.rank),
            [ps],
            DataLoaders(Directory.fixed("data_loader", [loader]), TIMEOUT),
            self.rank,
            self.nn_workers,
        )


def _nn_worker(task: tuple[Any, ...]) -> FitResult:
    rank, nn_workers, port, addresses, schema, mode, seed, make = task
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nn_workers)
    options = TrainerOptions(seed=seed, progress=False, timeout=TIMEOUT)
    trainer: Trainer = make(schema, mode, seed, Joined(rank, nn_workers, addresses), options)
    return trainer.fit(None)
