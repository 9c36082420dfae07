"""Health check of a process, and its optional Prometheus endpoint."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from persia.errors import ConfigError
from persia.telemetry.metrics import Health, Readings
from persia.telemetry.prometheus import Endpoint

__all__ = ["LOOPBACK", "ObservedProcess", "check_port"]

LOOPBACK = "127.0.0.1"


def check_port(port: int | None, field: str) -> None:
    """Raises ConfigError unless `port` is a port, 0 for any free port, or None."""
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16):
        raise ConfigError(f"Invalid {field} = {port!r}; expected a port from 0 to 65535, or none.", field=field)


class ObservedProcess:
    """Reports the health of one process. Thread-safe.

    Args:
        role: role of the process; "embedded" if it runs all roles.
        rank: rank within the role.
        observe: returns the current metrics.
    """

    def __init__(self, role: str, rank: int, observe: Callable[[], Readings]) -> None:
        self.incarnation = 1
        self._role = role
        self._rank = rank
        self._observe = observe
        self._began = time.monotonic()
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
        uptime = time.monotonic() - self._began
        who = (self._role, self._rank, self.incarnation, os.getpid(), socket.gethostname())
        return Health(*who, uptime, self._url, *self._observe())

    def close(self) -> None:
        """Stops the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
