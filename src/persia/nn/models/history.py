"""The user's history and the candidate: reading them from the schema, and layers on sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from persia.checks import check_flag, check_integer
from persia.errors import ConfigError
from persia.nn.models.event_layout import present_places
from persia.nn.models.layers import feature_dims, feature_names, feature_pairs, pooled, same_rows
from persia.nn.pooling import Embeddings, SequenceEmbedding
from persia.schema import IdFeature, Schema

__all__ = [
    "BatchNegatives",
    "Events",
    "HistoryInput",
    "NegativeEvents",
    "check_heads",
    "check_negatives",
    "last_of",
    "masked_softmax",
    "next_item_loss",
    "sampled_softmax",
]


class Events(NamedTuple):
    """The user's events in time order, and what is predicted.

    Attributes:
        values: `[batch, length, dim]`, zero where `mask` is False.
        mask: bool `[batch, length]`: True for as many events as there are, then False.
        candidate: `[batch, candidate dim]`.
    """

    values: Tensor
    mask: Tensor
    candidate: Tensor

    @property
    def lengths(self) -> Tensor:
        """Events of each sample, int64 `[batch]`."""
        return self.mask.sum(1)

    def last(self, states: Tensor) -> Tensor:
        """Returns the state `[batch, dim]` at the last event; zeros where there is none.

        Args:
            states: `[batch, length, dim]`.
        """
        return last_of(states, self.mask)


class HistoryInput:
    """Divides the input of a model into events, the candidate, and the rest.

    Args:
        schema: of the model.
        history: pairs of an un-pooled feature and the candidate's feature of the same kind, such as
            `[("history", "item"), ("history_categories", "category")]`. The un-pooled features are aligned: entry t of
            each is of the same event. None pairs the un-pooled feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        without: un-pooled features that the model reads otherwise.

    Attributes:
        pairs: the pairs.
        dim: width of an event, all its features side by side.
        candidate_dim: width of the candidate.
        max_length: of the history.
        others: width of all pooled features and those un-pooled ones that are not in the history, as `rest` returns.

    Raises:
        ConfigError: a feature is unknown, pooled or un-pooled where it must not be, sequences differ in length, or
            `history` is None where a table has several un-pooled features.
    """

    def __init__(
        self,
        schema: Schema,
        history: Sequence[tuple[str, str]] | None,
        newest_first: bool,
        without: Sequence[str] = (),
    ) -> None:
        dims = feature_dims(schema)
        check_flag("newest_first", newest_first)
        self.newest_first = newest_first
        self.pairs = _pairs_of_tables(schema, without) if history is None else feature_pairs("history", history)
        if not self.pairs:
            raise ConfigError(
                "This model needs a history: an un-pooled feature (pooling=None) and a pooled one of the same table; "
                "name others as history=[(un-pooled, candidate)].",
                field="history",
            )
        first = schema.feature(self.pairs[0][0])
        sequences = [name for name, _ in self.pairs]
        for sequence, candidate in self.pairs:
            feature = _un_pooled(schema, sequence, "history")
            if schema.feature(candidate).pooling is None:
                raise ConfigError(
                    f"The candidate's feature {candidate!r} is not pooled; pair {sequence!r} with a pooled feature.",
                    field="history",
                )
            if sequences.count(sequence) > 1:
                raise ConfigError(f"history names {sequence!r} twice; name each sequence once.", field="history")
            _check_aligned(first, feature, "history")
        self.max_length = first.max_length or 0
        self.dim = sum(dims[name] for name in sequences)
        self.candidate_dim = sum(dims[name] for _, name in self.pairs)
        self._others = tuple(name for name in dims if name not in sequences and name not in without)
        self.others = sum(dims[name] for name in self._others)

    def check_same_dim(self) -> None:
        """Raises ConfigError unless events and candidate have one width."""
        if self.dim != self.candidate_dim:
            raise ConfigError(
                f"An event has dim {self.dim}, but the candidate {self.candidate_dim}; pair features of equal dims.",
                field="history",
            )

    def events(self, embeddings: Embeddings) -> Events:
        """Returns the history in time order, and the candidate."""
        values, mask = self.past(embeddings)
        return Events(values, mask, self.candidate(embeddings))

    def past(self, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
        """Returns the events `[batch, length, dim]` in time order, and where there is one, bool `[batch, length]`."""
        return self.aligned(embeddings, [name for name, _ in self.pairs])

    def candidate(self, embeddings: Embeddings) -> Tensor:
        """Returns the candidate `[batch, candidate dim]`."""
        return torch.cat([_tensor(embeddings[name]) for _, name in self.pairs], 1)

    def aligned(
        self, embeddings: Embeddings, names: Sequence[str], *, in_time_order: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns sequences side by side, `[batch, length, dim]`, and where all have an id.

        Args:
            embeddings: of the ID-type features.
            names: of aligned un-pooled features.
            in_time_order: whether they have the order of the history, which is reversed if the newest is first.
        """
        parts = [_sequence(embeddings[name]) for name in names]
        mask = parts[0].mask
        values = torch.cat([part.values for part in parts], 2)
        if len(parts) > 1:
            for part in parts[1:]:
                mask = mask & part.mask
            values = values * mask.unsqueeze(2)
        if in_time_order:
            values = self.in_time_order(values, mask)
        return values, mask

    @property
    def user_features(self) -> tuple[str, ...]:
        """The features of the history; see `persia.nn.RankingModel`."""
        return tuple(name for name, _ in self.pairs)

    @property
    def item_features(self) -> tuple[str, ...]:
        """The features of the candidate; see `persia.nn.RankingModel`."""
        return tuple(name for _, name in self.pairs)

    def in_time_order(self, values: Tensor, mask: Tensor) -> Tensor:
        """Returns what the data list of each event, `[batch, length, ...]`, oldest first.

        Padding is 0 if the order is reversed, and else as it is.

        Args:
            values: in the order of the data.
            mask: bool `[batch, length]`: where there is an event.
        """
        if not self.newest_first:
            return values
        position = torch.arange(mask.shape[1], device=mask.device)
        index = (mask.sum(1, keepdim=True) - 1 - position).clamp(min=0)
        more = (1,) * (values.dim() - 2)
        return values.gather(1, index.view(*index.shape, *more).expand_as(values)) * mask.view(*mask.shape, *more)

    def rest(self, embeddings: Embeddings) -> list[Tensor]:
        """Returns the pooled features, the candidate's among them, and the means of other sequences."""
        return [pooled(embeddings[name]) for name in self._others]

    def rest_of_items(self, user: Mapping[str, Tensor], embeddings: Embeddings, items: int) -> list[Tensor]:
        """Returns the same as `rest`, for one user with many items.

        Args:
            user: the user's features by name, `[1, dim]`.
            embeddings: of the other features, of all items.
            items: number of items.
        """
        return [user[name].expand(items, -1) if name in user else pooled(embeddings[name]) for name in self._others]

    def rest_of_user(self, embeddings: Embeddings) -> dict[str, Tensor]:
        """Returns those features of `rest` that the user has, by name, `[1, dim]`."""
        return {name: pooled(embeddings[name]) for name in self._others if name in embeddings}


class NegativeEvents:
    """Embeddings that did not follow in a history, for a loss that predicts each event from those before it.

    Args:
        schema: of the model.
        history: of the model.
        negatives: un-pooled features, aligned with the history and one for each of its pairs, of ids that the user did
            not meet. None takes event t of another sample of the batch for event t. A batch of one sample has none.

    Raises:
        ConfigError: the features do not fit the history's.
    """

    def __init__(self, schema: Schema, history: HistoryInput, negatives: Sequence[str] | None) -> None:
        self._history = history
        self._names = None if negatives is None else feature_names("negatives", negatives)
        if self._names is None:
            return
        check_negatives(schema, history.pairs, self._names)

    def sample(self, embeddings: Embeddings, events: Events) -> tuple[Tensor, Tensor]:
        """Returns negatives `[batch, length, dim]` and where there is one, bool `[batch, length]`."""
        if self._names is not None:
            values, mask = self._history.aligned(embeddings, self._names)
        else:
            # Rows of one user often lie next to each other in the data, so the other sample is half a batch away.
            shift = len(events.mask) // 2
            values, mask = events.values.roll(shift, 0), events.mask.roll(shift, 0)
        # An event that did follow is no negative; in a batch of one sample that is every one.
        return values, mask & events.mask & (values != events.values).any(2)


class BatchNegatives(NamedTuple):
    """Items that did not follow, for all predictions of a batch.

    Attributes:
        values: `[n, width]`.
        present: bool `[n]`: where there is one; None if there is one everywhere.
        samples: number of the sample of the batch whose item each is, int64 `[n]`; None if they are of no sample.
    """

    values: Tensor
    present: Tensor | None
    samples: Tensor | None

    def excluded(self, follows: Tensor, samples: Tensor) -> Tensor:
        """Returns which negatives do not count for which prediction, bool `[predictions, n]`.

        Those with the row of the item that followed, and the item of the same sample: what the user chose later is no
        negative of what the user chose before.

        Args:
            follows: what is predicted, `[predictions, width]`.
            samples: number of the sample of each, int64 `[predictions]`.
        """
        excluded = same_rows(follows.detach(), self.values.detach())
        if self.present is not None:
            excluded = excluded | ~self.present
        if self.samples is not None:
            excluded = excluded | (samples.unsqueeze(1) == self.samples)
        return excluded

    @classmethod
    def of(cls, values: Tensor, mask: Tensor, numbers: Tensor) -> BatchNegatives:
        """Returns the items of sequences.

        Args:
            values: `[batch, length, width]`.
            mask: bool `[batch, length]`: where there is one.
            numbers: number of each sample, int64 `[batch]`.
        """
        place, present = present_places(mask)
        samples = numbers.unsqueeze(1).expand(mask.shape).flatten()[place]
        return cls(values.flatten(0, 1)[place], present, samples)

    def joined(self, others: BatchNegatives) -> BatchNegatives:
        """Returns these, which are all there and of samples, and others of samples."""
        assert self.present is None
        assert self.samples is not None
        assert others.samples is not None
        present = None if others.present is None else F.pad(others.present, (len(self.values), 0), value=True)
        samples = torch.cat([self.samples, others.samples])
        return BatchNegatives(torch.cat([self.values, others.values]), present, samples)

    def thinned(self, most: int) -> BatchNegatives:
        """Returns at most `most` of them, in equal steps."""
        every = slice(None, None, -(-len(self.values) // most) or 1)
        present, samples = (None if each is None else each[every] for each in (self.present, self.samples))
        return BatchNegatives(self.values[every], present, samples)


def check_negatives(
    schema: Schema, pairs: Sequence[tuple[str, str]], names: Sequence[str], *, aligned: bool = True
) -> None:
    """Raises ConfigError unless un-pooled features fit a history's pairs.

    Args:
        schema: of the model.
        pairs: of the history.
        names: features of items that did not follow, one for each pair.
        aligned: whether there is one for each event. If not, they are aligned with each other only.
    """
    if len(names) != len(pairs):
        raise ConfigError(
            f"negatives has {len(names)} features, but the history {len(pairs)}; give one for each sequence of the "
            "history, in its order.",
            field="negatives",
        )
    dims = feature_dims(schema)
    for name, (sequence, _) in zip(names, pairs, strict=True):
        feature = _un_pooled(schema, name, "negatives")
        _check_aligned(schema.feature(sequence if aligned else names[0]), feature, "negatives")
        if dims[name] != dims[sequence]:
            raise ConfigError(
                f"negatives: {name!r} has dim {dims[name]}, but {sequence!r} {dims[sequence]}; let both read one "
                "table.",
                field="negatives",
            )


def check_heads(heads: int, width: int) -> None:
    """Raises ConfigError unless `heads` of an attention divides the width of an event."""
    check_integer("heads", heads, 1)
    if width % heads:
        raise ConfigError(f"heads = {heads} does not divide the width of an event, {width}.", field="heads")


def last_of(states: Tensor, mask: Tensor) -> Tensor:
    """Returns the state `[batch, dim]` at the last event; zeros where there is none.

    Args:
        states: `[batch, length, dim]`, of one event or more.
        mask: bool `[batch, length]`: True for as many events as there are, then False.
    """
    index = (mask.sum(1) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, states.shape[2])
    return states.gather(1, index).squeeze(1) * mask[:, :1]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns a softmax over the last axis where `mask` is True, and 0 elsewhere, in float32; all 0 without any."""
    return F.softmax(scores.float().masked_fill(~mask, torch.finfo(torch.float32).min), -1) * mask


def next_item_loss(states: Tensor, events: Events, negatives: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the loss of predicting event t + 1 from state t: -log s(<state, next>) - log(1 - s(<state, other>)).

    It is the mean over the predictions of a sample, and then over the samples, those without predictions included. So
    it neither grows with the length of histories, nor depends on how samples are divided over NN workers and batches of
    gradient accumulation. A prediction without a negative has its first term only. The auxiliary loss of DIEN and the
    loss of SASRec (section 3.5) have this form.

    Args:
        states: `[batch, length, dim]`, of events up to t.
        events: the history.
        negatives: events that did not follow, and where there is one; as `NegativeEvents.sample` returns.

    Returns:
        float32 `[]`.
    """
    others, present = negatives
    state = states[:, :-1].float()
    follows, differs = events.mask[:, 1:], present[:, 1:]
    score = (state * events.values[:, 1:].float()).sum(2)
    other = (state * others[:, 1:].float()).sum(2)
    loss = F.softplus(-score) * follows + F.softplus(other) * differs
    return (loss.sum(1) / follows.sum(1).clamp(min=1)).mean()


def sampled_softmax(positive: Tensor, scores: Tensor, excluded: Tensor) -> Tensor:
    """Returns -log( exp(s+) / (exp(s+) + sum over j of exp(s_j)) ) of each prediction, `[predictions]`.

    Args:
        positive: scores s+ of what followed, `[predictions]`.
        scores: of negatives j, `[predictions, n]`; overwritten.
        excluded: which of them do not count, bool `[predictions, n]`.
    """
    scores = scores.masked_fill_(excluded, torch.finfo(scores.dtype).min)
    return torch.logsumexp(torch.cat([positive.unsqueeze(1), scores], 1), 1) - positive


def _pairs_of_tables(schema: Schema, without: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs the un-pooled feature of each table with the table's first pooled one."""
    candidates: dict[str, str] = {}
    for feature in schema.id_features:
        if feature.pooling is not None:
            candidates.setdefault(feature.table_name, feature.name)
    sequences: dict[str, str] = {}
    for feature in schema.id_features:
        if feature.pooling is not None or feature.name in without or feature.table_name not in candidates:
            continue
        first = sequences.setdefault(feature.table_name, feature.name)
        if first != feature.name:
            raise ConfigError(
                f"Ambiguous history: {first!r} and {feature.name!r} are both un-pooled features of the table "
                f"{feature.table_name!r}; name the one that the model reads, such as "
                f"history=[({first!r}, {candidates[feature.table_name]!r})].",
                field="history",
            )
    return tuple((sequence, candidates[table]) for table, sequence in sequences.items())


def _un_pooled(schema: Schema, name: str, field: str) -> IdFeature:
    feature = schema.feature(name)
    if feature.pooling is not None:
        raise ConfigError(
            f"{field}: feature {name!r} has pooling={feature.pooling!r}; declare it with pooling=None, which keeps the "
            "sequence.",
            field=field,
        )
    return feature


def _check_aligned(first: IdFeature, feature: IdFeature, field: str) -> None:
    if first.max_length != feature.max_length:
        raise ConfigError(
            f"{field}: {feature.name!r} has max_length {feature.max_length}, but {first.name!r} {first.max_length}; "
            "aligned sequences have one max_length.",
            field=field,
        )
    if first.keep != feature.keep:
        raise ConfigError(
            f"{field}: {feature.name!r} keeps the {feature.keep} ids of longer lists, but {first.name!r} the "
            f"{first.keep}; aligned sequences have one keep.",
            field=field,
        )


def _sequence(embedding: Tensor | SequenceEmbedding) -> SequenceEmbedding:
    assert isinstance(embedding, SequenceEmbedding)
    return embedding


def _tensor(embedding: Tensor | SequenceEmbedding) -> Tensor:
    assert isinstance(embedding, Tensor)
    return embedding
