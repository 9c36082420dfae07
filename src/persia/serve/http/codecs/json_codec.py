"""The codec of JSON, in which arrays are lists of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from persia.serve.http.codecs.codec import JSON, Samples
from persia.serve.http.codecs.messages import MessageCodec, TableColumn, Value, described

if TYPE_CHECKING:
    from persia.serve.http.batcher import JobResult
    from persia.serve.item_index import Retrieved
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["JsonCodec"]


class _Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples as columns; `dense` as in `Samples`."""

    features: dict[str, list[Value]]
    dense: dict[str, list[Value]] | list[Value] = msgspec.field(default_factory=dict)


class _EmbeddingsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ids of a table."""

    table: str
    ids: list[Value]


class JsonCodec(MessageCodec):
    """The codec of JSON."""

    media_type = JSON
    names = (JSON,)

    def __init__(self) -> None:
        super().__init__("JSON", _decoder)
        self._samples = _decoder(_Samples)
        self._embeddings = _decoder(_EmbeddingsRequest)

    def ids(self, body: bytes) -> TableColumn:
        """See `MessageCodec.ids`."""
        request = self._decoded(self._embeddings, body)
        return TableColumn(request.table, request.ids)

    def predictions(self, predictions: JobResult) -> bytes:
        """See `Codec.predictions`."""
        answers, by_label = predictions.answers, predictions.answers.by_label(predictions.values)
        values: dict[str, Any] = {label: part.tolist() for label, part in by_label.items()}
        if answers.name == "predictions":
            values = {each.label: {**described(each), "values": values[each.label]} for each in answers.of}
        versions = {"step": predictions.step, "epoch": predictions.epoch}
        return msgspec.json.encode({answers.name: values, **versions})

    def embeddings(self, table: str, embeddings: TableEmbeddings) -> bytes:
        """See `Codec.embeddings`."""
        found, rows, step, epoch = embeddings
        return msgspec.json.encode(
            {"table": table, "found": found.tolist(), "rows": rows.tolist(), "step": step, "epoch": epoch}
        )

    def nearest(self, items: Retrieved) -> bytes:
        """See `Codec.nearest`."""
        return msgspec.json.encode({"ids": items.ids.tolist(), "scores": items.scores.tolist(), "step": items.step})

    def _starts_array(self, body: bytes) -> bool:
        return body.lstrip(b" \t\r\n")[:1] == b"["

    def _columns(self, body: bytes) -> Samples:
        samples = self._decoded(self._samples, body)
        return Samples(samples.features, samples.dense)


def _decoder(form: Any) -> Any:
    return msgspec.json.Decoder(form).decode
