"""`Ray`: the roles as processes on one host or many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from types import TracebackType
from typing import Any, TypeVar

import ray

from persia.checks import plain
from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.nn_scaling import NNWorkerScaling
from persia.cluster.ray.nn_worker import Seat
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.placement import PlacedRole, Placement, nn_worker_gpus, read_place
from persia.cluster.ray.placing import Placer
from persia.cluster.ray.process_plan import Service
from persia.cluster.ray.processes import Process
from persia.cluster.ray.ps_scaling import answer_requests, bucket_map, move_rows, scale_servers
from persia.cluster.ray.roles import Roles
from persia.cluster.ray.runs import CONSEQUENCES, Departure, Recovery, Replacement, pickled, results
from persia.cluster.ray.scaler_driver import start_scaler
from persia.cluster.ray.scaling import check_capacity, check_count, count_of, scale
from persia.cluster.scaler import SCALED, ScaledRole
from persia.errors import ConfigError, PersiaError, RoleDiedError
from persia.modes import Mode, encode
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Attempt, Connection, RecoveryPoints
from persia.types import BucketMap, Feed, StreamStart

__all__ = ["Ray"]

T = TypeVar("T")

POLL_SECONDS = 0.5


class Ray:
    """Roles as processes on this machine, or on a Ray cluster. Programs written for `Embedded` run unchanged.

    Processes start when they are needed. Use it as a context manager, or `close` it; it is also closed when the program
    ends. Ray is started if this program is not connected to it, and then stopped by `close`.

    Args:
        ps: number of embedding PSs; each owns a partition of every table.
        embedding_workers: number of processes that deduplicate and route ids.
        data_loaders: number of processes that read data.
        nn_workers: number of processes that train the network.
        options: further settings.
        place: placements of roles, for example `{"ps": {"memory": "100GB"}, "nn_worker": {"GPU": 1}}`. Without any, PSs
            and NN workers go to the hosts in turn, and Ray places the other roles. Otherwise roles without a placement
            are spread, over hosts without GPUs first. Hosts are chosen when the cluster starts, for all processes or
            none.

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
        place: Mapping[PlacedRole, Placement | Mapping[str, Any]] | None = None,
    ) -> None:
        ps, embedding_workers, data_loaders, nn_workers = map(plain, (ps, embedding_workers, data_loaders, nn_workers))
        counts = {
            "ps": ps,
            "embedding_workers": embedding_workers,
            "data_loaders": data_loaders,
            "nn_workers": nn_workers,
        }
        for name, value in counts.items():
            check_count(name, value)
        check_capacity(embedding_workers, data_loaders, nn_workers)
        self.place = read_place(place or {})
        self.options = nn_worker_gpus(self.place, options or RayOptions())
        if self.options.scaler is not None:
            for role in SCALED:
                self.options.scaler.check_count(role, counts[role])
        self._roles = Roles(
            {
                "embedding_ps": ps,
                "embedding_worker": embedding_workers,
                "data_loader": data_loaders,
                "nn_worker": nn_workers,
            },
            self.options,
            Placer(self.place, self.options),
        )
        self._nn_workers = NNWorkerScaling(self._roles)
        self._function: Any = None
        """The pickled function of the current run, by which NN workers that join import what they need."""
        self._connections: list[WorkerConnection] = []
        self._answers = False
        """Whether requests of `persia control scale` are answered, and the scaler measures."""

    # --- for Trainer, EmbeddingCollection and users ------------------------------------------------

    @property
    def ps(self) -> int:
        """Number of embedding PSs; with `RayOptions.run`, that of the run once it has started."""
        return self._roles.counts["embedding_ps"]

    @property
    def nn_workers(self) -> int:
        """Number of NN workers, from the next run on."""
        return self._roles.counts["nn_worker"]

    @property
    def share(self) -> Fraction:
        """Factor of `TrainerOptions.accumulation_steps` by which the global batch has stayed; see `scale`."""
        return self._nn_workers.share

    @property
    def gpus(self) -> float:
        """Number of GPUs that Ray reserves for each NN worker."""
        return self.options.gpus

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Starts the roles and returns a connection for reading. Training happens on the NN workers.

        Raises:
            ConfigError: this cluster already serves another service, a process cannot be placed, or the declared
                capacity of the tables exceeds the memory of the PSs' hosts.
            DeadlineError: a process did not start, or a host did not report its memory, in time.
            RoleDiedError: a process could not start.
        """
        service = Service(schema, optimizer, encode(mode), seed)
        roles = self._roles
        with roles.lock:
            processes, plan, coordinator = roles.started()
            # First, so that no PS and no NN worker starts if the tables do not fit.
            capacities = roles.capacities_of(service) if roles.service is None else None
            roles.start_nn_workers()  # They take longest to start, so they start in parallel with the other roles.
            roles.serve(service, capacities)
            started = roles.nn_workers()
        processes.await_ready(started, self.options.timeout)
        reading = WorkerConnection(coordinator, plan)
        self._connections.append(reading)
        return reading.connection._replace(nn_workers=1)  # This process is not one of them.

    def run(self, function: Callable[[], T]) -> list[T]:
        """Runs a function on every NN worker at the same time, and returns the results by rank.

        In the function, an `EmbeddingCollection(..., cluster=cluster)` or `Trainer(..., cluster=cluster)` with this
        cluster is connected, and torch.distributed has a process group of all NN workers. cloudpickle pickles the
        function and the objects that it refers to.

        Raises:
            ConfigError: a process cannot be placed; the message lists the hosts and what each has.
            DataError: the source (see `feed`) cannot be shared by this many data loaders.
            RoleDiedError: a process has died (an NN worker: while the function ran). The error names it, with its last
                log lines, and processes that died after it.
            Exception: the error of the function on the NN worker that failed first; the other NN workers are ended.
        """
        done = self._run(function, None)
        return [done[rank] for rank in sorted(done)]

    def attempt(
        self,
        function: Callable[[], Any],
        halting: Callable[[], bool],
        keep: Callable[[Any], object] | None = None,
    ) -> Attempt:
        """Like `run`, but returns the death of a process that can be restarted; the next call restarts it.

        In an asynchronous mode the other NN workers continue; see `persia.errors.NNWorkersDiedError`.
        """
        recovery = Recovery(self._roles.ps_deaths, keep)
        try:
            return Attempt(self._run(function, recovery, halting), recovery.replaced, recovery.recovery_point)
        except CONSEQUENCES as error:
            deaths = recovery.deaths(error)
            if not deaths:
                raise
            return Attempt({}, deaths, recovery.recovery_point)

    @property
    def recovery_points(self) -> RecoveryPoints | None:
        """Recovery points that outlive this process; None without `RayOptions.run`."""
        return self._roles.attachment

    def fitting(self) -> AbstractContextManager[None]:
        """Returns a context for the attempts of one call of `fit`; see `persia.services.ProcessCluster`."""
        return self._nn_workers.fitting()

    @contextlib.contextmanager
    def keeping_rows(self) -> Iterator[None]:
        """Keeps rows in place, between two runs; see `persia.services.ProcessCluster`."""
        with self.fitting():
            # Rows can be saved without the coordinator, too: reading them checks the number of PSs against their map.
            with contextlib.suppress(PersiaError):
                self._follow_map()
            yield

    def owning_servers(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks of those PSs that own rows; see `persia.services.ProcessCluster`."""
        servers = self.buckets.servers
        return [rank for rank in ranks if rank < servers]

    def restart_servers(self, ranks: Sequence[int]) -> None:
        """Replaces embedding PSs that have died permanently with empty ones; see `persia.services.ProcessCluster`.

        Raises:
            ConfigError: a PS cannot be placed, and no host joined in time.
            DeadlineError: a PS did not start in time; the error names it.
            RoleDiedError: a PS could not start, or another process has died.
        """
        with self._roles.lock:
            self._roles.restart_servers(ranks)
            self._follow_map()  # A call of `scale` may not have come to it yet.

    def _run(
        self, function: Callable[[], Any], recovery: Recovery | None, halting: Callable[[], bool] = lambda: False
    ) -> dict[int, Any]:
        """Runs a function on every NN worker; returns the results of NN workers that returned, by rank."""
        roles = self._roles
        with roles.resting:
            acquired = roles.running.acquire(blocking=False)
        if not acquired:
            raise PersiaError(
                "This cluster is running another function. Wait until it has ended, or use another cluster."
            )
        try:
            processes, _, coordinator = roles.started(check=False)
            self._answer_requests()
            with roles.lock:
                self._nn_workers.begin_run(trains=recovery is not None)
                roles.forget_deaths()
                processes.check()
                roles.start_nn_workers()
                workers = roles.nn_workers()
            try:
                processes.await_ready(workers, self.options.timeout)
                generation = coordinator.regenerate(len(workers))
                if roles.attachment is not None:
                    roles.attachment.began(generation)
                roles.feed.share = self.share
                roles.renew_feed(generation)
                roles.ps_deaths.clear()
                rendezvous = ray.get(workers[0].handle.rendezvous.remote(), timeout=self.options.timeout)
                self._function = sent = ray.put(pickled(function, self))
                arguments = sent, generation, rendezvous, recovery is not None
                calls = {w.handle.run.remote(*arguments, Seat(w.rank, len(workers), self.share)): w for w in workers}
                operations: dict[str, Callable[..., Any]] = {
                    "serve": roles.serve,
                    "serve_dense": roles.serve_dense,
                    "begin": roles.begin_feed,
                    "commit": roles.feed.commit,
                }
                if recovery is None:
                    done = results(processes, calls, operations)
                else:
                    assert roles.tokens is not None
                    changes = self._nn_workers
                    if self.options.nn_worker_deaths == "leave":
                        recovery.replacement = Departure(processes, roles.tokens, generation, changes.release)
                    else:
                        recovery.replacement = Replacement(
                            processes, roles.tokens, generation, roles.start_nn_worker, self.options.timeout
                        )
                    operations |= {
                        "save_recovery_point": recovery.save,
                        "accept_change": changes.accept,
                        "refuse_change": changes.refuse,
                        "leave": changes.let_leave,
                    }
                    done = results(
                        processes, calls, operations, recovery.replacement, halting, lambda: changes.requested
                    )
            except ray.exceptions.RayActorError as error:
                roles.end_run()
                raise RoleDiedError(
                    f"{workers[0].title} died before the function had started: {error}", role="nn_worker", rank=0
                ) from error
            except BaseException:
                roles.end_run()
                raise
            self._follow_earlier_order()
            return done
        finally:
            self._function = None  # Ray would keep the object.
            try:
                if recovery is not None and self.options.nn_worker_deaths == "leave" and recovery.replaced:
                    self._nn_workers.drop([death.fields["rank"] for death in recovery.replaced])
            finally:
                roles.running.release()

    def feed(
        self,
        source: Any,
        epoch: int = 0,
        start: int = 0,
        accumulation_steps: int = 1,
        record: StreamStart | None = None,
    ) -> None:
        """Lets the data loaders read a source, for the functions that run after this call.

        The source is pickled and read by the data loaders. A Trainer in `run` starts each pass itself.

        Args:
            source: `persia.services.SharedStream`, `Sharded`, `Seekable`, or with one data loader any iterable of
                `persia.Batch`.
            epoch: number of the first pass.
            start: number of its first batch.
            accumulation_steps: batches per update. Those of an NN worker go to the same embedding worker.
            record: start of a stream; None for the start that the stream defines.

        Raises:
            ConfigError: the source cannot be pickled.
        """
        with self._roles.lock:
            self._roles.started(check=False)  # The run checks for deaths and may recover from them.
            self._roles.feed.set(source, Feed(epoch, start, self.nn_workers, 0, 1, 1), accumulation_steps)
            if self._roles.feed.kind == "stream":
                assert self._roles.stream_log is not None
                offsets, fresh = record or StreamStart({}, True)
                self._roles.stream_log.begin_stream(start, offsets, fresh)

    def unfeed(self) -> None:
        """Lets NN workers read their data themselves again, in functions that run after this call."""
        with self._roles.lock:
            self._roles.feed.clear()

    def scale(
        self,
        embedding_workers: int | None = None,
        data_loaders: int | None = None,
        ps: int | None = None,
        nn_workers: int | None = None,
        *,
        keep_global_batch: bool = False,
    ) -> None:
        """Starts or retires embedding workers, data loaders, embedding PSs and NN workers, also while a function runs.

        No batch and no update is lost. Do not call it from the thread that is in `run` or `fit`. Returns once the new
        processes serve or train, the retired ones have ended, and each PS owns an equal part of the rows. PSs and NN
        workers with the highest numbers retire.

        Rows move between PSs while a `Trainer` trains; training pauses only for what has changed in the last moments.
        Between two calls of `fit` they move, too, but not while a function of your own runs. The same holds for NN
        workers; training pauses for the hand-over of network, optimizer and position in the data.

        With all-reduce a step has a batch of each NN worker, so the global batch changes with their number. With
        `keep_global_batch` it stays, as each NN worker trains another number of batches per step, as with
        `TrainerOptions.accumulation_steps`. The global batch of `Gba` stays anyway.

        Args:
            embedding_workers: number of embedding workers; None for as many as before, as for the other numbers.
            data_loaders: number of data loaders.
            ps: number of embedding PSs.
            nn_workers: number of NN workers.
            keep_global_batch: whether the global batch stays if the number of NN workers changes.

        Raises:
            ConfigError: a number is below 1, exceeds the free ranks, allows more ready batches than embedding
                workers buffer, or a process cannot be placed; or PSs of tables with a declared capacity were to retire;
                or training cannot continue with this number of NN workers.
            DeadlineError: a process did not start, or still had batches, in time; or rows did not move; or training
                did not come to a step boundary.
            DataError: the source cannot be shared by this many data loaders.
            RoleDiedError: a new PS or NN worker has died. Training continues without it.
        """
        embedding_workers, data_loaders, ps = plain(embedding_workers), plain(data_loaders), plain(ps)
        nn_workers = plain(nn_workers)
        counts = {"embedding_worker": embedding_workers, "data_loader": data_loaders}
        numbers = {**{f"{role}s": number for role, number in counts.items()}, "ps": ps, "nn_workers": nn_workers}
        for name, count in numbers.items():
            if count is not None:
                check_count(name, count)
        check_capacity(
            count_of(self._roles, "embedding_worker") if embedding_workers is None else embedding_workers,
            count_of(self._roles, "data_loader") if data_loaders is None else data_loaders,
            self.nn_workers if nn_workers is None else nn_workers,
        )
        for role, count in counts.items():
            if count is not None:
                scale(self._roles, role, count)
        if ps is not None:
            scale_servers(self._roles, ps, self._follow_map)
        if nn_workers is not None:
            self._nn_workers.scale(nn_workers, keep_global_batch, self._prepare)

    def _prepare(self, joining: Sequence[Process]) -> None:
        """Lets NN workers import what the function that runs needs, before they are waited for."""
        function = self._function
        calls = [w.handle.prepare.remote(function) for w in joining if function is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self.options.timeout)

    def _scale_from(self, role: ScaledRole, before: int, after: int) -> bool:
        """Scales a role like `scale`, unless another number than `before` runs; returns whether `before` did."""
        if role == "ps":
            return scale_servers(self._roles, after, self._follow_map, before)
        return scale(self._roles, role.removesuffix("s"), after, before)

    @property
    def buckets(self) -> BucketMap:
        """The PS of each bucket of ids, by which rows are divided among the PSs; for `move_rows`."""
        return bucket_map(self._roles)

    def move_rows(self, buckets: BucketMap) -> None:
        """Moves rows between the PSs of this cluster, like `scale`. Returns once they have moved.

            cluster.move_rows(cluster.buckets.emptied([1]))  # All rows away from PS 1, whose host goes away.
            cluster.move_rows(cluster.buckets.moved(2))  # Equal parts again.

        Args:
            buckets: a map that follows `buckets`, for as many PSs.

        Raises:
            ConfigError: the map is for another number of PSs, nothing has been trained yet, or tables have a declared
                capacity.
            StaleMapError: the map does not follow `buckets`.
            DeadlineError: rows did not move in time.
        """
        move_rows(self._roles, buckets)
        self._follow_map()

    def _follow_map(self) -> None:
        """Continues with the PSs of the current map."""
        buckets = bucket_map(self._roles)
        for connection in self._connections:
            connection.reconnect()
            connection.servers.resize(buckets.servers)

    def _follow_earlier_order(self) -> None:
        """Continues with the PSs of a move that NN workers have completed, and a driver that has died had ordered."""
        roles = self._roles
        if roles.attachment is None or not roles.moving.acquire(blocking=False):  # Whoever moves rows follows the map.
            return
        try:
            servers = bucket_map(roles).servers
            if any(len(connection.servers) != servers for connection in self._connections):
                self._follow_map()
                roles.note_servers(now=True)
        finally:
            roles.moving.release()

    def _answer_requests(self) -> None:
        if not self._answers:
            self._answers = True
            answer_requests(self._roles, self.scale)
            if self.options.scaler is not None:
                start_scaler(self._roles, self.options.scaler, self._scale_from)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Returns the counters of every process by "role-rank", with the age of the report in seconds."""
        processes, _, coordinator = self._roles.started()
        reports = [p.handle.report.remote() for p in processes.all() if p.role != "coordinator" and p.info]
        if reports:
            ray.wait(reports, num_returns=len(reports), timeout=POLL_SECONDS)
        return coordinator.statistics()

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        with self._roles.lock:
            if not self._roles.closed:
                for connection in self._connections:
                    connection.close()
                self._roles.close()

    @property
    def control_address(self) -> str:
        """Returns the address for `persia control`; starts the cluster if needed."""
        return self._roles.started()[1].coordinator

    def __enter__(self) -> Ray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise ConfigError("A cluster can only be pickled as part of a function that is passed to its `run`.")
