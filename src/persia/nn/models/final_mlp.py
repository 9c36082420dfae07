"""FinalMLP: two perceptrons on gated features, and a bilinear fusion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.checks import check_integer, plain
from persia.errors import ConfigError
from persia.nn.models.layers import feature_dims, feature_names, layer_widths, mlp, output_count, pooled
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["FinalMLP"]


class FinalMLP(nn.Module):
    """Two-stream perceptron (Mao et al., AAAI 2023, arXiv 2304.00902).

    Each of two perceptrons gets all inputs, weighted by its own gate: 2 * sigmoid of a small network on the
    features that the gate names, or on a learned vector where it names none. The outputs o1, o2 meet in a bilinear
    form by heads: w1 o1 + w2 o2 + sum over heads of o1_h W_h o2_h. Un-pooled sequences enter as the mean over their
    ids.

    Args:
        schema: the input; names features, dimensions, labels.
        hidden: widths of the first stream's layers; the last one is its output.
        hidden2: widths of the second stream's layers; by default the widths of the first's.
        gates: for each stream the ID-type features that its gate reads, such as `(["user"], ["item"])`.
        gate_hidden: width of the gates' hidden layer.
        heads: of the fusion; divides the last width of both streams.
        dropout: share of each hidden layer that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: no ID-type feature, an unknown one in a gate, a bad width, or `heads` that do not divide the last
            widths.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: Sequence[int] = (256, 128),
        hidden2: Sequence[int] | None = None,
        gates: tuple[Sequence[str], Sequence[str]] = ((), ()),
        gate_hidden: int = 64,
        heads: int = 2,
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.features = tuple(dims)
        inputs = sum(dims.values()) + schema.dense_width
        first_widths = layer_widths("hidden", hidden)
        streams = (first_widths, first_widths if hidden2 is None else layer_widths("hidden2", hidden2))
        heads, gate_hidden = plain(heads), plain(gate_hidden)
        check_integer("heads", heads, 1)
        check_integer("gate_hidden", gate_hidden, 1)
        for widths in streams:
            if not widths or widths[-1] % heads:
                raise ConfigError(
                    f"heads = {heads} does not divide the last width of hidden = {list(widths)}; the fusion cuts the "
                    "output of each stream into equal heads.",
                    field="heads",
                )
        if not isinstance(gates, (tuple, list)) or len(gates) != 2:
            raise ConfigError(f"Invalid gates = {gates!r}; expected two lists of features.", field="gates")
        read = [feature_names("gates", names) for names in gates]
        for name in (*read[0], *read[1]):
            schema.feature(name)
        self.gates = nn.ModuleList(_Gate({name: dims[name] for name in names}, gate_hidden, inputs) for names in read)
        self.streams = nn.ModuleList(mlp(inputs, widths, None, dropout=dropout) for widths in streams)
        first, second = streams[0][-1], streams[1][-1]
        count = output_count(schema, outputs)
        self.linear = nn.Linear(first + second, count)
        self.bilinear = nn.Parameter(torch.empty(heads, first // heads, second // heads, count))
        nn.init.xavier_normal_(self.bilinear)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        features = {name: pooled(embeddings[name]) for name in self.features}
        inputs = torch.cat([*features.values(), dense], 1)
        outputs = [stream(gate(features) * inputs) for gate, stream in zip(self.gates, self.streams, strict=True)]
        first, second = (part.unflatten(1, (len(self.bilinear), -1)) for part in outputs)
        fused = torch.einsum("bhi,hijo,bhj->bo", first, self.bilinear.to(first.dtype), second)
        logits: Tensor = self.linear(torch.cat(outputs, 1)) + fused
        return logits


class _Gate(nn.Module):
    """Weights of a stream's inputs, between 0 and 2.

    Args:
        dims: of the features that it reads, by name; empty for a learned vector in their place.
        hidden: width of the hidden layer, and of that vector.
        outputs: number of weights.
    """

    def __init__(self, dims: dict[str, int], hidden: int, outputs: int) -> None:
        super().__init__()
        self.names = tuple(dims)
        self.context = None if dims else nn.Parameter(0.01 * torch.randn(1, hidden))
        self.network = mlp(sum(dims.values()) or hidden, [hidden], outputs)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Returns `[batch, outputs]`, or `[1, outputs]` if it reads no feature."""
        read = torch.cat([features[name] for name in self.names], 1) if self.context is None else self.context
        return 2 * torch.sigmoid(self.network(read))
