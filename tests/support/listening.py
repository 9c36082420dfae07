"""The sockets at which processes listen."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

__all__ = ["addresses", "descendants", "title"]

_LISTEN = "0A"


def addresses(pid: int) -> set[str]:
    """Returns the IP addresses at which a process listens; none if it has ended."""
    mine = set()
    for file in _files(pid):
        try:
            mine.add(os.readlink(file))
        except OSError:  # Closed meanwhile.
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in mine:
                found.add(_address(fields[1].split(":")[0]))
    return found


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
