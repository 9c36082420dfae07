"""DIEN: interests that evolve along the user's history."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.checks import check_number, plain
from persia.nn.losses import SchemaLoss
from persia.nn.models.history import HistoryInput, NegativeEvents, masked_softmax, next_item_loss
from persia.nn.models.layers import feature_names, mlp, output_count
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings
from persia.nn.targets import Targets
from persia.schema import Schema

__all__ = ["DIEN"]


class DIEN(nn.Module):
    """Deep interest evolution network (Zhou et al., AAAI 2019, arXiv 1809.03672).

    A GRU over the events gives an interest at each; in training, an auxiliary loss asks that it predicts the next event
    ("interest extractor layer"). A second GRU, whose update gate is scaled by the attention of the candidate to each
    interest (AUGRU, "interest evolving layer"), gives the interest that the candidate meets. Activations are ReLU,
    where the paper has PReLU and Dice. The auxiliary loss is the mean over the events of a sample, where the paper has
    the sum, so that its weight does not depend on their number. Other un-pooled sequences enter as the mean over their
    ids.

    Args:
        schema: the input; names features, dimensions, labels.
        history: pairs of an un-pooled feature and the candidate's feature, such as `[("history", "item")]`; the
            un-pooled features are aligned, and the features of one event are put side by side. By default the un-pooled
            feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        negatives: un-pooled features of events that did not happen, for the auxiliary loss: aligned with the history,
            one for each of its sequences. By default the items of another sample of the local batch, which depend on
            how samples are batched.
        auxiliary: weight of the auxiliary loss; 0 for none.
        hidden: widths of the deep network's hidden layers.
        dropout: share of each hidden layer that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: the schema has no history, a pair or negatives do not fit, or a width or weight is bad.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        history: Sequence[tuple[str, str]] | None = None,
        newest_first: bool = False,
        negatives: Sequence[str] | None = None,
        auxiliary: float = 1.0,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.input = HistoryInput(schema, history, newest_first, feature_names("negatives", negatives or ()))
        self.next_item = NegativeEvents(schema, self.input, negatives)
        self.auxiliary = plain(auxiliary)
        self._label_loss = SchemaLoss(schema)
        check_number("auxiliary", self.auxiliary, 0)
        width = self.input.dim  # Of the states too, as the auxiliary loss is of dot products of states and events.
        self.extractor = nn.GRU(width, width, batch_first=True)
        self.attention = nn.Linear(self.input.candidate_dim, width, bias=False)
        self.evolution = AttentionGRU(width)
        inputs = width + self.input.others + schema.dense_width
        self.deep = mlp(inputs, hidden, output_count(schema, outputs), dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor | ModelOutput:
        """Returns logits `[batch, outputs]`; in training with the auxiliary loss, float32 `[]`.

        Args:
            dense: dense features, `[batch, n]`.
            embeddings: of the ID-type features.
        """
        events = self.input.events(embeddings)
        states, _ = self.extractor(events.values)
        scores = torch.bmm(states, self.attention(events.candidate).unsqueeze(2)).squeeze(2)
        interest = self.evolution(states, masked_softmax(scores, events.mask))
        logits: Tensor = self.deep(torch.cat([interest, *self.input.rest(embeddings), dense], 1))
        if not (self.training and self.auxiliary):
            return logits
        return ModelOutput(logits, next_item_loss(states, events, self.next_item.sample(embeddings, events)))

    def loss(self, logits: Tensor, targets: Targets | Tensor, extra: Tensor | None = None) -> Tensor:
        """Returns the loss of the schema's labels, plus the weighted auxiliary loss.

        Args:
            logits: `[batch, Schema.outputs]`.
            targets: of the batch; or labels `[batch, labels]`, if none is missing.
            extra: the auxiliary loss, if there is one.
        """
        loss = self._label_loss(logits, targets, getattr(self, "task_weights", None))
        return loss if extra is None else loss + self.auxiliary * extra


class AttentionGRU(nn.Module):
    """GRU with an attentional update gate: an event without attention leaves the state as it is.

    The state is float32 under autocast, too: in 16 bits, the small changes of a long history would be rounded away.

    Args:
        width: of inputs and states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)
        self.states = nn.Linear(width, 3 * width)

    def forward(self, values: Tensor, attention: Tensor) -> Tensor:
        """Returns the last state, float32 `[batch, width]`.

        Args:
            values: `[batch, length, width]`.
            attention: of each, in [0, 1], float32 `[batch, length]`.
        """
        projected = self.inputs(values).float()
        state: Tensor = projected.new_zeros(values.shape[0], values.shape[2])
        for step, weight in zip(projected.unbind(1), attention.unsqueeze(2).unbind(1), strict=True):
            update, reset, new = step.chunk(3, 1)
            from_update, from_reset, from_new = self.states(state).float().chunk(3, 1)
            candidate = torch.tanh(new + torch.sigmoid(reset + from_reset) * from_new)
            state = torch.lerp(state, candidate, weight * torch.sigmoid(update + from_update))
        return state
