"""Files with secrets: they are read only if no other user has access, and again when they change."""

from __future__ import annotations

import os
import stat
import threading

from persia.errors import ConfigError

__all__ = ["SecretFile"]


class SecretFile:
    """A file with secrets, which may be replaced or edited while it is in use. Thread-safe.

    Args:
        path: path of the file. Symbolic links are followed at each read, as Kubernetes replaces them.
        what: what the file has, for errors.
        remedy: what to do if it cannot be read, for errors.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, remedy: str) -> None:
        self.path = os.fspath(path)
        self._what = what
        self._remedy = remedy
        self._lock = threading.Lock()
        self._read: tuple[int, ...] = ()

    def text(self) -> str:
        """Reads the file.

        Raises:
            ConfigError: the file cannot be read, is not UTF-8, or is accessible to other users. The group may read a
                file of root, unless this process is root's.
        """
        try:
            with open(self.path, encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                text = file.read()
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        with self._lock:
            self._read = _version(status)
        self._check(status)
        return text

    def changed(self) -> bool:
        """Whether the file is another one, or was written, since it was read last. A missing file has not changed."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        with self._lock:
            # A pipe of a shell can be read only once.
            return not stat.S_ISFIFO(status.st_mode) and _version(status) != self._read

    def check(self) -> None:
        """Checks who has access, without reading the file.

        Raises:
            ConfigError: the file does not exist, or is accessible to other users.
        """
        try:
            self._check(os.stat(self.path))
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._what} {self.path} cannot be read: {error}. {self._remedy}", path=self.path)

    def _check(self, status: os.stat_result) -> None:
        open_to = stat.S_IRWXG | stat.S_IRWXO
        if status.st_uid == 0 != os.geteuid():  # For example a secret that Kubernetes mounts for `fsGroup`.
            open_to &= ~stat.S_IRGRP
        if stat.S_ISREG(status.st_mode) and status.st_mode & open_to:
            mount = "0440` and `fsGroup`" if os.geteuid() else "0400`"
            raise ConfigError(
                f"{self._what} {self.path} are open to other users (mode {status.st_mode & 0o777:04o}); run "
                f"`chmod 600 {self.path}`, or mount a secret of Kubernetes with `defaultMode: {mount}.",
                path=self.path,
            )


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Returns what differs after each change; the time of the last `chmod` counts, too."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
