"""The CURVE key pair of a cluster. It encrypts all traffic; peers without it get no answer."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import NamedTuple

import zmq

from persia.checks import is_loopback
from persia.errors import ConfigError

__all__ = ["KEYS_VARIABLE", "Keys", "check_address", "find_keys", "make_keys"]

KEYS_VARIABLE = "PERSIA_CURVE_KEYS"


class Keys(NamedTuple):
    """A CURVE key pair in Z85, 40 characters each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:  # The secret must not get into logs.
        return f"Keys(public={self.public.decode()})"


def make_keys(path: str | os.PathLike[str]) -> None:
    """Writes a new key pair for a cluster, readable by its owner only. Copy it to every host of the cluster.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    public, secret = (part.decode() for part in zmq.curve_keypair())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            # Z85 has neither quotes nor backslashes in it, so a literal TOML text holds it.
            file.write(f"# Keys of a persia cluster: keep them secret.\npublic = '{public}'\nsecret = '{secret}'\n")
    except OSError as error:
        raise ConfigError(f"Cannot write the keys to {path}: {error.strerror}.", path=str(path)) from error


def find_keys(path: str | os.PathLike[str] | None) -> Keys | None:
    """Reads the keys of the cluster.

    Args:
        path: path of the file; None for the file that the variable PERSIA_CURVE_KEYS names, if any.

    Raises:
        ConfigError: the file is unreadable, not a key file, or accessible to other users.
    """
    found = path or os.environ.get(KEYS_VARIABLE)
    if not found:
        return None
    try:
        mode = os.stat(found).st_mode
        tree = tomllib.loads(Path(found).read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The keys {found} cannot be read: {error}. Make some with persia.rpc.make_keys.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"The keys {found} are open to other users; run `chmod 600 {found}`.", path=str(found))
    public, secret = str(tree.get("public", "")).encode(), str(tree.get("secret", "")).encode()
    try:
        fits = len(public) == 40 and zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        fits = False
    if not fits:
        raise ConfigError(f"{found} has no valid key pair; make one with persia.rpc.make_keys.", path=str(found))
    return Keys(public, secret)


def check_address(address: str, keys: Keys | None, insecure: bool) -> None:
    """Rejects an address that other hosts can reach, unless there are keys or `insecure` is set.

    Raises:
        ConfigError: the address is rejected.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" or keys is not None or insecure:
        return
    host = rest.rpartition(":")[0].strip("[]")
    local = scheme == "tcp" and is_loopback(host)
    if not local:
        raise ConfigError(
            f"{address} can be reached from other hosts without keys, so anyone could read and change the embeddings. "
            f"Make keys with persia.rpc.make_keys and set {KEYS_VARIABLE}, listen on tcp://127.0.0.1:*, or pass "
            "insecure=True.",
            address=address,
        )
