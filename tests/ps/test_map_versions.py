"""A PS refuses every request whose ids were routed by another bucket map."""

import numpy as np
import pytest

from persia import rpc
from persia.errors import StaleMapError
from persia.modes import Sync
from persia.optim import SGD
from persia.ps import EmbeddingServer, ServerOptions
from persia.rpc.interface import describe
from persia.schema import Table
from persia.services import EmbeddingPS, RecordableRows, RowChunk
from persia.types import BucketMap, Gradients, Moment, Packed, PackedGradients, PushHeader

IDS = np.arange(6, dtype=np.uint64)
PACKED = Packed(["item"], [len(IDS)], IDS)
VALUES = np.ones((len(IDS), 2), np.float32)
CURRENT = BucketMap.even(2).moved(3).emptied([1])
TIMEOUT = 20.0
METADATA = {name: np.zeros(len(IDS), np.uint32) for name in ("update_count", "last_step", "stamp")}

CALLS = {
    "lookup": lambda ps, *version: ps.lookup(PACKED, True, *version),
    "lookup_ahead": lambda ps, *version: ps.lookup_ahead(PACKED, *version),
    "refresh": lambda ps, *version: ps.refresh(PACKED, Moment(0, 0), None, *version),
    "recorded_lookup": lambda ps, *version: ps.recorded_lookup(PACKED, 1, *version),
    "push": lambda ps, *version: ps.push(
        PushHeader(1, 0, 1, 0, 6), PackedGradients.of({"item": Gradients(IDS, VALUES)}), *version
    ),
    "contains": lambda ps, *version: ps.contains(PACKED, *version),
    "read_rows": lambda ps, *version: ps.read_rows("item", IDS, True, *version),
    "set_rows": lambda ps, *version: ps.set_rows(1, "item", IDS, VALUES, None, *version),
    "import_rows": lambda ps, *version: ps.import_rows(
        RowChunk("item", 0, {"ids": IDS, "embeddings": VALUES, **METADATA}), *version
    ),
}


def server(buckets):
    return EmbeddingServer({"item": Table("item", 2)}, SGD(1.0), Sync(), 0, 1, ServerOptions(buckets=buckets))


def state(ps):
    return ps.statistics(), [
        {name: array.tolist() for name, array in chunk.arrays.items()} for chunk in ps.export_rows()
    ]


def test_all_requests_with_ids_have_the_version_of_the_map():
    routed = {
        name
        for protocol in (EmbeddingPS, RecordableRows)
        for name, method in describe(protocol).items()
        if {"ids", "gradients", "chunk"} & {parameter for parameter, _ in method.parameters}
    }
    versioned = {
        name
        for protocol in (EmbeddingPS, RecordableRows)
        for name, method in describe(protocol).items()
        if method.parameters[-1:] == (("map_version", 0),)
    }
    assert routed == versioned == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_request_by_another_map_is_refused_without_effect(name):
    ps = server(CURRENT)
    assert CURRENT.version == 2
    ps.lookup(PACKED, True, 2)
    before = state(ps)
    for other in ([0], [1], [3], []):  # Without a version: by the first map.
        with pytest.raises(StaleMapError, match=r"by bucket map \d.* has bucket map 2\.") as error:
            CALLS[name](ps, *other)
        assert error.value.fields == {"routed": (other or [0])[0], "current": 2}
        assert state(ps) == before
    CALLS[name](ps, 2)


def test_a_refused_lookup_is_not_recorded():
    ps = server(CURRENT)
    ps.begin_recording(0)
    with pytest.raises(StaleMapError):
        CALLS["recorded_lookup"](ps, 1)
    assert not ps.end_recording().reads


@pytest.mark.parametrize("name", CALLS)
def test_without_a_version_requests_are_by_the_first_map(name):
    ps = server(BucketMap.even(3))
    CALLS[name](ps)


def test_the_refusal_and_the_map_cross_processes():
    with rpc.serve(server(CURRENT), protocol=EmbeddingPS) as served:
        stub = rpc.connect(served.address, EmbeddingPS, timeout=TIMEOUT)
        try:
            assert stub.buckets() == CURRENT
            with pytest.raises(StaleMapError) as error:
                stub.lookup(PACKED, True, 1)
            assert error.value.fields["routed"] == 1
            assert error.value.fields["current"] == 2
        finally:
            rpc.close(stub)
