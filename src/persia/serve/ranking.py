"""Scores many items for one user; computes the user's part of the network once if the model supports it."""

from __future__ import annotations

import numpy as np
import torch

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.nn.ranking import RankingModel
from persia.schema import Schema
from persia.serve.views import View
from persia.types import Floats

__all__ = ["expanded", "rank"]


def rank(view: View, user: Batch, items: Batch) -> torch.Tensor:
    """Returns logits float32 `[items, labels]`; see `Predictor.rank`. Blocks for the computation."""
    schema, model = view.schema, view.network.module
    _check_form(schema, user, items)
    names = [feature.name for feature in schema.id_features]
    user_columns = {name: user.id_features[name] for name in names if name not in items.id_features}
    item_id_columns = {name: items.id_features[name] for name in names if name in items.id_features}
    user_batch = Batch(user_columns, np.where(np.isnan(user.dense), np.float32(0), user.dense), _no_labels(1))
    item_batch = Batch(item_id_columns, _merged_dense(user, items), _no_labels(len(items)))
    for part in (user_batch, item_batch):
        if part.id_features:
            part.validate(view.readers.of(part.id_features).schema, require_labels=False)
    if not isinstance(model, RankingModel) or not _can_split(model, schema, user, items):
        batch = expanded(schema, user, items)
        batch.validate(schema, require_labels=False)
        return view.logits(batch)
    with torch.no_grad():
        columns, _, embeddings = view.readers.of(user_columns).read(user_batch, view.rows)
        item_columns, labels, item_embeddings = view.readers.of(item_id_columns).read(item_batch, view.rows)
    return view.network.checked(
        lambda: model.score(model.user_part(columns, embeddings), item_columns, item_embeddings), labels
    )


def expanded(schema: Schema, user: Batch, items: Batch) -> Batch:
    """Returns the rows of the items, with the user's features in each. The caller has checked the shapes."""
    count = len(items)
    repeated = np.zeros(count, np.int64)
    columns = {
        feature.name: items.id_features[feature.name]
        if feature.name in items.id_features
        else user.id_features[feature.name].take(repeated)
        for feature in schema.id_features
    }
    return Batch(columns, _merged_dense(user, items), _no_labels(count))


def _check_form(schema: Schema, user: Batch, items: Batch) -> None:
    """Checks what is needed to split the features; `Batch.validate` checks the rest.

    Raises:
        DataError: the user has not one row, there are no items, a feature is missing or unknown, or the dense features
            have another shape.
    """
    if len(user) != 1 or not len(items):
        raise DataError(f"Ranking needs one user and at least one item; got {len(user)} and {len(items)} rows.")
    known = {feature.name for feature in schema.id_features}
    for name, batch in (("the user", user), ("the items", items)):
        dense, expected = batch.dense, (len(batch), schema.dense_width)
        if not isinstance(dense, np.ndarray) or dense.dtype != np.float32 or dense.shape != expected:
            raise DataError(
                f"Dense features of {name} must be float32{list(expected)}, with NaN in columns of the other batch."
            )
        for column in batch.id_features:
            if column not in known:
                raise DataError(
                    f"Feature {column!r} of {name} is not in the schema, which has {', '.join(sorted(known))}; remove "
                    "it.",
                    feature=column,
                )
    for feature in schema.id_features:
        if feature.name not in items.id_features and feature.name not in user.id_features:
            raise DataError(
                f"Neither the user nor the items have the feature {feature.name!r}; add it to one of them.",
                feature=feature.name,
            )


def _can_split(model: RankingModel, schema: Schema, user: Batch, items: Batch) -> bool:
    """Returns whether `user_part` reads only features of the user, and `score` only features of the items."""
    for feature in schema.id_features:
        other = feature.aligned_with
        if other is not None and (feature.name in items.id_features) != (other in items.id_features):
            return False  # Alignment can only be checked in complete rows.
    dense = schema.dense_slices
    for name in model.user_features:
        columns = dense.get(name)
        if columns is None and (name in items.id_features or name not in user.id_features):
            return False
        if columns is not None and not (
            np.isnan(items.dense[:, columns]).all() and np.isfinite(user.dense[0, columns]).all()
        ):
            return False
    return all(name in items.id_features for name in model.item_features)


def _merged_dense(user: Batch, items: Batch) -> Floats:
    """Returns the dense features of the items, with the user's where they are NaN."""
    return np.where(np.isnan(items.dense), user.dense, items.dense)


def _no_labels(rows: int) -> Floats:
    return np.empty((rows, 0), np.float32)
