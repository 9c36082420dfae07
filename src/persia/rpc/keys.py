"""Credentials that admit a peer: the CURVE key pairs of a cluster, or on one host the password of its user."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from persia.checks import is_loopback
from persia.errors import ConfigError
from persia.rpc.key_file import KeyFile

__all__ = ["KEYS_VARIABLE", "Password", "find_keys", "keys_to_connect", "keys_to_listen"]

KEYS_VARIABLE = "PERSIA_CURVE_KEYS"


class Password(NamedTuple):
    """Shared by the processes of a user on this host. It is sent unencrypted, so such connections never leave the host.

    Attributes:
        text: 40 random characters.
    """

    text: str

    def __repr__(self) -> str:
        return "Password()"


def find_keys(path: str | os.PathLike[str] | None) -> KeyFile | None:
    """Reads the keys of the cluster.

    Args:
        path: path of the file; None for the file that the variable PERSIA_CURVE_KEYS names, if any.

    Raises:
        ConfigError: the file is unreadable, not a key file, or accessible to other users. The group may read a file of
            root.
    """
    keys_file = path or os.environ.get(KEYS_VARIABLE)
    return KeyFile(keys_file) if keys_file else None


def keys_to_listen(address: str, path: str | os.PathLike[str] | None, *, insecure: bool) -> KeyFile | Password | None:
    """Returns the credentials that clients of an address need; None for an address that is open to anyone.

    Args:
        address: to listen on.
        path: as for `find_keys`.
        insecure: allows an address that other hosts can reach without keys.

    Raises:
        ConfigError: the address needs keys, or they cannot be read.
    """
    keys = keys_to_connect(address, path)
    if keys is None and not insecure:
        raise ConfigError(
            f"{address} can be reached from other hosts without keys, so anyone could read and change the embeddings. "
            f"Make keys with persia.rpc.make_keys and set {KEYS_VARIABLE}, listen on tcp://127.0.0.1:*, or pass "
            "insecure=True.",
            address=address,
        )
    return keys


def keys_to_connect(address: str, path: str | os.PathLike[str] | None) -> KeyFile | Password | None:
    """Returns the credentials for an address: the keys, or on this host and without keys the user's password.

    Args:
        address: to connect to.
        path: as for `find_keys`.

    Raises:
        ConfigError: they cannot be read.
    """
    keys = find_keys(path)
    if keys is not None:
        return keys
    scheme, _, rest = address.partition("://")
    local = scheme == "ipc" or (scheme == "tcp" and is_loopback(rest.rpartition(":")[0].strip("[]")))
    return _password() if local else None


def _password() -> Password:
    """Reads the password of this user, or creates it."""
    failures = []
    for folder in _folders():
        path = folder / "password"
        try:
            with contextlib.suppress(FileExistsError):
                _make_password(path)
            return _read_password(path)
        except (OSError, ValueError) as error:
            failures.append(f"{path}: {error}")
            if os.path.lexists(path):
                break  # Other processes may use it, and must not be left with another password.
    raise ConfigError(
        f"The password of this user's processes cannot be stored ({'; '.join(failures)}). Make one of these writable, "
        f"or make keys with persia.rpc.make_keys and set {KEYS_VARIABLE}.",
        failures=failures,
    )


def _read_password(path: Path) -> Password:
    """Reads a password, provided that no other user can have read, written or replaced it.

    Raises:
        OSError: it cannot be read.
        ValueError: other users have access to it, or it is damaged.
    """
    folder = os.lstat(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, encoding="ascii") as file:
        status = os.fstat(descriptor)
        owned = stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(status.st_mode)
        owned = owned and folder.st_uid == status.st_uid == os.geteuid()
        if (
            not owned
            or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        ):
            raise ValueError("other users have access to the file or its folder; remove it")
        text = file.read(41)
    if len(text) != 40:
        raise ValueError("the file is damaged; remove it")
    return Password(text)


def _folders() -> Iterator[Path]:
    """Yields the folders for the password, best first: the same ones in all processes of a user."""
    with contextlib.suppress(RuntimeError):  # A user without a home.
        yield Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "persia")
    with contextlib.suppress(FileNotFoundError):  # No folder for temporary files.
        yield Path(tempfile.gettempdir(), f"persia-{os.geteuid()}")


def _make_password(path: Path) -> None:
    """Writes a new password atomically.

    Raises:
        FileExistsError: a password exists, perhaps written by another process meanwhile.
    """
    if path.exists():
        raise FileExistsError
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # For its owner only.
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(20))
        os.link(draft, path)
    finally:
        os.unlink(draft)
