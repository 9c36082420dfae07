"""HSTU: gated pointwise attention over the history and the candidate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_integer, plain
from persia.nn.models.history import Events, HistoryInput, check_heads
from persia.nn.models.layers import mlp, output_count
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["HSTU"]

GROUPS = 4
"""Groups of samples of like length, on a CPU."""


class HSTU(nn.Module):
    """Hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv 2402.17152), for ranking.

    The history with the candidate behind it passes layers of

        u, v, q, k = split(SiLU(f1(norm(x)))),  a = SiLU(q k' + bias) v / n,  y = x + f2(norm(a) * u),

    with causal attention that is not normalised, a learned bias for each distance of positions, and n the largest
    number of positions. A learned vector for each position, counted from the oldest event, is added to the input. The
    candidate's output enters a perceptron with the other features. The paper's bias of time differences is left out; an
    aligned feature of the events' ages, as ids, is part of the events instead. Other un-pooled sequences enter as the
    mean over their ids.

    On a CPU the batch is jagged: samples of like length pass the layers together, each group padded to its longest. On
    other devices all are padded to `max_length`, as the host would have to wait for the device to learn their lengths;
    and so they are in a compiled or exported network, whose shapes do not depend on values.

    Args:
        schema: the input; names features, dimensions, labels.
        history: pairs of an un-pooled feature and the candidate's feature, such as `[("history", "item")]`; the
            un-pooled features are aligned, and the features of one event are put side by side. By default the un-pooled
            feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        layers: number of layers.
        heads: of the attention; divides the width of an event.
        hidden: widths of the deep network's hidden layers.
        dropout: share of each hidden layer of it that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: the schema has no history, a pair does not fit, or a width or number is bad.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        history: Sequence[tuple[str, str]] | None = None,
        newest_first: bool = False,
        layers: int = 2,
        heads: int = 1,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.input = HistoryInput(schema, history, newest_first)
        self.input.check_same_dim()
        layers, heads = plain(layers), plain(heads)
        check_integer("layers", layers, 1)
        width = self.input.dim
        check_heads(heads, width)
        positions = self.input.max_length + 1
        self.positions = nn.Parameter(0.02 * torch.randn(positions, width))
        self.layers = nn.ModuleList(_Layer(width, heads, positions) for _ in range(layers))
        inputs = width + self.input.others + schema.dense_width
        self.deep = mlp(inputs, hidden, output_count(schema, outputs), dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        events = self.input.events(embeddings)
        if events.mask.device.type == "cpu" and not torch.compiler.is_compiling():
            order = events.lengths.argsort()
            states = torch.cat([self._states(_shortened(events, rows)) for rows in order.chunk(GROUPS)])
            state = states.index_select(0, order.argsort())
        else:
            state = self._states(events)
        logits: Tensor = self.deep(torch.cat([state, *self.input.rest(embeddings), dense], 1))
        return logits

    def _states(self, events: Events) -> Tensor:
        """Returns the last layer's output for the candidate, `[batch, width]`."""
        rows, lengths = torch.arange(events.mask.shape[0], device=events.mask.device), events.lengths
        # The candidate takes the place behind the newest event; none of the two attends to the padding after it.
        x = F.pad(events.values, (0, 0, 0, 1)).index_put((rows, lengths), events.candidate)
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x[rows, lengths]


class _Layer(nn.Module):
    """A unit on sequences.

    Args:
        width: of inputs and outputs.
        heads: of the attention.
        positions: largest length of a sequence.
    """

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 4 * width)
        self.bias = nn.Parameter(0.02 * torch.randn(positions))
        self.attended = nn.LayerNorm(width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[batch, length, width]` from the same."""
        gate, *parts = F.silu(self.inputs(self.norm(x))).chunk(4, 2)
        # [batch, heads, length, width / heads]
        value, query, key = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        position = torch.arange(x.shape[1], device=x.device)
        distance = position.unsqueeze(1) - position
        bias = self.bias[distance.clamp(min=0)].to(query.dtype)
        weights = F.silu(query @ key.transpose(2, 3) + bias) * (distance >= 0) / len(self.bias)
        attended = (weights @ value).transpose(1, 2).flatten(2)
        result: Tensor = x + self.output(self.attended(attended) * gate)
        return result


def _shortened(events: Events, rows: Tensor) -> Events:
    """Returns the events of these samples, padded to the longest of them."""
    mask = events.mask[rows]
    length = int(mask.any(0).sum())
    return Events(events.values[rows, :length], mask[:, :length], events.candidate[rows])
