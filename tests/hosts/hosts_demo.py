"""Trains over three hosts of this machine, one of which dies and comes back: `make demo-hosts`.

    PYTHONPATH=tests python tests/hosts/hosts_demo.py [--gbits 1] [--seconds 15]

The hosts are namespaces (see `support.hosts`): each has its own processes, addresses, `/dev/shm` and Ray, and a link of
a given rate to the others. Prints the rate of training and the bytes that each link has carried, every second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from persia import rpc
from support.hosts import UnavailableError
from support.hosts_training import BATCH
from support.ray_hosts import RayHosts

HOSTS = 3
WAIT_SECONDS = 240.0
"""How long to wait for the next message of the training, and for a condition."""


class HostsRun:
    """A training run over hosts: starts its driver on the first one, sends it commands and receives its messages.

    Args:
        hosts: hosts that run Ray.
        folder: directory of checkpoints and of the training's log.
    """

    def __init__(self, hosts: RayHosts, folder: Path) -> None:
        self._hosts = hosts
        self._began = time.monotonic()
        self._log_file = folder / "driver.log"
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._looked_up: dict[str, float] = {}
        self._moved = [(0, 0)] * HOSTS
        self._at = self._began
        self.trains = False
        """Whether samples were trained before the last message."""
        self.roles_by_host: dict[str, list[str]] = {}
        """Roles by address of their host."""
        with self._log_file.open("w") as log:
            self._driver = hosts.start(
                0,
                *("-m", "support.hosts_training", str(folder / "checkpoints")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def log(self, text: str) -> None:
        """Prints a text with the seconds since the start of the training."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def measure_rate(self, seconds: float) -> float:
        """Prints rates for some seconds, and until a sample was trained; returns the mean rate, samples/s."""
        end, rates = time.monotonic() + seconds, []
        for rate in self._rates(seconds + WAIT_SECONDS):
            rates.append(rate)
            if time.monotonic() >= end and any(rates):
                return sum(rates) / len(rates)
        raise AssertionError

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Prints rates until a condition holds."""
        for _ in self._rates(WAIT_SECONDS):
            if condition():
                return

    def add_embedding_worker(self) -> dict[str, list[str]]:
        """Adds an embedding worker, now that a host has joined; returns the roles by address."""
        self._send("scale")
        for message in self._messages(WAIT_SECONDS):
            if "scaled" in message:
                self.roles_by_host = message["scaled"]
                return self.roles_by_host
        raise AssertionError

    def stop(self) -> dict[str, Any]:
        """Ends the training and returns its result."""
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        for message in self._messages(WAIT_SECONDS):
            if "result" in message:
                result: dict[str, Any] = message["result"]
                return result
        raise AssertionError

    def close(self) -> None:
        """Ends the hosts, and the driver with its host."""
        self._hosts.hosts.close()
        self._driver.wait()
        self._reading.join()
        for pipe in (self._driver.stdin, self._driver.stdout):
            assert pipe is not None
            pipe.close()

    def _rates(self, seconds: float) -> Iterator[float]:
        """Yields the rate of each second, and prints it; see `_messages` for its deadline."""
        for message in self._messages(seconds):
            if "looked_up" not in message:
                continue
            now, counts = time.monotonic(), message["looked_up"]
            more = sum(max(0.0, count - self._looked_up.get(name, 0.0)) for name, count in counts.items())
            moved = [self._hosts.hosts.moved(number) for number in range(HOSTS)]
            links = [
                f"{max(0, sum(after) - sum(before)) / (now - self._at) / 1e6:6.1f}"
                for before, after in zip(self._moved, moved, strict=True)
            ]
            rate = more * BATCH / (now - self._at)
            self.log(f"{rate:8,.0f} samples/s; MB/s by link: {' '.join(links)}")
            self._looked_up, self._moved, self._at = counts, moved, now
            self.trains, self.roles_by_host = rate > 0, message["hosts"]
            yield rate

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Yields the messages of the training.

        Raises:
            AssertionError: the training failed or ended, no message came for `WAIT_SECONDS`, or `seconds` have passed.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            timeout = min(left, WAIT_SECONDS)
            try:
                message = self._queue.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"no message of the training for {timeout:.0f} s:\n{self._tail()}") from None
            if message is None:
                raise AssertionError(f"the training has ended:\n{self._tail()}")
            if "failed" in message:
                raise AssertionError(f"the training has failed:\n{message['failed']}")
            yield message
        raise AssertionError(f"the training did not reach the expected state in {seconds:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        """Returns the end of the log of the training."""
        return self._log_file.read_text()[-4000:]

    def _send(self, message: str) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(f"{message}\n")
        self._driver.stdin.flush()

    def _read(self) -> None:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith("{"):
                self._queue.put(json.loads(line))
        self._queue.put(None)


def run_scenario(hosts: RayHosts, seconds: float, folder: Path) -> dict[str, Any]:
    """Trains, kills a host and boots it again; returns the metrics.

    Args:
        hosts: hosts that run Ray, `HOSTS` of them.
        seconds: seconds of training before, without and after the host.
        folder: a directory without checkpoints.

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
        hosts.hosts.boot(victim)
        hosts.start_ray(victim)
        run.log(f"host {addresses[victim]} is back")
        metrics["rejoined"] = run.add_embedding_worker()
        metrics["after"] = run.measure_rate(seconds)
        metrics["result"] = run.stop()
        metrics["victim"] = addresses[victim]
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
