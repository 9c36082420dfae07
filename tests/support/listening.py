"""The sockets at which processes listen. As a program, prints those of a host and what a stranger sees, as JSON."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from pathlib import Path
from typing import NamedTuple

__all__ = ["Listening", "addresses", "all_sockets", "descendants", "seen_by_a_stranger", "sockets", "title"]

SECONDS = 2.0
"""How long a stranger waits for an answer."""
_LISTEN = "0A"
_GREETING_BYTES = 64
"""Of ZMTP."""


class Listening(NamedTuple):
    """A socket that listens.

    Attributes:
        pid: process that has it.
        title: name of the process.
        address: IP address.
        port: number of the port.
    """

    pid: int
    title: str
    address: str
    port: int


def sockets(pid: int) -> list[Listening]:
    """Returns the sockets at which a process listens; none if it has ended."""
    mine = set()
    for file in _files(pid):
        try:
            mine.add(os.readlink(file))
        except OSError:  # Closed meanwhile.
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                found.append(Listening(pid, title(pid), _address(address), int(port, 16)))
    return found


def all_sockets() -> list[Listening]:
    """Returns the sockets at which any process listens that /proc has."""
    return [one for process in Path("/proc").glob("[0-9]*") for one in sockets(int(process.name))]


def addresses(pid: int) -> set[str]:
    """Returns the IP addresses at which a process listens; none if it has ended."""
    return {one.address for one in sockets(pid)}


def seen_by_a_stranger(listening: Listening) -> str:
    """Returns the protocol of a socket: what its first bytes say to someone without keys.

    "CURVE", "PLAIN" or "NULL" is the mechanism of a server of `persia.rpc`; "HTTP" is a server of HTTP without TLS;
    "other" is anything else, also silence.
    """
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    answer = _answer(listening, greeting[:12], greeting[12:])
    if answer[:1] == b"\xff" and answer[9:10] == b"\x7f":
        assert len(answer) == len(greeting), answer
        return answer[12:32].rstrip(b"\0").decode()
    return "HTTP" if _answer(listening, b"GET / HTTP/1.0\r\nHost: stranger\r\n\r\n").startswith(b"HTTP/1") else "other"


def _answer(listening: Listening, *words: bytes) -> bytes:
    """Returns the answers to some words, with a pause after each of them."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listening.address, listening.address)
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((host, listening.port), SECONDS) as stranger:
        stranger.settimeout(SECONDS)
        for number, part in enumerate(words, 1):
            stranger.sendall(part)
            most = number * _GREETING_BYTES
            while len(answer) < most and (more := stranger.recv(most)):
                answer += more
    return answer


def descendants(pid: int) -> list[int]:
    """Returns the ids of the processes that a process has started, and of those that they have started."""
    parents: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # It has ended.
            continue
        parents.setdefault(parent, []).append(int(process.name))
    found = list(parents.get(pid, []))
    for child in found:
        found.extend(parents.get(child, []))
    return found


def title(pid: int) -> str:
    """Returns the name of a program without its path, or of the script that Python runs, such as `monitor.py`."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().split()
    scripts = [part for part in command if part.endswith(".py")] if Path(command[0]).name.startswith("python") else []
    name = Path(scripts[0] if scripts else command[0]).name
    return name.partition(".")[0] if name.startswith("ray::") else name  # Without the method that it runs.


def _files(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _address(digits: str) -> str:
    """Returns an address of /proc/net, whose words of 32 bits have the order of bytes of this machine."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


if __name__ == "__main__":
    for one in all_sockets():
        print(json.dumps([*one, seen_by_a_stranger(one)]))
