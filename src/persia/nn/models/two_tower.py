"""Two towers for retrieval, trained by a softmax over the items of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.checks import check_integer, check_number, plain
from persia.errors import ConfigError
from persia.nn.losses import weighted_mean
from persia.nn.models.layers import feature_dims, feature_names, mlp, pooled, same_rows
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings
from persia.nn.targets import Targets
from persia.schema import Schema

__all__ = ["TwoTower"]


class TwoTower(nn.Module):
    """User and item towers with in-batch sampled softmax and logQ correction (Yi et al., RecSys 2019).

    Each tower is a perceptron whose output has length 1; the logit is the towers' dot product over the temperature. In
    training, each positive sample's item competes with all items of the batch:

        loss = mean over samples i of label_i * -log softmax_j(s(user_i, item_j) - log q_j)[i],

    where q_j is the probability that item j is in a sample (section 3): without it, popular items would be negatives
    too often. Other samples with the item of sample i are no negatives of it: those whose embeddings of the item's
    ID-type features are equal, and not all zero, as features of ids without rows are. The items are all items of one
    forward
    pass: of the local batch with several NN workers, and of one micro-batch with gradient accumulation. A batch of one
    sample has no negatives, and loss 0. Scores are float32 under autocast, too, as the temperature would magnify their
    rounding. Logits rank items; they are no log-odds, so log loss and normalised entropy say nothing, and predictions
    are the logits. Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input, with one binary label, which weighs samples: 1 for what the user chose, 0 for other rows,
            whose items are negatives only. The mean over samples is weighted by `Schema.sample_weight`; samples whose
            label is missing are left out of it, and their items are negatives too.
        item: ID-type and dense features of the item; all others are the user's.
        log_q: dense feature of one column with log(q) of the sample's item; None for no correction. No tower reads it.
            An item whose value is log(0) counts as the rarest of the batch.
        hidden: widths of each tower's hidden layers.
        dim: length of the towers' outputs.
        temperature: what dot products are divided by.
        dropout: share of each hidden layer that is dropped in training.

    Raises:
        ConfigError: a feature is unknown, a tower has none, there is not one label, or a width or number is bad.
    """

    are_log_odds: Final = False
    """Predictions are logits, which keep the order of items: sigmoids of the highest ones would all be 1."""

    def __init__(
        self,
        schema: Schema,
        *,
        item: Sequence[str],
        log_q: str | None = None,
        hidden: Sequence[int] = (128,),
        dim: int = 64,
        temperature: float = 0.05,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        dense = schema.dense_slices
        if len(schema.targets) != 1:
            raise ConfigError(
                f"TwoTower needs one label, but the schema has {len(schema.label_names)}; declare the one that says if "
                "the user chose the item.",
                field="labels",
            )
        label = schema.targets[0]
        if label.kind != "binary" or label.loss is not None or label.weight != 1:
            raise ConfigError(
                f"TwoTower has its own loss, of a binary label; declare {label.name!r} without another kind, loss "
                "or weight.",
                field="labels",
            )
        item = feature_names("item", item)
        for name in item:
            if name not in dense:
                schema.feature(name)
        if log_q is not None and log_q not in dense:
            raise ConfigError(f"log_q = {log_q!r} is no dense feature of the schema; declare it there.", field="log_q")
        if log_q is not None and (width := dense[log_q].stop - dense[log_q].start) != 1:
            raise ConfigError(
                f"log_q = {log_q!r} has {width} columns, but is one number; declare it with size=1 and without "
                "missing_indicator.",
                field="log_q",
            )
        self.temperature, dim = plain(temperature), plain(dim)
        check_number("temperature", self.temperature, 0, open_low=True)
        check_integer("dim", dim, 1)
        self.features = tuple(tuple(name for name in dims if (name in item) == of_item) for of_item in (False, True))
        if not all(self.features):
            raise ConfigError(
                f"item = {list(item)} leaves a tower without an ID-type feature; each needs one.", field="item"
            )
        names_of = [
            [name for name in dense if (name in item) == of_item and name != log_q] for of_item in (False, True)
        ]
        columns = [
            [each for name in names for each in range(dense[name].start, dense[name].stop)] for names in names_of
        ]
        self._user_dense = tuple(names_of[0])
        self.log_q = None if log_q is None else dense[log_q].start
        for name, numbers in zip(("user_columns", "item_columns"), columns, strict=True):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64), persistent=False)
        self.user, self.item = (
            mlp(sum(dims[name] for name in names) + len(numbers), hidden, dim, dropout=dropout)
            for names, numbers in zip(self.features, columns, strict=True)
        )

    user_columns: Tensor
    item_columns: Tensor

    def users(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the users' vectors, float32 `[batch, dim]`, of length 1: queries of a nearest-neighbour search."""
        parts = [pooled(embeddings[name]) for name in self.features[0]]
        return F.normalize(self.user(torch.cat([*parts, dense.index_select(1, self.user_columns)], 1)).float(), dim=1)

    def items(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the items' vectors, float32 `[batch, dim]`, of length 1: what an index of items holds."""
        parts = [pooled(embeddings[name]) for name in self.features[1]]
        return F.normalize(self.item(torch.cat([*parts, dense.index_select(1, self.item_columns)], 1)).float(), dim=1)

    @property
    def user_features(self) -> tuple[str, ...]:
        """The features of the user's tower."""
        return self.features[0] + self._user_dense

    @property
    def item_features(self) -> tuple[str, ...]:
        """The ID-type features of the item's tower."""
        return self.features[1]

    def user_part(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the user's vector; see `persia.nn.RankingModel`."""
        return self.users(dense, embeddings)

    def score(self, user: Tensor, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[items, 1]` of one user with many items; see `persia.nn.RankingModel`."""
        logits: Tensor = (user * self.items(dense, embeddings)).sum(1, keepdim=True) / self.temperature
        return logits

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor | ModelOutput:
        """Returns logits float32 `[batch, 1]`; in training with scores of all pairs, `[batch, batch]`.

        Args:
            dense: dense features, `[batch, n]`.
            embeddings: of the ID-type features.
        """
        users, items = self.users(dense, embeddings), self.items(dense, embeddings)
        logits: Tensor = (users * items).sum(1, keepdim=True) / self.temperature
        if not self.training:
            return logits
        with torch.autocast(users.device.type, enabled=False):
            scores = users @ items.T / self.temperature
        if self.log_q is not None:
            scores = scores - _finite(dense[:, self.log_q])
        same = _same_items([pooled(embeddings[name]).detach() for name in self.features[1]])
        return ModelOutput(logits, scores.masked_fill(same, -math.inf))

    def loss(self, logits: Tensor, targets: Targets | Tensor, extra: Tensor) -> Tensor:
        """Returns the in-batch softmax loss, mean over the batch.

        Args:
            logits: `[batch, 1]`; not used.
            targets: of the batch, whose labels weigh samples; or the labels `[batch, 1]`, if none is missing.
            extra: corrected scores of each user with all items, `[batch, batch]`.
        """
        targets = targets if isinstance(targets, Targets) else Targets(targets)
        losses = -(targets.labels.squeeze(1) * F.log_softmax(extra, 1).diagonal())
        return weighted_mean(losses, targets.weights_of(0))


def _finite(log_q: Tensor) -> Tensor:
    """Returns log probabilities `[batch]` with the least finite one in place of -inf, or 0 if all are -inf."""
    known = log_q > -math.inf
    least = F.pad(log_q.where(known, 0), (0, 1)).amin()  # The padding is log(1), the largest.
    return log_q.where(known, least)


def _same_items(features: list[Tensor]) -> Tensor:
    """Returns which other samples have the same item, bool `[batch, batch]`.

    Args:
        features: embeddings of the item, `[batch, dim]` each.
    """
    values = torch.cat([feature.float() for feature in features], 1)
    return same_rows(values, values).fill_diagonal_(False)
