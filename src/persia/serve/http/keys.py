"""Keys of clients."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from persia.errors import ConfigError

__all__ = ["ENVIRONMENT", "ClientKeys", "read_keys"]

ENVIRONMENT = "PERSIA_SERVE_KEYS"
MIN_LENGTH = 16


class ClientKeys:
    """The keys that a server accepts. Thread-safe.

    Args:
        keys: texts of at least 16 printable ASCII characters, without spaces.

    Raises:
        ConfigError: there is no key, or a key is too short or has other characters; the message does not contain it.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = []
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"Key {number} has {len(key)} characters; expected at least {MIN_LENGTH} of printable ASCII, "
                    "without spaces. Make one with: python -c 'import secrets; print(secrets.token_urlsafe())'",
                    field="keys",
                )
            self._digests.append(_digest(key.encode()))
        if not self._digests:
            raise ConfigError("There is no key; give one a line, or leave the option out.", field="keys")

    def accept(self, header: str | None) -> bool:
        """Returns whether an Authorization header has one of the keys, in constant time."""
        scheme, _, key = (header or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        equal = [hmac.compare_digest(digest, each) for each in self._digests]
        return scheme.lower() == "bearer" and any(equal)


def read_keys(path: str | None) -> ClientKeys | None:
    """Reads keys from a file, one a line, `#` for comments; else from PERSIA_SERVE_KEYS; None if neither is set.

    Raises:
        ConfigError: the file cannot be read, or a key is invalid.
    """
    if path is None:
        text = os.environ.get(ENVIRONMENT)
        return None if text is None else ClientKeys(text.replace(",", " ").split())
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the keys in {path}: {error}.", field="key_file") from error
    return ClientKeys(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
