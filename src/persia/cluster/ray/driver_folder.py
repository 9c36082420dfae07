"""The directory of a run: what another driver needs to go on after the death of this one. Does not import ray."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from persia.errors import ConfigError, PersiaError
from persia.retry import Backoff, Deadline, retry
from persia.types import BucketMap

__all__ = ["DriverFolder", "PlacedServer", "RunLayout", "has_recovery_point", "server_directory"]

Buffer: TypeAlias = bytes | memoryview

LOCK = "driver.lock"
LAYOUT = "run.json"
POINT = "recovery-point"
FORMAT = 1
MAGIC = b"PERSIARP"
HEADER = struct.Struct("<8sIIQI")
"""Before a recovery point: magic, format, bytes of the run's name, bytes of the state, CRC-32 of both."""
NAME = re.compile(r"persia-[0-9a-f]{8,32}")
"""Names of clusters. Others are refused, as files below `regions` that match the name are removed."""

LOCK_SECONDS = 10.0
"""Maximum seconds to wait for the lock: processes that a dead driver has forked may hold it for a moment."""
FULL_SECONDS = 30.0
"""Maximum seconds to wait for space on a full file system, or for one that does not answer."""
TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a full file system, and of a network file system whose server is restarting."""


def server_directory(rank: int, losses: int) -> str:
    """Returns the name of the directory of a PS.

    Args:
        rank: rank of the PS.
        losses: number of times that PSs had lost rows before it started with none; 0 for the first one of its rank.
    """
    return f"ps-{rank}.{losses}" if losses else f"ps-{rank}"


class PlacedServer(msgspec.Struct, frozen=True):
    """Where an embedding PS keeps its rows.

    Attributes:
        node: id of its Ray node.
        host: address of that node, for messages.
        losses: see `server_directory`.
        capacities: maximum rows of tables in total, by name.
        memory_rows: maximum rows of tables in memory, by name.
    """

    node: str
    host: str
    losses: int
    capacities: dict[str, int]
    memory_rows: dict[str, int]

    def directory(self, rank: int) -> str:
        """Returns the name of its directory."""
        return server_directory(rank, self.losses)


class RunLayout(msgspec.Struct, frozen=True):
    """Identity of a run, and where its rows are.

    Attributes:
        format: version of the file.
        name: name of the cluster: that of its directory below `regions`.
        regions: directory of regions on each host.
        asked: number of embedding PSs for which the program asks.
        incarnation: number of drivers that the run has had, with the present one.
        generation: the last generation of NN workers.
        service: schema, optimizer and seed, as JSON; empty until PSs have started.
        servers: the embedding PSs, by rank; none until they have started. More or fewer than `asked` once they were
            scaled.
        buckets: the bucket map, for a coordinator on another host; it may be one that the run had before.
    """

    format: int
    name: str
    regions: str
    asked: int
    incarnation: int = 1
    generation: int = 0
    service: str = ""
    servers: tuple[PlacedServer, ...] = ()
    buckets: BucketMap | None = None


def has_recovery_point(path: str) -> bool:
    """Returns whether a directory has the recovery point of a run whose driver has not ended it."""
    return (Path(path) / POINT).exists()


class DriverFolder:
    """The directory of one run, locked until it is closed or its process has ended.

    Each file is replaced atomically and flushed, so that it survives the host. Thread-safe.

    Args:
        path: the directory, which is created if missing. The hosts on which a driver may run must all see it.
        wait: seconds to wait for the lock.

    Raises:
        ConfigError: the directory cannot be created, or its file system has no locks.
        PersiaError: another driver of the run still lives; or a file is damaged, or of another version.
    """

    def __init__(self, path: str, wait: float = LOCK_SECONDS) -> None:
        self.path = Path(path).absolute()
        self._lock = threading.Lock()
        self._owner: object = None
        self._layout: RunLayout | None = None
        self._file: int | None = self._locked(wait)
        try:
            self._layout = self._read_layout()
            self._left = self._read_point()
        except BaseException:
            self.close()
            raise

    @property
    def layout(self) -> RunLayout | None:
        """The last stored layout; None in a new run."""
        return self._layout

    @property
    def left(self) -> memoryview | None:
        """The recovery point that the driver before has left; None if there is none, or this one has kept another."""
        return self._left

    def claim(self, owner: object) -> None:
        """Lets one object alone keep recovery points, as the directory holds one state.

        Raises:
            ConfigError: another object does.
        """
        with self._lock:
            if self._owner is not None and self._owner is not owner:
                raise ConfigError(
                    f"Another Trainer has already called `fit` on this cluster, and the run in {self.path} keeps the "
                    "state of one. Use one Trainer, or another cluster with another RayOptions.run.",
                    field="cluster",
                )
            self._owner = owner

    def write_layout(self, layout: RunLayout) -> None:
        """Stores a layout. Blocks for at most `FULL_SECONDS` while the file system fails.

        Raises:
            PersiaError: it cannot be written.
        """
        with self._lock:
            self._replace(LAYOUT, [msgspec.json.encode(layout)])
            self._layout = layout

    def keep(self, point: Sequence[Buffer]) -> None:
        """Stores a recovery point in place of the last one. Blocks for at most `FULL_SECONDS` if that fails.

        Args:
            point: the state, as a list of buffers.

        Raises:
            PersiaError: it cannot be written; the last one is intact.
        """
        with self._lock:
            assert self._layout is not None
            name = self._layout.name.encode()
            check, length = zlib.crc32(name), 0
            for part in point:
                check, length = zlib.crc32(part, check), length + memoryview(part).nbytes
            self._replace(POINT, [HEADER.pack(MAGIC, FORMAT, len(name), length, check), name, *point])
            self._left = None

    def forget(self) -> None:
        """Removes the recovery point, so that no other driver goes on from it."""
        with self._lock:
            self._left = None
            self._remove(POINT)

    def end(self) -> None:
        """Removes all files of the run, and closes. The directory stays if it has other files."""
        self.forget()
        with self._lock:
            self._remove(LAYOUT)
            self._layout = None
            if self._file is not None:
                self._remove(LOCK)  # While it is locked: who waits for it then sees that it is gone, and makes another.
        self.close()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    # --- the lock -------------------------------------------------------------------------------------------------

    def _locked(self, wait: float) -> int:
        """Takes the lock, which ends with the process that holds it, whatever ends that. Returns its file."""
        try:
            file = retry(
                self._try_lock,
                transient=lambda error: isinstance(error, BlockingIOError | FileNotFoundError),
                deadline=Deadline(wait),
                backoff=Backoff(0.05, 0.5),
            )
        except BlockingIOError as error:
            raise PersiaError(
                f"Another driver of the run in {self.path} is still running: {self._holder()}. Wait until it has "
                "ended, or end it with SIGTERM; for a run of its own choose another directory for RayOptions.run. If "
                "its host is lost, a network file system releases the lock after its lease (NFSv4: about 90 s): start "
                f"again then. If it never does, remove {self.path / LOCK}.",
                path=str(self.path),
            ) from error
        except OSError as error:
            raise ConfigError(
                f"The directory {self.path} of a run cannot be used: {error.strerror}. Choose one for RayOptions.run "
                "that can be written, on a file system with locks (flock).",
                field="run",
            ) from error
        os.ftruncate(file, 0)
        os.pwrite(file, self._self().encode(), 0)
        return file

    def _try_lock(self) -> int:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # Each time: the end of another run may remove it.
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino != os.stat(self.path / LOCK).st_ino:
                raise FileNotFoundError(errno.ENOENT, "The lock was removed by the end of another run")
        except BaseException:
            os.close(file)
            raise
        return file

    def _self(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            return (self.path / LOCK).read_text() or "a process that has just started"
        return "a process that is unknown"

    # --- files ----------------------------------------------------------------------------------------------------

    def _read_layout(self) -> RunLayout | None:
        path = self.path / LAYOUT
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            layout = msgspec.json.decode(data, type=RunLayout)
        except msgspec.MsgspecError as error:
            raise self._damaged(path, f"it is no layout of a run: {error}") from error
        if layout.format != FORMAT:
            raise self._damaged(path, f"it has format {layout.format}, and this version of persia reads {FORMAT}")
        if not NAME.fullmatch(layout.name) or layout.incarnation < 1 or layout.generation < 0:
            raise self._damaged(path, "its values are not valid")
        return layout

    def _read_point(self) -> memoryview | None:
        path = self.path / POINT
        try:
            data = memoryview(bytearray(path.read_bytes()))  # Tensors that share the memory are written to.
        except FileNotFoundError:
            return None
        if self._layout is None:
            raise self._damaged(path, f"the file {LAYOUT} is missing, which says where the rows are")
        if len(data) < HEADER.size:
            raise self._damaged(path, "it is incomplete")
        magic, version, named, length, check = HEADER.unpack_from(data)
        if magic != MAGIC or version != FORMAT:
            raise self._damaged(path, "it is no recovery point, or of another version of persia")
        content = data[HEADER.size :]
        if len(content) != named + length:
            raise self._damaged(path, f"it has {len(content)} bytes instead of {named + length}")
        if zlib.crc32(content) != check:
            raise self._damaged(path, "its checksum is wrong")
        if bytes(content[:named]) != self._layout.name.encode():
            raise self._damaged(path, f"it is of another run than {LAYOUT}: {bytes(content[:named])!r}")
        return content[named:]

    def _damaged(self, path: Path, why: str) -> PersiaError:
        rows = f"{self._layout.regions}/{self._layout.name}" if self._layout is not None else "the run"
        return PersiaError(
            f"The run in {self.path} cannot continue: {path.name}: {why}. Restore the file; or start over, from the "
            f"last checkpoint if there is one: remove {self.path}, and the rows of {rows} on each host with `persia "
            "cluster regions --clean`.",
            path=str(path),
        )

    def _replace(self, name: str, parts: Sequence[Buffer]) -> None:
        path, draft = self.path / name, self.path / f"{name}.new"

        def write() -> None:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            self._flush()

        self._on_storage(path, write)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            for path in (self.path / name, self.path / f"{name}.new"):
                path.unlink(missing_ok=True)
            self._flush()

    def _flush(self) -> None:
        """Flushes the names of the directory."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _on_storage(self, path: Path, write: Callable[[], None]) -> None:
        def passes(error: Exception) -> bool:
            return isinstance(error, OSError) and error.errno in TRANSIENT

        try:
            retry(write, transient=passes, deadline=Deadline(FULL_SECONDS))
        except OSError as error:
            raise PersiaError(
                f"{path} cannot be written: {error.strerror}. Free space there, or choose another directory for "
                "RayOptions.run. Without it, the run could not continue after the death of its driver.",
                path=str(path),
            ) from error
