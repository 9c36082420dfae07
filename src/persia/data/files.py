"""Files of a data set: local paths, globs, directories and any URL that fsspec supports."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias
from urllib.parse import unquote

from persia.errors import DataError, PersiaError
from persia.filesystems import missing_package
from persia.types import SourcePart

__all__ = ["File", "Paths", "dataset_path", "expand", "find", "listed"]

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a directory, a glob or a URL of one, or a list of these."""

_WITH_HOST = ("hdfs", "webhdfs")
"""Protocols whose URLs name the host of the file system."""

_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


@dataclass(frozen=True)
class File:
    """One file of a data set.

    Attributes:
        path: path for fsspec, with the protocol unless it is local.
        keys: hive keys in the path, such as {"day": "03"} for `clicks/day=03/part.parquet`.
        size: bytes when it was listed; None if unknown.
        modified: time of its last modification when it was listed, in nanoseconds since 1970; None if unknown.
    """

    path: str
    keys: dict[str, str] = field(default_factory=dict)
    size: int | None = field(default=None, compare=False)
    modified: int | None = field(default=None, compare=False)

    @property
    def part(self) -> SourcePart:
        """Path, size and time of modification; of a local file as they are now, of others as they were listed."""
        if "://" not in self.path:
            try:
                status = os.stat(self.path)
            except OSError:
                return SourcePart(self.path)  # Reading the file raises the error.
            return SourcePart(self.path, status.st_size, status.st_mtime_ns)
        return SourcePart(self.path, self.size, self.modified)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Opens the file for reading. Errors until it is closed become a DataError that names the path."""
        import fsspec

        try:
            with fsspec.open(self.path, "rb") as stream:
                yield stream
        except (PersiaError, MemoryError):
            raise
        except Exception as error:  # pyarrow and each file system of fsspec raise their own errors.
            if isinstance(error, FileNotFoundError):
                raise DataError(f"{self.path}: there is no such file; correct the path.", path=self.path) from error
            raise DataError(
                f"{self.path} cannot be read, it may be truncated, corrupt or of another format "
                f"({type(error).__name__}: {error}); restore or exclude it.",
                path=self.path,
            ) from error

    @contextmanager
    def open_text(self) -> Iterator[IO[str]]:
        """Opens the file for reading as decompressed text; errors as in `open`."""
        import pyarrow as pa

        with self.open() as stream:
            plain = pa.CompressedInputStream(stream, self.compression) if self.compression else stream
            yield io.TextIOWrapper(plain, encoding="utf-8-sig", errors="replace")

    @property
    def compression(self) -> str | None:
        """The compression, by the suffix of the name."""
        return _COMPRESSION.get(PurePosixPath(self.path).suffix)


def expand(paths: Paths, suffixes: tuple[str, ...]) -> list[File]:
    """Lists the files that `paths` match, sorted per entry. In directories, only files with these suffixes count.

    Raises:
        DataError: an entry matches no file.
        MissingExtraError: a protocol needs a package that is not installed.
    """
    entries = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files = [file for entry in entries for file in _expand_one(os.fspath(entry), suffixes)]
    if not files:
        raise DataError("The list of paths is empty; give at least one.", path="")
    return files


def listed(directory: str, suffixes: tuple[str, ...], marker: str | None = None) -> dict[str, File]:
    """Lists a directory and its subdirectories as they are now; empty if the directory does not exist.

    Args:
        directory: a path or URL.
        suffixes: suffixes of files to list, unless a name below the directory begins with `.` or `_`.
        marker: name of further files to list.

    Returns:
        Files by path below the directory, in its order.

    Raises:
        DataError: the directory cannot be listed.
        MissingExtraError: the protocol needs a package that is not installed.
    """
    system, local = _file_system(directory)
    prefix = local.rstrip("/") + "/"
    try:
        system.invalidate_cache()
        names = system.find(local) if system.isdir(local) else []
    except FileNotFoundError:
        names = []  # Removed in between.
    except OSError as error:
        raise DataError(f"{directory} cannot be listed ({error}); check path and access.", path=directory) from error
    below = {str(name).removeprefix(prefix): str(name) for name in names}
    return {
        path: File(_full(directory, system, name), _hive_keys(path))
        for path, name in sorted(below.items())
        if (path.endswith(suffixes) and not _hidden(path)) or path.rpartition("/")[2] == marker
    }


def _expand_one(path: str, suffixes: tuple[str, ...]) -> list[File]:
    system, local = _file_system(path)
    try:
        if any(c in local for c in "*?["):
            matches, problem = system.glob(local, detail=True), f"No file matches {path}"
        elif system.isdir(local):
            below = system.find(local, detail=True)
            matches = {n: below[n] for n in below if n.endswith(suffixes) and not _hidden(n[len(local) :])}
            problem = f"{path} has no file whose name ends in {', '.join(suffixes)}"
        else:
            matches = {local: system.info(local)} if system.exists(local) else {}
            problem = f"There is no file or directory {path}"
    except OSError as error:
        raise DataError(f"{path} cannot be listed ({error}); check path and access.", path=path) from error
    if not matches:
        raise DataError(f"{problem}; correct the path.", path=path)
    infos = sorted((str(name), info) for name, info in matches.items())
    return [File(_full(path, system, n), _hive_keys(n), info.get("size"), _modified(info)) for n, info in infos]


def _modified(info: Mapping[str, Any]) -> int | None:
    """Returns the time of the last modification; file systems report it under different names."""
    names = ("mtime", "LastModified", "last_modified", "modified", "updated", "modificationTime", "created")
    time = next((info[name] for name in names if info.get(name) is not None), None)
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return None
    if isinstance(time, datetime):
        time = time.timestamp()
    return round(time * 1e9) if isinstance(time, int | float) else None


def _full(path: str, system: Any, name: str) -> str:
    """Returns a name in a file system as `File.path`, where `path` is a path or URL of the same file system."""
    protocol, separator, rest = path.partition("://")
    if not separator:
        return name
    if protocol in _WITH_HOST:  # Names in these file systems lack the host.
        return f"{protocol}://{rest.partition('/')[0]}/{name.lstrip('/')}"
    return str(system.unstrip_protocol(name))


def _file_system(path: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)  # type: ignore[no-any-return]
    except ImportError as error:
        raise missing_package(path, error) from error
    except ValueError as error:
        raise DataError(f"{path}: {error}; correct the protocol.", path=path) from error


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(path).parts)


def _hive_keys(path: str) -> dict[str, str]:
    """Parses the `key=value` parts of a path; of the file name, only the part before the first dot."""
    *folders, name = PurePosixPath(path).parts
    parts = [*folders, name.split(".")[0]]
    pairs = (part.partition("=") for part in parts)
    return {unquote(key): unquote(value) for key, _, value in pairs if key and value}  # As Hive and Arrow write them.


def find(name: str) -> Path | None:
    """Returns the path of a data set in the directory that PERSIA_DATA names; None if it is not there."""
    folder = os.environ.get("PERSIA_DATA")
    path = Path(folder, name) if folder else None
    return path if path is not None and path.exists() else None


def dataset_path(name: str) -> Path:
    """Returns the path of a data set.

    Raises:
        DataError: the data set is not found.
    """
    path = find(name)
    if path is None:
        raise DataError(
            f"Data set {name!r} not found; give the path, or set PERSIA_DATA to the directory that holds {name}.",
            path=name,
        )
    return path
