"""The process of a role: what all roles have in common. Does not import what a single role needs."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from typing import Any

import ray

from persia import rpc
from persia.batching import default_threads
from persia.cluster.ray.process_plan import Plan, ProcessInfo
from persia.cluster.ray.stubs import reach_coordinator
from persia.errors import ConfigError
from persia.retry import Backoff, Deadline, retry
from persia.rpc.interface import describe
from persia.services import Coordinator, Observable
from persia.telemetry.logs import get_logger, log_to_stderr
from persia.telemetry.metrics import Metric, Readings
from persia.telemetry.process import LOOPBACK, ObservedProcess, process_metrics
from persia.types import TITLES

__all__ = ["Host", "cores", "together", "usable_processors"]

REPORT_SECONDS = 1.0
BIND_SECONDS = 5.0


class Host:
    """A process of a role. Ray creates it, and again after a crash if the role may restart.

    Args:
        plan: plan of the cluster.
        rank: rank within the role.
    """

    role = ""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        sys.path.extend(folder for folder in plan.path if folder not in sys.path)
        for module in plan.modules:
            importlib.import_module(module)
        title = repr(self)
        layout = f"%(asctime)s %(levelname)s {title}: %(message)s"
        log_to_stderr(plan.options.log_level.upper(), layout, force=True)
        self.log = get_logger("persia.cluster")
        self.server: rpc.Server | None = None
        self._watch = threading.Event()
        self.ready = False
        """Whether the role exists and can be observed."""
        self.process = ObservedProcess(self.role, rank, self._observe)
        if plan.options.prometheus_port is not None:
            name = ray.util.get_node_ip_address()
            interface = (LOOPBACK, LOOPBACK) if plan.loopback else ("::" if ":" in name else "0.0.0.0", name)
            self.process.expose(plan.options.prometheus_port, *interface)
        self.address = ""
        self.coordinator: Coordinator | None = None

    def __repr__(self) -> str:  # Ray's prefix of each line that the process prints.
        return f"{TITLES[self.role]} {self.rank}"

    def info(self) -> ProcessInfo:
        """Returns the location of this process once the role is ready."""
        context = ray.get_runtime_context()
        return ProcessInfo(
            os.getpid(),
            ray.util.get_node_ip_address(),
            context.get_node_id(),
            [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)],
            self.process.incarnation,
            self.address,
        )

    def watch(self) -> None:
        """Returns only if it is called again. The call fails when the process ends, which notifies the driver."""
        own = threading.Event()
        before, self._watch = self._watch, own
        before.set()  # Its connection was lost. Ray runs a limited number of calls at a time.
        own.wait()

    def report(self) -> None:
        """Reports the counters of this process to the coordinator."""
        assert self.coordinator is not None
        counters = {"cpu_seconds": time.process_time(), **self.counters()}
        if self.server is not None:
            counters.update((f"rpc.{name}", float(value)) for name, value in self.server.statistics().items())
        self.coordinator.report(self.role, self.rank, counters)

    def counters(self) -> dict[str, float]:
        """Returns the counters of the role."""
        return {}

    def observe(self) -> Readings:
        """Returns the metrics of the role."""
        return Readings([], [])

    def _observe(self) -> Readings:
        role_readings = self.observe() if self.ready else Readings([], [])
        served = self.server.observe() if self.server is not None else Readings([], [])
        return Readings(
            role_readings.metrics + served.metrics + process_metrics(),
            role_readings.latencies + served.latencies,
            role_readings.notes,
        )

    def serve(self, service: object, protocol: type, address: str = "") -> str:
        """Serves the role and `Observable` at this address, or at any address; returns the address."""
        answers = protocol if protocol is Observable else together(protocol, Observable)
        bind = functools.partial(
            rpc.serve,
            _Observable(service, self.process),
            address or f"{self.origin}*",
            protocol=answers,
            keys=self.plan.keys,
            tracer=self.process.tracer,
        )
        # A killed process may take a moment to release its address.
        self.server = retry(
            bind,
            transient=lambda error: isinstance(error, ConfigError),
            deadline=Deadline(BIND_SECONDS),
            backoff=Backoff(0.05, 0.5),
        )
        self.address = self.server.address
        return self.address

    @property
    def origin(self) -> str:
        """Prefix of the addresses of this host."""
        host = "127.0.0.1" if self.plan.loopback else ray.util.get_node_ip_address()
        return f"tcp://[{host}]:" if ":" in host else f"tcp://{host}:"

    def join(self, address: str) -> Coordinator:
        """Joins the membership, and starts reporting at intervals."""
        if self.coordinator is None:
            self.coordinator = reach_coordinator(self.plan)
            self.process.reference = rpc.cast_to(Observable, self.coordinator).clock
            threading.Thread(target=self._report_always, name="persia-report", daemon=True).start()
        incarnation = self.coordinator.join(self.role, self.rank, address).incarnation
        self.process.incarnation = incarnation
        self.ready = True
        self.log.info("joined as incarnation %d, listens at %s", incarnation, address)
        return self.coordinator

    def rejoin(self) -> ProcessInfo:
        """Joins the membership again, after the driver marked this process as dead because it was unreachable.

        Others continue as after a restart: this process may have missed what they did meanwhile.
        """
        assert self.coordinator is not None
        self.process.incarnation = self.coordinator.join(self.role, self.rank, self.address).incarnation
        self.log.warning("was out of reach, and has joined again as incarnation %d", self.process.incarnation)
        return self.info()

    def _report_always(self) -> None:
        while True:
            time.sleep(REPORT_SECONDS)
            try:
                self.report()
            except Exception as error:  # Another report follows.
                self.log.info("report failed: %s", error)


def together(*protocols: type) -> type:
    """Returns a class with the methods of several Protocols and the name of the first one."""
    return type(protocols[0].__name__, protocols, {})


class _Observable:
    """A role that also answers the calls of `Observable`."""

    def __init__(self, service: object, process: ObservedProcess) -> None:
        self._service = service
        for name in describe(Observable):
            setattr(self, name, getattr(process, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


def cores(plan: Plan) -> int:
    """Returns the number of threads of a store."""
    return plan.options.threads or default_threads()


def usable_processors(plan: Plan) -> Metric:
    """Returns the number of processors that a store or an embedding worker can use, as a metric."""
    return Metric("process_processors", float(min(cores(plan), len(os.sched_getaffinity(0)))), {})
