"""The process of an NN worker: runs the user's function, with torch.distributed and the cluster at hand."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import ray

from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.hosts import Host, together
from persia.cluster.ray.plan import Plan, Service
from persia.errors import ConfigError
from persia.modes import Mode, encode
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection, DenseMaker, DensePS, Observable, Recordable
from persia.telemetry.metrics import Readings, figures

__all__ = ["CLUSTER", "DenseServerHost", "NNWorkerHost", "Outcome", "Request", "WorkerProcess"]

CLUSTER = "persia cluster"
"""Stands for the cluster in a pickled function."""


class Outcome(NamedTuple):
    """Outcome of a function.

    Attributes:
        value: what it returned.
        error: what it raised, or None.
        trace: of that, for people.
    """

    value: Any
    error: BaseException | None = None
    trace: str = ""


class Request(NamedTuple):
    """A request of the user's function to the driver.

    Attributes:
        number: of the request.
        operation: method of the cluster in the driver.
        arguments: of it.
    """

    number: int
    operation: str
    arguments: tuple[Any, ...]


class _Answer(NamedTuple):
    done: threading.Event
    outcome: list[Outcome]


class NNWorkerHost(Host):
    """Process of an NN worker. Its requests travel as answers to the driver's calls: only the driver makes calls."""

    role = "nn_worker"

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        import torch

        from persia.dense.torch_threads import default_torch_threads

        threads = plan.options.threads
        if threads is None:
            here = plan.nn_workers if plan.loopback else 1
            threads = default_torch_threads(here)
        torch.set_num_threads(threads)
        if plan.loopback:  # The name of the host may resolve to an interface that does not reach itself.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._requests: queue.Queue[Request] = queue.Queue()
        self._answers: dict[int, _Answer] = {}
        self._numbers = itertools.count(1)

        self.halted = False
        """Whether the driver has asked the function to end."""
        self.observer: Callable[[], Readings] | None = None
        """Reads the metrics of the function's trainer."""

    def observe(self) -> Readings:
        """Returns the metrics of the trainer, if there is one."""
        return self.observer() if self.observer is not None else Readings([], [])

    # --- for the driver -----------------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int]:
        """Returns a free address on this host, for torch.distributed."""
        host = "127.0.0.1" if self.plan.loopback else ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port: int = free.getsockname()[1]
            return host, port

    def run(self, function: bytes, generation: int, rendezvous: tuple[str, int], keeps: bool) -> Outcome:
        """Runs a function, with a process group of all NN workers, and returns how it ended.

        Args:
            function: pickled.
            generation: of the NN workers.
            rendezvous: where they meet.
            keeps: whether the driver keeps what it is given, and begins anew from that.
        """
        import torch

        self.halted = False
        self.join(self.serve(self, Observable))  # In this generation.
        backend = "cpu:gloo,cuda:nccl" if self.plan.options.gpus and torch.cuda.is_available() else "gloo"
        cluster = WorkerProcess(self, generation, keeps)
        try:
            torch.distributed.init_process_group(
                backend,
                init_method="tcp://{}:{}".format(*rendezvous),
                rank=self.rank,
                world_size=self.plan.nn_workers,
                timeout=datetime.timedelta(seconds=self.plan.options.timeout),
            )
            work: Callable[[], Any] = _Unpickler(BytesIO(function), cluster).load()
            return Outcome(work())
        except BaseException as error:
            return _failed(error)
        finally:
            cluster.close()
            self.observer = None
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    def halt(self) -> None:
        """Asks the function to end after its step. The driver repeats the call until it has ended."""
        self.halted = True

    def next_request(self, timeout: float) -> Request | None:
        """Returns the next request of the function to the driver; None if there is none in this time."""
        try:
            return self._requests.get(timeout=timeout)
        except queue.Empty:
            return None

    def answer(self, number: int, outcome: Outcome) -> None:
        """Takes the driver's answer to a request."""
        waiting = self._answers.pop(number)
        waiting.outcome.append(outcome)
        waiting.done.set()

    # --- for the function ---------------------------------------------------------------------------------------

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Sends a request to the driver, and waits for the answer."""
        number = next(self._numbers)
        waiting = self._answers[number] = _Answer(threading.Event(), [])
        self._requests.put(Request(number, operation, arguments))
        # No deadline of its own: the driver ends this process when it fails or is late.
        waiting.done.wait()
        outcome = waiting.outcome[0]
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


class DenseServerHost(Host):
    """Process of a dense PS."""

    role = "dense_ps"

    def __init__(self, plan: Plan, rank: int, maker: DenseMaker) -> None:
        super().__init__(plan, rank)
        import torch

        from persia.dense import DenseServer
        from persia.dense.torch_threads import default_torch_threads

        torch.set_num_threads(plan.options.threads or default_torch_threads(plan.options.dense_ps))
        self.servant = DenseServer(maker, rank, plan.options.dense_ps, plan.options.timeout)
        self.join(self.serve(self.servant, together(DensePS, Recordable)))

    def observe(self) -> Readings:
        """Returns the counters of the role."""
        return Readings(figures("dense", self.servant.statistics()), [])

    def counters(self) -> dict[str, float]:
        """Returns the metrics of the role."""
        return {name: float(value) for name, value in self.servant.statistics().items()}


class _Unpickler(pickle.Unpickler):
    """Unpickles a function, with this process's view of the cluster in place of the driver's."""

    def __init__(self, file: BytesIO, cluster: WorkerProcess) -> None:
        super().__init__(file)
        self._cluster = cluster

    def persistent_load(self, name: Any) -> Any:
        if name != CLUSTER:
            raise pickle.UnpicklingError(f"unknown object {name!r}")
        return self._cluster


def _failed(error: BaseException) -> Outcome:
    trace = "".join(traceback.format_exception(error))
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        return Outcome(None, RuntimeError(f"{type(error).__qualname__}: {error}"), trace)
    return Outcome(None, error.with_traceback(None), trace)


class WorkerProcess:
    """The form of `Ray(...)` on an NN worker: `connect` returns the connection of that worker.

    Args:
        host: the process.
        generation: of the NN workers.
        keeps: whether the driver keeps what it is given.
    """

    def __init__(self, host: NNWorkerHost, generation: int, keeps: bool = False) -> None:
        self._host = host
        self._generation = generation
        self._keeps = keeps
        self._linked: WorkerConnection | None = None

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Waits for the roles, which the first call of any NN worker starts.

        Raises:
            ConfigError: the cluster serves something else, or this run is connected already.
        """
        if self._linked is not None:
            raise ConfigError(
                "A second EmbeddingCollection (or Trainer) was made in one run on this cluster. Make one, and put all "
                "tables into its schema; or use another cluster.",
                field="cluster",
            )
        host = self._host
        fed: bool = host.ask("serve", Service(schema, optimizer, encode(mode), seed))
        assert host.coordinator is not None
        begin = functools.partial(host.ask, "begin") if fed else None
        make_dense = functools.partial(host.ask, "serve_dense")
        self._linked = WorkerConnection(host.coordinator, host.plan, host.rank, self._generation, begin, make_dense)
        keep = functools.partial(host.ask, "keep") if self._keeps else None

        def observe(trainer: Callable[[], Readings]) -> None:
            host.observer = trainer

        return self._linked.connection._replace(observe=observe, keep=keep, halted=lambda: host.halted)

    def close(self) -> None:
        """Ends the connection."""
        if self._linked is not None:
            self._linked.close()
