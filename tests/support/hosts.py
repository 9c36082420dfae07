"""Virtual hosts on this machine: namespaces with their own processes, `/dev/shm` and addresses, joined by links.

A switch (a bridge) joins their links. Everything lives in namespaces that the first process of a host, or of the
switch, holds: its end, also by the death of this process, ends all processes of the host, and removes its links and its
`/dev/shm`. Nothing is left in the namespaces of this process.

Needs root, a kernel and container that permit namespaces, `unshare` and `nsenter`, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from support.packet_relay import Treatment

__all__ = ["NETWORK", "Hosts", "Treatment", "UnavailableError"]

PROGRAMS = ("setpriv", "unshare", "nsenter", "ip", "tc", "ss")
RELAY = Path(__file__).with_name("packet_relay.py")
NETWORK = "10.213.77"
COMMAND_SECONDS = 60.0
QUEUE_SECONDS = 0.05
"""How much a link queues before it drops, as a switch does."""
UNSHAPED_GBITS = 100.0
BURST_SECONDS = 0.001
LEAST_BURST = 128 << 10
"""Bytes; a packet of TCP may have 64 KiB until it leaves the host."""
LOSE = "4,32 0 0 4294963256,53 1 0 {},6 0 0 4294967295,6 0 0 0"
"""A classic BPF program that matches a share of all packets at random, as 2^32 times the share."""
FIRST = (
    "mount -t tmpfs -o size=50% tmpfs /dev/shm && hostname {} && ip link set lo up && echo ready"
    " && {{ sleep infinity & wait; }}"  # Not as the last command: bash would become it, and reap no orphan.
)


class UnavailableError(Exception):
    """This machine does not permit hosts, or lacks a program; raised only by the constructor of `Hosts`."""


class Hosts:
    """Hosts that reach one another by a switch. Use it as a context manager, or `close` it.

    Args:
        count: number of hosts, 1 to 200.
        gbits: rate of each link in each direction, Gbit/s; None for as fast as the kernel copies.

    Attributes:
        addresses: address of each host. A host that was killed may boot with another one.

    Raises:
        UnavailableError: this machine does not permit them; the message says why.
    """

    def __init__(self, count: int, gbits: float | None = None) -> None:
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise UnavailableError(f"hosts need {', '.join(missing)}, which is not installed")
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self._gbits = [gbits] * count
        self._lost = [0.0] * count
        self._hosts: list[_First | None] = [None] * count
        self._relays: dict[int, subprocess.Popen[str]] = {}
        self._switch: _First | None = None
        try:
            self._switch = _First("unshare", "--net", "sh", "-c", "echo ready && exec sleep infinity")
            self._on_switch("ip link add name switch type bridge")
            self._on_switch("ip link set switch up")
            for number in range(count):
                self._boot(number)
        except RuntimeError as error:
            self.close()
            raise UnavailableError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def boot(self, number: int) -> None:
        """Starts a host that was killed, without processes and with an empty `/dev/shm`.

        Raises:
            RuntimeError: a command failed.
        """
        self._boot(number)
        for other, host in enumerate(self._hosts):
            if host is not None and other != number:
                # Else a connection may fail with the ARP probes that the host, while it was down, did not answer.
                host.run(f"ip neigh flush to {self.addresses[number]} dev eth0")

    def kill(self, number: int) -> None:
        """Kills all processes of a host, as a power failure does: the other hosts get no notice."""
        host, self._hosts[number] = self._hosts[number], None
        if host is not None:
            self._end_relay(number)
            self._on_switch(f"ip link delete h{number}")  # First, else its connections would be closed properly.
            host.kill()

    # --- links ------------------------------------------------------------------------------------------------------

    def shape(self, number: int, gbits: float | None) -> None:
        """Sets the rate of a host's link in both directions; None for as fast as the kernel copies."""
        self._gbits[number] = gbits
        self._shape(number)

    def lose(self, number: int, share: float) -> None:
        """Drops packets at random in both directions of a host's link.

        Args:
            number: number of the host.
            share: share of packets that are lost, 0 to 1. As a packet of TCP may have 64 KiB on such a link, each of
                them counts as one.
        """
        self._lost[number] = share
        _lose("eth0", share, partial(self._on_host, number))
        _lose(f"h{number}", share, self._on_switch)

    def cut(self, number: int) -> None:
        """Takes the link of a host down: it reaches no other host, and none reaches it."""
        self._on_switch(f"ip link set h{number} down")

    def join(self, number: int) -> None:
        """Takes the link of a host up again."""
        self._on_switch(f"ip link set h{number} up")

    def mute(self, number: int) -> None:
        """Drops what a host sends, and delivers what others send to it, until `lose` sets another share."""
        _lose("eth0", 1.0, partial(self._on_host, number))

    def deafen(self, number: int) -> None:
        """Drops what others send to a host, and delivers what it sends, until `lose` sets another share."""
        _lose(f"h{number}", 1.0, self._on_switch)

    def treat(self, number: int, treatment: Treatment) -> None:
        """Delays, reorders and duplicates the packets of a host's link, both those that it sends and receives.

        Which packets, the number of the host decides, as the seed of random numbers. The packets of TCP; as with
        `lose`, each may have 64 KiB.
        """
        if treatment == Treatment():
            if number in self._relays:
                self._end_relay(number)
                self._on_switch(f"ip link set h{number} master switch")
            return
        if number not in self._relays:
            self._start_relay(number)
        relay = self._relays[number]
        assert relay.stdin is not None
        assert relay.stdout is not None
        relay.stdin.write(f"{json.dumps(treatment)}\n")
        relay.stdin.flush()
        if not relay.stdout.readline():
            raise RuntimeError(f"the relay of host {number} has ended")

    def reset(self, number: int) -> None:
        """Resets all TCP connections between a host and others, as a firewall does that has lost its state."""
        own = self.addresses[number]
        self._on_host(number, ["ss", "--kill", "--tcp", "dst", f"{NETWORK}.0/24", "and", "not", "dst", own])

    def moved(self, number: int) -> tuple[int, int]:
        """Returns the bytes that a host has sent and received over its link; zeros once it was killed."""
        if self._hosts[number] is None:
            return 0, 0
        text = self._on_host(number, "cat /proc/net/dev")
        fields = re.search(r"eth0:(.*)", text)
        assert fields is not None
        values = fields[1].split()
        return int(values[8]), int(values[0])

    # --- programs ---------------------------------------------------------------------------------------------------

    def start(
        self, number: int, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a program on a host. Its end is not that of its children: `kill` and `close` end all.

        Args:
            number: number of the host.
            arguments: program and arguments.
            env: additions to the environment of this process.
            options: of `subprocess.Popen`.
        """
        host = self._hosts[number]
        assert host is not None, f"host {number} was killed"
        command = ["nsenter", "-t", str(host.pid), "--all", f"--wdns={os.getcwd()}", "--", *arguments]
        return subprocess.Popen(command, text=True, env={**os.environ, **(env or {})}, **options)

    def run(
        self, number: int, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program on a host to its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time; it is left to `kill` and `close`.
        """
        process = self.start(
            number, *arguments, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self) -> None:
        """Ends all processes of all hosts, and removes hosts and links. Idempotent."""
        for number in list(self._relays):
            self._end_relay(number)
        for host in (*self._hosts, self._switch):
            if host is not None:
                host.kill()
        self._hosts = [None] * len(self._hosts)
        self._switch = None

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- their parts ------------------------------------------------------------------------------------------------

    def _boot(self, number: int) -> None:
        assert self._switch is not None
        kinds = ("--kill-child", "--fork", "--pid", "--mount-proc", "--uts", "--ipc", "--net")
        host = _First("unshare", *kinds, "bash", "-c", FIRST.format(f"host-{number}"))
        self._hosts[number] = host
        self._on_switch(f"ip link add name h{number} type veth peer name eth0 netns {host.pid}")
        self._on_switch(f"ip link set h{number} master switch up")
        self._on_host(number, f"ip addr add {self.addresses[number]}/24 dev eth0")
        self._on_host(number, "ip link set eth0 up")
        self._shape(number)

    def _shape(self, number: int) -> None:
        gbits = self._gbits[number] or UNSHAPED_GBITS
        burst = max(LEAST_BURST, int(gbits * 1e9 / 8 * BURST_SECONDS))
        queue = max(2 * LEAST_BURST, int(gbits * 1e9 / 8 * QUEUE_SECONDS))
        for device, run in (("eth0", partial(self._on_host, number)), (f"h{number}", self._on_switch)):
            run(f"tc qdisc delete dev {device} root", check=False)
            run(f"tc qdisc add dev {device} root handle 1: htb default 10 r2q 1000")
            run(f"tc class add dev {device} parent 1: classid 1:10 htb rate {gbits}gbit burst {burst} cburst {burst}")
            run(f"tc qdisc add dev {device} parent 1:10 bfifo limit {queue}")
            run(f"tc class add dev {device} parent 1: classid 1:20 htb rate 1gbit")
            run(f"tc qdisc add dev {device} parent 1:20 bfifo limit 1")
            _lose(device, self._lost[number], run)

    def _start_relay(self, number: int) -> None:
        """Puts a relay between a host's link and the switch."""
        assert self._switch is not None
        self._on_switch(f"ip link add name r{number} type veth peer name p{number}")
        for device in (f"r{number}", f"p{number}"):
            self._on_switch(f"ip link set {device} up")
        command = [sys.executable, "-IS", str(RELAY), f"h{number}", f"r{number}", str(number)]
        self._relays[number] = self._switch.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._on_switch(f"ip link set h{number} nomaster")
        self._on_switch(f"ip link set p{number} master switch")

    def _end_relay(self, number: int) -> None:
        relay = self._relays.pop(number, None)
        if relay is not None:
            relay.communicate()  # It ends with its input.
            self._on_switch(f"ip link delete r{number}")

    def _on_host(self, number: int, command: str | Sequence[str], check: bool = True) -> str:
        host = self._hosts[number]
        assert host is not None, f"host {number} was killed"
        return host.run(command, check)

    def _on_switch(self, command: str | Sequence[str], check: bool = True) -> str:
        assert self._switch is not None
        return self._switch.run(command, check)


def _lose(device: str, share: float, run: Callable[..., str]) -> None:
    """Sends a share of the packets that leave by a device to a class whose queue has no space for any."""
    run(f"tc filter delete dev {device} parent 1:", check=False)
    if share:
        program = LOSE.format(min(int(share * 2**32), 2**32 - 1))
        run(["tc", "filter", "add", "dev", device, "parent", "1:", "bpf", "bytecode", program, "flowid", "1:20"])


class _First:
    """The first process of new namespaces, which ends with this one; its end ends all others in them.

    Args:
        arguments: makes the namespaces, and prints "ready" in them.

    Raises:
        RuntimeError: it did not.
    """

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        answer = self._process.stdout.readline()
        if answer.strip() != "ready":
            self.kill()
            raise RuntimeError(f"cannot make namespaces: {answer.strip() or arguments}")
        if "--fork" in arguments:
            self.pid = int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text())

    def run(self, command: str | Sequence[str], check: bool = True) -> str:
        """Runs a command in the namespaces and returns its output.

        Raises:
            RuntimeError: it failed.
        """
        words = command.split() if isinstance(command, str) else list(command)
        process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            raise RuntimeError(f"`{' '.join(words)}` failed: {err.strip() or process.returncode}")
        return out

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a program in the network of the namespaces, with options of `subprocess.Popen`."""
        return subprocess.Popen(["nsenter", "-t", str(self.pid), "--net", "--", *command], text=True, **options)

    def kill(self) -> None:
        """Ends the process, and with it all others in the namespaces; returns once they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # `unshare`, which waits for it, ends too.
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
