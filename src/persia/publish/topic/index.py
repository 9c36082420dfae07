"""Index of the files of a log of changes in a topic, built from the records of its first partition."""

from __future__ import annotations

from collections import OrderedDict

from persia.publish.topic.file_records import FileRecord, Record

__all__ = ["TopicIndex"]


class TopicIndex:
    """The files that were written and not removed. Not thread-safe."""

    def __init__(self) -> None:
        self._offsets: OrderedDict[str, int] = OrderedDict()
        """Offset of the record of each file, in the order of the records."""
        self._directories: dict[str, dict[str, FileRecord]] = {}
        """Files by directory and name."""

    def apply(self, offset: int, record: Record) -> None:
        """Applies a record. Call it in the order of offsets."""
        path = record.path
        directory, _, name = path.rpartition("/")
        if isinstance(record, FileRecord):
            self._directories.setdefault(directory, {})[name] = record
            self._offsets.pop(path, None)
            self._offsets[path] = offset
            return
        below = [other for other in self._directories if other == path or other.startswith(f"{path}/")]
        for other in below:
            for each in list(self._directories[other]):
                self._forget(f"{other}/{each}")
        self._forget(path)

    def forget_before(self, offset: int) -> None:
        """Drops the files whose records precede an offset, as they have been deleted from the topic."""
        while self._offsets and self.begin(offset) < offset:
            self._forget(next(iter(self._offsets)))

    def clear(self) -> None:
        """Drops all files."""
        self._offsets.clear()
        self._directories.clear()

    def get(self, path: str) -> FileRecord | None:
        """Returns the record of a file; None if there is no such file."""
        directory, _, name = path.rpartition("/")
        return self._directories.get(directory, {}).get(name)

    def names(self, path: str) -> list[str]:
        """Returns the sorted names of the files and directories in a directory."""
        prefix = f"{path}/" if path else ""
        inner = {other[len(prefix) :].partition("/")[0] for other in self._directories if other.startswith(prefix)}
        return sorted({*self._directories.get(path, ()), *inner} - {""})

    def begin(self, end: int) -> int:
        """Returns the offset of the oldest record of an existing file; `end` if there are no files."""
        return self._offsets[next(iter(self._offsets))] if self._offsets else end

    def _forget(self, path: str) -> None:
        if self._offsets.pop(path, None) is None:
            return
        directory, _, name = path.rpartition("/")
        del self._directories[directory][name]
        if not self._directories[directory]:
            del self._directories[directory]
