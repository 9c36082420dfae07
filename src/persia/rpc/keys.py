"""Credentials that admit a peer: the CURVE key pair of a cluster, or on one host the password of its user."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq

from persia.checks import is_loopback
from persia.errors import ConfigError

__all__ = ["KEYS_VARIABLE", "Keys", "Password", "find_keys", "keys_to_connect", "keys_to_listen", "make_keys"]

KEYS_VARIABLE = "PERSIA_CURVE_KEYS"


class Keys(NamedTuple):
    """A CURVE key pair in Z85, 40 characters each. It encrypts all traffic."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:  # The secret must not get into logs.
        return f"Keys(public={self.public.decode()})"


class Password(NamedTuple):
    """Shared by the processes of a user on this host. It is sent unencrypted, so such connections never leave the host.

    Attributes:
        text: 40 random characters.
    """

    text: str

    def __repr__(self) -> str:
        return "Password()"


def make_keys(path: str | os.PathLike[str]) -> None:
    """Writes a new key pair for a cluster, readable by its owner only. Copy it to every host of the cluster.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    public, secret = (part.decode() for part in zmq.curve_keypair())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            # Z85 has neither quotes nor backslashes, so a literal TOML string can hold it.
            file.write(f"# Keys of a persia cluster: keep them secret.\npublic = '{public}'\nsecret = '{secret}'\n")
    except OSError as error:
        raise ConfigError(f"Cannot write the keys to {path}: {error.strerror}.", path=str(path)) from error


def find_keys(path: str | os.PathLike[str] | None) -> Keys | None:
    """Reads the keys of the cluster.

    Args:
        path: path of the file; None for the file that the variable PERSIA_CURVE_KEYS names, if any.

    Raises:
        ConfigError: the file is unreadable, not a key file, or accessible to other users. The group may read a file of
            root.
    """
    keys_file = path or os.environ.get(KEYS_VARIABLE)
    if not keys_file:
        return None
    try:
        status = os.stat(keys_file)
        tree = tomllib.loads(Path(keys_file).read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The keys {keys_file} cannot be read: {error}. Make some with persia.rpc.make_keys."
        ) from error
    open_to = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid == 0 != os.geteuid():  # For example a secret that Kubernetes mounts for `fsGroup`.
        open_to &= ~stat.S_IRGRP
    if status.st_mode & open_to:
        raise ConfigError(
            f"The keys {keys_file} are open to other users; run `chmod 600 {keys_file}`.", path=str(keys_file)
        )
    public, secret = str(tree.get("public", "")).encode(), str(tree.get("secret", "")).encode()
    try:
        fits = len(public) == 40 and zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{keys_file} has no valid key pair; make one with persia.rpc.make_keys.", path=str(keys_file)
        )
    return Keys(public, secret)


def keys_to_listen(address: str, path: str | os.PathLike[str] | None, *, insecure: bool) -> Keys | Password | None:
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


def keys_to_connect(address: str, path: str | os.PathLike[str] | None) -> Keys | Password | None:
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
