"""HSTU: gated pointwise attention over jagged histories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_integer, plain
from persia.nn.models.history import HistoryInput, check_heads
from persia.nn.models.layers import mlp, output_count
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["HSTU"]

GROUPS = 4
"""Groups of samples of like length, each padded to its longest."""


class HSTU(nn.Module):
    """Hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv 2402.17152), for ranking.

    The history with the candidate behind it passes layers of

        u, v, q, k = split(SiLU(f1(norm(x)))),  a = SiLU(q k' + bias) v / n,  y = x + f2(norm(a) * u),

    with causal attention that is not normalised, a learned bias for each distance of positions, and n the largest
    number of positions. The candidate's output enters a perceptron with the other features. Attention is jagged: linear
    layers see real events only, and samples of like length are attended to together, each group padded to its longest
    sample. The paper's bias of time differences is left out; an aligned feature of the events' ages, as ids, is part of
    the events instead. Other un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        history: pairs of an un-pooled feature and the candidate's feature, such as `[("history", "item")]`; the
            un-pooled features are aligned, and those of one event are put side by side. By default the un-pooled
            feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        layers: number of layers.
        heads: of the attention; divides the width of an event.
        hidden: widths of the deep network's hidden layers.
        dropout: share of each hidden layer of it that is dropped in training.
        outputs: logits per sample; one for each label by default.

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
        inputs = width + self.input.others + len(schema.dense_features)
        self.deep = mlp(inputs, hidden, output_count(schema, outputs), dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        events = self.input.events(embeddings)
        lengths = events.lengths
        rows = torch.arange(len(lengths), device=lengths.device)
        # The candidate takes the place behind the newest event.
        values = F.pad(events.values, (0, 0, 0, 1)).index_put((rows, lengths), events.candidate)
        mask = torch.arange(values.shape[1], device=lengths.device) <= lengths.unsqueeze(1)
        x = (values + self.positions)[mask]
        ends = (lengths + 1).cumsum(0)
        groups = _groups(lengths + 1, ends)
        for layer in self.layers:
            x = layer(x, groups)
        logits: Tensor = self.deep(torch.cat([x[ends - 1], *self.input.rest(embeddings), dense], 1))
        return logits


class _Layer(nn.Module):
    """A unit on jagged sequences.

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

    def forward(self, x: Tensor, groups: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns `[events, width]` from the same.

        Args:
            x: the events of all samples, one after another.
            groups: of samples, as `_groups` returns.
        """
        gate, *parts = F.silu(self.inputs(self.norm(x))).chunk(4, 1)
        found = torch.zeros_like(parts[0])
        for index, mask in groups:
            length = index.shape[1]
            # [samples, heads, length, width / heads]
            value, query, key = (p[index].unflatten(2, (self.heads, -1)).transpose(1, 2) for p in parts)
            distance = torch.arange(length, device=x.device)
            distance = distance.unsqueeze(1) - distance
            bias = self.bias[distance.clamp(min=0)].to(query.dtype)
            weights = F.silu(query @ key.transpose(2, 3) + bias) * (distance >= 0) / len(self.bias)
            # Padding lies behind the events, so none of them attends to it.
            attended = (weights @ value).transpose(1, 2).flatten(2)
            found = found.index_put((index[mask],), attended[mask].to(found.dtype))
        result: Tensor = x + self.output(self.attended(found) * gate)
        return result


def _groups(lengths: Tensor, ends: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns groups of samples of like length: where their events lie, `[samples, longest]`, and which are real.

    Args:
        lengths: of the samples, `[batch]`, 1 or more.
        ends: where each ends among the events of all.
    """
    found = []
    for samples in lengths.argsort().chunk(GROUPS) if len(lengths) else ():
        mine = lengths[samples].unsqueeze(1)
        position = torch.arange(int(mine.max()), device=lengths.device)
        mask = position < mine
        found.append(((ends[samples].unsqueeze(1) - mine + position).where(mask, 0), mask))
    return found
