"""Keys of clients."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterable

from persia.errors import ConfigError
from persia.secret_files import SecretFile
from persia.telemetry.logs import get_logger

__all__ = ["ENVIRONMENT", "ClientKeyFile", "ClientKeys", "read_keys"]

ENVIRONMENT = "PERSIA_SERVE_KEYS"
MIN_LENGTH = 16
LOOK_SECONDS = 1.0
"""Seconds between two looks at a file of keys."""

_log = get_logger("persia.serve")


class ClientKeys:
    """The keys that a server accepts. Thread-safe.

    Args:
        keys: texts of at least 16 printable ASCII characters, without spaces.

    Raises:
        ConfigError: there is no key, or a key is too short or has other characters; the message does not contain it.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = _digests(keys)

    def accept(self, header: str | None) -> bool:
        """Returns whether an Authorization header has one of the keys, in constant time."""
        scheme, _, key = (header or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        equal = [hmac.compare_digest(digest, each) for each in self._digests]
        return scheme.lower() == "bearer" and any(equal)


class ClientKeyFile(ClientKeys):
    """The keys of a file, one a line, which may change while the server runs. Thread-safe.

    Args:
        path: path of the file.
        clock: returns the current time in seconds.

    Raises:
        ConfigError: the file cannot be read, other users have access to it, or a key is invalid.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = SecretFile(path, "The keys of clients in", "Write one a line.")
        self._clock = clock
        self._look = clock() + LOOK_SECONDS
        self._problem = ""
        super().__init__(_lines(self._file.text()))

    def accept(self, header: str | None) -> bool:
        """Returns whether an Authorization header has one of the keys that the file has now."""
        now = self._clock()
        if now >= self._look:
            self._look = now + LOOK_SECONDS
            self._refresh()
        return super().accept(header)

    def _refresh(self) -> None:
        """Reads a changed file again. While it is invalid, the earlier keys stay, and a warning says why."""
        if not self._file.changed():
            return
        try:
            self._digests = _digests(_lines(self._file.text()))
            self._problem = ""
            _log.info("%s has changed; %d keys are accepted now", self._file.path, len(self._digests))
        except ConfigError as error:
            if error.message != self._problem:
                _log.warning("%s: %s Until then the earlier keys are accepted.", self._file.path, error.message)
            self._problem = error.message


def read_keys(path: str | None) -> ClientKeys | None:
    """Reads keys from a file, one a line, `#` for comments; else from PERSIA_SERVE_KEYS; None if neither is set.

    A file is read again when it changes.

    Raises:
        ConfigError: the file cannot be read, other users have access to it, or a key is invalid.
    """
    if path is not None:
        return ClientKeyFile(path)
    text = os.environ.get(ENVIRONMENT)
    return None if text is None else ClientKeys(text.replace(",", " ").split())


def _digests(keys: Iterable[str]) -> list[bytes]:
    """Checks keys and returns their digests.

    Raises:
        ConfigError: there is no key, or one is invalid.
    """
    found = []
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"Key {number} has {len(key)} characters; expected at least {MIN_LENGTH} of printable ASCII, "
                "without spaces. Make one with: python -c 'import secrets; print(secrets.token_urlsafe())'",
                field="keys",
            )
        found.append(_digest(key.encode()))
    if not found:
        raise ConfigError("There is no key; give one a line, or leave the option out.", field="keys")
    return found


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
