"""A process that can be observed: it answers `health`, and has a Prometheus endpoint where asked for."""

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
    """Raises ConfigError unless this is a port to begin with, 0 for any, or None."""
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16):
        raise ConfigError(f"{field} = {port!r}; give a port from 0 to 65535, or leave it out.", field=field)


class ObservedProcess:
    """How one process is. Thread-safe.

    Args:
        role: of the process; "embedded" where it has all of them.
        rank: within the role.
        observe: what is observed of it now.
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
        """Serves figures to Prometheus from now on.

        Args:
            port: the first that is tried.
            host: interface to listen at.
            name: of this host, by which others reach it; `host` by default.

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
        """Ends the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
