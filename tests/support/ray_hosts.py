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
SECONDS = 240.0
RETRIES = 2
"""Ray gives itself 30 seconds to start, in which it imports itself several times: too few where much else runs."""
QUICK_NOTICE = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ray considers a host dead that has not answered for 6 seconds, not 30."""
LATE_NOTICE = {"RAY_health_check_timeout_ms": "120000", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
"""Ray considers a host dead that has not answered for two minutes: longer than a network fails in a test."""


class RayHosts:
    """Hosts of which each runs Ray; the first one is the head. Use it as a context manager.

    Args:
        count: number of hosts.
        gbits: rate of each link, Gbit/s.
        keys: file with the CURVE keys of the roles.
        cpus: number of CPUs that Ray counts on each host.
        notice: environment variables of Ray that say when it considers a host dead.
        clocks: libraries by number of a host, which all its processes load first; see `support.clocks`.

    Attributes:
        hosts: the hosts.

    Raises:
        UnavailableError: this machine does not permit them; the message says why.
    """

    def __init__(
        self,
        count: int,
        gbits: float | None,
        keys: Path,
        cpus: int = 2,
        notice: Mapping[str, str] = QUICK_NOTICE,
        clocks: Mapping[int, Path] | None = None,
    ) -> None:
        self._cpus = cpus
        self._clocks = clocks or {}
        paths = os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])
        self._environment = {
            "PERSIA_CURVE_KEYS": str(keys),
            "PYTHONPATH": paths,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **notice,
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
        start = [
            *("-m", "ray.scripts.scripts", "start", *(where if number == 0 else [f"--address={head}"])),
            *(f"--node-ip-address={address}", f"--num-cpus={self._cpus}", "--disable-usage-stats"),
            "--object-store-memory=80000000",
        ]
        done = self.run(number, *start)
        for _ in range(RETRIES):
            if done.returncode == 0:
                return
            self.run(number, "-m", "ray.scripts.scripts", "stop", "--force")
            done = self.run(number, *start)
        assert done.returncode == 0, f"Ray did not start on host {number}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    def run(
        self, number: int, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python ARGUMENTS...` on a host to its end."""
        environment = {**self._environment_of(number), **(env or {})}
        return self.hosts.run(number, sys.executable, *arguments, env=environment, seconds=seconds)

    def start(
        self, number: int, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts `python ARGUMENTS...` on a host."""
        environment = {**self._environment_of(number), **(env or {})}
        return self.hosts.start(number, sys.executable, *arguments, env=environment, **options)

    def _environment_of(self, number: int) -> dict[str, str]:
        clock = self._clocks.get(number)
        return self._environment if clock is None else {**self._environment, "LD_PRELOAD": str(clock)}

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.close()
