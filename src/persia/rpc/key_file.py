"""The file with the CURVE key pairs of a cluster: how it is made, read, and changed while the cluster runs."""

from __future__ import annotations

import os
import tempfile
import threading
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from persia.errors import ConfigError
from persia.secret_files import SecretFile
from persia.telemetry.logs import get_logger

__all__ = ["KeyFile", "Keys", "add_key", "make_keys", "promote_key", "retire_keys"]

_log = get_logger("persia.rpc")


class Keys(NamedTuple):
    """A CURVE key pair in Z85, 40 characters each. It encrypts all traffic."""

    public: bytes
    secret: bytes

    @property
    def name(self) -> str:
        """Start of the public key, which tells pairs apart in logs. Public keys are no secret."""
        return self.public[:8].decode()

    def __repr__(self) -> str:  # The secret must not get into logs.
        return f"Keys(public={self.public.decode()})"


class KeyFile:
    """The key pairs of a cluster, from a file that may change while they are in use. Thread-safe.

    Args:
        path: path of the file.

    Attributes:
        pairs: the pairs. A server listens with the first one; clients try all, in this order.

    Raises:
        ConfigError: the file cannot be read, is not a key file, or is accessible to other users.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = SecretFile(path, "The keys", "Make some with persia.rpc.make_keys.")
        self._lock = threading.Lock()
        self._problem = ""
        self.pairs = _parse(self._file)

    def refresh(self) -> None:
        """Reads the file again if it has changed. While it is invalid, the last pairs stay, and a warning says why."""
        if not self._file.changed():
            return
        with self._lock:
            try:
                self.pairs = _parse(self._file)
                self._problem = ""
            except ConfigError as error:
                if error.message != self._problem:  # Once, as this is called each second.
                    _log.warning("%s Until then the earlier keys stay in use.", error.message)
                self._problem = error.message


def make_keys(path: str | os.PathLike[str]) -> None:
    """Writes a new key pair for a cluster, readable by its owner only. Copy it to every host of the cluster.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(_text([_new_pair()]))
    except OSError as error:
        raise ConfigError(f"Cannot write the keys to {path}: {error.strerror}.", path=str(path)) from error


def add_key(path: str | os.PathLike[str]) -> None:
    """Adds a new key pair to a file, which clients try after the others. The first step of a rotation.

    Raises:
        ConfigError: the file is not a valid key file, or cannot be written.
    """
    _replace(path, [*KeyFile(path).pairs, _new_pair()])


def promote_key(path: str | os.PathLike[str]) -> None:
    """Moves the newest pair of a file to the front: servers listen with it, and refuse the other pairs.

    Raises:
        ConfigError: the file is not a valid key file, has only one pair, or cannot be written.
    """
    *earlier, newest = KeyFile(path).pairs
    if not earlier:
        raise ConfigError(
            f"The keys {path} have only one pair; add one with `persia keys add {path}`, and copy the file to all "
            "hosts first.",
            path=str(path),
        )
    _replace(path, [newest, *earlier])


def retire_keys(path: str | os.PathLike[str]) -> None:
    """Removes all pairs but the first from a file. The last step of a rotation.

    Raises:
        ConfigError: the file is not a valid key file, or cannot be written.
    """
    _replace(path, KeyFile(path).pairs[:1])


def _new_pair() -> Keys:
    return Keys(*zmq.curve_keypair())


def _parse(file: SecretFile) -> tuple[Keys, ...]:
    text = file.text()
    try:
        tree = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"The keys {file.path} cannot be read: {error}. Make some with persia.rpc.make_keys.", path=file.path
        ) from error
    others = tree.get("other", [])
    pairs = [_pair(part) for part in [tree, *(others if isinstance(others, list) else [others])]]
    valid = [pair for pair in pairs if pair is not None]
    if len(valid) < len(pairs):
        raise ConfigError(
            f"{file.path} has no valid key pair, or one that is invalid; make one with persia.rpc.make_keys.",
            path=file.path,
        )
    return tuple(dict.fromkeys(valid))


def _pair(table: Any) -> Keys | None:
    """Returns the pair of a table; None if it has no valid one."""
    fields = table if isinstance(table, dict) else {}
    public, secret = (str(fields.get(name, "")).encode() for name in ("public", "secret"))
    try:
        fits = len(public) == 40 and zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        return None
    return Keys(public, secret) if fits else None


def _text(pairs: Sequence[Keys]) -> str:
    # Z85 has neither quotes nor backslashes, so a literal TOML string can hold it.
    tables = [f"public = '{pair.public.decode()}'\nsecret = '{pair.secret.decode()}'\n" for pair in pairs]
    heading = "# Keys of a persia cluster: keep them secret. Servers use the first pair, clients try all.\n"
    return heading + "\n[[other]]\n".join(tables)


def _replace(path: str | os.PathLike[str], pairs: Sequence[Keys]) -> None:
    """Writes a file in one step, so that no process reads a part of it."""
    target = os.path.realpath(path)
    try:
        descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(target))  # For its owner only.
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(_text(pairs))
                file.flush()
                os.fsync(descriptor)
            os.replace(draft, target)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise ConfigError(f"Cannot write the keys to {path}: {error.strerror}.", path=str(path)) from error
