"""Messages of a topic that are damaged, of something else, or in another order are refused one by one."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia-recsys[kafka]"')

import persia
from persia.checkpoint.format import checksum_text
from persia.checkpoint.storage import crc32
from persia.publish import Replica, follow
from persia.publish.epochs import begin_epoch
from persia.publish.log_storage import open_storage
from persia.publish.topic.file_records import CHUNK, HEADER, RECORD, decode_record, encode_record
from persia.types import BucketMap
from support.change_log import advance, assert_equal_rows, begun, replica_of

pytestmark = pytest.mark.processes

SCHEMA = persia.Schema([persia.IdFeature("item", 3)])


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def file_record(path="epoch-0000000000/epoch.json", **fields):
    data = b"{}"
    whole = {"path": path, "begin": 0, "size": 2, "checksum": checksum_text(crc32(memoryview(data))), "data": data}
    return msgspec.msgpack.encode({"type": "file", **whole, **fields})


HOSTILE = [
    ([], b"{}", "does not belong to a log of changes"),
    ([("other", RECORD)], b"{}", "does not belong to a log of changes"),
    ([(HEADER, b"2/record")], file_record(), "of another version of persia"),
    ([(HEADER, RECORD), (HEADER, CHUNK)], file_record(), "of another version of persia"),
    ([(HEADER, RECORD)], None, "has no record"),
    ([(HEADER, RECORD)], b"", "damaged"),
    ([(HEADER, RECORD)], file_record()[:-1], "damaged"),
    ([(HEADER, RECORD)], pickle.dumps(Bomb()), "damaged"),
    ([(HEADER, RECORD)], bytes(range(256)), "damaged"),
    ([(HEADER, RECORD)], file_record(more=1), "unknown field"),
    ([(HEADER, RECORD)], file_record("../etc/passwd"), "path"),
    ([(HEADER, RECORD)], file_record("epoch-0000000000/../../x"), "path"),
    ([(HEADER, RECORD)], file_record(begin=1 << 40), "contradicts itself"),
    ([(HEADER, RECORD)], file_record(size=3), "contradicts itself"),
    ([(HEADER, RECORD)], file_record(data=b"[]"), "contradicts itself"),
    ([(HEADER, RECORD)], file_record(data=None), "contradicts itself"),
    ([(HEADER, RECORD)], file_record(data=None, chunks=[2, 2]), "contradicts itself"),
    ([(HEADER, RECORD)], file_record(size=1 << 60), "size"),
]


def test_hostile_messages_are_refused_one_by_one(topic, kafka):
    log = begun(topic)
    replica = replica_of(log)
    for headers, value, said in HOSTILE:
        kafka.write([value], headers=headers)
        advance(log)
        replica.refresh()
        assert said in replica.problem
        assert f"in partition 0 of {topic}" in replica.problem
        assert replica.steps == {0: log.step}
    assert_equal_rows(replica, log)
    replica.refresh()
    assert not replica.problem
    late = Replica(follow(topic))
    late.refresh()
    assert late.problem
    assert_equal_rows(late, log)
    assert begin_epoch(open_storage(topic), BucketMap.even(1), SCHEMA).epoch == 1  # Writers leave them out, too.


@given(
    st.binary(max_size=80)
    | st.builds(lambda cut, at, by: _flipped(cut, at, by), st.integers(0, 90), st.integers(0, 89), st.integers(1, 255))
)
def test_any_bytes_are_a_record_or_refused(data):
    try:
        record = decode_record(data, 7)
    except ValueError:
        return
    assert decode_record(encode_record(record), 7) == record


def _flipped(cut, at, by):
    data = bytearray(file_record())
    data[at % len(data)] ^= by
    return bytes(data[:cut])


@pytest.mark.parametrize("chunks", ["of another file", "beyond the end", "too many", "too few"])
def test_records_whose_chunks_are_not_theirs(topic, chunks):
    log = begun(f"{topic}?message.max.bytes=5200")
    replica = replica_of(log)
    advance(log)
    path = log.place("0000000001.00000.safetensors")
    log.storage.refresh()
    record = log.storage._index.get(path)
    other = log.storage._index.get(log.place("0000000000.00000.safetensors"))
    offsets = {
        "of another file": other.chunks,
        "beyond the end": [*record.chunks, 10_000],
        "too many": sorted({*record.chunks, *other.chunks}),
        "too few": record.chunks[:1] if len(record.chunks) > 1 else other.chunks[:1],
    }[chunks]
    log.storage._record(msgspec.structs.replace(record, chunks=offsets))
    replica.refresh()
    assert "is damaged: its chunks" in replica.problem
    assert replica.steps == {0: 3}
    log.storage._record(record)
    replica.refresh()
    assert_equal_rows(replica, log)


def test_records_that_come_twice_or_too_early(topic):
    log = begun(topic)
    replica = replica_of(log)
    advance(log, 2)
    log.storage.refresh()
    names = ["0000000001.00000.safetensors", "0000000001-increment.json", "0000000002.00000.safetensors"]
    records = [log.storage._index.get(log.place(name)) for name in names]
    log.storage.remove(log.place(names[0]))
    replica.refresh()
    assert "is missing; its manifest says" in replica.problem
    assert replica.steps == {0: 3}
    for record in records:  # The part comes after its manifest, and all of them come twice.
        log.storage._record(record)
    replica.refresh()
    assert_equal_rows(replica, log)
    for record in records:
        log.storage._record(record)
    advance(log)
    replica.refresh()
    assert_equal_rows(replica, log)
    assert not replica.problem
