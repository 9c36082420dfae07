"""HSTU: gated pointwise attention over the history and the candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_number, plain
from persia.errors import ConfigError
from persia.nn.losses import SchemaLoss, weighted_mean
from persia.nn.models.history import (
    BatchNegatives,
    Events,
    HistoryInput,
    NegativeEvents,
    next_item_loss,
    sampled_softmax,
)
from persia.nn.models.hstu_encoder import HSTUEncoder, Past
from persia.nn.models.layers import feature_names, mlp, output_count
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings
from persia.nn.targets import Targets
from persia.schema import Schema

__all__ = ["HSTU", "ages_of"]

GROUPS = 4
"""Groups of samples of like length, on a CPU."""

NEGATIVES = 128
"""Most items that the candidate competes with."""

CANDIDATE = 0.5
"""Weight of predicting the candidate, next to the mean over the history. More drowns what the history teaches first."""


class HSTU(nn.Module):
    """Hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv 2402.17152), for ranking.

    The history with the candidate behind it passes layers of

        u, v, q, k = split(SiLU(f1(norm(x)))),  a = SiLU(q k' + bias) v / n,  y = x + f2(norm(a) * u),

    with causal attention that is not normalised by a softmax; n is the number of events that an event attends to,
    itself among them. The bias is a learned number for each distance of positions plus, with `ages`, one for each
    bucket floor(ln(max(1, t)) / 0.301) of the time t from the attended event to the event that follows the attending
    one, whose item is predicted. So the bias of the newest event depends on how long ago it was, as in the authors'
    code. A learned vector for each position, counted from the oldest event, is added to the input.

    The logit is a perceptron's output on the candidate's output and the other features, plus the dot product of the
    candidate's embedding and the newest event's normalised output, with a learned weight. In training, each event's
    normalised output also predicts the event after it by such a dot product, as the paper trains retrieval: a sample
    then teaches as many predictions as it has events, and not one. After the newest event comes the candidate, if the
    user chose it: where the first binary label is 1, it competes in a softmax with up to 128 candidates and events of
    the batch's other samples. Other un-pooled sequences enter as the mean over their ids.

    First values: SiLU(0) = 0, and `norm(a)` has the same length whatever the sum of the weights is. With the usual
    random values, the weights of all events are noise of one size, in which one event of n is 1 / n of the sum, and its
    gradient too. So the bias begins as 0.5 / (1 + d) at the distance d, by which each doubling of the distance has the
    same sum of weights, whatever the length of the history, and queries and keys begin near 0: attention is by recency
    until positions, times or contents that predict better grow from it. Biases of times and vectors of positions
    begin at 0, the weights of the dot product at 1.

    On a CPU the batch is jagged: samples of like length pass the layers together, each group padded to its longest. On
    other devices all are padded to `max_length`, as the host would have to wait for the device to learn their lengths;
    and so they are in a compiled or exported network, whose shapes do not depend on values. `Predictor.rank` computes
    the history once for all candidates.

    Args:
        schema: the input; names features, dimensions, labels.
        history: pairs of an un-pooled feature and the candidate's feature, such as `[("history", "item")]`; the
            un-pooled features are aligned, and the features of one event are put side by side. By default the un-pooled
            feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        ages: dense feature of `max_length` numbers: the time from each event of the history to the sample, in seconds
            or another unit, in the order of the history; any number for events that are not there. The perceptron does
            not read it. None leaves the bias of times out.
        negatives: un-pooled features of items that did not follow, as in `DIEN`. By default the items of another sample
            of the batch.
        next_item: weight of the loss of predicting the next event, next to the loss of the labels; 0 for none. It is
            the mean over the positions of the history, plus half the loss of the candidate. Next to histories of
            hundreds of events, the gradients of few labels are noise; a larger weight then helps.
        layers: number of layers.
        heads: of the attention; divides the width of an event.
        hidden: widths of the deep network's hidden layers.
        dropout: share of each hidden layer of it that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: the schema has no history, a pair, ages or negatives do not fit, or a width or number is bad.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        history: Sequence[tuple[str, str]] | None = None,
        newest_first: bool = False,
        ages: str | None = None,
        negatives: Sequence[str] | None = None,
        next_item: float = 1.0,
        layers: int = 2,
        heads: int = 1,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.input = HistoryInput(schema, history, newest_first, feature_names("negatives", negatives or ()))
        self.input.check_same_dim()
        self.negatives = NegativeEvents(schema, self.input, negatives)
        self._label_loss = SchemaLoss(schema)
        self._chosen = next((column for column, label in enumerate(schema.targets) if label.kind == "binary"), None)
        self.next_item = plain(next_item)
        check_number("next_item", self.next_item, 0)
        self._ages = None if ages is None else ages_of(schema, ages, self.input.max_length)
        self._ages_name = ages
        self.encoder = HSTUEncoder(self.input.dim, self.input.max_length, layers, heads, ages is not None)
        logits = output_count(schema, outputs)
        self.match = nn.Parameter(torch.ones(logits))
        dense = schema.dense_width - (0 if ages is None else self.input.max_length)
        self.deep = mlp(self.input.dim + self.input.others + dense, hidden, logits, dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor | ModelOutput:
        """Returns logits `[batch, outputs]`; in training with the losses of the next event.

        Args:
            dense: dense features, `[batch, n]`.
            embeddings: of the ID-type features.
        """
        events = self.input.events(embeddings)
        ages = self._times(dense, events.mask)
        if events.mask.device.type == "cpu" and not torch.compiler.is_compiling():
            order = events.lengths.argsort()
            groups = [self._outputs(*_shortened(events, ages, rows)) for rows in order.chunk(GROUPS)]
            back = order.argsort()
            state, newest, states = (torch.cat(parts).index_select(0, back) for parts in zip(*groups, strict=True))
        else:
            state, newest, states = self._outputs(events, ages)
        logits = self._logits(state, newest, events.candidate, self.input.rest(embeddings), dense)
        if not (self.training and self.next_item):
            return logits
        of_history = next_item_loss(states, events, self.negatives.sample(embeddings, events))
        of_candidate = None if self._chosen is None else _candidate_losses(newest, events)
        return ModelOutput(logits, _NextEvent(of_history, of_candidate))

    def loss(self, logits: Tensor, targets: Targets | Tensor, extra: _NextEvent | None = None) -> Tensor:
        """Returns the loss of the schema's labels, plus the weighted loss of predicting the next event.

        Args:
            logits: `[batch, Schema.outputs]`.
            targets: of the batch; or labels `[batch, labels]`, if none is missing.
            extra: the losses of the next event, if there are any.
        """
        loss = self._label_loss(logits, targets, getattr(self, "task_weights", None))
        if extra is None:
            return loss
        next_event = extra.of_history
        if self._chosen is not None and extra.of_candidate is not None:
            targets = targets if isinstance(targets, Targets) else Targets(targets)
            chosen = targets.labels[:, self._chosen] * extra.of_candidate
            next_event = next_event + CANDIDATE * weighted_mean(chosen, targets.weights_of(self._chosen))
        loss += self.next_item * next_event
        return loss

    @property
    def user_features(self) -> tuple[str, ...]:
        """The features of the history."""
        return self.input.user_features + (() if self._ages_name is None else (self._ages_name,))

    @property
    def item_features(self) -> tuple[str, ...]:
        """The features of the candidate."""
        return self.input.item_features

    def user_part(self, dense: Tensor, embeddings: Embeddings) -> _User:
        """Returns what depends on the user only; see `persia.nn.RankingModel`."""
        values, mask = self.input.past(embeddings)
        length = max(1, int(mask.sum()))  # Padding comes last.
        ages = self._times(dense, mask)
        past = self.encoder.past(values[:, :length], mask[:, :length], None if ages is None else ages[:, :length])
        return _User(past, self.input.rest_of_user(embeddings))

    def score(self, user: _User, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[items, outputs]` of one user with many items; see `persia.nn.RankingModel`."""
        candidate = self.input.candidate(embeddings)
        state = self.encoder.candidates(candidate.unsqueeze(0), user.past).squeeze(0)
        rest = self.input.rest_of_items(user.others, embeddings, len(candidate))
        return self._logits(state, user.past.newest, candidate, rest, dense)

    def _times(self, dense: Tensor, mask: Tensor) -> Tensor | None:
        """Returns ages `[batch, length]` in time order, 0 where there is no event; None without them."""
        return None if self._ages is None else self.input.in_time_order(dense[:, self._ages], mask).float() * mask

    def _outputs(self, events: Events, ages: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns outputs for the candidate and the newest event, `[batch, width]`, and for all events.

        The latter are padded to `[batch, max_length, width]`.
        """
        past = self.encoder.past(events.values, events.mask, ages)
        state = self.encoder.candidates(events.candidate.unsqueeze(1), past).squeeze(1)
        return state, past.newest, F.pad(past.states, (0, 0, 0, self.input.max_length - past.states.shape[1]))

    def _logits(self, state: Tensor, newest: Tensor, candidate: Tensor, rest: list[Tensor], dense: Tensor) -> Tensor:
        if self._ages is not None:
            dense = torch.cat([dense[:, : self._ages.start], dense[:, self._ages.stop :]], 1)
        match = (newest.float() * candidate.float()).sum(1, keepdim=True)
        logits: Tensor = self.deep(torch.cat([state, *rest, dense], 1)) + self.match * match
        return logits


class _NextEvent(NamedTuple):
    """Losses of predicting the next event.

    Attributes:
        of_history: mean over the positions of histories, float32 `[]`.
        of_candidate: of each sample's candidate, float32 `[batch]`; 0 without a history. None if no label says whether
            the user chose it.
    """

    of_history: Tensor
    of_candidate: Tensor | None


class _User(NamedTuple):
    """The user's part of a ranking.

    Attributes:
        past: the history, a batch of one.
        others: the user's other features, `[1, dim]` each.
    """

    past: Past
    others: dict[str, Tensor]


def ages_of(schema: Schema, name: str, max_length: int) -> slice:
    """Returns the columns of the ages of events.

    Raises:
        ConfigError: there is no such feature, it has another number of values, or a rule changes them.
    """
    features = {feature.name: feature for feature in schema.dense}
    if name not in features:
        raise ConfigError(f"ages = {name!r} is no dense feature of the schema; declare it there.", field="ages")
    feature = features[name]
    if feature.width != max_length:
        raise ConfigError(
            f"ages = {name!r} has {feature.width} values, but the history max_length {max_length}; declare "
            f"DenseFeature({name!r}, size={max_length}).",
            field="ages",
        )
    if feature.log or feature.scale is not None:
        raise ConfigError(
            f"ages = {name!r} has log or scale, but HSTU takes times and puts them into buckets of their logarithms; "
            "leave both out.",
            field="ages",
        )
    return schema.dense_slices[name]


def _candidate_losses(newest: Tensor, events: Events) -> Tensor:
    """Returns the loss of predicting each candidate from the newest event's output, float32 `[batch]`.

    No gradient reaches the rows that are compared: a batch has few candidates, and next to the positions of histories
    their gradients are noise.
    """
    numbers = torch.arange(len(newest), device=newest.device)
    negatives = BatchNegatives(events.candidate, None, numbers).thinned(NEGATIVES)
    if (few := NEGATIVES - len(numbers)) > 0:
        negatives = negatives.joined(BatchNegatives.of(events.values, events.mask, numbers).thinned(few))
    with torch.autocast(newest.device.type, enabled=False):
        state, candidate = newest.float(), events.candidate.detach().float()
        scores = state @ negatives.values.detach().float().T
        excluded = negatives.excluded(events.candidate, numbers)
        losses = sampled_softmax((state * candidate).sum(1), scores, excluded)
    return losses * events.mask[:, 0]


def _shortened(events: Events, ages: Tensor | None, rows: Tensor) -> tuple[Events, Tensor | None]:
    """Returns the events of these samples and their ages, padded to the longest of them."""
    mask = events.mask[rows]
    length = max(1, int(mask.any(0).sum()))
    few = Events(events.values[rows, :length], mask[:, :length], events.candidate[rows])
    return few, None if ages is None else ages[rows, :length]
