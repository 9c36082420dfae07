"""A cluster of which only the control plane and the health of processes are real: fast to start, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from persia import rpc
from persia.cluster.ray.host import _Observable, together
from persia.cluster.ray.hosts import _ControlPlane
from persia.coordinator import CoordinatorServer, TokenScheduler
from persia.data.streams.offset_log import OffsetLog
from persia.services import ControlPlane, Observable
from persia.telemetry.metrics import Histogram, Metric, Readings, metrics_of
from persia.telemetry.process import ObservedProcess, process_metrics


class Trained:
    """The metrics of an NN worker and a PS that do some work with every reading."""

    def __init__(self) -> None:
        self.steps = 0
        self.readings = 0
        self.waits = Histogram()
        self.table = "item"

    def nn_worker(self) -> Readings:
        self.steps += 1
        self.waits.add(0.001)
        counts = {"step": self.steps, "rows": 100 * self.steps, "ready": 3, "loss": 0.25, "auc": 0.75}
        counts |= {"staleness_sum": 3 * self.steps, "staleness_lookups": 2 * self.steps}
        return Readings([*metrics_of("nn", counts), *process_metrics()], [self.waits.latency("nn_wait_seconds")])

    def embedding_ps(self) -> Readings:
        self.readings += 1
        counts = {"rows": 5, "lookups": 1000 * self.readings, "hits": 900 * self.readings}
        return Readings([Metric(f"ps_{n}", float(v), {"table": self.table}) for n, v in counts.items()], [])


@contextmanager
def observed_cluster(**roles: Callable[[], Readings]) -> Iterator[tuple[str, CoordinatorServer]]:
    """Serves the health of a process for each role; yields the control address, and the coordinator."""
    coordinator = CoordinatorServer()
    coordinator.regenerate(1)
    servers = []

    def serve(service: object, protocol: type, role: str, observe: Callable[[], Readings]) -> str:
        process = ObservedProcess(role, 0, observe)
        answers = protocol if protocol is Observable else together(protocol, Observable)
        servers.append(rpc.serve(_Observable(service, process), protocol=answers, tracer=process.tracer))
        return servers[-1].address

    plane = _ControlPlane(coordinator, TokenScheduler(10.0), OffsetLog())
    address = serve(plane, ControlPlane, "coordinator", lambda: Readings([], []))
    try:
        for role, observe in roles.items():
            coordinator.join(role, 0, serve(object(), Observable, role, observe))
        yield address, coordinator
    finally:
        for server in servers:
            server.close()
