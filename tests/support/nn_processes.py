"""What NN workers in processes of their own need: the other roles in the test's process, over rpc; a small network."""

import contextlib
import threading
from typing import NamedTuple

import numpy as np
import torch

import persia
from persia import rpc
from persia.errors import MovedError
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Sync
from persia.optim import SGD
from persia.services import Connection, DataLoader, EmbeddingPS, EmbeddingWorker
from persia.types import Delivery, RegisteredBatch
from persia.worker import Worker
from support.processes import TIMEOUT
from support.several_ps import several_servers


class Loader:
    """As little of a data loader as can be."""

    def __init__(self, batches, workers, accumulation=1):
        self.batches, self.workers, self.accumulation = batches, workers, accumulation
        self.feed = None
        self.last = {}
        self.lock = threading.Lock()

    def begin(self, feed):
        self.feed = feed
        self.last = {}

    def take(self, rank, epoch, number):
        feed = self.feed
        assert epoch == feed.epoch
        if number % feed.loaders != feed.loader:
            raise MovedError("Not mine.")
        if number >= len(self.batches):
            return Delivery(number, None)
        with self.lock:
            if self.last.get(rank, Delivery(-1, None)).number != number:
                batch = self.batches[number]
                group = (number - feed.start) // feed.nn_workers // self.accumulation
                worker = self.workers[(group * feed.nn_workers + rank) % len(self.workers)]
                batch_id = worker.register(batch.id_features)
                self.last[rank] = Delivery(number, RegisteredBatch(batch_id, batch.dense, batch.labels, batch.day))
            return self.last[rank]

    def end(self):
        pass

    def statistics(self):
        return {}


class Addresses(NamedTuple):
    servers: list
    workers: list
    loaders: list


class Services:
    """PSs, embedding workers and data loaders of one run, served over rpc; used as a context."""

    def __init__(self, schema, batches, nn_workers, mode=None, optimizer=None, wrap=lambda worker: worker, **options):
        counts = {"servers": 2, "workers": 2, "loaders": 2, "accumulation": 1, "seed": 0} | options
        hold = {"nn_workers": nn_workers, "timeout": TIMEOUT}
        tables = schema.resolved_tables()
        self.servers = several_servers(
            counts["servers"], tables, optimizer or SGD(lr=0.1), mode or Sync(), counts["seed"], **hold
        )
        self.workers = [wrap(Worker(schema, self.servers, 1, rank)) for rank in range(counts["workers"])]
        self.loaders = [Loader(batches, self.workers, counts["accumulation"]) for _ in range(counts["loaders"])]
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        def serve(objects, protocol):
            return [
                self._stack.enter_context(rpc.serve(o, "tcp://127.0.0.1:*", protocol=protocol)).address for o in objects
            ]

        self.addresses = Addresses(
            serve(self.servers, EmbeddingPS), serve(self.workers, EmbeddingWorker), serve(self.loaders, DataLoader)
        )
        return self

    def __exit__(self, *_):
        self._stack.close()

    def rows(self, table, ids):
        found = np.zeros((ids, self.servers[0].tables()[table].dim), np.float32)
        for server in self.servers:
            found += server.lookup({table: np.arange(ids, dtype=np.uint64)}, train=False)[table]
        return found


class Remote:
    """The cluster of one NN worker: stubs of the services."""

    def __init__(self, rank, nn_workers, addresses):
        self.rank, self.nn_workers, self.addresses = rank, nn_workers, addresses

    def connect(self, *_):
        def stubs(addresses, protocol):
            return [rpc.connect(a, protocol, timeout=TIMEOUT) for a in addresses]

        workers = Directory.fixed("embedding_worker", stubs(self.addresses.workers, EmbeddingWorker))
        loaders = Directory.fixed("data_loader", stubs(self.addresses.loaders, DataLoader))
        return Connection(
            EmbeddingWorkers(workers, TIMEOUT, self.rank),
            stubs(self.addresses.servers, EmbeddingPS),
            DataLoaders(loaders, TIMEOUT),
            self.rank,
            self.nn_workers,
        )


class Model(torch.nn.Module):
    """A small network; with `norm`, one whose statistics and gradients a batch of zeros would spoil."""

    def __init__(self, schema, norm=False, dropout=0.0):
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.names = [f.name for f in schema.id_features]
        width = sum(f.dim for f in schema.id_features) + schema.dense_width
        self.norm = norm
        self.first = torch.nn.Linear(width, 8)
        self.batch_norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()
        self.last = torch.nn.Linear(8, len(schema.labels))

    def forward(self, dense, embeddings):
        x = torch.cat([dense, *(embeddings[name] for name in self.names)], dim=1)
        if self.norm:
            x = x / x.norm(dim=1, keepdim=True)  # NaN where all is zero.
        return self.last(self.dropout(torch.relu(self.batch_norm(self.first(x)))))


def trainer(rank, nn_workers, addresses, schema, mode=None, norm=False, dropout=0.0, **options):
    torch.manual_seed(rank)  # The first one's parameters count.
    return persia.Trainer(
        Model(schema, norm, dropout),
        schema,
        optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.5),
        embedding_optimizer=SGD(lr=0.1),
        mode=mode or Sync(),
        cluster=Remote(rank, nn_workers, addresses),
        options=persia.TrainerOptions(**{"progress": False, "timeout": TIMEOUT} | options),
    )


def parameters(model):
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def fit(rank, nn_workers, addresses, schema, mode=None, norm=False, calls=({},), evaluate=None, **options):
    t = trainer(rank, nn_workers, addresses, schema, mode, norm, **options)
    for call in calls:
        result = t.fit(None, eval_data=evaluate, **call)
    return result, parameters(t.model)


def resume(rank, nn_workers, addresses, schema, directory, dropout=0.0):
    torch.manual_seed(9 + rank)
    t = persia.Trainer.resume(
        directory,
        Model(schema, dropout=dropout),
        optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.5),
        cluster=Remote(rank, nn_workers, addresses),
    )
    result = t.fit(None)
    return result, parameters(t.model)
