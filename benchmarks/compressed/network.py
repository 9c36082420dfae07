"""A network of known bandwidth between processes of this machine.

`ShapedNetwork` gives each rank a network namespace, connects them through a bridge in one more, and limits both
directions of every link with `tc ... tbf`. It is the kernel's TCP over a slow link, so protocol overhead, several
flows on one link and the work of the processor are real; there is no added latency. It needs iproute2 and the right to
create namespaces (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN); `ShapedNetwork.allowed()` tells. Everything is removed on
`close()`, also of an interrupted run; names are random, so two networks do not meet. If a run was killed with
SIGKILL: `ip netns list | grep '^persia-bench' | cut -d' ' -f1 | xargs -n1 ip netns del`.

`Loopback` is what is left without the rights: one host, no limit; ranks pace their own connections (see paced.py), and
every JSON line says so.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from types import TracebackType
from typing import Protocol

__all__ = ["Loopback", "Network", "ShapedNetwork", "open_network"]

QUEUE_MS = 500
"""What a link buffers before it drops: long, so that TCP never loses a packet to the emulation."""
SMALLEST_BURST = 80_000
"""Bytes that may pass at once after a pause: at least one of the packets of 64 KiB that the kernel hands down."""
BURST_S = 0.25e-3
"""The same in time, for fast links: what the kernel's timers can keep."""


class Network(Protocol):
    """Where ranks run."""

    kind: str

    def command(self, rank: int) -> list[str]:
        """What stands before the command line of that rank's process."""
        ...

    def address(self, rank: int) -> str:
        """Where the others reach it."""
        ...

    def interface(self) -> str:
        """Name of the ranks' network interface."""
        ...

    def limit(self, gbit: float | None) -> None:
        """Sets the bandwidth of every link, each direction, in Gbit/s; None: unlimited."""
        ...

    def sent(self) -> list[int] | None:
        """Bytes that each rank has sent so far, headers included; None if that is not counted."""
        ...

    def close(self) -> None:
        """Takes it down."""
        ...


class Loopback:
    """One host, no limits, no rights needed."""

    kind = "loopback, each TCP connection paced: no rights for network namespaces"

    def command(self, rank: int) -> list[str]:
        return []

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def interface(self) -> str:
        return "lo"

    def limit(self, gbit: float | None) -> None:
        return None

    def sent(self) -> list[int] | None:
        return None

    def close(self) -> None:
        return None


class ShapedNetwork:
    """Namespaces, veth pairs, a bridge, token buckets.

    Args:
        ranks: how many hosts, at most 200.

    Raises:
        OSError: a command failed, most likely for lack of rights.
    """

    kind = "network namespaces, tc tbf on both directions of each link"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        name = f"persia-bench-{secrets.token_hex(4)}"
        self.hub = f"{name}-hub"
        self.hosts = [f"{name}-{rank}" for rank in range(ranks)]
        self._made: list[str] = []
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def allowed() -> bool:
        """Whether this machine and this user can do it."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            return False
        try:
            with ShapedNetwork(1) as network:
                network.limit(1.0)
        except OSError:
            return False
        return True

    def command(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self.hosts[rank]]

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def interface(self) -> str:
        return "eth0"

    def limit(self, gbit: float | None) -> None:
        for rank, host in enumerate(self.hosts):
            self._shape(host, "eth0", gbit)
            self._shape(self.hub, f"r{rank}", gbit)

    def sent(self) -> list[int] | None:
        links = {link["ifname"]: link for link in json.loads(_run("ip", "-n", self.hub, "-s", "-j", "link", "show"))}
        return [links[f"r{rank}"]["stats64"]["rx"]["bytes"] for rank in range(self.ranks)]

    def close(self) -> None:
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True, check=False, timeout=20)

    def __enter__(self) -> ShapedNetwork:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _set_up(self) -> None:
        for name in (self.hub, *self.hosts):
            _run("ip", "netns", "add", name)
            self._made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for rank, host in enumerate(self.hosts):
            port = f"r{rank}"
            _run("ip", "-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _run("ip", "-n", self.hub, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(rank)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")

    def _shape(self, namespace: str, device: str, gbit: float | None) -> None:
        if gbit is None:
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"],
                capture_output=True, check=False, timeout=20,
            )  # fmt: skip
            return
        burst = max(SMALLEST_BURST, int(BURST_S * gbit * 1e9 / 8))
        _run(
            "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
            "rate", f"{int(gbit * 1e9)}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms",
        )  # fmt: skip


def open_network(ranks: int) -> Network:
    """The shaped network, or the loopback where that is not allowed; says so once."""
    if ShapedNetwork.allowed():
        return ShapedNetwork(ranks)
    print("No rights for network namespaces: each TCP connection is paced instead.", file=sys.stderr)
    return Loopback()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
