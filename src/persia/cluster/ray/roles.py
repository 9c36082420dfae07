"""The processes of a cluster by role: starts them when they are needed, and restarts them after deaths."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from persia import rpc
from persia.cluster.ray.attachment import RunAttachment
from persia.cluster.ray.capacities import server_capacities
from persia.cluster.ray.feeding import LoaderFeed, SourceKind
from persia.cluster.ray.hosts import CoordinatorHost, DataLoaderHost, EmbeddingWorkerHost
from persia.cluster.ray.nn_worker import DenseServerHost, NNWorkerHost, warn_of_idle_gpus
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.placing import Placer
from persia.cluster.ray.process_plan import Plan, Service, here, seat_of
from persia.cluster.ray.processes import Process, Processes, connect, make_plan
from persia.cluster.ray.runs import RESTARTED
from persia.cluster.ray.server_host import EmbeddingServerHost
from persia.cluster.ray.stubs import reach_coordinator, reach_stream_log, reach_tokens
from persia.cluster.scaler import MAX_PROCESSES
from persia.errors import ClosedError, ConfigError, PersiaError, RoleDiedError
from persia.ps.regions import remove_leftovers
from persia.ps.shares import Shares
from persia.services import BucketMaps, Coordinator, DenseMaker, StreamLog, TokenService
from persia.telemetry.logs import get_logger
from persia.types import Feed

__all__ = ["DEPART_SECONDS", "Roles"]

LOG = get_logger("persia.cluster")

DEPART_SECONDS = 5.0
"""Seconds that the coordinator may take to record a departure."""


class Roles:
    """The processes of a cluster. Thread-safe; methods block while processes start.

    Args:
        counts: numbers of processes by role; for roles that scale, the initial numbers.
        options: options of the cluster.
        placer: chooses the hosts; None for the hosts in turn.

    Attributes:
        counts: see above.
        options: see above.
        placer: see above.
        lock: held while processes start or end. Reentrant.
        running: held while a function runs on the NN workers.
        resting: held while a run begins, or rows move between two runs.
        moving: held while rows move to other PSs, one move at a time.
        fits: number of calls of `fit` in progress, also between the runs of one, and of those that save or load rows
            between two runs. It increases under `resting`.
        service: service of PSs and embedding workers; None until they start.
        plan: addresses and settings. None until the coordinator has started, like the next four attributes.
        coordinator: a connection to the coordinator.
        tokens: a connection to its token scheduler.
        stream_log: a connection to its offset log of a stream.
        processes: all processes of the cluster.
        feed: source and feed of the data loaders.
        closed: whether `close` has been called.
        told: number of NN workers that the PSs know for functions without a `Trainer`; None if it is not certain.
        ps_deaths: deaths of embedding PSs in the current run. In asynchronous modes a restarted PS is out of phase.
        attachment: what a driver leaves to the next one if it dies; None without `RayOptions.run`.
    """

    def __init__(self, counts: Mapping[str, int], options: RayOptions, placer: Placer | None = None) -> None:
        self.counts = dict(counts)
        self.options = options
        self.placer = placer or Placer({}, options)
        self.lock = threading.RLock()
        self.running = threading.Lock()
        self.resting = threading.Lock()
        self.moving = threading.Lock()
        self.fits = 0
        self.service: Service | None = None
        self.plan: Plan | None = None
        self.coordinator: Coordinator | None = None
        self.tokens: TokenService | None = None
        self.stream_log: StreamLog | None = None
        self.processes: Processes | None = None
        self.feed = LoaderFeed(options.timeout, counts["nn_worker"])
        self.closed = False
        self.told: int | None = None
        self.ps_deaths: list[RoleDiedError] = []
        self.attachment = RunAttachment(options, counts["embedding_ps"]) if options.run is not None else None
        self._owns_ray = False
        self._capacities: list[Shares] = []
        self._losses: dict[int, int] = {}
        """How many times embedding PSs had lost their rows when a PS last started without any, by its rank."""
        self._attaches: set[int] = set()
        """Ranks of PSs that must have the rows that a dead driver has left."""

    # --- starting -----------------------------------------------------------------------------------------------

    def started(self, check: bool = True) -> tuple[Processes, Plan, Coordinator]:
        """Starts Ray and the coordinator, unless they run.

        Args:
            check: whether to raise if a process has died permanently.

        Raises:
            ClosedError: the cluster is closed.
            ConfigError: a process cannot be placed; the message lists the hosts and what each has.
            DeadlineError: the coordinator did not start in time.
            RoleDiedError: a process has died permanently, or the coordinator could not start.
        """
        with self.lock:
            if self.closed:
                raise ClosedError("This cluster is closed; create a new one.")
            if self.processes is None or self.plan is None or self.coordinator is None:
                self._owns_ray = connect(self.options.address) or self._owns_ray
                plan = make_plan(self.counts["embedding_ps"], self.counts["nn_worker"], self.options)
                if self.attachment is not None:
                    plan = self.attachment.attach(plan)
                    self.placer.pin(self.attachment.nodes)
                    self._attaches = set(self.attachment.nodes)
                    self._losses = self.attachment.losses
                    self.counts["embedding_ps"] = plan.servers
                self.placer.lay_out(self.counts)
                plan = self._for_hosts(plan)
                self.processes = Processes(self._died, self._restarted, self.options.timeout)
                process = self.processes.start(
                    CoordinatorHost,
                    "coordinator",
                    0,
                    (plan, 0),
                    num_cpus=0,
                    name=f"{plan.name}/coordinator",
                    scheduling_strategy=here(),  # If the host of this process dies, training ends anyway.
                    max_restarts=self.options.restarts if self.options.regions else 0,
                )
                self.processes.await_ready([process], self.options.timeout)
                assert process.info is not None
                self.plan = plan._replace(coordinator=process.info.address)
                self.coordinator = reach_coordinator(self.plan)
                self.tokens = reach_tokens(self.plan)
                self.stream_log = reach_stream_log(self.plan)
            if check:
                if not self.running.locked():
                    self.forget_deaths()
                self.processes.check()
            return self.processes, self.plan, self.coordinator

    def _for_hosts(self, plan: Plan) -> Plan:
        """Returns a plan with the form of messages between embedding workers and NN workers that suits their hosts."""
        hosts = self.placer.row_hosts()
        one_host = len(hosts) == 1
        plan = plan._replace(
            compression=self.options.row_compression(one_host), pool_at=self.options.feature_pooling(one_host)
        )
        LOG.info(
            "embedding workers and NN workers are on %s, so rows and gradients have compression %s (RayOptions: %s), "
            "and features are pooled at %s (RayOptions: %s)",
            ", ".join(hosts),
            plan.compression,
            self.options.compression,
            "whichever sends fewer bytes" if plan.pool_at == "auto" else plan.pool_at,
            self.options.pool_at,
        )
        return plan

    def start_nn_workers(self) -> None:
        """Starts the NN workers that do not run. Does not wait until they are ready."""
        with self.lock:
            assert self.processes is not None
            present = [process.rank for process in self.nn_workers()]
            missing = [rank for rank in range(self.counts["nn_worker"]) if rank not in present]
            if missing:
                warn_of_idle_gpus(self.options.gpus)
                self.placer.reserve("nn_worker", missing)
                for rank in missing:
                    self.start_nn_worker(rank)

    def start_nn_worker(self, rank: int, expendable: bool = False) -> Process:
        """Starts the NN worker of a rank; an expendable one does not train yet. Does not wait until it is ready.

        Raises:
            ConfigError: its host is gone, and no other host has the required resources.
        """
        self.placer.reserve("nn_worker", [rank], wait=False)
        return self._start(NNWorkerHost, "nn_worker", rank, expendable=expendable)

    def nn_workers(self) -> list[Process]:
        """Returns the NN workers that train, by rank, without those that join or leave."""
        assert self.processes is not None
        return [process for process in self.processes.of("nn_worker") if not process.expendable]

    def set_nn_workers(self, count: int) -> None:
        """Sets the number of NN workers, for the next run."""
        with self.lock:
            self.counts["nn_worker"] = self.feed.nn_workers = count
            if self.plan is not None:
                self.plan = self.plan._replace(nn_workers=count)

    def capacities_of(self, service: Service) -> list[Shares]:
        """Returns the capacities of the tables at each PS.

        Raises:
            ConfigError: they exceed the memory of the PSs' hosts.
            DeadlineError: a host did not report its memory in time.
        """
        if self.attachment is not None and self.attachment.shares:
            return self.attachment.shares  # Rows that exist are not divided again.
        nodes = self.placer.server_nodes(self.counts["embedding_ps"])
        return server_capacities(service, nodes, self.options, self.placer.server_memory())

    def serve(self, service: Service, capacities: list[Shares] | None = None) -> SourceKind:
        """Starts PSs, embedding workers and data loaders, unless they run; returns the kind of source.

        Args:
            service: service of PSs and embedding workers.
            capacities: capacities of the PSs, if they have already been divided.

        Raises:
            ConfigError: they serve another service.
        """
        with self.lock:
            processes, _, _ = self.started()
            if self.service is None:
                if self.attachment is not None:
                    self.attachment.check(service)
                self._capacities = capacities or self.capacities_of(service)
                self.service = service
                self.placer.reserve("embedding_ps", range(self.counts["embedding_ps"]))
                started = self.start_servers(range(self.counts["embedding_ps"]), service)
                self.told = self.counts["nn_worker"]
                for role in ("embedding_worker", "data_loader"):
                    started += self.start_role(role, range(self.counts[role]))
                processes.await_ready(started, self.options.timeout)
                # PSs that have attached have their rows: the next driver must find the nodes of these.
                self.note_servers(now=self.attachment is not None and bool(self.attachment.nodes))
                self.send_feed()
            elif self.service != service:
                raise ConfigError(
                    "This cluster serves another schema, embedding optimizer, mode or seed, to which its rows belong. "
                    "Use another cluster.",
                    field="cluster",
                )
            return self.feed.kind

    def serve_dense(self, maker: DenseMaker) -> None:
        """Starts the dense PSs, unless they run."""
        with self.lock:
            processes, _, _ = self.started()
            if not processes.of("dense_ps"):
                ranks = range(self.options.dense_ps)
                self.placer.reserve("dense_ps", ranks)
                started = [self._start(DenseServerHost, "dense_ps", rank, maker) for rank in ranks]
                processes.await_ready(started, self.options.timeout)

    def start_role(self, role: str, ranks: Collection[int]) -> list[Process]:
        """Starts embedding workers or data loaders. Does not wait until they are ready.

        Raises:
            ConfigError: a process cannot be placed; then none starts.
        """
        host = EmbeddingWorkerHost if role == "embedding_worker" else DataLoaderHost
        self.placer.reserve(role, ranks)
        return [self._start(host, role, rank, self.service, max_restarts=self.options.restarts) for rank in ranks]

    def add_servers(self, count: int) -> list[Process]:
        """Starts further PSs, up to this number. Blocks until they are members.

        Raises:
            ConfigError: a PS cannot be placed, or the declared capacity of the tables exceeds the memory of its host.
            DeadlineError: a PS did not start in time.
            RoleDiedError: a PS could not start.
        """
        with self.lock:
            processes, _, _ = self.started()
            assert self.service is not None
            ranks = range(self.counts["embedding_ps"], count)
            self.placer.reserve("embedding_ps", ranks)
            try:
                capacities = server_capacities(
                    self.service, self.placer.server_nodes(count), self.options, self.placer.server_memory()
                )
                self._capacities[ranks.start :] = capacities[ranks.start :]
                started = self.start_servers(ranks, self.service, count, expendable=True)
                processes.await_ready(started, self.options.timeout)
            except BaseException:
                self.remove_servers(ranks.start)
                raise
            self.counts["embedding_ps"] = count
            self.note_servers(now=True)
            return started

    def remove_servers(self, count: int) -> None:
        """Ends all PSs but the first ones, after they have left the membership. They have no rows, and may have died.

        The number of PSs is lower from now on even if this raises, so that the call can be repeated.

        Args:
            count: number of PSs that stay.

        Raises:
            DeadlineError: a process did not end in time.
        """
        with self.lock:
            processes, _, coordinator = self.started(check=False)
            ranks = range(count, MAX_PROCESSES)  # Also of those that have died: nothing waits for their return.
            servers = [process for process in processes.of("embedding_ps") if process.rank in ranks]

            def leave() -> None:  # Without a reason.
                for member in coordinator.membership().members:
                    if member.role == "embedding_ps" and member.rank in ranks:
                        coordinator.depart(member.role, member.rank, member.incarnation)

            for process in servers:
                process.expendable = True
            try:
                leave()
            finally:
                try:
                    processes.release(servers)
                    processes.end(servers)
                finally:
                    for death in processes.failures():  # From before they were expendable.
                        if death.fields["role"] == "embedding_ps" and death.fields["rank"] in ranks:
                            processes.forget_failures("embedding_ps", death.fields["rank"])
                    self.placer.release("embedding_ps", ranks)
                    self._attaches.difference_update(ranks)
                    self.counts["embedding_ps"] = min(self.counts["embedding_ps"], count)
                    leave()  # Those that have just joined.

    def start_servers(
        self, ranks: Collection[int], service: Service, count: int | None = None, expendable: bool = False
    ) -> list[Process]:
        """Starts PSs, of `count` PSs. If their rows outlive their processes, they restart on the same host."""
        restarts = self.options.restarts if self.options.regions else 0
        nodes = self.placer.server_nodes(count or self.counts["embedding_ps"])
        started = []
        for rank in ranks:
            seat = seat_of(rank, nodes)._replace(attaches=rank in self._attaches)
            arguments = (service, self._capacities[rank], self._losses.get(rank, 0), seat)
            options = {"max_restarts": restarts, "expendable": expendable}
            started.append(self._start(EmbeddingServerHost, "embedding_ps", rank, *arguments, **options))
        return started

    def note_servers(self, count: int | None = None, now: bool = False) -> None:
        """Notes where the PSs have their rows, for another driver; nothing while one of them is missing.

        Args:
            count: number of PSs, without those that are about to leave; None for all.
            now: see `RunAttachment.placed`.
        """
        if self.attachment is not None:
            assert self.service is not None
            processes, _, coordinator = self.started(check=False)
            started = {p.rank: p.info for p in processes.of("embedding_ps") if p.info is not None}
            ranks = range(self.counts["embedding_ps"] if count is None else count)
            if not all(rank in started for rank in ranks):
                return
            buckets = rpc.cast_to(BucketMaps, coordinator).map_state().buckets
            places = [started[rank] for rank in ranks]
            self.attachment.placed(self.service, self._capacities, places, self._losses, buckets, now)

    def _start(self, host: type, role: str, rank: int, *arguments: Any, **options: Any) -> Process:
        assert self.processes is not None
        assert self.plan is not None
        name = f"{self.plan.name}/{role}-{rank}-{uuid.uuid4().hex[:4]}"
        options = {"name": name, **self.placer.actor_options(role, rank), **options}
        return self.processes.start(host, role, rank, (self.plan, rank, *arguments), **options)

    # --- data loaders -------------------------------------------------------------------------------------------

    def begin_feed(self, feed: Feed) -> None:
        """Starts another pass of the data loaders, or another part of one."""
        with self.lock:
            self.feed.begin(feed, self._loaders())

    def renew_feed(self, generation: int) -> None:
        """Starts the feed again for a new generation of NN workers."""
        with self.lock:
            self.feed.renew(generation)
            self.send_feed()

    def send_feed(self) -> None:
        """Sends each data loader its share of the feed.

        Raises:
            DataError: the source cannot be shared by this many data loaders.
        """
        self.feed.send(self._loaders())

    def _loaders(self) -> list[Process]:
        assert self.processes is not None
        return [p for p in self.processes.of("data_loader") if not p.leaving]

    # --- deaths and restarts ------------------------------------------------------------------------------------

    def restart_servers(self, ranks: Sequence[int]) -> None:
        """Replaces embedding PSs that have died for good, and not left, with empty ones; restarts embedding workers.

        Raises:
            ConfigError: a PS cannot be placed, and no host joined in time.
            DeadlineError: a process did not start in time.
            RoleDiedError: a process could not start, or another process has died.
        """
        with self.lock:
            assert self.processes is not None
            assert self.service is not None
            state = rpc.cast_to(BucketMaps, self.coordinator).map_state()
            ranks = [rank for rank in ranks if not state.has_left(rank)]
            self.placer.unpin(ranks)
            self._attaches.difference_update(ranks)
            self.placer.reserve("embedding_ps", ranks)
            self.processes.forget_failures("embedding_ps")
            processes, _, _ = self.started()
            if not ranks:
                return
            self._losses.update(dict.fromkeys(ranks, max(self._losses.values(), default=0) + 1))
            started = self.start_servers(ranks, self.service)
            processes.await_ready(started, self.options.timeout)
            self.note_servers()
            # Embedding workers are connected to the PSs that have died.
            workers = processes.of("embedding_worker")
            processes.end(workers)
            started = self.start_role("embedding_worker", [worker.rank for worker in workers])
            processes.await_ready(started, self.options.timeout)

    def forget_deaths(self) -> None:
        """Ends the last run if processes have died that the next run restarts: between runs these are no failures."""
        assert self.processes is not None
        if any(death.fields["role"] in RESTARTED for death in self.processes.failures()):
            self.end_run()

    def end_run(self) -> None:
        """Ends all NN workers, as others may wait for a failed one; the next run starts new ones."""
        with self.lock:
            if self.closed:
                return
            assert self.processes is not None
            # Those that join are starting, and wait for no one.
            self.processes.end([*self.nn_workers(), *self.processes.of("dense_ps")])
            for role in RESTARTED:
                self.processes.forget_failures(role)

    def _died(self, process: Process, reason: str) -> None:
        if process.role == "embedding_ps" and not process.expendable:
            with contextlib.suppress(PersiaError):  # `scale` may not have noticed yet that it owns no rows any more.
                maps = rpc.within(rpc.cast_to(BucketMaps, self.coordinator), DEPART_SECONDS)
                process.expendable = maps.map_state().has_left(process.rank)
        if process.role == "embedding_ps" and not process.expendable:
            self.ps_deaths.append(
                RoleDiedError(
                    f"{process.title} has died: {reason} Its gradients of the current step are lost.",
                    role=process.role,
                    rank=process.rank,
                    returns=True,
                )
            )
        if self.coordinator is not None and process.role != "coordinator":
            incarnation = process.info.incarnation if process.info else 1
            rpc.within(self.coordinator, DEPART_SECONDS).depart(process.role, process.rank, incarnation, reason)

    def _restarted(self, process: Process) -> None:
        if process.role == "data_loader":
            with self.lock:
                self.send_feed()

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all processes, and Ray if this object started it. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            rpc.close(self.coordinator)
            rpc.close(self.tokens)
            rpc.close(self.stream_log)
            try:
                if self.attachment is not None and not self.attachment.taken:
                    if self.processes is not None and ray.is_initialized():
                        self.processes.close(release=False)
                elif self.processes is not None and ray.is_initialized():
                    if self.attachment is not None:
                        self.attachment.forget()
                    try:
                        self.processes.close()
                    finally:
                        if self.plan is not None and (root := self.options.regions):
                            self.processes.on_unreleased(partial(remove_leftovers, root, f"{self.plan.name}/*"))
                    if self.attachment is not None:
                        self.attachment.remove_regions()
                        self.attachment.end()
            finally:
                if self.attachment is not None:
                    self.attachment.close()
                if self._owns_ray:
                    ray.shutdown()
