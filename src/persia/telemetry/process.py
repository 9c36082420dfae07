"""Health check and traces of a process, and its optional Prometheus endpoint."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from persia.errors import ConfigError
from persia.telemetry.metrics import Health, Metric, Readings
from persia.telemetry.prometheus import Endpoint
from persia.telemetry.tracing import ProcessTrace, Tracer, clock_offset

__all__ = ["LOOPBACK", "ObservedProcess", "check_port", "process_metrics"]

LOOPBACK = "127.0.0.1"


def check_port(port: int | None, field: str) -> None:
    """Raises ConfigError unless `port` is a port, 0 for any free port, or None."""
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16):
        raise ConfigError(f"Invalid {field} = {port!r}; expected a port from 0 to 65535, or none.", field=field)


def process_metrics() -> list[Metric]:
    """Returns processor time and memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as counts:
        pages = int(counts.read().split()[1])
    memory = float(pages * os.sysconf("SC_PAGE_SIZE"))
    return [Metric("cpu_seconds", time.process_time(), {}), Metric("process_bytes", memory, {})]


class ObservedProcess:
    """Reports the health of one process, and traces it. Thread-safe.

    Args:
        role: role of the process; "embedded" if it runs all roles.
        rank: rank within the role.
        observe: returns the current metrics.

    Attributes:
        incarnation: number of restarts of this role and rank, counted from 1.
        tracer: records the spans of this process.
        reference: reads the clock to which the spans of `trace` are related; by default the clock of this process.
    """

    def __init__(self, role: str, rank: int, observe: Callable[[], Readings]) -> None:
        self.incarnation = 1
        self.tracer = Tracer()
        self.reference: Callable[[], float] = self.clock
        self._role = role
        self.rank = rank
        self._observe = observe
        self._start = time.monotonic()
        self._endpoint: Endpoint | None = None
        self._url = ""

    def expose(self, port: int, host: str, name: str = "") -> None:
        """Starts to serve metrics to Prometheus.

        Args:
            port: first port to try.
            host: interface to listen on.
            name: name by which other hosts reach this one; defaults to `host`.

        Raises:
            MissingExtraError: prometheus_client is not installed.
            ConfigError: no port is free.
        """
        self._endpoint = Endpoint(port, host, self.health)
        name = name or host
        self._url = f"http://{f'[{name}]' if ':' in name else name}:{self._endpoint.port}/metrics"

    def health(self) -> Health:
        """See `persia.services.Observable`."""
        uptime = time.monotonic() - self._start
        identity = (self._role, self.rank, self.incarnation, os.getpid(), socket.gethostname())
        return Health(*identity, uptime, self._url, *self._observe())

    def clock(self) -> float:
        """See `persia.services.Observable`."""
        return time.monotonic()

    def start_trace(self, seconds: float) -> None:
        """See `persia.services.Observable`."""
        self.tracer.start(seconds)

    def trace(self) -> ProcessTrace:
        """See `persia.services.Observable`."""
        self.tracer.stop()
        own_clock = self.reference == self.clock
        offset, uncertainty = (0.0, 0.0) if own_clock else clock_offset(self.reference)
        return self.tracer.trace(self._role, self.rank, os.getpid(), socket.gethostname(), offset, uncertainty)

    def close(self) -> None:
        """Stops the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
