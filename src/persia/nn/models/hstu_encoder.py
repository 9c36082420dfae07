"""Layers of HSTU on histories, and on candidates that follow them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_integer, plain
from persia.nn.models.event_layout import EventLayout
from persia.nn.models.history import check_heads, last_of

__all__ = ["HSTUEncoder", "Past"]

BLOCK = 128
"""Events that attend in one call. They attend to no later ones: blocks of 128 save 3 of 8 pairs of 500 events."""

RECENCY = 0.5
"""First bias of an event for itself. An event at the distance d begins with this bias divided by 1 + d."""

CONTENT = 0.02
"""Standard deviation of the first weights of queries and keys, as the authors' code has it."""

AGE_BUCKETS = 128
AGE_BASE = 0.301
"""A bucket of times ends at e^0.301, or 1.35, times where it begins; 128 go beyond any time, in any unit."""


class HSTUEncoder(nn.Module):
    """Layers of HSTU on histories, and on candidates that follow them.

    Args:
        width: of an event.
        max_length: largest number of events.
        layers: number of layers.
        heads: of the attention; divides the width.
        timed: whether there is a bias of times.

    Raises:
        ConfigError: a number is bad.
    """

    def __init__(self, width: int, max_length: int, layers: int, heads: int, timed: bool) -> None:
        super().__init__()
        layers, heads = plain(layers), plain(heads)
        check_integer("layers", layers, 1)
        check_heads(heads, width)
        self.width = width
        positions = max_length + 1
        self.positions = nn.Parameter(torch.zeros(positions, width))
        self.layers = nn.ModuleList(_Layer(width, heads, positions, timed) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def states(self, events: Tensor, layout: EventLayout, ages: Tensor | None) -> Tensor:
        """Returns normalised states `[places, width]` at the events of a layout.

        Args:
            events: `[places, width]`, in time order.
            layout: where they are.
            ages: time from each event to the sample, float32 `[places]`, 0 at padding; given if `timed`.
        """
        return self._passed(events, layout, ages)[0]

    def past(self, values: Tensor, mask: Tensor, ages: Tensor | None) -> Past:
        """Passes events through the layers. No candidate changes them.

        Args:
            values: `[batch, length, width]`, in time order, before the padding.
            mask: bool `[batch, length]`: where there is an event.
            ages: time from each event to the sample, float32 `[batch, length]`; given if `timed`.
        """
        layout = EventLayout.padded(mask)
        flat, attended = self._passed(layout.flat(values), layout, None if ages is None else layout.flat(ages))
        states = layout.unflat(flat)
        own = None if ages is None else _bucket(ages)
        return Past([of_layer[0] for of_layer in attended], mask, own, states, last_of(states, mask))

    def _passed(
        self, events: Tensor, layout: EventLayout, ages: Tensor | None
    ) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]]]:
        """Returns normalised states, and each layer's keys and values of each group; see `Past`."""
        of_groups = layout.grouped(events)
        x = layout.joined([e * math.sqrt(self.width) + self.positions[: e.shape[1]] for e in of_groups])
        buckets: list[list[Tensor] | None] = [None] * len(of_groups)
        if ages is not None:
            buckets = [_buckets_of_pairs(own) for own in layout.grouped(ages)]
        attended = []
        for layer in self.layers:
            x, of_layer = layer(x, layout, buckets)
            attended.append(of_layer)
        return self.norm(x), attended

    def candidates(self, candidates: Tensor, past: Past) -> Tensor:
        """Returns the last layer's outputs for candidates `[batch, number, width]` that follow histories, the same."""
        lengths = past.mask.sum(1)
        x = candidates * math.sqrt(self.width) + self.positions[lengths].unsqueeze(1)
        for layer, (keys, values) in zip(self.layers, past.attended, strict=True):
            assert isinstance(layer, _Layer)
            x = layer.candidates(x, keys, values, past.mask, past.buckets)
        return x


class Past(NamedTuple):
    """Histories after the layers, as candidates read them.

    Attributes:
        attended: each layer's keys and values, `[batch, heads, length, width / heads]`.
        mask: bool `[batch, length]`.
        buckets: of the events' ages, int32 `[batch, length]`; None without them.
        states: normalised outputs, `[batch, length, width]`.
        newest: normalised output of the newest event, `[batch, width]`; zeros without events.
    """

    attended: list[tuple[Tensor, Tensor]]
    mask: Tensor
    buckets: Tensor | None
    states: Tensor
    newest: Tensor


class _Layer(nn.Module):
    """A unit on histories and on candidates that follow them.

    Args:
        width: of inputs and outputs.
        heads: of the attention.
        positions: largest length of a sequence.
        timed: whether there is a bias of times.
    """

    def __init__(self, width: int, heads: int, positions: int, timed: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 4 * width)
        with torch.no_grad():
            self.inputs.weight[2 * width :].normal_(0, CONTENT)
            self.inputs.bias[2 * width :].zero_()
        self.bias = nn.Parameter(RECENCY / torch.arange(1, positions + 1))
        self.times = nn.Parameter(torch.zeros(AGE_BUCKETS)) if timed else None
        # The sum that it normalises is small in long histories, next to the usual epsilon.
        self.attended = nn.LayerNorm(width, eps=1e-6)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: Tensor, layout: EventLayout, buckets: Sequence[list[Tensor] | None]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Returns outputs of events `[places, width]`, and keys and values of all heads of each group.

        Args:
            x: `[places, width]`.
            layout: of the places.
            buckets: of each group, as `_buckets_of_pairs` returns; or None.
        """
        gate, rest = F.silu(self.inputs(self.norm(x))).tensor_split([x.shape[1]], 1)
        attended, of_groups = list[Tensor](), list[tuple[Tensor, Tensor]]()
        for group, own in zip(layout.grouped(rest), buckets, strict=True):
            value, query, key = self._of_heads(group.chunk(3, 2))
            attended.append(self._attended(query, key, value, own).transpose(1, 2).flatten(2))
            of_groups.append((key, value))
        return self._output(x, layout.joined(attended), gate), of_groups

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, buckets: list[Tensor] | None) -> Tensor:
        """Returns what events attend to, float32 `[samples, heads, length, width / heads]`."""
        position = torch.arange(query.shape[2], device=query.device)
        blocks = list[Tensor]()
        for number, own in enumerate(position.split(BLOCK)):
            end = min((number + 1) * BLOCK, len(position))
            distance = own.unsqueeze(1) - position[:end]
            bias = self.bias[distance.clamp(min=0)]
            if self.times is not None:
                assert buckets is not None
                bias = (bias + _looked_up(self.times, buckets[number])).unsqueeze(1)
            scores = query[:, :, number * BLOCK : end] @ key[:, :, :end].transpose(2, 3)
            weights = F.silu(scores + bias.to(query.dtype)) * (distance >= 0)
            blocks.append((weights @ value[:, :, :end]).float() / (own + 1).unsqueeze(1))
        return torch.cat(blocks, 2)

    def candidates(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, buckets: Tensor | None) -> Tensor:
        """Returns outputs of candidates, each of which attends to the history and to itself.

        Args:
            x: `[batch, candidates, width]`.
            keys: of the history, `[batch, heads, length, width / heads]`.
            values: of the history, the same.
            mask: bool `[batch, length]`: where there is an event.
            buckets: of the events' ages, int32 `[batch, length]`, or None.
        """
        gate, value, query, key = self._projected(x)
        lengths = mask.sum(1).view(-1, 1, 1, 1)
        position = torch.arange(mask.shape[1], device=x.device)
        bias, own_bias = self.bias[(lengths - position).clamp(min=0)], self.bias[0]
        if self.times is not None:
            assert buckets is not None
            bias, own_bias = bias + _looked_up(self.times, buckets).view(bias.shape), own_bias + self.times[0]
        weights = F.silu(query @ keys.transpose(2, 3) + bias.to(query.dtype)) * mask[:, None, None]
        own = F.silu((query * key).sum(3, keepdim=True) + own_bias.to(query.dtype))
        attended = (weights @ values + own * value).float() / (lengths + 1)
        return self._output(x, attended.transpose(1, 2).flatten(2), gate)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gate, `[batch, length, width]`, and values, queries and keys of each head."""
        gate, *parts = F.silu(self.inputs(self.norm(x))).chunk(4, 2)
        value, query, key = self._of_heads(parts)
        return gate, value, query, key

    def _of_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns `[batch, heads, length, width / heads]` of each part `[batch, length, width]`."""
        return [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts]

    def _output(self, x: Tensor, attended: Tensor, gate: Tensor) -> Tensor:
        result: Tensor = x + self.output(self.attended(attended) * gate)
        return result


def _bucket(times: Tensor) -> Tensor:
    """Returns the buckets of times, int32 of the same shape; a negative time, of clocks that differ, counts as 0."""
    return times.clamp(min=1).log_().div_(AGE_BASE).clamp_(max=AGE_BUCKETS - 1).int()


def _buckets_of_pairs(ages: Tensor) -> list[Tensor]:
    """Returns the buckets of times from events to those that attend, in blocks of `BLOCK` of those that attend.

    An event attends by the time of the one after it; after the newest one comes the sample, of age 0.

    Args:
        ages: `[samples, length]`.

    Returns:
        int32 `[samples, events of the block, events up to the last one of the block]`.
    """
    blocks = F.pad(ages[:, 1:], (0, 1)).split(BLOCK, 1)
    return [
        _bucket(ages[:, : number * BLOCK + following.shape[1]].unsqueeze(1) - following.unsqueeze(2))
        for number, following in enumerate(blocks)
    ]


def _looked_up(values: Tensor, index: Tensor) -> Tensor:
    """Returns values `[n]` at the places of an int32 index, in its shape."""
    if values.device.type == "cpu":  # Three times as fast; elsewhere, it would add gradients in any order.
        return values.index_select(0, index.flatten()).view(index.shape)
    return values[index]
