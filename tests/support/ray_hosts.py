"""Ray on several hosts of this machine: see `support.hosts`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.hosts import Hosts

__all__ = ["RayHosts"]

TESTS = Path(__file__).parents[1]
PORT = 6379
FOLDER = "/dev/shm/ray"
"""Of each host."""
SECONDS = 120.0
QUICK_NOTICE = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ray considers a host dead that has not answered for 6 seconds, not 30."""


class RayHosts:
    """Hosts of which each runs Ray; the first one is the head. Use it as a context manager.

    Args:
        count: number of hosts.
        gbits: rate of each link, Gbit/s.
        keys: file with the CURVE keys of the roles.
        cpus: number of CPUs that Ray counts on each host.

    Attributes:
        hosts: the hosts.

    Raises:
        UnavailableError: this machine does not permit them; the message says why.
    """

    def __init__(self, count: int, gbits: float | None, keys: Path, cpus: int = 2) -> None:
        self._cpus = cpus
        paths = os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])
        self._environment = {
            "PERSIA_CURVE_KEYS": str(keys),
            "PYTHONPATH": paths,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **QUICK_NOTICE,
        }
        self.hosts = Hosts(count, gbits)
        try:
            self.start_ray(0)
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(self.start_ray, range(1, count)))
        except BaseException:
            self.hosts.close()
            raise

    def start_ray(self, number: int) -> None:
        """Starts Ray on a host, which joins the Ray of the first host. Returns once it has joined."""
        address = self.hosts.addresses[number]
        head = f"{self.hosts.addresses[0]}:{PORT}"
        where = ["--head", f"--port={PORT}", f"--temp-dir={FOLDER}", "--include-dashboard=false"]
        done = self.run(
            number,
            *("-m", "ray.scripts.scripts", "start", *(where if number == 0 else [f"--address={head}"])),
            *(f"--node-ip-address={address}", f"--num-cpus={self._cpus}", "--disable-usage-stats"),
            *("--object-store-memory=80000000",),
        )
        assert done.returncode == 0, f"Ray did not start on host {number}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    def run(self, number: int, *arguments: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Runs `python ARGUMENTS...` on a host to its end."""
        return self.hosts.run(number, sys.executable, *arguments, env=self._environment, seconds=seconds)

    def start(
        self, number: int, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts `python ARGUMENTS...` on a host."""
        return self.hosts.start(number, sys.executable, *arguments, env={**self._environment, **(env or {})}, **options)

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.close()
