"""Converts requests to batches. Checks everything; unpickles nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.computed_ids import add_computed
from persia.batching.derived_ids import split_count
from persia.batching.id_columns import id_column
from persia.batching.input_rules import apply_rules
from persia.errors import DataError
from persia.schema import NO_RULES, DenseFeature, InputRules, Schema
from persia.serve.http.codecs.arrow_codec import value_count
from persia.serve.http.codecs.codec import Codec, Records, Samples
from persia.serve.http.codecs.messages import MessageCodec
from persia.serve.schema_parts import check_user_columns, schema_of_columns, with_all_dense

if TYPE_CHECKING:
    from persia.nn.item_catalogue import TowerFeatures
    from persia.serve.http.limits import ServeLimits

__all__ = ["Bodies", "IdsOfTable", "UsersAndCount"]


class IdsOfTable(NamedTuple):
    """Ids whose embeddings are requested.

    Attributes:
        table: name of the table.
        ids: uint64 `[n]`.
    """

    table: str
    ids: NDArray[np.uint64]


class UsersAndCount(NamedTuple):
    """Users whose nearest items are requested.

    Attributes:
        users: batch with the features of users, and all dense features.
        k: number of items for each user.
    """

    users: Batch
    k: int


class Bodies:
    """Converts bodies of requests for a model. Thread-safe.

    Args:
        schema: schema of the model.
        limits: limits of rows and values.
        rules: rules of the reader of the training data, for missing values and lists.
        note: called with the raw columns of each batch; see `Predictor.note_columns`.
    """

    def __init__(
        self,
        schema: Schema,
        limits: ServeLimits,
        rules: InputRules = NO_RULES,
        note: Callable[[Mapping[str, Any]], None] = lambda columns: None,
    ) -> None:
        self._schema = schema
        self._limits = limits
        self._rules = rules
        self._note = note
        self._separators = {f.column: f.split for f in schema.id_features if f.split is not None} | dict(rules.lists)
        self._names = frozenset(schema.feature_columns)
        of_samples = {name for name in (schema.sample_weight, schema.group) if name is not None}
        self._ignored = frozenset({*schema.label_names, *of_samples}) - self._names

    def samples(self, codec: Codec, body: bytes) -> Batch:
        """Returns the samples of a `/predict` request.

        Args:
            codec: codec of the body.
            body: the body.

        Raises:
            MalformedBodyError: the body does not match its type or its form.
            DataError: the samples do not fit the schema or the limits; names the feature, the row and the remedy.
        """
        columns = self._columns(codec.samples(body, self._limits), self._schema.dense)
        return self._batch(columns, self._schema, "the body")

    def user_and_items(self, codec: MessageCodec, body: bytes) -> tuple[Batch, Batch]:
        """Returns the user, a batch of one row, and the items of a `/rank` request.

        Raises:
            MalformedBodyError: as in `samples`.
            DataError: as in `samples`; or a feature of the model is missing, or is given for both.
        """
        user, items = (self._columns(samples, None) for samples in codec.user_and_items(body, self._limits))
        if both := user.keys() & items.keys():
            raise DataError(
                f"Feature {min(both)!r} is given for the user and for the items; leave it out of one.",
                feature=min(both),
            )
        if missing := self._names - user.keys() - items.keys():
            raise DataError(
                f"Feature {min(missing)!r} of the schema is missing; give it with the user or with the items.",
                feature=min(missing),
            )
        made = [self._part(user, "user"), self._part(items, "items")]
        if len(made[0]) != 1:
            raise DataError(f"The user has {len(made[0])} rows; give one, and rank for each user by itself.")
        return made[0], self._with_crosses(made[0], made[1])

    def users(self, codec: MessageCodec, body: bytes, features: TowerFeatures) -> UsersAndCount:
        """Returns the users of a `/retrieve` request.

        Args:
            codec: codec of the body.
            body: the body.
            features: features of users.

        Raises:
            MalformedBodyError: as in `samples`.
            DataError: as in `samples`; or a feature of users is missing, or another one is given; or too many items are
                requested.
        """
        request = codec.users(body, self._limits)
        if request.k > self._limits.max_k:
            raise DataError(
                f"k = {request.k}; the server finds at most {self._limits.max_k} items (--max-k).", k=request.k
            )
        columns = self._columns(request.users, None)
        for name in columns:
            self._check_name(name)
        check_user_columns(self._schema, features, columns)
        schema = schema_of_columns(self._schema, columns)
        users = self._batch(columns, schema, "'users'")
        if len(users) * request.k > self._limits.max_values:
            raise DataError(
                f"{request.k} items for each of {len(users)} users are more than {self._limits.max_values}, the "
                "limit of a request (--max-values). Send fewer users, or request fewer items.",
                k=request.k,
            )
        return UsersAndCount(with_all_dense(users, schema.dense_names, self._schema), request.k)

    def _with_crosses(self, user: Batch, items: Batch) -> Batch:
        """Returns the items with the features that are computed from features of both the user and the items."""
        missing = [f.name for f in self._schema.id_features if f.name not in {*user.id_features, *items.id_features}]
        if not missing:
            return items
        repeated = np.zeros(len(items), np.int64)
        ids = {**{name: column.take(repeated) for name, column in user.id_features.items()}, **items.id_features}
        add_computed(self._schema, ids)
        return Batch({**items.id_features, **{name: ids[name] for name in missing}}, items.dense, items.labels)

    def _part(self, columns: Mapping[str, Any], part: str) -> Batch:
        """Returns a part of the features, with all dense features; dense features of the other part are NaN."""
        batch = self._batch(columns, schema_of_columns(self._schema, columns), f"the part {part!r}")
        places = self._schema.dense_slices
        dense = np.full((len(batch), self._schema.dense_width), np.nan, np.float32)
        dense[:, [at for name in places if name in columns for at in range(*places[name].indices(dense.shape[1]))]] = (
            batch.dense
        )
        return Batch(batch.id_features, dense, batch.labels)

    def ids(self, codec: MessageCodec, body: bytes) -> IdsOfTable:
        """Returns the ids of an `/embeddings` request.

        Raises:
            MalformedBodyError: as in `samples`.
            DataError: there is no such table, or an id is missing or has another kind.
        """
        request = codec.ids(body)
        features = [f for f in self._schema.id_features if f.table_name == request.table]
        if not features:
            known = ", ".join(map(repr, self._schema.resolved_tables()))
            raise DataError(f"There is no table {request.table!r}; the model has {known}.", table=request.table)
        kinds = [f.kind for f in features if not f.computed]
        column = request.ids
        self._check_values("ids", column)
        self._check_rows("ids", _length(column))
        made = id_column("ids", column, kinds[0] if kinds else "auto")
        if made.offsets is not None and (np.diff(made.offsets) != 1).any():
            row = int((np.diff(made.offsets) != 1).argmax())
            raise DataError(f"Column 'ids' has no id, or several, at row {row}; give one each.", column="ids", row=row)
        return IdsOfTable(request.table, made.values)

    def _columns(self, samples: Samples | Records, dense_features: Sequence[DenseFeature] | None) -> dict[str, Any]:
        """Returns columns by name; checks their numbers of values.

        Args:
            samples: samples as columns or records.
            dense_features: features of the columns of `dense`; None if `dense` must have columns by name.
        """
        if isinstance(samples, list):
            return self._of_records(samples)
        columns = dict(samples.features)
        for name, column in columns.items():
            self._check_values(name, column)
        if isinstance(samples.dense, dict):
            dense = samples.dense
            for name, column in dense.items():
                self._check_values(name, column)
        elif dense_features is None:
            raise DataError("'dense' has no names of features; give it as columns by name.", column="dense")
        else:
            self._check_values("dense", samples.dense)
            dense = self._matrix(samples.dense, dense_features)
        for name in dense.keys() & columns.keys():
            raise DataError(f"Column {name!r} is in 'features' and in 'dense'; leave it out of one.", column=name)
        return {**columns, **dense}

    def _matrix(self, values: Any, features: Sequence[DenseFeature]) -> dict[str, Any]:
        """Returns the columns of a matrix `[rows, values of dense features]`."""
        width = sum(feature.values for feature in features)
        expected = f"values of {len(features)} dense features in each row, in the order of the schema"
        expected += f": {width} numbers" if width != len(features) else ""
        stops = np.cumsum([feature.values for feature in features])
        places = [slice(stop - each.values, stop) for each, stop in zip(features, stops, strict=True)]
        if isinstance(values, np.ndarray):
            if values.ndim != 2 or values.shape[1] != width:
                raise DataError(f"'dense' has shape {list(values.shape)}; expected {expected}.", column="dense")
            return {
                each.name: values[:, place.start] if each.size == 1 else values[:, place]
                for each, place in zip(features, places, strict=True)
            }
        self._check_rows("dense", _length(values))
        for row, value in enumerate(values):
            if not isinstance(value, list) or len(value) != width:
                raise DataError(f"'dense' has another form at row {row}; expected {expected}.", column="dense", row=row)
        return {
            each.name: [value[place.start] if each.size == 1 else value[place] for value in values]
            for each, place in zip(features, places, strict=True)
        }

    def _of_records(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        self._check_rows("records", len(records))
        names = dict.fromkeys(name for record in records for name in record)
        for name in names:
            self._check_name(name)
        columns = {name: [record.get(name) for record in records] for name in names}
        for name, column in columns.items():
            self._check_values(name, column)
        return columns

    def _check_values(self, name: str, column: Any) -> None:
        if isinstance(column, list):
            count = sum(len(value) if isinstance(value, list) else 1 for value in column)
        else:
            values = column[0] if isinstance(column, tuple) else column
            count = values.size if isinstance(values, np.ndarray) else value_count(values)
        self._check_count(name, count)

    def _check_count(self, name: str, count: int) -> None:
        if count > self._limits.max_values:
            raise DataError(
                f"Column {name!r} has {count} values; the server takes {self._limits.max_values} (--max-values). Send "
                "fewer samples per request.",
                column=name,
            )

    def _check_rows(self, name: str, rows: int) -> None:
        if rows > self._limits.max_rows:
            raise DataError(
                f"{name!r} has {rows} rows; the server takes {self._limits.max_rows} (--max-rows). Send several "
                "requests.",
                column=name,
            )

    def _check_name(self, name: str) -> None:
        if name not in self._names and name not in self._ignored:
            known = ", ".join(map(repr, sorted(self._names)))
            raise DataError(f"The model has no feature {name!r}; remove it, or correct it: {known}.", column=name)

    def _batch(self, columns: Mapping[str, Any], schema: Schema, part: str) -> Batch:
        for name, column in columns.items():
            self._check_name(name)
            self._check_rows(name, _length(column))
        if not columns:
            raise DataError(f"There are no columns in {part}; give the features of the model.")
        inputs = {name: column for name, column in columns.items() if name not in self._ignored}
        for name, separator in self._separators.items():
            if name in inputs:
                self._check_count(name, split_count(inputs[name], separator))
        batch = Batch.from_columns(schema, apply_rules(self._rules, inputs), require_labels=False)
        self._note(inputs)
        return batch


def _length(column: Any) -> int:
    """Returns the number of rows of a column."""
    return max(0, len(column[1]) - 1) if isinstance(column, tuple) else len(column)
