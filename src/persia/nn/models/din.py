"""DIN: the candidate weighs the user's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.nn.models.history import HistoryInput
from persia.nn.models.layers import mlp, output_count
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["DIN"]


class _User(NamedTuple):
    """The user's part of a ranking.

    Attributes:
        events: `[length, dim]`, without padding.
        first: first layer of the attention, so far as it depends on the events alone, `[length, width]`.
        factors: what the candidate is multiplied by for the rest of it, `[dim, length * width]`.
        others: the user's other features, `[1, dim]` each.
    """

    events: Tensor
    first: Tensor
    factors: Tensor
    others: dict[str, Tensor]


class DIN(nn.Module):
    """Deep interest network (Zhou et al., KDD 2018, arXiv 1706.06978).

    The weight of an event e for the candidate a is a small network's output on [e, a, e - a, e * a]; the user's
    interest is the weighted sum of the events. Weights are not normalised, so that the sum tells how strong the
    interest is (section 4.3). Activations are ReLU, where the paper has Dice. The order of events does not matter.
    Candidate and events have one dimension; other un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        history: pairs of an un-pooled feature and the candidate's feature, such as `[("history", "item")]`; the
            un-pooled features are aligned, and the features of one event are put side by side. By default the un-pooled
            feature of each table with its first pooled one.
        attention: widths of the attention network's hidden layers.
        hidden: widths of the deep network's hidden layers.
        dropout: share of each hidden layer that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: the schema has no history, a pair does not fit, or a width is bad.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        history: Sequence[tuple[str, str]] | None = None,
        attention: Sequence[int] = (36,),
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.input = HistoryInput(schema, history, newest_first=False)
        self.input.check_same_dim()
        width = self.input.dim
        self.attention = mlp(4 * width, attention, 1, option="attention")
        inputs = width + self.input.others + schema.dense_width
        self.deep = mlp(inputs, hidden, output_count(schema, outputs), dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        values, mask, candidate = self.input.events(embeddings)
        target = candidate.unsqueeze(1).expand_as(values)
        weights = self.attention(torch.cat([values, target, values - target, values * target], 2)).squeeze(2)
        weights = weights.to(values.dtype) * mask
        interest = torch.bmm(weights.unsqueeze(1), values).squeeze(1)
        logits: Tensor = self.deep(torch.cat([interest, *self.input.rest(embeddings), dense], 1))
        return logits

    @property
    def user_features(self) -> tuple[str, ...]:
        """The features of the history."""
        return self.input.user_features

    @property
    def item_features(self) -> tuple[str, ...]:
        """The features of the candidate."""
        return self.input.item_features

    def user_part(self, dense: Tensor, embeddings: Embeddings) -> _User:
        """Returns what depends on the user only; see `persia.nn.RankingModel`.

        With the attention's first layer W = [W1 W2 W3 W4] on [e, a, e - a, e * a], it is e (W1 + W3), and for each
        event the factor W2 - W3 + W4 e of the candidate a.
        """
        values, mask = self.input.past(embeddings)
        events = values[0, : max(1, int(mask.sum()))]  # Padding comes last.
        layer = self.attention[0]
        assert isinstance(layer, nn.Linear)
        of_event, of_candidate, of_difference, of_product = layer.weight.chunk(4, 1)
        first = F.linear(events, of_event + of_difference, layer.bias)
        factors = (of_candidate - of_difference) + of_product * events.unsqueeze(1)  # [length, width, dim]
        return _User(
            events * mask[0, : len(events), None], first, factors.flatten(0, 1).T, self.input.rest_of_user(embeddings)
        )

    def score(self, user: _User, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[items, outputs]` of one user with many items; see `persia.nn.RankingModel`."""
        candidate = self.input.candidate(embeddings)
        hidden = (candidate @ user.factors).unflatten(1, user.first.shape) + user.first
        weights = self.attention[1:](hidden).squeeze(2)
        interest = weights.to(user.events.dtype) @ user.events
        rest = self.input.rest_of_items(user.others, embeddings, len(candidate))
        logits: Tensor = self.deep(torch.cat([interest, *rest, dense], 1))
        return logits
