"""Embedding PSs in this process whose rows move."""

import gc
import time

import numpy as np

from persia.errors import StoreError
from persia.modes import Sync
from persia.optim import Adagrad, Adam
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Table
from persia.services import Round
from persia.types import Gradients, Packed, PackedGradients, PushHeader
from support.twins.batching import owner

SECONDS = 60.0
TABLES = {"item": Table("item", 3), "user": Table("user", 2, optimizer=Adam(0.1), dtype="bfloat16")}


class PSs:
    """PSs in this process that reach each other, and what an embedding worker does with them."""

    def __init__(self, count, buckets, tables=TABLES, regions=None, **options):
        self.tables, self.regions, self.options = tables, regions, {"timeout": SECONDS} | options
        self.first = buckets
        self.all = [self.make(rank) for rank in range(count)]
        self.sequence = 0
        self.round = Round(1, 0)

    def make(self, rank):
        regions = str(self.regions / f"ps-{rank}") if self.regions is not None else None
        options = ServerOptions(buckets=self.first, rank=rank, peer=self.peer, regions=regions, **self.options)
        return EmbeddingServer(self.tables, Adagrad(0.1), Sync(), 3, 1, options)

    def peer(self, other):
        return self.all[other]

    def restart(self, rank):
        """As after a kill: what is in the regions is there, and nothing else. Calls in other threads end first."""
        self.all[rank]._moves.close()
        self.all[rank] = None
        until(lambda: self._starts(rank))

    def _starts(self, rank):
        try:
            self.all[rank] = self.make(rank)
        except StoreError as error:
            if "has it in use" not in str(error):
                raise
            gc.collect()  # Its last reference may be that of an error.
            return False
        return True

    @property
    def buckets(self):
        return self.all[0].buckets()

    def train(self, ids, table="item"):
        """One lookup and one push of all ids, with gradients that depend on the step."""
        self.sequence += 1
        ids = np.unique(np.array(ids, np.uint64))
        owners = np.array([owner(table, int(id_), self.buckets) for id_ in ids])
        version = self.buckets.version
        for rank in range(self.buckets.servers):
            own = ids[owners == rank]
            self.all[rank].lookup(Packed([table], [len(own)], own), True, version)
            gradients = np.full((len(own), self.tables[table].dim), 0.25 * self.sequence, np.float32)
            part = PackedGradients.of({table: Gradients(own, gradients)})
            self.all[rank].push(PushHeader(self.sequence, 0, 1, self.sequence - 1, len(own)), part, version)

    def rows(self):
        """All rows that the PSs export, by table and id, each once."""
        found = {}
        for ps in self.all:
            for chunk in ps.export_rows():
                for place, id_ in enumerate(chunk.arrays["ids"].tolist()):
                    assert (chunk.table, id_) not in found
                    found[chunk.table, id_] = tuple(
                        chunk.arrays[name][place].tobytes()
                        for name in ("embeddings", "state", "update_count", "last_step")
                    )
        return found

    def places(self):
        """The PSs whose stores have a row, by table and id."""
        places = {}
        for rank, ps in enumerate(self.all):
            for name, index in ps._index.items():
                for _, rows in ps._store.iterate_rows(index):
                    for id_ in rows.ids.tolist():
                        places.setdefault((name, id_), []).append(rank)
        return places

    def begin(self, after):
        for rank in range(self.buckets.servers):
            self.all[rank].begin_move(after)

    def await_pass(self, passes=1):
        """Waits until each PS has completed this number of passes, or more."""
        until(lambda: all(ps.moving().passes >= passes for ps in self.all if ps.moving().version >= 0))

    def finish(self, after):
        """The next round, until all PSs that get rows are complete."""
        self.round = Round(self.round.generation, self.round.number + 1)
        for ps in self.all:
            if ps.moving().version >= 0:
                assert ps.finish_move(self.round, after).complete
        for ps in self.all:
            ps.complete_move(self.round, after)

    def end(self, after):
        """The next round, with a map that all adopt."""
        self.finish(after)
        for ps in self.all:
            ps.adopt(self.round, after)

    def check_places(self):
        """Each row is in the store of its owner, and in no other, once the others have removed it."""
        for ps in self.all:
            ps._moves._await_removal()
        assert self.places() == {(t, id_): [owner(t, id_, self.buckets)] for t, id_ in self.places()}


def until(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
