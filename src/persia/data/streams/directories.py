"""Reads the Parquet files of a growing directory."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple, Unpack

from persia.batching.batch import Batch
from persia.checks import check_choice, check_integer, check_seconds, plain
from persia.data.files import File, listed
from persia.data.from_parquet import ParquetSource
from persia.data.reader import canonical, cut
from persia.data.row_options import ColumnOptions, conversion_of, with_options
from persia.data.rows import Conversion
from persia.data.streams.recorded import BatchRecord, LocalStream, Stopped
from persia.errors import DataError
from persia.schema import InputRules, Schema
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Metric
from persia.types import Offsets

__all__ = ["DirectoryReader", "growing"]

LOG = get_logger("persia.data")

SUFFIXES = (".parquet", ".pq")
STOP_SECONDS = 0.1
"""Interval of checking whether to stop while waiting for a file."""


@with_options(ColumnOptions)
def growing(
    directory: str | PathLike[str],
    schema: Schema,
    batch_size: int = 1024,
    *,
    success: str | None = None,
    poll_seconds: float = 10.0,
    until: Literal["now"] | None = None,
    late: Literal["error", "skip"] = "error",
    **columns: Unpack[ColumnOptions],
) -> DirectoryReader:
    """Reads the Parquet files of a directory in the order of their paths, then files that are added later.

    A batch is a range of rows of one file. It is recorded before it is returned, so it can be read again exactly. The
    file and the row are part of the trainer's checkpoints: a resumed run, and the next call of `fit`, continue there,
    even if older files have been removed.

    New files must come later in the order, as hourly partitions `day=2024-05-01/hour=07/...` do. A file is read as soon
    as it exists under a name that does not begin with `.` or `_`, so write it elsewhere and rename it, as Spark does;
    or wait for a marker with `success`. Object stores list complete files only.

    Reading waits for new files until `Trainer.stop` or a signal ends it.

    Args:
        directory: a path, or any URL that fsspec supports: `s3://`, `gs://`, `az://`, `hdfs://`, `webhdfs://`.
        schema: columns to read. A column may also be a hive key, a part `key=value` of the path.
        batch_size: maximum samples per batch. The last batch of a file may have fewer.
        success: name of a file that marks the directory of a partition as complete, such as "_SUCCESS". Files of
            incomplete directories, and all files after them in the order, are not read yet.
        poll_seconds: interval of listing the directory.
        until: None for a stream without an end; "now" for the files that exist when reading begins.
        late: for a file that precedes, in the order, a file whose reading has begun: "error" raises, "skip" skips and
            counts the file.
        **columns: see `ColumnOptions`.

    Raises:
        MissingExtraError: the protocol of the URL needs a package that is not installed.
        ConfigError: an argument is invalid.
        DataError: while iterating: the directory cannot be listed; a file is missing, corrupt, late, or has invalid
            values. The message names the file.
    """
    batch_size = plain(batch_size)
    check_integer("batch_size", batch_size, 1)
    check_seconds("poll_seconds", poll_seconds)
    if until is not None:
        check_choice("until", until, ("now",))
    check_choice("late", late, ("error", "skip"))
    conversion = conversion_of(schema, **columns)
    path = fspath(directory).rstrip("/")
    return DirectoryReader(conversion, batch_size, DirectoryOptions(path, success, poll_seconds, until, late))


@dataclass(frozen=True)
class DirectoryOptions:
    """Arguments of `growing`."""

    path: str
    success: str | None
    poll_seconds: float
    until: Literal["now"] | None
    late: Literal["error", "skip"]


class RowRange(NamedTuple):
    """Rows of a file, named by its path below the directory, from `begin` to before `end`."""

    path: str
    begin: int
    end: int


class _FileRecord(BatchRecord[RowRange]):
    """The rows of the batches of a directory, and the files that have been read.

    Args:
        directory: path of the directory.
        number: number of the first batch.
        offsets: row at which the batch begins, by file. All files before the last of these have been read.
    """

    def __init__(self, directory: str, number: int, offsets: Offsets) -> None:
        self._directory = directory
        name = max(offsets, default="")
        path, row = name.removeprefix(f"{directory}/"), offsets.get(name, {}).get(0, 0)
        super().__init__("directory", number, self._position(path, row))
        self.origin = path
        """Files up to here may have been read before this record."""
        self.newest = path
        self.met: set[str] = set()
        """Files that have been opened or skipped since this record began."""
        self.end = (path, row)
        """File and row at which the last batch ends."""

    def add(self, rows: RowRange) -> None:
        """Records the rows of the next batch."""
        self.end = (rows.path, rows.end)
        self.append(rows, self._position(*self.end))

    def _position(self, path: str, row: int) -> Offsets:
        return {f"{self._directory}/{path}": {0: row}} if path else {}


class DirectoryReader(LocalStream[_FileRecord]):
    """A `Reader` of a growing directory, and a `persia.services.Stream`. Picklable; its record is not pickled.

    Args:
        conversion: converts rows to batches.
        batch_size: maximum samples per batch.
        options: arguments of `growing`.
    """

    def __init__(self, conversion: Conversion, batch_size: int, options: DirectoryOptions) -> None:
        super().__init__((options.path,), functools.partial(_FileRecord, options.path))
        self.batch_size = batch_size
        self._conversion = conversion
        self._options = options
        self._rows = self._batch_count = self._late = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the record."""
        return DirectoryReader, (self._conversion, self.batch_size, self._options)

    @property
    def schema(self) -> Schema:
        """The schema of the batches."""
        return self._conversion.schema

    def with_schema(self, schema: Schema) -> DirectoryReader:
        """Returns a reader of the same rows for another schema, without a record."""
        conversion = dataclasses.replace(self._conversion, schema=schema)
        return DirectoryReader(conversion, self.batch_size, self._options)

    @property
    def input_rules(self) -> InputRules:
        """See `Conversion.input_rules`."""
        return self._conversion.input_rules

    def commit(self, offsets: Offsets) -> None:
        """No-op: a directory has no lag monitors."""

    def observe(self) -> list[Metric]:
        """Returns rows and batches read, and late files. Thread-safe."""
        counts = {"rows": self._rows, "batches": self._batch_count, "late_files": self._late}
        return [Metric(f"stream_{name}", count, {}) for name, count in counts.items()]

    # --- reading ------------------------------------------------------------------------------------------------

    def _reads(self, name: str) -> bool:
        return name.startswith(f"{self._options.path}/")

    def _read(self, record: _FileRecord, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        files: dict[str, File] = {}
        while (recorded := record.find(number)) is not None:
            files = files or self._listed()
            number += 1
            yield self._counted(self._read_again(files, recorded))
        bounds = self._complete() if self._options.until is not None else None
        for path, file in self._files(record, bounds, stopping):
            at, row = record.end
            begin = row if at == path else 0
            for batch in self._rows_of(file, begin):
                record.add(RowRange(path, begin, begin + len(batch)))
                begin += len(batch)
                yield self._counted(batch)

    def _files(
        self, record: _FileRecord, bounds: dict[str, File] | None, stopping: Callable[[], bool]
    ) -> Iterator[tuple[str, File]]:
        """Yields the files in order, from the last file of the record on; waits for more unless there are bounds."""
        while not stopping():
            files = self._complete() if bounds is None else bounds
            path = self._next(record, files)
            if path is not None:
                record.met.add(path)
                record.newest = path
                yield path, files[path]
            elif bounds is not None:
                return
            else:
                deadline = time.monotonic() + self._options.poll_seconds
                while time.monotonic() < deadline and not stopping():
                    time.sleep(min(STOP_SECONDS, self._options.poll_seconds))
        raise Stopped

    def _next(self, record: _FileRecord, files: Iterable[str]) -> str | None:
        """Returns the first file that has not been read; refuses new files that precede a read one."""
        for path in files:
            if path in record.met or path < record.origin:
                continue
            if path >= record.newest:
                return path
            self._refuse(record, path)
        return None

    def _refuse(self, record: _FileRecord, path: str) -> None:
        place = f"{self._options.path}/{path}"
        if self._options.late == "error":
            raise DataError(
                f"{place} was added after reading of {record.newest} began, which it precedes in the order of paths. "
                'Write new files after all others; late="skip" skips late files.',
                path=place,
            )
        LOG.warning(
            "%s is skipped: it was added after reading of %s began, which it precedes in the order of paths.",
            place, record.newest,
        )  # fmt: skip
        self._late += 1
        record.met.add(path)

    def _listed(self) -> dict[str, File]:
        return listed(self._options.path, SUFFIXES, self._options.success)

    def _complete(self) -> dict[str, File]:
        """Lists the files that count, in order."""
        files, success = self._listed(), self._options.success
        if success is None:
            return files
        complete = {path.rpartition("/")[0] for path in files if path.rpartition("/")[2] == success}
        counted: dict[str, File] = {}
        for path, file in files.items():
            folder, _, name = path.rpartition("/")
            if folder not in complete:
                break  # Later files would be read before the files that this directory still lacks.
            if name != success:
                counted[path] = file
        return counted

    def _rows_of(self, file: File, begin: int) -> Iterator[Batch]:
        """Yields the rows of a file from row `begin` on as batches."""
        source = ParquetSource((file,), self._conversion)
        if source.count() > begin:
            yield from map(canonical, cut(source.chunks(begin), self.batch_size))

    def _read_again(self, files: Mapping[str, File], recorded: RowRange) -> Batch:
        """Reads a recorded batch."""
        path, begin, end = recorded
        source = ParquetSource((files[path],), self._conversion) if path in files else None
        if source is None or source.count() < end:
            raise DataError(
                f"{self._options.path}/{path} no longer has rows {begin} to {end}, which were read from it and are "
                "needed again. Keep files until a checkpoint covers them, and do not change them.",
                path=f"{self._options.path}/{path}",
            )
        return canonical(next(cut(source.chunks(begin), end - begin)))

    def _counted(self, batch: Batch) -> Batch:
        self._rows += len(batch)
        self._batch_count += 1
        return batch
