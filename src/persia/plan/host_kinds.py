"""The hosts that a plan may use: their cores, memory, disk, network and GPUs, and the roles that run on them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from persia.config import convert
from persia.errors import ConfigError
from persia.memory import host_memory
from persia.units import parse_bandwidth, parse_bytes

__all__ = ["ROLES", "HostKind", "host_of", "load_hosts", "share_a_host", "this_host"]

ROLES = ("embedding_ps", "embedding_worker", "data_loader", "nn_worker")

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
"""Names of kinds of hosts follow the labels of Google Cloud: in lower case, so never `CPU` or `GPU`."""
RESERVED = ("head", "memory", "object_store_memory")
"""The type of the head in a cluster file, and Ray resources."""


class _HostFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `[[hosts]]` section as written in the file."""

    name: str
    cores: int
    memory: str | int | float
    roles: list[str] = []
    count: int | None = None
    disk: str | int | float = 0
    network: str | int | float | None = None
    gpus: int = 0


class _HostsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: list[_HostFields]


class HostKind(msgspec.Struct, frozen=True):
    """Hosts with equal resources.

    Attributes:
        name: name of the kind; also the Ray resource of these hosts, and their type in a cluster file.
        cores: cores of each host, as the operating system counts them.
        memory: bytes of memory of each host that processes may use.
        roles: roles that may run on these hosts.
        count: maximum number of hosts; None for as many as needed.
        disk: bytes of SSD of each host for rows beyond memory.
        network: bytes/s of each host, in each direction; None if the processes share one host.
        gpus: number of GPUs of each host.

    Raises:
        ConfigError: the name is not valid.
    """

    name: str
    cores: int
    memory: int
    roles: tuple[str, ...] = ROLES
    count: int | None = None
    disk: int = 0
    network: float | None = None
    gpus: int = 0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or self.name in RESERVED:
            raise ConfigError(
                f"Invalid name {self.name!r} of a kind of hosts; expected a lower-case letter and up to 62 lower-case "
                f"letters, digits, '-' or '_', and none of: {', '.join(RESERVED)}. It names a type of hosts in a "
                "cluster file, and a Ray resource.",
                field="hosts",
            )


def load_hosts(path: str) -> list[HostKind]:
    """Reads the hosts of a TOML file with `[[hosts]]` sections.

    Raises:
        ConfigError: the file cannot be read, or a field is invalid; the message names it.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The hosts file {path} cannot be read: {error.strerror}.", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", path=path) from error
    kinds = [
        _host_kind(fields, f"{path}: hosts[{i}]") for i, fields in enumerate(convert(tree, _HostsFile, path).hosts)
    ]
    names = [kind.name for kind in kinds]
    if not kinds or len(set(names)) < len(names):
        raise ConfigError(f"{path}: expected [[hosts]] sections with distinct names; it has {names}.", field="hosts")
    for role in ROLES:
        host_of(kinds, role)
    return kinds


def _host_kind(fields: _HostFields, where: str) -> HostKind:
    for name, low in (("cores", 1), ("gpus", 0), ("count", 1)):
        value = getattr(fields, name)
        if value is not None and value < low:
            raise ConfigError(f"Invalid {where}.{name} = {value}; expected at least {low}.", field=f"{where}.{name}")
    if unknown := [role for role in fields.roles if role not in ROLES]:
        raise ConfigError(
            f"Invalid {where}.roles: {unknown[0]!r}; expected some of: {', '.join(ROLES)}.", field=f"{where}.roles"
        )
    return HostKind(
        fields.name,
        fields.cores,
        parse_bytes(fields.memory, f"{where}.memory"),
        tuple(fields.roles) or ROLES,
        fields.count,
        parse_bytes(fields.disk, f"{where}.disk"),
        None if fields.network is None else parse_bandwidth(fields.network, f"{where}.network"),
        fields.gpus,
    )


def this_host(regions: str = "") -> HostKind:
    """Returns this machine, on which all roles run. It has no disk for rows: specify one in a hosts file.

    Args:
        regions: directory of the rows of PSs, which limits their memory; empty if rows are in process memory.
    """
    return HostKind("this-host", len(os.sched_getaffinity(0)), host_memory(regions or None).total, count=1)


def host_of(kinds: Sequence[HostKind], role: str) -> HostKind:
    """Returns the first kind of host that may run a role.

    Raises:
        ConfigError: no kind runs the role.
    """
    for kind in kinds:
        if role in kind.roles:
            return kind
    raise ConfigError(f"No kind of host runs {role!r}; add it to the `roles` of a [[hosts]] section.", field="roles")


def share_a_host(kinds: Sequence[HostKind], *roles: str) -> bool:
    """Returns whether all processes of these roles are on one host. Kinds without a network are one host.

    Raises:
        ConfigError: no kind runs a role.
    """
    first, *others = (host_of(kinds, role) for role in roles)
    return all(kind is first for kind in others) and (first.network is None or first.count == 1)
