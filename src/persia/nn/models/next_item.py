"""`NextItem`: a history's next item among all items, at every position, for retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_choice, check_integer, check_number, plain
from persia.errors import ConfigError
from persia.nn.losses import weighted_mean
from persia.nn.models.event_layout import EventLayout, layout_of, present_places
from persia.nn.models.history import BatchNegatives, HistoryInput, check_negatives, sampled_softmax
from persia.nn.models.hstu import ages_of
from persia.nn.models.hstu_encoder import HSTUEncoder
from persia.nn.models.layers import feature_names
from persia.nn.models.sasrec import SelfAttentionEncoder
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings
from persia.nn.targets import Targets
from persia.schema import Schema

__all__ = ["NextItem"]

Backbone = Literal["sasrec", "hstu", "gru"]
NextItemLoss = Literal["sampled_softmax", "bce", "gbce"]


class NextItem(nn.Module):
    """Predicts the item after each event of a history, for retrieval from all items.

    A sample is a history and the item that followed it. A causal backbone turns each prefix of the history into a
    state; the score of an item is the dot product of the state and the item's row, the one that histories read, too. In
    training, the item that followed each prefix competes with negatives, which all samples of the batch share:

        sampled_softmax:  -log( exp(s+ - log q+) / (exp(s+ - log q+) + sum over j of exp(s_j - log q_j)) )
        bce:              (-log sigmoid(s+) - sum over j of log(1 - sigmoid(s_j))) / (n + 1)
        gbce:             the same with -beta log sigmoid(s+)

    for n negatives j; q is the probability with which an item is drawn, without which items that are drawn often would
    be scored too low (Yi et al., RecSys 2019). `gbce` corrects the scores of `bce`, which negative sampling makes too
    high: with the sampling rate a = n / (items - 1) and the calibration t, beta = a (t (1 - 1/a) + 1/a) (gSASRec,
    Petrov & Macdonald, RecSys 2023). A negative with the row of the item that followed does not count. Items are told
    apart by their rows, so tables need a random initializer: rows that are all zero, as of `Zeros` or of ids that are
    not admitted, always count, and other equal rows never. The loss is the mean over the predictions of a sample, then
    over the samples, weighted by the label and `Schema.sample_weight`.

    Logits are scores of the sample's item after its whole history, 0 without one. They rank items; they are no
    log-odds.

    On a CPU, samples of similar length are groups that are padded to their longest; with "gru", a batch is one group.
    On other devices, and in a compiled or exported network, all are padded to `max_length`.

    Args:
        schema: the input, with one binary label: 1 for what the user chose; 0 for rows that only give negatives.
        backbone: "sasrec", self-attention (arXiv 1808.09781); "hstu", gated pointwise attention (arXiv 2402.17152), the
            one that reads `ages`; "gru", a recurrent network (GRU4Rec, arXiv 1511.06939).
        loss: see above.
        history: pairs of an un-pooled feature and the item's feature, such as `[("history", "item")]`; by default the
            un-pooled feature of each table with its first pooled one.
        newest_first: whether the data list the newest event first.
        targets: "all" predicts the item after each event, for data with a sample per user. "newest" predicts the item
            of the sample only, for data with a sample per event, such as a stream: each event is a target once.
        new_events: dense feature with the number of events, the sample's item and the newest of its history, that no
            sample before had: only these are targets, at least the item. For data with a sample per visit; for
            `targets="all"`.
        negatives: un-pooled features on the tables of the history, one for each of its pairs, of drawn items; those of
            all samples of the batch are the negatives of each. By default the items of the batch's
            other samples.
        log_q: dense feature with log(q) of the sample's item; for `sampled_softmax`. None for no correction, which is
            right if all items are drawn alike.
        history_log_q: dense feature of `max_length` numbers with log(q) of each event, in the order of the history;
            needed next to `log_q` if targets are "all".
        negatives_log_q: dense feature with log(q) of each of the sample's `negatives`; needed next to `log_q` if there
            are any.
        ages: dense feature of `max_length` numbers with the time from each event to the sample, for `hstu`; see `HSTU`.
        temperature: scores are cosines over it; None for dot products.
        items: number of items that negatives are drawn from, for `gbce`.
        calibration: t of `gbce`: 0 is `bce`, 1 corrects its scores fully.
        layers: number of layers of the backbone.
        heads: of the attention of `sasrec` and `hstu`, by default 1; divides the width of an event.
        dropout: share of embeddings and hidden units that is dropped in training, by default 0; for `sasrec`.

    Raises:
        ConfigError: a feature is unknown or does not fit, there is not one binary label, or an option is invalid.
    """

    are_log_odds: Final = False
    """Predictions are scores, which rank items."""

    def __init__(
        self,
        schema: Schema,
        *,
        backbone: Backbone = "sasrec",
        loss: NextItemLoss = "sampled_softmax",
        history: Sequence[tuple[str, str]] | None = None,
        newest_first: bool = False,
        targets: Literal["all", "newest"] = "all",
        new_events: str | None = None,
        negatives: Sequence[str] | None = None,
        log_q: str | None = None,
        history_log_q: str | None = None,
        negatives_log_q: str | None = None,
        ages: str | None = None,
        temperature: float | None = None,
        items: int | None = None,
        calibration: float = 0.75,
        layers: int = 2,
        heads: int | None = None,
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("backbone", backbone, ("sasrec", "hstu", "gru"))
        _check_reads(backbone, heads, dropout)
        check_choice("loss", loss, ("sampled_softmax", "bce", "gbce"))
        check_choice("targets", targets, ("all", "newest"))
        _check_label(schema)
        self.negatives = None if negatives is None else feature_names("negatives", negatives)
        self.input = HistoryInput(schema, history, newest_first, self.negatives or ())
        self.input.check_same_dim()
        if self.negatives is not None:
            check_negatives(schema, self.input.pairs, self.negatives, aligned=False)
        self.kind, self.targets = loss, targets
        self.temperature, self.item_count, self.calibration = map(plain, (temperature, items, calibration))
        if self.temperature is not None:
            check_number("temperature", self.temperature, 0, open_low=True)
        check_number("calibration", self.calibration, 0, 1)
        if (loss == "gbce") != (self.item_count is not None):
            raise ConfigError(
                f"loss = {loss!r} {'needs' if loss == 'gbce' else 'takes no'} items; give the number of items that "
                'negatives are drawn from for "gbce" only.',
                field="items",
            )
        if self.item_count is not None:
            check_integer("items", self.item_count, 2)
        length = self.input.max_length
        sizes = {"log_q": 1, "history_log_q": length, "negatives_log_q": _length(schema, self.negatives)}
        given = {"log_q": log_q, "history_log_q": history_log_q, "negatives_log_q": negatives_log_q}
        self._log_q = {
            option: _columns(schema, option, name, sizes[option]) for option, name in given.items() if name is not None
        }
        self._check_log_q()
        if new_events is not None and targets != "all":
            raise ConfigError(
                f'new_events = {new_events!r} chooses among the targets; leave it out, or use targets = "all".',
                field="new_events",
            )
        self._new_events = None if new_events is None else _columns(schema, "new_events", new_events, 1)
        if ages is not None and backbone != "hstu":
            raise ConfigError(f'backbone = {backbone!r} reads no ages; use "hstu", or leave them out.', field="ages")
        self._ages = None if ages is None else ages_of(schema, ages, length)
        self._ages_name = ages
        read = [] if self._ages is None else list(range(self._ages.start, self._ages.stop))
        # No log(q): servers ask for what the vectors are computed from.
        self.register_buffer("user_columns", torch.tensor(read, dtype=torch.int64), persistent=False)
        self.register_buffer("item_columns", torch.empty(0, dtype=torch.int64), persistent=False)
        width = self.input.dim
        self.backbone: SelfAttentionEncoder | HSTUEncoder | _GRUEncoder
        heads, dropout = 1 if heads is None else heads, 0.0 if dropout is None else dropout
        if backbone == "sasrec":
            self.backbone = SelfAttentionEncoder(width, length, layers, heads, dropout)
        elif backbone == "hstu":
            self.backbone = HSTUEncoder(width, length, layers, heads, ages is not None)
        else:
            check_integer("layers", plain(layers), 1)
            self.backbone = _GRUEncoder(width, plain(layers))

    user_columns: Tensor
    item_columns: Tensor

    def _check_log_q(self) -> None:
        needed = set()
        if self._log_q:
            needed = {"log_q"} | ({"history_log_q"} if self.targets == "all" else set())
            needed |= set() if self.negatives is None else {"negatives_log_q"}
            if self.kind != "sampled_softmax":
                raise ConfigError(
                    f"loss = {self.kind!r} has no correction by log(q); leave {min(self._log_q)} out, or use "
                    '"sampled_softmax".',
                    field=min(self._log_q),
                )
        for option in sorted(needed.symmetric_difference(self._log_q)):
            raise ConfigError(
                f"{option} {'is missing' if option in needed else 'is not used'} with targets = {self.targets!r} and "
                f"{'no negatives' if self.negatives is None else 'negatives'}; the correction by log(q) takes "
                f"{', '.join(sorted(needed))}.",
                field=option,
            )

    @property
    def features(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The ID-type features of the user and of the item, for `persia.serve.Retriever`."""
        return tuple(name for name, _ in self.input.pairs), self.item_features

    @property
    def user_features(self) -> tuple[str, ...]:
        """The features of the history."""
        return tuple(name for name, _ in self.input.pairs) + (() if self._ages_name is None else (self._ages_name,))

    @property
    def item_features(self) -> tuple[str, ...]:
        """The features of the item."""
        return tuple(name for _, name in self.input.pairs)

    def users(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the users' vectors, float32 `[batch, dim]`: queries of a nearest-neighbour search by dot product."""
        events, layout = self._events(embeddings)
        return self._vectors(layout.last(self._states(dense, events, layout)))

    def items(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the items' vectors, float32 `[batch, dim]`: what an index of items holds."""
        return self._vectors(self.input.candidate(embeddings))

    def user_part(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the user's vector; see `persia.nn.RankingModel`."""
        return self.users(dense, embeddings)

    def score(self, user: Tensor, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[items, 1]` of one user with many items; see `persia.nn.RankingModel`."""
        return self._scaled((user * self.items(dense, embeddings)).sum(1, keepdim=True))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor | ModelOutput:
        """Returns logits float32 `[batch, 1]`; in training with the loss of each sample, float32 `[batch]`.

        Args:
            dense: dense features, `[batch, n]`.
            embeddings: of the ID-type features.
        """
        events, layout = self._events(embeddings)
        states, item = self._states(dense, events, layout), self.input.candidate(embeddings)
        with torch.autocast(states.device.type, enabled=False):  # A temperature would magnify the rounding.
            newest = self._vectors(layout.last(states))
            logits = self._scores(newest, self._vectors(item))
            if not self.training:
                return logits.unsqueeze(1)
            negatives = self._negatives(dense, embeddings, item)
            if self.targets == "newest":
                losses = self._losses_of_newest(dense, newest, layout, item, negatives)
            else:
                losses = self._losses(dense, self._vectors(states), events, layout, item, negatives)
            return ModelOutput(logits.unsqueeze(1), losses)

    def loss(self, logits: Tensor, targets: Targets | Tensor, extra: Tensor) -> Tensor:
        """Returns the mean loss over samples.

        Args:
            logits: `[batch, 1]`; not used.
            targets: of the batch, whose labels weigh samples; or the labels `[batch, 1]`, if none is missing.
            extra: the loss of each sample, `[batch]`.
        """
        targets = targets if isinstance(targets, Targets) else Targets(targets)
        return weighted_mean(targets.labels.squeeze(1) * extra, targets.weights_of(0))

    def _events(self, embeddings: Embeddings) -> tuple[Tensor, EventLayout]:
        """Returns the events of the history, `[places, width]`, and where they are."""
        values, mask = self.input.past(embeddings)
        layout = layout_of(mask, one_group=isinstance(self.backbone, _GRUEncoder))
        return layout.flat(values), layout

    def _states(self, dense: Tensor, events: Tensor, layout: EventLayout) -> Tensor:
        """Returns the backbone's states, `[places, width]`."""
        if isinstance(self.backbone, HSTUEncoder):
            ages = None if self._ages is None else self._of_events(dense, self._ages, layout).float()
            return self.backbone.states(events, layout, ages)
        return self.backbone.states(events, layout)

    def _of_events(self, dense: Tensor, columns: slice, layout: EventLayout) -> Tensor:
        """Returns a dense feature with a number for each event, `[places]`; 0 at padding."""
        return layout.flat(self.input.in_time_order(dense[:, columns], layout.mask) * layout.mask)

    def _vectors(self, rows: Tensor) -> Tensor:
        """Returns what scores are dot products of, in float32."""
        return rows.float() if self.temperature is None else F.normalize(rows.float(), dim=-1)

    def _scores(self, states: Tensor, items: Tensor) -> Tensor:
        return self._scaled((states * items).sum(-1))

    def _scaled(self, products: Tensor) -> Tensor:
        """Returns scores from dot products."""
        return products if self.temperature is None else products / self.temperature

    def _losses(
        self,
        dense: Tensor,
        states: Tensor,
        events: Tensor,
        layout: EventLayout,
        item: Tensor,
        negatives: _Negatives,
    ) -> Tensor:
        """Returns the loss of each sample, the mean over its predictions, float32 `[batch]`; 0 without a history."""
        left = layout.left
        predicted = left > 0
        if self._new_events is not None:  # The state at the newest event predicts the first of them, the item.
            newest = dense[:, self._new_events].squeeze(1).clamp(min=1)
            predicted = predicted & (left <= layout.of_samples(newest))
        log_q = None
        if self._log_q:
            of_item = dense[:, self._log_q["log_q"]].squeeze(1)
            log_q = layout.following(self._of_events(dense, self._log_q["history_log_q"], layout), of_item)
        follows, sample = layout.following(events, item), torch.arange(item.shape[0], device=item.device)
        losses = self._of_predictions(states, follows, log_q, layout.of_samples(sample), negatives)
        total, count = (
            layout.per_sample([group.sum(1) for group in layout.grouped(each)])
            for each in (losses * predicted, predicted)
        )
        return total / count.clamp(min=1)

    def _losses_of_newest(
        self, dense: Tensor, newest: Tensor, layout: EventLayout, item: Tensor, negatives: _Negatives
    ) -> Tensor:
        """Returns the loss of each sample, of its newest event's state, float32 `[batch]`; 0 without a history."""
        log_q = dense[:, self._log_q["log_q"]].squeeze(1) if self._log_q else None
        sample = torch.arange(item.shape[0], device=item.device)
        return self._of_predictions(newest, item, log_q, sample, negatives) * (layout.lengths > 0)

    def _of_predictions(
        self, states: Tensor, follows: Tensor, log_q: Tensor | None, sample: Tensor, negatives: _Negatives
    ) -> Tensor:
        """Returns the loss of each prediction, float32 `[n]`.

        Args:
            states: that predict, `[n, width]`.
            follows: what they predict, the same.
            log_q: of these, `[n]`, if scores are corrected.
            sample: number of the sample of each, int64 `[n]`.
            negatives: of the batch.
        """
        positive = self._scores(states, self._vectors(follows))
        scores = self._scaled(states @ self._vectors(negatives.shared.values).T)
        excluded = negatives.shared.excluded(follows, sample)
        if log_q is not None:
            positive, scores = positive - log_q, scores - negatives.log_q
        if self.kind == "sampled_softmax":
            return sampled_softmax(positive, scores, excluded)
        counts = ~excluded
        number, beta = counts.sum(1), 1.0 if self.item_count is None else self._beta(counts)
        losses: Tensor = (beta * F.softplus(-positive) + (F.softplus(scores) * counts).sum(1)) / (number + 1)
        return losses

    def _beta(self, counts: Tensor) -> Tensor:
        assert self.item_count is not None
        rate: Tensor = (counts.sum(1) / (self.item_count - 1)).clamp(max=1)
        beta: Tensor = rate * self.calibration + 1 - self.calibration
        return beta

    def _negatives(self, dense: Tensor, embeddings: Embeddings, item: Tensor) -> _Negatives:
        """Returns the negatives of the batch."""
        log_q = dense.new_zeros(())
        if self.negatives is None:
            if self._log_q:
                log_q = dense[:, self._log_q["log_q"]].squeeze(1)
            return _Negatives(BatchNegatives(item, None, torch.arange(len(item), device=item.device)), log_q)
        values, mask = self.input.aligned(embeddings, self.negatives, in_time_order=False)
        place, present = present_places(mask)  # Most samples may have fewer negatives than they have places.
        if self._log_q:
            log_q = dense[:, self._log_q["negatives_log_q"]].flatten()[place]
        return _Negatives(BatchNegatives(values.flatten(0, 1)[place], present, None), log_q)


class _Negatives(NamedTuple):
    """Negatives that the samples of a batch share.

    Attributes:
        shared: the negatives.
        log_q: `[n]`, or `[]` if scores are not corrected.
    """

    shared: BatchNegatives
    log_q: Tensor


class _GRUEncoder(nn.Module):
    """A recurrent network over events, with normalised states."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.scale = width**0.5

    def states(self, events: Tensor, layout: EventLayout) -> Tensor:
        """Returns states `[places, width]` at the events."""
        groups = [self.gru(group * self.scale)[0] for group in layout.grouped(events)]
        states: Tensor = self.norm(layout.joined(groups))
        return states


def _check_reads(backbone: Backbone, heads: int | None, dropout: float | None) -> None:
    """Raises ConfigError if an option is given that the backbone does not have."""
    for option, value, backbones in (("heads", heads, ("sasrec", "hstu")), ("dropout", dropout, ("sasrec",))):
        if value is not None and backbone not in backbones:
            raise ConfigError(
                f"backbone = {backbone!r} has no {option}; leave {option} = {value!r} out, or use "
                f"{' or '.join(map(repr, backbones))}.",
                field=option,
            )


def _check_label(schema: Schema) -> None:
    """Raises ConfigError unless there is one binary label without rules."""
    if len(schema.targets) == 1:
        label = schema.targets[0]
        if label.kind == "binary" and label.loss is None and label.weight == 1:
            return
    raise ConfigError(
        f"NextItem has its own loss, of one binary label, but the schema has {list(schema.label_names)}; declare the "
        "one that says if the user chose the item, without another kind, loss or weight.",
        field="labels",
    )


def _length(schema: Schema, names: Sequence[str] | None) -> int:
    return 0 if not names else schema.feature(names[0]).max_length or 0


def _columns(schema: Schema, option: str, name: str, size: int) -> slice:
    """Returns the columns of a dense feature.

    Raises:
        ConfigError: there is no such feature, or it has another number of values.
    """
    if name not in schema.dense_slices:
        raise ConfigError(f"{option} = {name!r} is no dense feature of the schema; declare it there.", field=option)
    columns = schema.dense_slices[name]
    if columns.stop - columns.start != size:
        raise ConfigError(
            f"{option} = {name!r} has {columns.stop - columns.start} values, but needs {size}; declare "
            f"DenseFeature({name!r}, size={size}).",
            field=option,
        )
    return columns
