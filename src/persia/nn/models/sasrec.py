"""SASRec: self-attention over the user's history predicts the next item."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_integer, check_number, plain
from persia.errors import ConfigError
from persia.nn.losses import SchemaLoss
from persia.nn.models.event_layout import EventLayout, layout_of
from persia.nn.models.history import HistoryInput, NegativeEvents, check_heads, last_of, next_item_loss
from persia.nn.models.layers import feature_names
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings
from persia.nn.targets import Targets
from persia.schema import Schema

__all__ = ["SASRec", "SelfAttentionEncoder"]


class SASRec(nn.Module):
    """Self-attentive sequential recommendation (Kang, McAuley, ICDM 2018, arXiv 1808.09781).

    Blocks of causal self-attention and a position-wise network on the items of the history give a state at each; the
    logit is the dot product of the newest state and the candidate's embedding, 0 without a history. A learned vector
    for each position, counted from the newest event as in the paper, is added to the items. Only the history and the
    candidate are read. In training, each state also predicts the item after it, the paper's loss (section 3.5).
    Histories are padded as in `NextItem`.

    Args:
        schema: the input, with one label, of a kind and loss with one logit.
        history: pairs of an un-pooled feature and the candidate's feature, such as `[("history", "item")]`; by default
            the un-pooled feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        negatives: un-pooled features of items that did not follow, as in `DIEN`. By default the items of another sample
            of the batch.
        next_item: weight of the loss over all positions of the history, next to the loss of the candidate; 0 for none.
        blocks: number of blocks.
        heads: of the attention; divides the width of an event. The paper has one.
        dropout: share of embeddings, attention outputs and hidden units that is dropped in training.

    Raises:
        ConfigError: the schema has no history or not one logit, a pair or negatives do not fit, or a number is bad.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        history: Sequence[tuple[str, str]] | None = None,
        newest_first: bool = False,
        negatives: Sequence[str] | None = None,
        next_item: float = 1.0,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.input = HistoryInput(schema, history, newest_first, feature_names("negatives", negatives or ()))
        self.input.check_same_dim()
        self.negatives = NegativeEvents(schema, self.input, negatives)
        if len(schema.label_names) != 1 or schema.outputs != 1:
            raise ConfigError(
                f"SASRec has one logit, but the schema has {len(schema.label_names)} labels with {schema.outputs} "
                "logits; declare one label, whose kind and loss have one logit.",
                field="labels",
            )
        self._label_loss = SchemaLoss(schema)
        self.next_item = plain(next_item)
        check_number("next_item", self.next_item, 0)
        self.encoder = SelfAttentionEncoder(self.input.dim, self.input.max_length, blocks, heads, dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor | ModelOutput:
        """Returns logits `[batch, 1]`; in training with the loss over all positions, float32 `[]`.

        Args:
            dense: not used.
            embeddings: of the ID-type features.
        """
        events = self.input.events(embeddings)
        states = self.encoder(events.values, events.mask)
        logits = (events.last(states) * events.candidate).sum(1, keepdim=True)
        if not (self.training and self.next_item):
            return logits
        return ModelOutput(logits, next_item_loss(states, events, self.negatives.sample(embeddings, events)))

    @property
    def user_features(self) -> tuple[str, ...]:
        """The features of the history."""
        return self.input.user_features

    @property
    def item_features(self) -> tuple[str, ...]:
        """The features of the candidate."""
        return self.input.item_features

    def user_part(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the state at the user's newest event, `[1, dim]`; see `persia.nn.RankingModel`."""
        values, mask = self.input.past(embeddings)
        return last_of(self.encoder(values, mask), mask)

    def score(self, user: Tensor, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[items, 1]` of one user with many items; see `persia.nn.RankingModel`."""
        return (user * self.input.candidate(embeddings)).sum(1, keepdim=True)

    def loss(self, logits: Tensor, targets: Targets | Tensor, extra: Tensor | None = None) -> Tensor:
        """Returns the loss of the label of the candidate, plus the weighted loss over all positions.

        Args:
            logits: `[batch, 1]`.
            targets: of the batch; or labels `[batch, 1]`, if none is missing.
            extra: the loss over all positions, if there is one.
        """
        loss = self._label_loss(logits, targets)
        return loss if extra is None else loss + self.next_item * extra


class SelfAttentionEncoder(nn.Module):
    """Blocks of causal self-attention and a position-wise network, with a learned vector for each position.

    Args:
        width: of an event.
        max_length: largest number of events.
        blocks: number of blocks.
        heads: of the attention; divides the width.
        dropout: share of embeddings, attention outputs and hidden units that is dropped in training.

    Raises:
        ConfigError: a number is bad.
    """

    def __init__(self, width: int, max_length: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        blocks, heads, dropout = map(plain, (blocks, heads, dropout))
        check_integer("blocks", blocks, 1)
        check_number("dropout", dropout, 0, 1, open_high=True)
        check_heads(heads, width)
        self.width = width
        self.positions = nn.Parameter(0.02 * torch.randn(max_length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """Returns states `[batch, length, width]` at the events, which are in time order and precede the padding."""
        layout = layout_of(mask)
        return layout.unflat(self.states(layout.flat(values), layout))

    def states(self, events: Tensor, layout: EventLayout) -> Tensor:
        """Returns states `[places, width]` at the events of a layout, the same."""
        x = self.dropout(events * math.sqrt(self.width) + self._positions(layout))
        for block in self.blocks:
            x = block(x, layout)
        states: Tensor = self.norm(x)
        return states

    def _positions(self, layout: EventLayout) -> Tensor:
        """Returns the vectors of the events' positions, `[places, dim]`; the newest event has the last one."""
        index = -layout.left % len(self.positions)
        return F.embedding(index, self.positions)  # Padding has some vector, which no event attends to.


class _Block(nn.Module):
    """Causal self-attention and a position-wise network, each on normalised inputs and with a residual connection.

    Events lie before the padding, so that causality alone keeps padding from them.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projection = nn.Linear(width, 3 * width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, layout: EventLayout) -> Tensor:
        """Returns `[places, width]` from the same."""
        projected = layout.grouped(self.projection(self.norms[0](x)))
        x = x + self.dropout(layout.joined([self._attended(group) for group in projected]))
        hidden = self.dropout(torch.relu(self.first(self.norms[1](x))))
        result: Tensor = x + self.dropout(self.second(hidden))
        return result

    def _attended(self, projected: Tensor) -> Tensor:
        """Returns what events attend to, `[samples, length, width]`, from their queries, keys and values."""
        parts = projected.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return attended.transpose(1, 2).flatten(2)
