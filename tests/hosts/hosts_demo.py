"""Trains over three hosts of this machine, one of which dies and comes back: `make demo-hosts`.

    PYTHONPATH=tests python tests/hosts/hosts_demo.py [--gbits 1] [--seconds 15]

The hosts are namespaces (see `support.hosts`): each has its own processes, addresses, `/dev/shm` and Ray, and a link of
a given rate to the others. Prints the rate of training and the bytes that each link has carried, every second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from persia import rpc
from support.hosts import UnavailableError
from support.hosts_driver import HostsDriver
from support.hosts_training import BATCH
from support.ray_hosts import RayHosts

HOSTS = 3


class HostsRun(HostsDriver):
    """A training run over hosts: starts its driver on the first one, sends it commands and receives its messages.

    Args:
        hosts: hosts that run Ray.
        folder: directory of checkpoints and of the training's log.
    """

    def __init__(self, hosts: RayHosts, folder: Path) -> None:
        self._began = self._at = time.monotonic()
        self._looked_up: dict[str, float] = {}
        self._moved = [(0, 0)] * HOSTS
        self.trains = False
        """Whether samples were trained before the last message."""
        self.roles_by_host: dict[str, list[str]] = {}
        """Roles by address of their host."""
        super().__init__(hosts, folder / "driver.log", "-m", "support.hosts_training", str(folder / "checkpoints"))

    def log(self, text: str) -> None:
        """Prints a text with the seconds since the start of the training."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def measure_rate(self, seconds: float) -> float:
        """Prints rates for some seconds, and until a sample was trained; returns the mean rate, samples/s."""
        end, rates = time.monotonic() + seconds, []
        for rate in self._rates(seconds + self.WAIT_SECONDS):
            rates.append(rate)
            if time.monotonic() >= end and any(rates):
                return sum(rates) / len(rates)
        raise AssertionError

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Prints rates until a condition holds."""
        for _ in self._rates(self.WAIT_SECONDS):
            if condition():
                return

    def add_embedding_worker(self) -> dict[str, list[str]]:
        """Adds an embedding worker, now that a host has joined; returns the roles by address."""
        self.send("scale")
        self.roles_by_host = self.await_message("scaled", self.WAIT_SECONDS)
        return self.roles_by_host

    def stop(self) -> dict[str, Any]:
        """Ends the training and returns its result."""
        self.end_input()
        result: dict[str, Any] = self.await_message("result", self.WAIT_SECONDS)
        return result

    def _rates(self, seconds: float) -> Iterator[float]:
        """Yields the rate of each second, and prints it; see `messages` for its deadline."""
        for message in self.messages(seconds):
            if "looked_up" not in message:
                continue
            now, counts = time.monotonic(), message["looked_up"]
            more = sum(max(0.0, count - self._looked_up.get(name, 0.0)) for name, count in counts.items())
            moved = [self.hosts.hosts.moved(number) for number in range(HOSTS)]
            links = [
                f"{max(0, sum(after) - sum(before)) / (now - self._at) / 1e6:6.1f}"
                for before, after in zip(self._moved, moved, strict=True)
            ]
            rate = more * BATCH / (now - self._at)
            self.log(f"{rate:8,.0f} samples/s; MB/s by link: {' '.join(links)}")
            self._looked_up, self._moved, self._at = counts, moved, now
            self.trains, self.roles_by_host = rate > 0, message["hosts"]
            yield rate


def run_scenario(hosts: RayHosts, seconds: float, folder: Path, address: str = "") -> dict[str, Any]:
    """Trains, kills a host and boots it again; returns the metrics.

    Args:
        hosts: hosts that run Ray, `HOSTS` of them.
        seconds: seconds of training before, without and after the host.
        folder: a directory without checkpoints.
        address: address with which the host returns; empty for the one that it had.

    Raises:
        AssertionError: the training failed, or did not continue.
    """
    addresses = hosts.hosts.addresses
    with contextlib.closing(HostsRun(hosts, folder)) as run:
        run.wait_until(lambda: run.trains)
        for address, roles in sorted(run.roles_by_host.items()):
            run.log(f"{address}: {', '.join(sorted(roles))}")
        metrics: dict[str, Any] = {"placed": run.roles_by_host, "before": run.measure_rate(seconds)}
        run.wait_until((folder / "checkpoints" / "LATEST").exists)  # From which the rows of a lost host come back.
        # Not the host of the driver, which is the first one.
        victim = next(n for n in range(1, HOSTS) if "embedding_ps" in str(run.roles_by_host.get(addresses[n])))
        run.log(f"host {addresses[victim]} dies")
        died = time.monotonic()
        hosts.hosts.kill(victim)
        run.wait_until(lambda: run.trains and addresses[victim] not in run.roles_by_host)
        metrics["recovered_s"] = time.monotonic() - died
        run.log(f"it trains again after {metrics['recovered_s']:.1f} s")
        metrics["without"] = run.measure_rate(seconds)
        metrics["victim"], addresses[victim] = addresses[victim], address or addresses[victim]
        hosts.hosts.boot(victim)
        hosts.start_ray(victim)
        run.log(f"host {addresses[victim]} is back")
        metrics["rejoined"] = run.add_embedding_worker()
        metrics["after"] = run.measure_rate(seconds)
        metrics["result"] = run.stop()
        metrics["moved_bytes"] = {address: hosts.hosts.moved(number) for number, address in enumerate(addresses)}
        return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbits", type=float, default=1.0, help="rate of each link, Gbit/s")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds before, without and after the host")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        rpc.make_keys(keys)
        try:
            hosts = RayHosts(HOSTS, arguments.gbits, keys)
        except UnavailableError as reason:
            sys.exit(f"This needs hosts in namespaces: {reason}")
        with hosts:
            print(f"Ray runs on {', '.join(hosts.hosts.addresses)}, with {arguments.gbits:g} Gbit/s each", flush=True)
            metrics = run_scenario(hosts, arguments.seconds, Path(folder))
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
