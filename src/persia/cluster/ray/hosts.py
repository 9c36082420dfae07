"""The processes of the roles: each creates its role, serves it and joins. Does not import torch: see `nn_worker`."""

from __future__ import annotations

import os
import threading
from typing import Any

import ray

from persia import rpc
from persia.cluster.ray.host import Host, cores, together, usable_processors
from persia.cluster.ray.process_plan import Plan, ProcessInfo, Service
from persia.cluster.ray.stubs import reach, reach_servers, reach_stream_log
from persia.coordinator import CoordinatorServer, TokenScheduler, report_metrics
from persia.coordinator.store import CoordinatorStore, StateFile
from persia.data.loader import FRESH_SECONDS, Loader
from persia.data.streams.loader import StreamLoader
from persia.data.streams.offset_log import OffsetLog
from persia.errors import DeadlineError
from persia.membership.directory import Directory
from persia.membership.listener import Listener
from persia.rpc.interface import describe
from persia.services import (
    BucketMaps,
    ControlPlane,
    Coordinator,
    DataLoader,
    EmbeddingWorker,
    RecordableTokens,
    RecordableWorker,
    SharedStream,
    StreamLog,
    TokenService,
)
from persia.telemetry.metrics import Readings, metrics_of
from persia.types import BucketMap, Feed, Membership
from persia.worker import Worker, WorkerOptions

__all__ = [
    "CoordinatorHost",
    "DataLoaderHost",
    "Deferred",
    "EmbeddingWorkerHost",
]


class CoordinatorHost(Host):
    """Process of the coordinator. A restart retains its state and address."""

    role = "coordinator"

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self._store = (
            CoordinatorStore(f"{plan.options.regions}/{plan.name}/coordinator") if plan.options.regions else None
        )
        path = self._store.path if self._store is not None else lambda _: None
        self._tokens = TokenScheduler(plan.options.timeout, path("tokens"))
        saved = StateFile(path("address"), str)
        previous = saved.load() or ""
        self._members = members = CoordinatorServer(
            path=path("members"),
            buckets=plan.buckets or BucketMap.even(plan.servers),
            incarnation=plan.incarnation,
            generation=plan.generation,
        )
        stream = OffsetLog(path=path("stream"))
        if members.begins:  # Another process may have taken the address meanwhile.
            previous = ""
        address = self.serve(_ControlPlane(members, self._tokens, stream), ControlPlane, previous)
        if address != previous:
            saved.save(address)  # For the next process after a restart.
        self.ready = True

    def observe(self) -> Readings:
        """Returns the metrics of asynchronous modes, and what the scaler has reported."""
        metrics, latencies, _ = report_metrics(self._tokens.summary())
        scaler = self._members.scaler
        return Readings(metrics + scaler.metrics, latencies, scaler.notes)

    def release(self) -> None:
        """Removes files that would outlive the process. Called when the cluster ends."""
        if self._store is not None:
            self._store.remove()


class _ControlPlane:
    """Coordinator, token scheduler and the offset log of a stream at one address."""

    def __init__(self, coordinator: CoordinatorServer, tokens: TokenScheduler, stream: StreamLog) -> None:
        servants: dict[type, object] = {
            Coordinator: coordinator,
            BucketMaps: coordinator,
            TokenService: tokens,
            RecordableTokens: tokens,
            StreamLog: stream,
        }
        for protocol, servant in servants.items():
            for name in describe(protocol):
                setattr(self, name, getattr(servant, name))


def worker_options(plan: Plan) -> WorkerOptions:
    """Returns the bounds of an embedding worker, and the form of its messages.

    A push may wait for `timeout` at a PS. Batches that were read ahead expire later than that, and later than data
    loaders assume.
    """
    timeout = plan.options.timeout
    return WorkerOptions(plan.compression, plan.pool_at, timeout=timeout, expiry=max(2 * FRESH_SECONDS, 3 * timeout))


class EmbeddingWorkerHost(Host):
    """Process of an embedding worker."""

    role = "embedding_worker"

    def __init__(self, plan: Plan, rank: int, service: Service) -> None:
        super().__init__(plan, rank)
        self.servant: Worker | None = None
        # Joins first, as the incarnation is part of batch ids; calls wait until the role exists.
        deferred = Deferred(repr(self), "a connection to all PSs", plan.options.timeout)
        coordinator = self.join(self.serve(deferred, together(EmbeddingWorker, RecordableWorker)))
        options = worker_options(plan)
        self._servers = reach_servers(coordinator, plan)
        self._listener = Listener(coordinator, self._servers.update)  # Until the role exists.
        servers = self._servers.current()[1]
        self.servant = Worker(
            service.schema,
            servers,
            cores(plan),
            rank,
            self.process.incarnation,
            options,
            newest_map=self._servers.current,
        )
        deferred.resolve(self.servant)
        self._listener.close()
        self._listener = Listener(coordinator, self._changed)

    def counters(self) -> dict[str, float]:
        """Returns the counters of the role; empty before it exists."""
        return {name: float(v) for name, v in self.servant.statistics().items()} if self.servant is not None else {}

    def observe(self) -> Readings:
        """Returns the metrics of the role; empty before it exists."""
        if self.servant is None:
            return Readings([], [])
        metrics, latencies, _ = self.servant.observe()
        return Readings([*metrics, usable_processors(self.plan)], latencies)

    def rejoin(self) -> ProcessInfo:
        """Ends this process; Ray starts it again. Its incarnation is part of the batch ids that others have."""
        self.log.warning("was out of reach, and restarts")
        os._exit(1)

    def buffered(self) -> int:
        """Returns the number of buffered batches. The driver ends a leaving process once it has none."""
        assert self.servant is not None
        return self.servant.statistics()["buffered"]

    def _changed(self, membership: Membership) -> None:
        self._servers.update(membership)
        identity = (self.role, self.rank, self.process.incarnation)
        if any(member[:3] == identity and member.state != "alive" for member in membership.members):
            assert self.servant is not None
            self.servant.retire()


class Deferred:
    """A placeholder for a role that does not exist yet. Calls wait until it exists.

    Args:
        title: title of the process.
        missing: the condition that calls wait for, used in errors.
        timeout: seconds that a call waits.
    """

    def __init__(self, title: str, missing: str, timeout: float) -> None:
        self._title, self._missing, self._timeout = title, missing, timeout
        self._resolved = threading.Event()
        self._role: object = None

    def resolve(self, role: object) -> None:
        """Forwards calls to this role from now on."""
        self._role = role
        self._resolved.set()

    def __getattr__(self, name: str) -> Any:
        if not self._resolved.wait(self._timeout):
            raise DeadlineError(
                f"{self._title}: {name} waited {self._timeout:g} s for {self._missing}. Check the logs of the cluster.",
                operation=name,
                seconds=self._timeout,
            )
        return getattr(self._role, name)


class DataLoaderHost(Host):
    """Process of a data loader. Calls of NN workers wait until the driver has sent a feed."""

    role = "data_loader"

    def __init__(self, plan: Plan, rank: int, service: Service) -> None:
        super().__init__(plan, rank)
        self._schema = service.schema
        self._lock = threading.Lock()
        self._source = ""
        self._loader: Loader | None = None
        self._stream_log: StreamLog | None = None
        self._workers: Directory[EmbeddingWorker] = Directory(
            "embedding_worker", lambda member: reach(member, EmbeddingWorker, plan), rpc.close
        )
        self._deferred = Deferred(repr(self), "a source to read", plan.options.timeout)
        coordinator = self.join(self.serve(self._deferred, DataLoader))
        self._listener = Listener(coordinator, self._changed)

    def begin(self, pickled: bytes, source: str, accumulation_steps: int, feed: Feed) -> None:
        """Starts to read.

        Args:
            pickled: the source.
            source: name of the source; a known source is not unpickled again.
            accumulation_steps: number of consecutive batches of an NN worker at one embedding worker.
            feed: the batches to read.
        """
        with self._lock:
            previous = self._loader
            if self._loader is None or source != self._source:
                timeout = self.plan.options.timeout
                read = ray.cloudpickle.loads(pickled)
                if isinstance(read, SharedStream):
                    self._stream_log = self._stream_log or reach_stream_log(self.plan)
                    self._loader = StreamLoader(
                        read, self._stream_log, self._schema, self._workers, accumulation_steps, timeout
                    )
                else:
                    self._loader = Loader(read, self._schema, self._workers, accumulation_steps, timeout)
                self._loader.tracer = self.process.tracer
                self._source = source
            self._loader.begin(feed)
            self._deferred.resolve(self._loader)
        # Without the lock, as `end` waits for a registration in progress.
        if previous is not None and previous is not self._loader:
            previous.end()

    def end(self) -> None:
        """Stops reading and releases ready batches, before this process ends."""
        with self._lock:
            loader = self._loader
        if loader is not None:
            loader.end()

    def counters(self) -> dict[str, float]:
        """Returns the counters of the role."""
        loader = self._loader
        if loader is None:
            return {}
        return {"idle_seconds": loader.idle.seconds, **{n: float(value) for n, value in loader.statistics().items()}}

    def observe(self) -> Readings:
        """Returns the metrics of the role; empty before it reads."""
        loader = self._loader
        stream_metrics = loader.observe() if isinstance(loader, StreamLoader) else []
        return Readings(metrics_of("loader", self.counters()) + stream_metrics, [])

    def _changed(self, membership: Membership) -> None:
        self._workers.update(membership)
        loader = self._loader
        if loader is not None:
            loader.check_workers()
