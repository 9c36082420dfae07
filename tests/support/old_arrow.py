"""Arrow IPC streams whose buffers are compressed as before Arrow 1.0: metadata say so, not a field of the message."""

from __future__ import annotations

import io

import pyarrow as pa


def old_compressed(plain: int) -> bytes:
    """Returns a stream with a column `a` of whole numbers, whose buffer decompresses to so many bytes."""
    data = plain.to_bytes(8, "little") + pa.Codec("zstd").compress(bytes(plain), asbytes=True)
    batch = pa.record_batch({"a": pa.Array.from_buffers(pa.int8(), len(data), [None, pa.py_buffer(data)])})
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "zstd"})
    return sink.getvalue()
