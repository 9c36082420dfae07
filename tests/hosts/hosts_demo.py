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
from support.hosts_story import BATCH
from support.ray_hosts import RayHosts

HOSTS = 3
WAIT_SECONDS = 240.0
"""How long to wait for the next message of the training, and for a condition."""


class Story:
    """A training over hosts, seen from outside.

    Args:
        hosts: hosts that run Ray.
        folder: directory of checkpoints and of the training's log.
    """

    def __init__(self, hosts: RayHosts, folder: Path) -> None:
        self._hosts = hosts
        self._began = time.monotonic()
        self._log = folder / "driver.log"
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._looked_up: dict[str, float] = {}
        self._moved = [(0, 0)] * HOSTS
        self._at = self._began
        self.trains = False
        """Whether samples were trained in the last second."""
        self.places: dict[str, list[str]] = {}
        """Roles by address of their host."""
        with self._log.open("w") as log:
            self._driver = hosts.start(
                0,
                *("-m", "support.hosts_story", str(folder / "checkpoints")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def say(self, text: str) -> None:
        """Prints what happens, with the seconds since the training was started."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def follow(self, seconds: float) -> float:
        """Prints rates for some seconds, and until a sample was trained; returns the mean rate, samples/s."""
        end, rates = time.monotonic() + seconds, []
        for rate in self._rates(seconds + WAIT_SECONDS):
            rates.append(rate)
            if time.monotonic() >= end and any(rates):
                return sum(rates) / len(rates)
        raise AssertionError

    def until(self, condition: Callable[[], bool]) -> None:
        """Prints rates until a condition holds."""
        for _ in self._rates(WAIT_SECONDS):
            if condition():
                return

    def joined(self) -> dict[str, list[str]]:
        """Adds an embedding worker, now that a host has joined; returns the roles by address."""
        self._tell("joined")
        for line in self._following(WAIT_SECONDS):
            if "scaled" in line:
                self.places = line["scaled"]
                return self.places
        raise AssertionError

    def end(self) -> dict[str, Any]:
        """Ends the training and returns its result."""
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        for line in self._following(WAIT_SECONDS):
            if "result" in line:
                result: dict[str, Any] = line["result"]
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
        """Yields the rate of each second, and prints it; see `_following` for its deadline."""
        for line in self._following(seconds):
            if "looked_up" not in line:
                continue
            now, counts = time.monotonic(), line["looked_up"]
            more = sum(max(0.0, count - self._looked_up.get(name, 0.0)) for name, count in counts.items())
            moved = [self._hosts.hosts.moved(number) for number in range(HOSTS)]
            links = [
                f"{max(0, sum(after) - sum(before)) / (now - self._at) / 1e6:6.1f}"
                for before, after in zip(self._moved, moved, strict=True)
            ]
            rate = more * BATCH / (now - self._at)
            self.say(f"{rate:8,.0f} samples/s; MB/s by link: {' '.join(links)}")
            self._looked_up, self._moved, self._at = counts, moved, now
            self.trains, self.places = rate > 0, line["hosts"]
            yield rate

    def _following(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Yields the messages of the training.

        Raises:
            AssertionError: the training failed or ended, no message came for `WAIT_SECONDS`, or `seconds` have passed.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            timeout = min(left, WAIT_SECONDS)
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"no message of the training for {timeout:.0f} s:\n{self._tail()}") from None
            if line is None:
                raise AssertionError(f"the training has ended:\n{self._tail()}")
            if "failed" in line:
                raise AssertionError(f"the training has failed:\n{line['failed']}")
            yield line
        raise AssertionError(f"the training did not reach the expected state in {seconds:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        """Returns the end of the log of the training."""
        return self._log.read_text()[-4000:]

    def _tell(self, line: str) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(f"{line}\n")
        self._driver.stdin.flush()

    def _read(self) -> None:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)


def tell(hosts: RayHosts, seconds: float, folder: Path) -> dict[str, Any]:
    """Runs the whole story; returns its figures.

    Args:
        hosts: hosts that run Ray, `HOSTS` of them.
        seconds: seconds of training before, without and after the host.
        folder: a directory without checkpoints.
    """
    addresses = hosts.hosts.addresses
    with contextlib.closing(Story(hosts, folder)) as story:
        story.until(lambda: story.trains)
        for address, roles in sorted(story.places.items()):
            story.say(f"{address}: {', '.join(sorted(roles))}")
        figures: dict[str, Any] = {"placed": story.places, "before": story.follow(seconds)}
        story.until((folder / "checkpoints" / "LATEST").exists)  # From which the rows of a lost host come back.
        # Not the host of the driver, which is the first one.
        victim = next(n for n in range(1, HOSTS) if "embedding_ps" in str(story.places.get(addresses[n])))
        story.say(f"host {addresses[victim]} dies")
        died = time.monotonic()
        hosts.hosts.kill(victim)
        story.until(lambda: story.trains and addresses[victim] not in story.places)
        figures["recovered_s"] = time.monotonic() - died
        story.say(f"it trains again after {figures['recovered_s']:.1f} s")
        figures["without"] = story.follow(seconds)
        hosts.hosts.boot(victim)
        hosts.start_ray(victim)
        story.say(f"host {addresses[victim]} is back")
        figures["rejoined"] = story.joined()
        figures["after"] = story.follow(seconds)
        figures["result"] = story.end()
        figures["victim"] = addresses[victim]
        figures["moved_bytes"] = {address: hosts.hosts.moved(number) for number, address in enumerate(addresses)}
        return figures


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
            figures = tell(hosts, arguments.seconds, Path(folder))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
