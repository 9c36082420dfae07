"""`Ray`: the roles as processes on one host or many."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import ray

from persia import rpc
from persia.cluster.ray.capacities import server_capacities
from persia.cluster.ray.connection import WorkerConnection, reach_coordinator, reach_tokens
from persia.cluster.ray.feeding import LoaderFeed
from persia.cluster.ray.hosts import CoordinatorHost, DataLoaderHost, EmbeddingServerHost, EmbeddingWorkerHost
from persia.cluster.ray.nn_worker import DenseServerHost, NNWorkerHost, warn_of_idle_gpus
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.plan import Plan, Service, here, place
from persia.cluster.ray.processes import Process, Processes, connect, make_plan
from persia.cluster.ray.runs import CONSEQUENCES, RESTARTED, Recovery, Replacement, pickled, results
from persia.cluster.ray.scaling import DEPART_SECONDS, await_leave, check_capacity, check_count, free_ranks
from persia.errors import ClosedError, ConfigError, DataError, PersiaError, RoleDiedError
from persia.modes import Mode, encode
from persia.ps.regions import remove_leftovers
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Attempt, Connection, Coordinator, DenseMaker, Tokens
from persia.types import Feed

__all__ = ["Ray"]

T = TypeVar("T")

POLL_SECONDS = 0.5


class Ray:
    """Roles as processes on this machine, or on a Ray cluster. Programs written for `Embedded` run unchanged.

    Processes start when they are needed. Use it as a context manager, or `close` it; the end of the program also closes
    it. Ray itself is started if this program is not connected to one, and then ended by `close`.

    Args:
        ps: number of embedding PSs; each owns a partition of every table.
        embedding_workers: number of processes that remove duplicates and route.
        data_loaders: number of processes that read.
        nn_workers: number of processes that train the network.
        options: further settings.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        ps: int = 1,
        embedding_workers: int = 1,
        data_loaders: int = 1,
        nn_workers: int = 1,
        options: RayOptions | None = None,
    ) -> None:
        counts = {
            "ps": ps,
            "embedding_workers": embedding_workers,
            "data_loaders": data_loaders,
            "nn_workers": nn_workers,
        }
        for name, value in counts.items():
            check_count(name, value)
        check_capacity(embedding_workers, data_loaders, nn_workers)
        self.ps = ps
        self.nn_workers = nn_workers
        self.options = options or RayOptions()
        self._embedding_workers = embedding_workers
        self._data_loaders = data_loaders
        self._lock = threading.RLock()
        self._running = threading.Lock()
        self._closed = False
        self._owns_ray = False
        self._service: Service | None = None
        self._capacities: list[dict[str, int]] = []
        self._plan: Plan | None = None
        self._coordinator: Coordinator | None = None
        self._tokens: Tokens | None = None
        self._processes: Processes | None = None
        self._connections: list[WorkerConnection] = []
        self._ps_deaths: list[RoleDiedError] = []
        """Deaths of embedding PSs in the current run. In asynchronous modes a restarted PS is out of phase."""
        self._losses = 0
        """Number of times that embedding PSs have lost their rows."""
        self._loader_feed = LoaderFeed(self.options.timeout, nn_workers)

    # --- for Trainer, EmbeddingCollection and users ------------------------------------------------

    @property
    def gpus(self) -> float:
        """Number of GPUs that Ray reserves for each NN worker."""
        return self.options.gpus

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Starts the roles and returns a connection for reading: training happens on the NN workers.

        Raises:
            ConfigError: this cluster serves something else already, or the declared capacity of the tables exceeds the
                memory of the PSs' hosts.
            DeadlineError: a process did not start, or a host did not report its memory, in time.
            RoleDiedError: a process could not start.
        """
        service = Service(schema, optimizer, encode(mode), seed)
        with self._lock:
            processes, plan, coordinator = self._started()
            # First: if tables do not fit, no PS and no NN worker starts.
            capacities = server_capacities(service, self.ps, self.options) if self._service is None else None
            self._start_nn_workers()  # They take longest, so all start at the same time.
            self._serve(service, capacities)
        processes.await_ready(processes.of("nn_worker"), self.options.timeout)
        reading = WorkerConnection(coordinator, plan)
        self._connections.append(reading)
        return reading.connection._replace(nn_workers=1)  # This process is not one of them.

    def run(self, function: Callable[[], T]) -> list[T]:
        """Runs a function on every NN worker at the same time, and returns the results by rank.

        There, an `EmbeddingCollection(..., cluster=cluster)` or `Trainer(..., cluster=cluster)` with this same cluster
        is connected, and torch.distributed has a process group of all NN workers. The function, and what it refers to,
        is pickled by cloudpickle.

        Raises:
            DataError: the source (see `feed`) cannot be shared by this many data loaders.
            RoleDiedError: a process has died (of NN workers, while the function ran); it is named, with its last
                lines, and so are those that died after it.
            Exception: the failure of the function, on the NN worker that failed first; the others are ended.
        """
        done = self._run(function, None)
        return [done[rank] for rank in sorted(done)]

    def attempt(self, function: Callable[[], Any], halting: Callable[[], bool]) -> Attempt:
        """Like `run`, but returns the death of a process that may be restarted; the next call restarts it.

        In an asynchronous mode the other NN workers continue; see `persia.errors.NNWorkersDiedError`.
        """
        recovery = Recovery(self._ps_deaths)
        try:
            return Attempt(self._run(function, recovery, halting), recovery.replaced, recovery.recovery_point)
        except CONSEQUENCES as error:
            deaths = recovery.deaths(error)
            if not deaths:
                raise
            return Attempt({}, deaths, recovery.recovery_point)

    def restart_servers(self, ranks: Sequence[int]) -> None:
        """Replaces embedding PSs that have died permanently by empty ones, on any node with free resources.

        Raises:
            DeadlineError: one did not start in time; it is named.
            RoleDiedError: one could not start, or something else has died.
        """
        with self._lock:
            assert self._processes is not None
            assert self._service is not None
            self._processes.forget_failures("embedding_ps")
            processes, _, _ = self._started()
            self._losses += 1
            started = [self._start_server(rank, self._service) for rank in ranks]
            processes.await_ready(started, self.options.timeout)
            # Embedding workers are connected to the PSs that have died.
            workers = processes.of("embedding_worker")
            processes.end(workers)
            started = [self._start_role("embedding_worker", worker.rank) for worker in workers]
            processes.await_ready(started, self.options.timeout)
            for connection in self._connections:
                connection.reconnect()

    def _run(
        self, function: Callable[[], Any], recovery: Recovery | None, halting: Callable[[], bool] = lambda: False
    ) -> dict[int, Any]:
        """Runs a function on every NN worker; returns the results of those that returned, by rank."""
        if not self._running.acquire(blocking=False):
            raise PersiaError(
                "This cluster is running another function. Wait until it is done, or use another cluster."
            )
        try:
            processes, _, coordinator = self._started(check=False)
            self._forget_deaths(processes)
            processes.check()
            self._start_nn_workers()
            workers = processes.of("nn_worker")
            try:
                processes.await_ready(workers, self.options.timeout)
                generation = coordinator.regenerate(self.nn_workers)
                self._renew(generation)
                self._ps_deaths.clear()
                rendezvous = ray.get(workers[0].handle.rendezvous.remote(), timeout=self.options.timeout)
                sent = ray.put(pickled(function, self))
                recovers = recovery is not None
                calls = {w.handle.run.remote(sent, generation, rendezvous, recovers): w for w in workers}
                operations: dict[str, Callable[..., Any]] = {
                    "serve": self._serve,
                    "serve_dense": self._serve_dense,
                    "begin": self._begin,
                }
                if recovery is None:
                    return results(processes, calls, operations)
                assert self._tokens is not None
                recovery.replacement = Replacement(
                    processes, self._tokens, generation, self._start_nn_worker, self.options.timeout
                )
                operations["save_recovery_point"] = recovery.save
                return results(processes, calls, operations, recovery.replacement, halting)
            except ray.exceptions.RayActorError as error:
                self._end_run(processes)
                raise RoleDiedError(
                    f"{workers[0].title} died before the function had started: {error}", role="nn_worker", rank=0
                ) from error
            except BaseException:
                self._end_run(processes)
                raise
        finally:
            self._running.release()

    def feed(self, source: Any, epoch: int = 0, start: int = 0, accumulation_steps: int = 1) -> None:
        """Lets the data loaders read a source, for the functions that run after this call.

        The source is pickled, and read where the data loaders are. A Trainer in `run` begins each pass by itself.

        Args:
            source: `persia.services.Sharded`, `Seekable`, or with one data loader any iterable of `persia.Batch`.
            epoch: number of the pass to begin with.
            start: number of its first batch.
            accumulation_steps: batches per update: those of one NN worker go to one embedding worker.

        Raises:
            ConfigError: the source cannot be pickled.
        """
        with self._lock:
            self._started(check=False)  # The run checks; it may recover from deaths.
            self._loader_feed.set(source, Feed(epoch, start, self.nn_workers, 0, 1, 1), accumulation_steps)

    def unfeed(self) -> None:
        """Makes NN workers read their data themselves again, in functions that run after this call."""
        with self._lock:
            self._loader_feed.clear()

    def scale(self, embedding_workers: int | None = None, data_loaders: int | None = None) -> None:
        """Starts or retires embedding workers and data loaders, also while a function runs; no batch is lost.

        Call it from another thread than the one that is in `run` or `fit`. Returns once the new processes serve, and
        the retired ones have ended.

        Raises:
            ConfigError: a number is below 1, exceeds the free ranks, or allows more ready batches than embedding
                workers buffer.
            DeadlineError: a process did not start, or still had batches, in time.
            DataError: the source cannot be shared by this many data loaders.
        """
        wanted = {"embedding_worker": embedding_workers, "data_loader": data_loaders}
        for role, count in wanted.items():
            if count is not None:
                check_count(f"{role}s", count)
        check_capacity(
            self._count("embedding_worker") if embedding_workers is None else embedding_workers,
            self._count("data_loader") if data_loaders is None else data_loaders,
            self.nn_workers,
        )
        for role, count in wanted.items():
            if count is not None:
                self._scale(role, count)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Returns the counters of every process by "role-rank", with the age of the report in seconds."""
        processes, _, coordinator = self._started()
        reports = [p.handle.report.remote() for p in processes.all() if p.role != "coordinator" and p.info]
        if reports:
            ray.wait(reports, num_returns=len(reports), timeout=POLL_SECONDS)
        return coordinator.statistics()

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in self._connections:
                connection.close()
            rpc.close(self._coordinator)
            rpc.close(self._tokens)
            try:
                if self._processes is not None and ray.is_initialized():
                    try:
                        self._processes.close()
                    finally:
                        if self._plan is not None and (root := self.options.regions):
                            self._processes.on_unreleased(partial(remove_leftovers, root, f"{self._plan.name}/*"))
            finally:
                if self._owns_ray:
                    ray.shutdown()

    @property
    def control_address(self) -> str:
        """Returns the address for `persia control`; starts the cluster if needed."""
        return self._started()[1].coordinator

    def __enter__(self) -> Ray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise ConfigError("A cluster can only be pickled as a part of a function that is passed to its `run`.")

    # --- starting -----------------------------------------------------------------------------------------------

    def _started(self, check: bool = True) -> tuple[Processes, Plan, Coordinator]:
        """Starts Ray and the coordinator; with `check`, raises if a process has died permanently."""
        with self._lock:
            if self._closed:
                raise ClosedError("This cluster is closed; create another one.")
            if self._processes is None or self._plan is None or self._coordinator is None:
                self._owns_ray = connect(self.options.address) or self._owns_ray
                plan = make_plan(self.ps, self.nn_workers, self.options)
                self._processes = Processes(self._died, self._restarted, self.options.timeout)
                process = self._processes.start(
                    CoordinatorHost,
                    "coordinator",
                    0,
                    (plan, 0),
                    num_cpus=0,
                    name=f"{plan.name}/coordinator",
                    scheduling_strategy=here(),  # If the host of this process dies, training ends anyway.
                    max_restarts=self.options.restarts if self.options.regions else 0,
                )
                self._processes.await_ready([process], self.options.timeout)
                assert process.info is not None
                self._plan = plan._replace(coordinator=process.info.address)
                self._coordinator = reach_coordinator(self._plan)
                self._tokens = reach_tokens(self._plan)
            if check:
                if not self._running.locked():
                    self._forget_deaths(self._processes)
                self._processes.check()
            return self._processes, self._plan, self._coordinator

    def _start(self, host: type, role: str, rank: int, *arguments: Any, **options: Any) -> Process:
        assert self._processes is not None
        assert self._plan is not None
        name = f"{self._plan.name}/{role}-{rank}-{uuid.uuid4().hex[:4]}"
        options = {"num_cpus": self.options.cpus, "name": name, **options}
        return self._processes.start(host, role, rank, (self._plan, rank, *arguments), **options)

    def _start_nn_workers(self) -> None:
        with self._lock:
            assert self._processes is not None
            if not self._processes.of("nn_worker"):
                warn_of_idle_gpus(self.options.gpus)
                for rank in range(self.nn_workers):
                    self._start_nn_worker(rank)

    def _start_nn_worker(self, rank: int) -> Process:
        gpus = self.options.gpus
        # Ray knows which hosts have GPUs.
        where = "SPREAD" if gpus else place(rank, self.options.cpus > 0)
        return self._start(NNWorkerHost, "nn_worker", rank, num_gpus=gpus, scheduling_strategy=where)

    def _serve(self, service: Service, capacities: list[dict[str, int]] | None = None) -> bool:
        """Starts PSs, embedding workers and data loaders, unless they run; returns whether the latter have a source.

        Args:
            service: what they serve.
            capacities: of the PSs, if they have been divided already.
        """
        with self._lock:
            processes, _, _ = self._started()
            if self._service is None:
                self._capacities = capacities or server_capacities(service, self.ps, self.options)
                self._service = service
                started = [self._start_server(rank, service) for rank in range(self.ps)]
                started += [self._start_role("embedding_worker", rank) for rank in range(self._embedding_workers)]
                started += [self._start_role("data_loader", rank) for rank in range(self._data_loaders)]
                processes.await_ready(started, self.options.timeout)
                self._send_feed()
            elif self._service != service:
                raise ConfigError(
                    "This cluster serves another schema, embedding optimizer, mode or seed, to which its rows belong. "
                    "Use another cluster.",
                    field="cluster",
                )
            return self._loader_feed.has_source

    def _start_server(self, rank: int, service: Service) -> Process:
        """Starts a PS. If its rows outlive its process, it restarts on the same host."""
        restarts = self.options.restarts if self.options.regions else 0
        where = place(rank, self.options.cpus > 0)
        return self._start(
            EmbeddingServerHost,
            "embedding_ps",
            rank,
            service,
            self._capacities[rank],
            self._losses,
            scheduling_strategy=where,
            max_restarts=restarts,
        )

    def _serve_dense(self, maker: DenseMaker) -> None:
        """Starts the dense PSs, unless they are running."""
        with self._lock:
            processes, _, _ = self._started()
            if not processes.of("dense_ps"):
                ranks = range(self.options.dense_ps)
                started = [self._start(DenseServerHost, "dense_ps", rank, maker) for rank in ranks]
                processes.await_ready(started, self.options.timeout)

    def _start_role(self, role: str, rank: int) -> Process:
        """Starts an embedding worker or a data loader."""
        host = EmbeddingWorkerHost if role == "embedding_worker" else DataLoaderHost
        return self._start(host, role, rank, self._service, max_restarts=self.options.restarts)

    # --- deaths and restarts -------------------------------------------------------------------------------------

    def _died(self, process: Process, reason: str) -> None:
        if process.role == "embedding_ps":
            self._ps_deaths.append(
                RoleDiedError(
                    f"{process.title} has died: {reason} Its gradients of the current step are lost.",
                    role=process.role,
                    rank=process.rank,
                    returns=True,
                )
            )
        if self._coordinator is not None and process.role != "coordinator":
            incarnation = process.info.incarnation if process.info else 1
            rpc.within(self._coordinator, DEPART_SECONDS).depart(process.role, process.rank, incarnation, reason)

    def _restarted(self, process: Process) -> None:
        if process.role == "data_loader":
            with self._lock:
                self._send_feed()

    # --- data loaders, scaling ------------------------------------------------------------------------------------

    def _begin(self, feed: Feed) -> None:
        with self._lock:
            self._loader_feed.begin(feed, self._loaders())

    def _renew(self, generation: int) -> None:
        with self._lock:
            self._loader_feed.renew(generation)
            self._send_feed()

    def _send_feed(self) -> None:
        self._loader_feed.send(self._loaders())

    def _loaders(self) -> list[Process]:
        assert self._processes is not None
        return [p for p in self._processes.of("data_loader") if not p.leaving]

    def _count(self, role: str) -> int:
        """Returns the number of processes of a role, without leaving ones."""
        with self._lock:
            if self._service is None or self._processes is None:
                return self._embedding_workers if role == "embedding_worker" else self._data_loaders
            return sum(not p.leaving for p in self._processes.of(role))

    def _scale(self, role: str, wanted: int) -> None:
        with self._lock:
            if self._service is None:  # Nothing has started yet.
                if role == "embedding_worker":
                    self._embedding_workers = wanted
                else:
                    self._data_loaders = wanted
                return
            processes, _, coordinator = self._started()
            all_of_them = processes.of(role)
            staying = [p for p in all_of_them if not p.leaving]
            ranks = free_ranks(role, {p.rank for p in all_of_them}, wanted - len(staying))
            new = [self._start_role(role, rank) for rank in ranks]
            processes.await_ready(new, self.options.timeout)
            retired = staying[wanted:]
            for process in retired:
                process.leaving = True
                coordinator.retire(role, process.rank)
            if role == "data_loader" and (new or retired):
                try:
                    self._send_feed()
                except DataError:  # The source cannot be shared by this many; training continues with the old ones.
                    for process in new:
                        coordinator.depart(role, process.rank, process.info.incarnation if process.info else 1, "")
                    processes.end(new)
                    self._send_feed()
                    raise
        # Without the lock: training continues, and consumes their batches.
        for process in retired:
            await_leave(process, coordinator, self.options.timeout, self._running.locked)
        processes.end(retired)

    # --- a run --------------------------------------------------------------------------------------------------

    def _forget_deaths(self, processes: Processes) -> None:
        """Forgets deaths of processes that the next run restarts anyway: between two runs they cost nothing."""
        if any(death.fields["role"] in RESTARTED for death in processes.failures()):
            self._end_run(processes)

    def _end_run(self, processes: Processes) -> None:
        """Ends all NN workers, as others may wait for the one that failed; the next run starts new ones."""
        with self._lock:
            if self._closed:
                return
            processes.end([*processes.of("nn_worker"), *processes.of("dense_ps")])
            for role in RESTARTED:
                processes.forget_failures(role)
