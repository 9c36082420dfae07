"""The process of a data loader: reads what the driver gives it."""

from __future__ import annotations

import threading

import ray

from persia import rpc
from persia.cluster.ray.hosts import Deferred, Host
from persia.cluster.ray.membership import Listener, reach
from persia.cluster.ray.plan import Plan, Service
from persia.data.loader import Loader, WorkerPeer
from persia.services import DataLoader, EmbeddingWorker
from persia.telemetry.metrics import Readings, figures
from persia.types import Feed, Membership

__all__ = ["DataLoaderHost"]


class DataLoaderHost(Host):
    """Process of a data loader. Calls of NN workers wait until the driver has told it what to read."""

    role = "data_loader"

    def __init__(self, plan: Plan, rank: int, service: Service) -> None:
        super().__init__(plan, rank)
        self._schema = service.schema
        self._lock = threading.Lock()
        self._source = ""
        self._loader: Loader | None = None
        self._peers: dict[tuple[int, int], WorkerPeer] = {}
        self._later = Deferred(repr(self), "a source to read", plan.options.timeout)
        coordinator = self.join(self.serve(self._later, DataLoader))
        self._listener = Listener(coordinator, self._changed)

    def begin(self, pickled: bytes, source: str, accumulation_steps: int, feed: Feed) -> None:
        """Begins to read.

        Args:
            pickled: the source.
            source: its name; one that is there already is not unpickled again.
            accumulation_steps: so many batches of an NN worker lie on one embedding worker.
            feed: what of it.
        """
        with self._lock:
            before = self._loader
            if self._loader is None or source != self._source:
                timeout = self.plan.options.timeout
                read = ray.cloudpickle.loads(pickled)
                self._loader = Loader(read, self._schema, list(self._peers.values()), accumulation_steps, timeout)
                self._source = source
            self._loader.begin(feed)
            self._later.become(self._loader)
        # Without the lock: it may be calling an embedding worker that has died, until `_changed` closes that.
        if before is not None and before is not self._loader:
            before.end()

    def end(self) -> None:
        """Releases what is ready, before this process ends."""
        with self._lock:
            loader = self._loader
        if loader is not None:
            loader.end()

    def counters(self) -> dict[str, float]:
        """As the role counts them."""
        loader = self._loader
        return {name: float(value) for name, value in loader.statistics().items()} if loader is not None else {}

    def observe(self) -> Readings:
        """As the role counts them; nothing before it reads."""
        return Readings(figures("loader", self.counters()), [])

    def _changed(self, membership: Membership) -> None:
        with self._lock:
            peers: dict[tuple[int, int], WorkerPeer] = {}
            for member in membership.members:
                key = member.rank, member.incarnation
                if member.role != "embedding_worker" or member.state == "dead":
                    continue
                known = self._peers.get(key)
                stub = known.service if known is not None else reach(member, EmbeddingWorker, self.plan)
                peers[key] = WorkerPeer(*key, stub, member.state == "leaving")
            gone = [peer for key, peer in self._peers.items() if key not in peers]
            self._peers = peers
            if self._loader is not None:
                self._loader.set_workers(list(peers.values()))
            for peer in gone:
                rpc.close(peer.service)  # Calls to it end, and are made elsewhere.
