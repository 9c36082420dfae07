"""The processes that use torch: NN workers, which run the user's function, and dense PSs."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import itertools
import os
import pickle
import queue
import socket
import struct
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from io import BytesIO
from typing import Any, NamedTuple

import ray

from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.feeding import SourceKind
from persia.cluster.ray.host import Host, together
from persia.cluster.ray.process_plan import Plan, Service
from persia.cluster.ray.sigterm import on_sigterm
from persia.errors import ConfigError
from persia.modes import Mode, encode
from persia.openmp import limit_spinning
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection, DenseMaker, DensePS, NNWorkersChange, Observable, Recordable
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Readings, metrics_of

__all__ = [
    "CLUSTER",
    "DenseServerHost",
    "NNWorkerHost",
    "Outcome",
    "Request",
    "Seat",
    "WorkerProcess",
    "await_connected",
    "check_cuda",
    "interface_of",
    "warn_of_idle_gpus",
]

LOG = get_logger("persia.cluster")

SIOCGIFADDR = 0x8915
"""Linux ioctl that reads the IPv4 address of an interface."""

CONNECT_SECONDS = 10.0
_CONNECTED = "persia/connected/"
"""Begin of the keys that say which NN workers have connected."""

CLUSTER = "persia cluster"
"""Placeholder for the cluster in a pickled function."""


class Outcome(NamedTuple):
    """Result of a function.

    Attributes:
        value: value that the function returned.
        error: error that the function raised, or None.
        trace: formatted traceback of the error.
    """

    value: Any
    error: BaseException | None = None
    trace: str = ""


class Request(NamedTuple):
    """A request of the user's function to the driver.

    Attributes:
        number: number of the request.
        operation: method of the cluster in the driver.
        arguments: arguments of the method.
    """

    number: int
    operation: str
    arguments: tuple[Any, ...]


class Seat(NamedTuple):
    """Place of an NN worker in a run. It differs from run to run, as NN workers join and leave.

    Attributes:
        rank: rank of the NN worker.
        nn_workers: number of NN workers.
        share: see `persia.services.ProcessCluster`.
    """

    rank: int
    nn_workers: int
    share: Fraction


class NNWorkerHost(Host):
    """Process of an NN worker. Its requests are results of the driver's calls, as only the driver makes calls."""

    role = "nn_worker"

    def __init__(self, plan: Plan, rank: int) -> None:
        limit_spinning()  # Modules of the user, which `super` imports, may load torch.
        super().__init__(plan, rank)
        self._set_threads()
        # By default gloo takes the interface that the host name resolves to: it may not reach the host itself, or may
        # be public.
        interface = "lo" if plan.loopback else interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._requests: queue.Queue[Request] = queue.Queue()
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._served: Any = None
        self.halted = False
        """Whether the driver has requested that the function end."""
        self.change: NNWorkersChange | None = None
        """The number of NN workers with which the driver has requested that training continue."""
        self.observer: Callable[[], Readings] | None = None
        """Reads the metrics of the function's trainer."""
        self._may_leave = False
        """Whether a function runs that continues if this NN worker leaves."""
        on_sigterm(self._leave)

    def observe(self) -> Readings:
        """Returns the metrics of the trainer, if there is one."""
        return self.observer() if self.observer is not None else Readings([], [])

    def _leave(self) -> bool:
        """Asks the driver to continue without this NN worker; the driver ends this process. Returns whether it may."""
        if self._may_leave:
            number = next(self._numbers)
            self._answers[number] = Future()  # Nothing waits for it.
            node = ray.get_runtime_context().get_node_id()
            self._requests.put(Request(number, "leave", (os.getpid(), node)))
        return self._may_leave

    def _set_threads(self) -> None:
        import torch

        from persia.dense.torch_threads import default_torch_threads

        threads = self.plan.options.threads
        if threads is None:
            threads = default_torch_threads(self.plan.nn_workers if self.plan.loopback else 1)
        torch.set_num_threads(threads)

    # --- for the driver -----------------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int]:
        """Starts the store of the next run's process group on a free port; returns its address."""
        host = "127.0.0.1" if self.plan.loopback else ray.util.get_node_ip_address()
        # By default, the store would listen on every interface, and anyone could write to it.
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            port = listening.getsockname()[1]
            # The socket already listens, as another process could take a port that is merely free. Other NN workers
            # may use the store for their last batches after the function has returned here, so the store lives
            # until the next run.
            self._served = self._store_at(host, port, listening.detach())
        return host, port

    def _store_at(self, host: str, port: int, listening: int | None = None) -> Any:
        """Returns the store at an address. With a listening socket, serves the store on it and closes it later."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # It is documented.

        return TCPStore(
            host,
            port,
            is_master=listening is not None,
            timeout=datetime.timedelta(seconds=self.plan.options.timeout),
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    def prepare(self, function: bytes) -> None:
        """Imports what a function needs, so that it begins sooner here than in a new process."""
        import torch

        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], 0.1)  # The first optimizer of a process imports torch._dynamo, for seconds.
        _Unpickler(BytesIO(function), WorkerProcess(self, 0)).load()

    def run(self, function: bytes, generation: int, rendezvous: tuple[str, int], recovers: bool, seat: Seat) -> Outcome:
        """Runs a function with a process group of all NN workers, and returns its outcome.

        Args:
            function: pickled function.
            generation: generation of the NN workers.
            rendezvous: address of the store of their process group.
            recovers: whether the driver stores recovery points, and restarts NN workers from the last one.
            seat: place of this NN worker.
        """
        import torch

        self.halted, self.change = False, None
        self.rank, self.plan = seat.rank, self.plan._replace(nn_workers=seat.nn_workers)
        self.process.rank = seat.rank
        self._set_threads()
        self.join(self.serve(self, Observable))  # In this generation.
        cluster = WorkerProcess(self, generation, recovers, seat.share)
        store = None
        try:
            check_cuda(self.plan.options.gpus, self.rank)
            store = self._served or self._store_at(*rendezvous)
            torch.distributed.init_process_group(
                self.plan.options.process_group_backend,
                store=store,
                rank=self.rank,
                world_size=self.plan.nn_workers,
                timeout=datetime.timedelta(seconds=self.plan.options.timeout),
            )
            store.set(f"{_CONNECTED}{self.rank}", b"")
            work: Callable[[], Any] = _Unpickler(BytesIO(function), cluster).load()
            self._may_leave = recovers
            return Outcome(work())
        except BaseException as error:
            return _failed(error)
        finally:
            self._may_leave = False
            cluster.close()
            self.observer = None
            if torch.distributed.is_initialized():
                await_connected(store, self.plan.nn_workers)
                torch.distributed.destroy_process_group()

    def halt(self) -> None:
        """Requests that the function end after its current step. The driver repeats the call until it has ended."""
        self.halted = True

    def request_change(self, change: NNWorkersChange) -> None:
        """Requests that the function end for another number of NN workers. Repeated until it has ended, or refuses."""
        self.change = change

    def next_request(self, timeout: float) -> Request | None:
        """Returns the next request of the function to the driver; None if there is none within `timeout`."""
        try:
            return self._requests.get(timeout=timeout)
        except queue.Empty:
            return None

    def answer(self, number: int, outcome: Outcome) -> None:
        """Forwards the driver's answer to the request that waits for it."""
        answer = self._answers.pop(number)
        if outcome.error is not None:
            answer.set_exception(outcome.error)
        else:
            answer.set_result(outcome.value)

    # --- for the function ---------------------------------------------------------------------------------------

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Sends a request to the driver, and waits for the answer."""
        number = next(self._numbers)
        answer: Future[Any] = Future()
        self._answers[number] = answer
        self._requests.put(Request(number, operation, arguments))
        return answer.result()  # Needs no deadline: the driver ends this process when it fails or is late.


class DenseServerHost(Host):
    """Process of a dense PS."""

    role = "dense_ps"

    def __init__(self, plan: Plan, rank: int, maker: DenseMaker) -> None:
        limit_spinning()  # Modules of the user, which `super` imports, may load torch.
        super().__init__(plan, rank)
        import torch

        from persia.dense import DenseServer
        from persia.dense.torch_threads import default_torch_threads

        torch.set_num_threads(plan.options.threads or default_torch_threads(plan.options.dense_ps))
        self.servant = DenseServer(maker, rank, plan.options.dense_ps, plan.options.timeout)
        self.join(self.serve(self.servant, together(DensePS, Recordable)))

    def observe(self) -> Readings:
        """Returns the metrics of the role."""
        return Readings(metrics_of("dense", self.servant.statistics()), [])

    def counters(self) -> dict[str, float]:
        """Returns the counters of the role."""
        return {name: float(value) for name, value in self.servant.statistics().items()}


class _Unpickler(pickle.Unpickler):
    """Unpickles a function, with this process's view of the cluster in place of the driver's."""

    def __init__(self, file: BytesIO, cluster: WorkerProcess) -> None:
        super().__init__(file)
        self._cluster = cluster

    def persistent_load(self, name: Any) -> Any:
        if name != CLUSTER:
            raise pickle.UnpicklingError(f"Unknown persistent object {name!r}.")
        return self._cluster


def check_cuda(gpus: float, rank: int) -> None:
    """Checks that an NN worker can use the GPUs that are reserved for it, and would not train on the CPU.

    Raises:
        ConfigError: torch finds no CUDA device.
    """
    import torch

    if gpus and not torch.cuda.is_available():
        raise ConfigError(
            f"RayOptions.gpus reserves {gpus:g} GPU for each NN worker, but torch {torch.__version__} sees no CUDA "
            f"device in NN worker {rank} on {ray.util.get_node_ip_address()}. Install a torch with CUDA and the GPU's "
            "driver on that host, or set gpus=0 to train on CPUs.",
            field="gpus",
        )


def warn_of_idle_gpus(gpus: float) -> None:
    """Logs a warning if Ray has GPUs, but none is reserved for NN workers. For the driver."""
    gpus_of_ray = ray.cluster_resources().get("GPU", 0)
    if gpus_of_ray and not gpus:
        LOG.warning(
            "Ray has GPUs (%g), but RayOptions.gpus is 0, so it gives none to NN workers. RayOptions(gpus=1) gives one "
            "to each.",
            gpus_of_ray,
        )


def await_connected(store: Any, nn_workers: int, seconds: float = CONNECT_SECONDS) -> None:
    """Waits until all NN workers have connected with each other, or `seconds` have passed.

    A function without a collective may end here before another NN worker has connected with this one. It would fail
    if this one's connections were closed by then.

    Args:
        store: of the process group, in which each NN worker says that it has connected.
        nn_workers: number of NN workers.
        seconds: deadline. Whoever is later has died or failed, which the driver reports.
    """
    keys = [f"{_CONNECTED}{rank}" for rank in range(nn_workers)]
    with contextlib.suppress(RuntimeError):  # Late, or the store's process is gone.
        store.wait(keys, datetime.timedelta(seconds=seconds))


def _failed(error: BaseException) -> Outcome:
    trace = "".join(traceback.format_exception(error))
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        return Outcome(None, RuntimeError(f"{type(error).__qualname__}: {error}"), trace)
    return Outcome(None, error.with_traceback(None), trace)


class WorkerProcess:
    """The view of the cluster in the user's function: `connect` returns the connection of this NN worker.

    Args:
        host: the process.
        generation: generation of the NN workers.
        recovers: whether the driver stores recovery points.
        share: see `persia.services.ProcessCluster`.
    """

    def __init__(
        self, host: NNWorkerHost, generation: int, recovers: bool = False, share: Fraction = Fraction(1)
    ) -> None:
        self.share = share
        self._host = host
        self._generation = generation
        self._recovers = recovers
        self._connected: WorkerConnection | None = None

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Waits for the roles, which the first call of any NN worker starts.

        Raises:
            ConfigError: the cluster serves another service, or this run is already connected.
        """
        if self._connected is not None:
            raise ConfigError(
                "This run already has an EmbeddingCollection (or Trainer) on this cluster. Put all tables into one "
                "schema, or use another cluster.",
                field="cluster",
            )
        host = self._host
        fed: SourceKind = host.ask("serve", Service(schema, optimizer, encode(mode), seed))
        assert host.coordinator is not None
        begin = functools.partial(host.ask, "begin") if fed is not None else None
        commit = functools.partial(host.ask, "commit") if fed == "stream" else None
        make_dense = functools.partial(host.ask, "serve_dense")
        self._connected = WorkerConnection(
            host.coordinator, host.plan, host.rank, self._generation, begin, make_dense, commit, begin_rounds=True
        )
        save = functools.partial(host.ask, "save_recovery_point") if self._recovers else None

        def observe(trainer: Callable[[], Readings]) -> None:
            host.observer = trainer

        return self._connected.connection._replace(
            observe=observe,
            save_recovery_point=save,
            halted=lambda: host.halted,
            tracer=host.process.tracer,
            changes=_Changes(host) if self._recovers else None,
            survives=self._recovers and host.plan.options.nn_worker_deaths == "leave",
        )

    def close(self) -> None:
        """Closes the connection."""
        if self._connected is not None:
            self._connected.close()


class _Changes:
    """See `persia.services.NNWorkersChanges`."""

    def __init__(self, host: NNWorkerHost) -> None:
        self._host = host

    @property
    def requested(self) -> NNWorkersChange | None:
        """The change that the driver has requested."""
        return self._host.change

    def accept(self, change: NNWorkersChange) -> bool:
        """Accepts a change, unless the driver has withdrawn it."""
        accepted: bool = self._host.ask("accept_change", change.number)
        if not accepted:
            self._host.change = None  # The driver repeats one that it still requests.
        return accepted

    def refuse(self, change: NNWorkersChange, reason: str) -> None:
        """Refuses a change; the driver raises the reason."""
        self._host.change = None
        self._host.ask("refuse_change", change.number, reason)


def interface_of(address: str) -> str | None:
    """Returns the network interface with an IPv4 address; None if there is none, or for other kinds of addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # The interface has no IPv4 address.
                reply = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
