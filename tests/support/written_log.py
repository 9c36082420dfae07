"""A log of changes that a test writes entry by entry; the values of all rows are the step that they are of."""

from __future__ import annotations

import time

import numpy as np
import torch

import persia
from persia import batching
from persia.checkpoint.storage import Storage
from persia.publish.epochs import begin_epoch, remove_older_epochs
from persia.publish.format import NETWORK, TableChanges, epoch_name, stream_of
from persia.publish.stream import StreamWriter
from persia.types import BucketMap, ModelDescription

SCHEMA = persia.Schema([persia.IdFeature("item", 4), persia.IdFeature("user", 2)])
IDS = np.arange(64, dtype=np.uint64)


class Steps(torch.nn.Module):
    """Logits: the step of an item's row, minus that of the network. A probability below 0.5 is a mixture of steps."""

    def __init__(self, schema=None):
        super().__init__()
        self.step = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense, embeddings):
        return embeddings["item"][:, :1] - self.step


class WrittenLog:
    """Writes epochs with rows of all `IDS` in both tables, and networks of `Steps`."""

    def __init__(self, url, servers=1, schema=SCHEMA, model=None, buckets=None):
        self.url, self.servers, self.schema, self.model = str(url), servers, schema, model
        self.buckets = buckets or BucketMap.even(servers)
        self.storage = Storage(self.url)

    def begin(self, step, *, rows=True, network=True):
        model = None if self.model is None else ModelDescription(*self.model)
        self.epoch = begin_epoch(self.storage, self.buckets, self.schema, model=model)
        self.streams = [self.writer(stream_of(server)) for server in range(self.servers)]
        self.networks = self.writer(NETWORK)
        if rows:
            for server in range(self.servers):
                self.rows(server, step, whole=True)
        if network:
            self.network(step)

    def writer(self, stream):
        return StreamWriter(self.storage, self.epoch.epoch, self.epoch.run, stream, keep=3)

    def publish(self, step, whole=False):
        for server in range(self.servers):
            self.rows(server, step, whole=whole)
        self.network(step)

    def rows(self, server, step, *, whole=False, removed=(), readmitted=False, dims=None):
        """Writes an entry; `readmitted` rows are set again in a later part than that which removes them."""
        tables, part, first = [], {}, {}
        gone = np.array(removed, np.uint64)
        for place, name in enumerate(sorted(self.schema.resolved_tables())):
            dim = (dims or {}).get(name) or self.schema.resolved_tables()[name].dim
            ids = IDS[batching.owners(name, IDS, self.buckets) == server]
            mine = gone[batching.owners(name, gone, self.buckets) == server]
            ids = ids if readmitted else np.setdiff1d(ids, mine)
            if len(ids):  # Empty tensors are left out.
                part |= {f"{place}.ids": ids, f"{place}.values": self.values(ids, dim, step)}
            if len(mine):
                (first if readmitted else part)[f"{place}.removed"] = mine
            tables.append(TableChanges(name=name, dim=dim, rows=len(ids), removed=len(mine)))
        for each in (first, part):
            if each:
                self.streams[server].add_part(each)
        self.streams[server].commit("snapshot" if whole else "increment", step, time.monotonic(), tables)

    def values(self, ids, dim, step):
        return np.full((len(ids), dim), step, np.float32)

    def network(self, step, **tensors):
        self.networks.add_part(tensors or {"step": np.full(1, step, np.float32)})
        self.networks.commit("network", step, time.monotonic(), [])
        self.networks.remove_old()

    def end_older_epochs(self):
        remove_older_epochs(self.storage, self.epoch.epoch)

    def path(self, name, server=0, epoch=None):
        return f"{self.url}/{epoch_name(self.epoch.epoch if epoch is None else epoch)}/rows-{server}/{name}"


def batch(ids=IDS, schema=SCHEMA):
    """Returns a batch with these ids in both features."""
    return persia.Batch.from_columns(schema, {"item": ids, "user": ids}, require_labels=False)
