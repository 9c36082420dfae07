"""MMoE and PLE: experts that several labels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.checks import check_integer, plain
from persia.errors import ConfigError
from persia.nn.models.layers import feature_dims, layer_widths, mlp, output_count, pooled
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["PLE", "MMoE"]


class MMoE(nn.Module):
    """Multi-gate mixture of experts (Ma et al., KDD 2018).

    Experts are perceptrons on all embeddings and dense features. Each label has a gate, a softmax over the experts, and
    a tower on the experts' weighted sum. Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        experts: number of experts.
        expert_hidden: widths of an expert's layers.
        hidden: widths of a tower's hidden layers.
        dropout: share of each layer that is dropped in training.
        outputs: number of logits, each with its own gate and tower. By default each label has a gate, and a
            tower with the logits of its kind.

    Raises:
        ConfigError: no ID-type feature, or a bad width or number.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        experts: int = 4,
        expert_hidden: Sequence[int] = (256,),
        hidden: Sequence[int] = (64,),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.features = tuple(dims)
        inputs = sum(dims.values()) + schema.dense_width
        experts = plain(experts)
        check_integer("experts", experts, 1)
        expert_hidden = _expert_widths(expert_hidden)
        width = expert_hidden[-1]
        widths = _tower_widths(schema, outputs)
        self.experts = nn.ModuleList(mlp(inputs, expert_hidden, None, dropout=dropout) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(inputs, experts, bias=False) for _ in widths)
        self.towers = nn.ModuleList(mlp(width, hidden, count, dropout=dropout) for count in widths)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        x = torch.cat([*(pooled(embeddings[name]) for name in self.features), dense], 1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = [_mixture(gate(x), outputs) for gate in self.gates]
        return torch.cat([tower(part) for tower, part in zip(self.towers, mixed, strict=True)], 1)


class PLE(nn.Module):
    """Progressive layered extraction (Tang et al., RecSys 2020).

    At each level every label has its own experts next to shared ones, and a gate over both; a gate over all experts
    feeds the shared ones of the next level. Towers on the last level's outputs give the logits. One level is the
    paper's customised gate control (CGC). Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        levels: number of levels.
        experts: number of experts of each label, at each level.
        shared_experts: number of shared experts, at each level.
        expert_hidden: widths of an expert's layers.
        hidden: widths of a tower's hidden layers.
        dropout: share of each layer that is dropped in training.
        outputs: number of logits, each with its own experts, gates and tower. By default each label has these, and
            the logits of its kind.

    Raises:
        ConfigError: no ID-type feature, or a bad width or number.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        levels: int = 2,
        experts: int = 2,
        shared_experts: int = 2,
        expert_hidden: Sequence[int] = (128,),
        hidden: Sequence[int] = (64,),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.features = tuple(dims)
        inputs = sum(dims.values()) + schema.dense_width
        levels, experts, shared_experts = plain(levels), plain(experts), plain(shared_experts)
        check_integer("levels", levels, 1)
        check_integer("experts", experts, 1)
        check_integer("shared_experts", shared_experts, 1)
        expert_hidden = _expert_widths(expert_hidden)
        width = expert_hidden[-1]
        widths = _tower_widths(schema, outputs)
        counts = [experts] * len(widths) + [shared_experts]
        self.levels = nn.ModuleList(
            _Extraction(width if level else inputs, counts, expert_hidden, dropout, feeds_next=level < levels - 1)
            for level in range(levels)
        )
        self.towers = nn.ModuleList(mlp(width, hidden, count, dropout=dropout) for count in widths)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        x = torch.cat([*(pooled(embeddings[name]) for name in self.features), dense], 1)
        parts = [x] * (len(self.towers) + 1)
        for level in self.levels:
            parts = level(parts)
        return torch.cat([tower(part) for tower, part in zip(self.towers, parts, strict=True)], 1)


class _Extraction(nn.Module):
    """A level of PLE: experts of each task and shared ones, and the gates on them.

    Args:
        inputs: width of its inputs.
        counts: numbers of experts, of each task, and shared ones.
        hidden: widths of an expert's layers.
        dropout: share of each layer that is dropped in training.
        feeds_next: whether a level follows, which needs the shared output.
    """

    def __init__(
        self, inputs: int, counts: Sequence[int], hidden: Sequence[int], dropout: float, *, feeds_next: bool
    ) -> None:
        super().__init__()
        *own, shared = counts
        self.experts = nn.ModuleList(
            nn.ModuleList(mlp(inputs, hidden, None, dropout=dropout) for _ in range(count)) for count in counts
        )
        self.gates = nn.ModuleList(nn.Linear(inputs, count + shared, bias=False) for count in own)
        self.shared_gate = nn.Linear(inputs, sum(counts), bias=False) if feeds_next else None

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        """Returns the output for each task, and the shared one if a level follows; takes one more than tasks."""
        by_group = [[expert(x) for expert in group] for group, x in zip(self.experts, parts, strict=True)]  # type: ignore[attr-defined]
        shared = by_group[-1]
        outputs = [
            _mixture(gate(x), torch.stack([*own, *shared], 1))
            for gate, x, own in zip(self.gates, parts[:-1], by_group[:-1], strict=True)
        ]
        if self.shared_gate is not None:
            everything = torch.stack([one for group in by_group for one in group], 1)
            outputs.append(_mixture(self.shared_gate(parts[-1]), everything))
        return outputs


def _mixture(scores: Tensor, experts: Tensor) -> Tensor:
    """Returns the sum `[batch, width]` of experts `[batch, experts, width]`, weighted by a softmax of the scores."""
    weights = torch.softmax(scores, 1).to(experts.dtype)
    return torch.bmm(weights.unsqueeze(1), experts).squeeze(1)


def _expert_widths(hidden: Sequence[int]) -> tuple[int, ...]:
    """Returns the widths of an expert's layers, of which there is one at least."""
    widths = layer_widths("expert_hidden", hidden)
    if not widths:
        raise ConfigError("An expert needs a layer; give expert_hidden a width.", field="expert_hidden")
    return widths


def _tower_widths(schema: Schema, outputs: int | None) -> list[int]:
    """Returns the number of logits of each tower: one tower for each label, or one for each of `outputs` logits."""
    count = output_count(schema, outputs)
    return [label.outputs for label in schema.targets] if outputs is None else [1] * count
