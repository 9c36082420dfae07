"""A training run in miniature that publishes, and a comparison with what a reader has."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from persia.publish import PublishOptions, PublishOrder, Replica, follow
from persia.publish.format import EPOCH_FILE, FORMAT, NETWORK, VERSION, Epoch, epoch_name
from persia.publish.log_storage import open_storage
from persia.publish.publisher import Publisher
from persia.publish.stream import StreamWriter
from persia.store import NativeStore, TableConfig
from persia.types import BucketMap
from support.stores import contents, lookup, update


def everywhere(*marks):
    """Runs a test with a log in each kind of place; others take a local directory and a topic.

    Args:
        marks: of the places that are reached over HTTP.
    """
    quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # moto's
    remote = [pytest.param("hdfs", marks=marks), pytest.param("bucket", marks=[quiet, *marks])]
    return pytest.mark.parametrize("url", ["directory", "topic", *remote], indirect=True)


class ChangeLog:
    """A training run in miniature: stores, publishers that publish on demand, and a network."""

    def __init__(self, url, servers=1, **options):
        self.url, self.options, self.servers = str(url), PublishOptions(str(url), seconds=3600.0, **options), servers
        self.stores = [self.new_store() for _ in range(servers)]
        self.storage = open_storage(self.url)
        self.step, self.epoch = 0, -1
        self.random = np.random.default_rng(1)

    def new_store(self):
        store = NativeStore()
        for name, dim in (("item", 3), ("user", 2)):
            store.create_table(TableConfig(name, dim, capacity=400, shards=2))
        return store

    def begin(self):
        """Begins an epoch, with a snapshot of each PS and a network."""
        self.epoch, self.run = self.epoch + 1, f"{self.epoch + 1:032x}"
        epoch = Epoch(
            format=FORMAT, version=VERSION, epoch=self.epoch, run=self.run, buckets=BucketMap.even(self.servers)
        )
        self.storage.put(f"{epoch_name(self.epoch)}/{EPOCH_FILE}", msgspec.json.encode(epoch))
        self.publishers = [self.publisher(server) for server in range(self.servers)]
        self.network = StreamWriter(self.storage, self.epoch, self.run, NETWORK, keep=2)
        self.publish()

    def publisher(self, server):
        order = PublishOrder(self.options, self.epoch, self.run, server, 0)
        return Publisher(self.stores[server], {"user": 1, "item": 0}, order, lambda: self.step)

    def train(self, steps=1):
        for _ in range(steps):
            for number, store in enumerate(self.stores):
                for table in (0, 1):
                    ids = self.random.integers(0, 600, 40).astype(np.uint64) * np.uint64(self.servers)
                    ids += np.uint64(number)
                    lookup(store, ids, table=table)
                    gradients = self.random.normal(size=(len(ids), store.config(table).dim))
                    update(store, ids, gradients, table=table)
            self.step += 1

    def publish(self):
        for publisher in self.publishers:
            publisher._publish()
        self.network.add_part({"weight": np.full(2, self.step, np.float32)})
        self.network.commit("network", self.step, 0.0, [])
        self.network.remove_old()

    def rows(self, table):
        return {
            int(id_): row
            for store in self.stores
            for rows in contents(store, table).values()
            for id_, row in zip(rows.ids, rows.embeddings, strict=True)
        }

    def place(self, name="", server=0, epoch=None):
        """The path of a file of a PS in the storage."""
        return f"{epoch_name(self.epoch if epoch is None else epoch)}/rows-{server}/{name}".rstrip("/")

    def path(self, name="", server=0, epoch=None):
        return f"{self.url}/{self.place(name, server, epoch)}"

    def names(self, path=None):
        self.storage.refresh()
        return self.storage.names(self.place() if path is None else path)

    def read(self, path):
        self.storage.refresh()
        return self.storage.head(path, 0, self.storage.size(path))


def assert_equal_rows(replica, log, atol=0.0):
    for number, table in enumerate(("item", "user")):
        mine, theirs = replica.rows(table), log.rows(number)
        assert mine.keys() == theirs.keys()
        for id_, row in theirs.items():
            np.testing.assert_allclose(mine[id_], row, rtol=0, atol=atol)


def begun(url, servers=1, **options):
    """Returns a log with an epoch."""
    log = ChangeLog(url, servers, **options)
    log.train(3)
    log.begin()
    return log


def advance(log, entries=1):
    for _ in range(entries):
        log.train()
        log.publish()


def outgrow(log):
    """Publishes until the first PS has removed its oldest snapshot."""
    entries = log.publishers[0]._writer._entries
    oldest = entries[0][0]
    while entries[0][0] == oldest:
        advance(log)


def replica_of(log):
    found = Replica(follow(log.url))
    found.refresh()
    return found


@contextmanager
def unwritable(directory):
    """Has a file where a directory was, so that nothing can be written there."""
    place, away = Path(directory), Path(f"{directory}-away")
    place.rename(away)
    place.touch()
    try:
        yield
    finally:
        place.unlink()
        away.rename(place)
