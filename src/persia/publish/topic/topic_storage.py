"""Stores a log of changes in a topic of Kafka."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from persia.checkpoint.format import checksum_text
from persia.checkpoint.storage import crc32
from persia.errors import PublishError
from persia.kafka_client import require_library
from persia.publish.topic.address import parse_address
from persia.publish.topic.client import DeletedMessageError, TopicClient, TopicMessage
from persia.publish.topic.file_records import (
    CHUNK,
    RECORD,
    FileRecord,
    Record,
    RemovalRecord,
    decode_record,
    encode_record,
    kind_of,
)
from persia.publish.topic.index import TopicIndex

__all__ = ["TopicStorage"]

CHUNK_BYTES = 768 << 10
"""Length of a chunk: below the default of `message.max.bytes`, 1,000,000, of librdkafka and brokers."""

ENVELOPE_BYTES = 4096
"""Space in a message for other data than the content of a file: path, headers, ..."""

INLINE_BYTES = 16 << 10
"""Maximum length of a file whose content is in its record."""

REFRESH_SECONDS = 30.0
"""Interval at which a writer refreshes its index, to record from which offset new readers must read."""

RENEW_SECONDS = 300.0
"""Files of an epoch are written again after this time, before the topic's retention deletes them."""

TAIL = 32
"""Number of messages at the end of the topic that a new reader reads first."""


class TopicStorage:
    """Files in a topic; see `persia.publish.log_storage.LogStorage`. Connects in the background.

    The first partition has a record of each file, and the contents of small files. Contents of other files are in
    chunks, in the other partitions if there are any. A file exists once its record does. Every record has the offset of
    the oldest record that still matters, from which a new reader starts.

    Args:
        url: see `parse_address`.

    Raises:
        ConfigError: the URL is not valid, or librdkafka rejects a setting.
        MissingExtraError: confluent-kafka is not installed.
    """

    def __init__(self, url: str) -> None:
        address = parse_address(url)
        require_library()
        self.url = address.url
        self.problem = ""
        self._client = TopicClient(address)
        limit = address.settings.get("message.max.bytes", "")
        self._chunk_bytes = max(1024, int(limit) - ENVELOPE_BYTES) if limit.isdecimal() else CHUNK_BYTES
        self._index = TopicIndex()
        self._position: int | None = None
        """Offset up to which records have been read; None before the first."""
        self._last: TopicMessage | None = None
        """The last message that was read. If its offset has another message, the topic was recreated."""
        self._refreshed = 0.0
        self._partitions = 0
        self._renewed: dict[str, tuple[bytes, float]] = {}
        """Files of epochs that this object has written, with the times of writing."""

    # --- read ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Reads new records. Rejects other messages; `problem` has the reason."""
        try:
            self._catch_up()
        except DeletedMessageError:  # Retention has deleted it since the bounds were read, so they have changed.
            self._catch_up()

    def _catch_up(self) -> None:
        low, high = self._client.bounds(0)
        if self._position is None or high < self._position or not self._read(self._position, low, high):
            self._index.clear()  # This is the first read, or the topic was recreated.
            self._position = self._last = None
            self._read(self._start(low, high), low, high)
        self._index.forget_before(low)
        self._refreshed = time.monotonic()

    def _read(self, position: int, low: int, high: int) -> bool:
        """Reads the records from a position on. Returns False if the last message before it no longer exists."""
        self.problem = ""
        begin, last = max(low, position), self._last
        if last is not None and low <= last.offset and begin < high:
            begin = last.offset
        for message, record in self._records(begin, high):
            if last is not None and message.offset <= last.offset:
                if message != last:
                    return False
                continue
            if isinstance(record, str):
                self.problem = self.problem or record
            elif record is not None:
                self._index.apply(message.offset, record)
            self._position, self._last = message.offset + 1, message
        self._position = high
        return True

    def _start(self, low: int, high: int) -> int:
        """Returns the offset from which to read to get all files."""
        tail = TAIL
        while (begin := max(low, high - tail)) > low:
            offsets = [
                record.begin
                for _, record in self._records(begin, high)
                if isinstance(record, FileRecord | RemovalRecord)
            ]
            if offsets:
                return max(low, min(offsets))
            tail *= 8
        return low

    def _records(self, begin: int, end: int) -> Iterator[tuple[TopicMessage, Record | str | None]]:
        """Yields messages with their records; None for chunks, and the problem for invalid messages."""
        for message in self._client.messages(0, begin, end):
            try:
                record = decode_record(message.value, message.offset) if kind_of(message.headers) == "record" else None
            except ValueError as error:
                yield message, f"Message {message.offset} in partition 0 of {self.url} {error}."
            else:
                yield message, record

    def full(self, path: str = "") -> str:
        """Returns the path with the URL, for messages."""
        return f"{self.url}/{path}" if path else self.url

    def names(self, path: str = "") -> list[str]:
        """Returns the sorted names in a directory, as of the last refresh."""
        return self._index.names(path)

    def size(self, path: str) -> int | None:
        """Returns the length of a file; None if there was no such file at the last refresh."""
        record = self._index.get(path)
        return None if record is None else record.size

    def head(self, path: str, begin: int, end: int) -> bytes:
        """Reads the bytes [begin, end) of a small file."""
        return bytes(self._content(path, self._file_record(path))[begin:end])

    def load(self, path: str, size: int) -> tuple[memoryview, int]:
        """Reads a file of `size` bytes; returns it with its CRC-32."""
        data = self._content(path, self._file_record(path))
        if len(data) != size:
            raise PublishError(f"{self.full(path)} has {len(data)} bytes instead of {size}.", path=path)
        return data, crc32(data)

    def _file_record(self, path: str) -> FileRecord:
        record = self._index.get(path)
        if record is None:
            raise PublishError(f"Cannot read {self.full(path)}: it does not exist.", path=path)
        return record

    def _content(self, path: str, record: FileRecord) -> memoryview:
        """Returns the content of a file, after checking its length and checksum."""
        if record.data is not None:  # Checked when the record was decoded.
            return memoryview(bytearray(record.data))
        chunks, partition = record.chunks, record.partition
        low, high = self._client.bounds(partition)
        if chunks[0] < low:
            raise PublishError(
                f"{self.full(path)} has been deleted by the topic's retention: partition {partition} begins at offset "
                f"{low}, and its first chunk is at {chunks[0]}. Raise the retention above the time between two "
                "snapshots.",
                path=path,
            )
        data, number = bytearray(), 0
        for message in self._client.messages(partition, chunks[0], min(high, chunks[-1] + 1)):
            if number < len(chunks) and message.offset == chunks[number]:
                number += 1
                data += _chunk(message.headers, message.value)
                if len(data) > record.size:
                    break
        view = memoryview(data)
        if number < len(chunks) or len(data) != record.size or checksum_text(crc32(view)) != record.checksum:
            raise PublishError(
                f"{self.full(path)} is damaged: its chunks in partition {partition} do not have the length and "
                "checksum of its record.",
                path=path,
            )
        return view

    # --- write --------------------------------------------------------------------------------------------------

    def write(self, path: str, buffers: Iterable[memoryview]) -> tuple[int, int]:
        """Writes a file in chunks; returns its length and CRC-32."""
        size = crc = 0

        def chunks() -> Iterator[tuple[str, bytes]]:
            nonlocal size, crc
            for number, data in enumerate(_chunks(buffers, self._chunk_bytes)):
                size, crc = size + len(data), crc32(memoryview(data), crc)
                yield f"{path}#{number}", data

        begin = self._begin()
        partition = self._partition(path)
        offsets = self._client.write(partition, CHUNK, chunks())
        content = {"partition": partition, "chunks": offsets} if offsets else {"data": b""}
        self._record(FileRecord(path=path, begin=begin, size=size, checksum=checksum_text(crc), **content))
        return size, crc

    def put(self, path: str, data: bytes) -> None:
        """Writes or replaces a small file: readers see the old or the new one."""
        self._put(path, data)
        now = time.monotonic()
        if path.count("/") == 1:  # A file of an epoch, which no later file replaces.
            self._renewed[path] = data, now
        for other, (content, written) in list(self._renewed.items()):
            if now - written > RENEW_SECONDS:
                self._put(other, content)
                self._renewed[other] = content, now

    def _put(self, path: str, data: bytes) -> None:
        if len(data) > min(INLINE_BYTES, self._chunk_bytes):
            self.write(path, [memoryview(data)])
            return
        checksum = checksum_text(crc32(memoryview(data)))
        self._record(FileRecord(path=path, begin=self._begin(), size=len(data), checksum=checksum, data=data))

    def probe(self) -> None:
        """Writes the removal of a file that does not exist, which readers skip."""
        self.remove("probe")

    def sync(self) -> None:
        """No-op: all in-sync replicas have acknowledged the writes."""

    def remove(self, path: str) -> None:
        """Removes a file, or a directory and its contents, for readers. The topic's retention deletes the messages."""
        self._renewed = {
            other: entry for other, entry in self._renewed.items() if not f"{other}/".startswith(f"{path}/")
        }
        self._record(RemovalRecord(path=path, begin=self._begin()))

    def _record(self, record: Record) -> None:
        self._client.write(0, RECORD, [(record.path, encode_record(record))])

    def _begin(self) -> int:
        """Returns the offset of the oldest record that still matters, or of an older one."""
        if self._position is None or time.monotonic() - self._refreshed > REFRESH_SECONDS:
            self.refresh()
        assert self._position is not None
        return self._index.begin(self._position)

    def _partition(self, path: str) -> int:
        """Returns the partition for the chunks of a file. A stream has one, so that readers skip other streams."""
        self._partitions = self._partitions or self._client.partitions()
        if self._partitions == 1:
            return 0
        server = path.rpartition("/")[0].rpartition("-")[2]
        place = 1 + int(server) if server.isdecimal() else 0
        return 1 + place % (self._partitions - 1)


def _chunk(headers: list[tuple[str, bytes]] | None, value: bytes | None) -> bytes:
    try:
        right = kind_of(headers) == "chunk"
    except ValueError:
        right = False
    return value if right and value is not None else b""


def _chunks(buffers: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Yields bytes of buffers in chunks of `size`; the last one may be shorter."""
    data = bytearray()
    for buffer in buffers:
        remaining = buffer
        while len(remaining):
            piece = remaining[: size - len(data)]
            data += piece
            remaining = remaining[len(piece) :]
            if len(data) == size:
                yield bytes(data)
                data.clear()
    if data:
        yield bytes(data)
