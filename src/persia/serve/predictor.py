"""`Predictor`: predictions from the rows and the network of a log of changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.input_rules import apply_rules
from persia.checks import without_userinfo
from persia.errors import ClosedError, ConfigError, DeadlineError, PublishError
from persia.metrics import Answers, answers_of
from persia.nn.arguments import check_arguments, options_of
from persia.nn.output import are_log_odds, probabilities_of
from persia.nn.row_cache import CacheCounts
from persia.schema import InputRules, Schema
from persia.serve.network_builder import ModelSource
from persia.serve.options import ServeOptions, ServeState
from persia.serve.polling import LogPoller
from persia.serve.ranking import rank
from persia.serve.row_sources import LocalRows
from persia.serve.table_embeddings import TableEmbeddings
from persia.serve.view_updater import ChangeListener, ViewUpdater
from persia.serve.views import View
from persia.types import Ids, Packed

__all__ = ["Prediction", "Predictor"]

START_POLL_SECONDS = 0.1
"""Interval of polling a log that is not complete yet."""


class Prediction(NamedTuple):
    """Scores of samples, with the versions that they were computed with.

    Attributes:
        scores: logits, float32 `[n, Schema.outputs]`, for binary labels a column each. Rank by them.
        step: global step of the network; the rows contain at least this step.
        epoch: number of the epoch in the log.
        are_log_odds: whether the scores have probabilities; scores of a `TwoTower` have none.
        schema: of the network, which says what its logits stand for; None for binary labels.
    """

    scores: NDArray[np.float32]
    step: int
    epoch: int
    are_log_odds: bool = True
    schema: Schema | None = None

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Probabilities of binary labels, float32 `[n, labels]`. They do not preserve the order: high ones become 1.

        Raises:
            ConfigError: the scores are not log-odds, or there are labels of other kinds.
        """
        if not self.are_log_odds:
            raise ConfigError(
                "The logits of this model are not log-odds, so there are no probabilities; use `scores`, which rank.",
                field="probabilities",
            )
        if self.schema is None:
            return probabilities_of(self.scores)
        if self.answers.name != "probabilities":
            raise ConfigError(
                f"The answers of this model are {', '.join(f'{a.label}: {a.kind}' for a in self.answers.of)}, so they "
                "are not all probabilities; use `by_label`.",
                field="probabilities",
            )
        return self.values

    @property
    def answers(self) -> Answers:
        """Label, kind, unit and classes of the columns of `values`.

        Raises:
            ConfigError: the prediction has no schema.
        """
        if self.schema is None:
            raise ConfigError("The prediction has no schema; use `scores` or `probabilities`.", field="schema")
        return answers_of(self.schema, log_odds=self.are_log_odds)

    @property
    def values(self) -> NDArray[np.float32]:
        """The answers, float32 `[n, columns]`; see `answers`."""
        return self.answers.answers(self.scores)

    @property
    def by_label(self) -> dict[str, NDArray[np.float32]]:
        """The answers of each label: `[n]`, or `[n, classes]`."""
        return self.answers.by_label(self.values)

    @property
    def ranking(self) -> Prediction:
        """The same with scores in place of probabilities, which keep the order."""
        return self._replace(are_log_odds=False)


class Predictor:
    """Serves predictions from a log of changes, which it follows. Thread-safe, except `start` and `close`.

    A request computes with one version of the network, and with rows that contain at least its step. It never waits for
    an update: a separate thread applies updates. The next snapshot replaces missing or damaged entries of the log.
    Until then the predictor serves what it has, and `state().problem` describes the problem.

        with Predictor("s3://bucket/changes") as predictor:
            print(predictor.predict(batch).probabilities)

    Args:
        url: URL of the log of changes, as in `PublishOptions`.
        model: the network, as an `nn.Module` like the one that was trained, or a function that builds it from the
            schema. None builds it from its description in the log, which `persia train` publishes.
        options: device, interval, cache, ...

    Raises:
        CheckpointError: the URL is not valid.
        MissingExtraError: a package for the URL's file system is not installed.
        ConfigError: an argument is not valid.
    """

    def __init__(self, url: str, model: ModelSource = None, options: ServeOptions | None = None) -> None:
        if model is not None and not callable(model):
            raise ConfigError(
                f"Invalid model of type {type(model).__name__}; expected an nn.Module, a function of the schema, or "
                "None.",
                field="model",
            )
        check_arguments(options=(options, options_of(ServeOptions)))
        self._options = options or ServeOptions()
        self._url = without_userinfo(str(url))
        self._updater = ViewUpdater(str(url), model, self._options)
        self._stop = self._updater.stop
        self._poller = LogPoller(self._updater.refresh, self._options.poll_seconds, self._stop, self._url)

    # --- start and close -----------------------------------------------------------------------------------------

    def start(self, timeout: float = 60.0) -> None:
        """Reads the newest snapshots and network, then follows the log in a thread. Blocks until it can predict.

        Args:
            timeout: seconds to wait for a complete epoch in the log; reading it may take longer.

        Raises:
            PublishError: the epoch in the log cannot be served; the message says why.
            DeadlineError: there is no complete epoch, or it cannot be read.
            ConfigError: a row server has another part than its place in `ServeOptions.rows` says; or the device lacks
                the memory for `ServeOptions.device_rows`.
        """
        deadline = time.monotonic() + timeout
        while not self._updater.ready():
            self._updater.refresh()
            if self._updater.ready():
                break
            if self._updater.refusal:
                raise PublishError(self._updater.refusal)
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"There was nothing to serve in {self._url} within {timeout:g} s: "
                    f"{self._updater.problem or 'its newest epoch is not complete'}. Check the URL, and whether "
                    "training publishes there.",
                    url=self._url,
                )
            if self._stop.wait(START_POLL_SECONDS):
                raise ClosedError("The predictor was closed while it started.")
        self._poller.start()

    def stop(self) -> None:
        """Stops following the log, and makes a `start` in another thread raise ClosedError. Does not block.

        Requests are answered until `close`.
        """
        self._stop.set()

    def close(self) -> None:
        """Ends the thread and frees the rows. Requests in progress complete; later ones raise ClosedError.

        Requests that wait for a row server raise ClosedError, too.
        """
        self._poller.end()
        self._updater.release()

    def __enter__(self) -> Predictor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def refresh(self) -> None:
        """Applies new entries of the log. The thread does so every `ServeOptions.poll_seconds`. Blocks."""
        self._updater.refresh()

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The input of the network, from the log.

        Raises:
            ClosedError: the predictor has not started, or is closed.
        """
        return self._view().schema

    @property
    def input_rules(self) -> InputRules:
        """The rules of the training data's reader for missing values and lists, from the log.

        Raises:
            ClosedError: the predictor has not started, or is closed.
        """
        return self._view().network.input_rules

    def batch(self, columns: Mapping[str, Any]) -> Batch:
        """Returns a batch of raw columns, converted by the rules of the training data's reader.

        Fills in missing numbers, splits texts into lists, and treats texts that stand for a missing value as missing,
        as in training: the same values give the same bits.

        Args:
            columns: each feature, as for `Batch.from_columns`. Labels are not needed.

        Raises:
            DataError: a column is missing or does not fit; names the column, the first bad row and the remedy.
            ClosedError: the predictor has not started, or is closed.
        """
        return self._noted(columns, self._view())

    def predict(self, batch: Batch | Mapping[str, Any]) -> Prediction:
        """Returns the predictions for a batch, whose labels are not needed. Blocks for the computation only.

        Ids without rows read as zeros, as in `Trainer.predict`, whose probabilities have the same bits at the same
        step for the same batch on a device of the same kind.

        Args:
            batch: the samples; or raw columns, which are converted as by `batch`.

        Raises:
            DataError: the batch does not fit the schema.
            ClosedError: the predictor has not started, or is closed.
            DeadlineError: a row server did not answer in time; see `ServeOptions.rows`.
            PublishError: a row server does not have the rows that belong to the network.
        """
        view = self._view()
        with view.in_use():
            batch = batch if isinstance(batch, Batch) else self._noted(batch, view)
            batch.validate(view.schema, require_labels=False)
            logits = view.logits(batch).cpu().numpy()
        if self._updater.drift is not None:
            self._updater.drift.note(batch, logits)
        if self._updater.inputs is not None:
            self._updater.inputs.note_batch(batch)
        return Prediction(logits, view.network.step, view.epoch, are_log_odds(view.network.module), view.schema)

    def embeddings(self, table: str, ids: Ids) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Returns whether each id has a row, bool `[n]`, and the rows, float32 `[n, dim]`; zeros where there is none.

        Args:
            table: name of the table.
            ids: uint64 `[n]`.

        Raises:
            ConfigError: there is no such table.
            ClosedError: the predictor has not started, or is closed.
            DeadlineError: a row server did not answer in time.
            PublishError: a row server does not have the rows.
        """
        found, rows, _, _ = self.table_rows(table, ids)
        return found, rows

    def table_rows(self, table: str, ids: Ids) -> TableEmbeddings:
        """Returns the result of `embeddings`, with step and epoch of the rows. Raises as `embeddings` does."""
        view = self._view()
        step = min(view.rows.steps().values())  # Before the lookup: rows may be updated meanwhile.
        self._check_table(view, table)
        ids = np.ascontiguousarray(ids, np.uint64).reshape(-1)
        with view.in_use():
            found, rows = view.rows.lookup(Packed([table], [len(ids)], ids))
        return TableEmbeddings(found[table], rows[table], step, view.epoch)

    def ids(self, table: str) -> Ids:
        """Returns the ids that have a row now, uint64 `[n]`, in any order.

        Args:
            table: name of the table.

        Raises:
            ConfigError: there is no such table, or the rows are at row servers, which do not list them.
            ClosedError: the predictor has not started, or is closed.
        """
        view = self._view()
        self._check_table(view, table)
        if not isinstance(view.rows, LocalRows):
            raise ConfigError(
                "Row servers do not list their ids; start a predictor without ServeOptions.rows for it.", field="rows"
            )
        with view.in_use():
            return view.rows.ids(table)

    def rank(self, user: Batch, items: Batch) -> Prediction:
        """Returns the predictions for one user with each of many items: rank by `scores`. Blocks for the computation.

        The result equals `predict` on the rows of the items with the user's features in each row. A model with
        `user_part` and `score` (see `persia.nn.RankingModel`) computes the user's part once.

        Args:
            user: one row. It has the ID-type features that `items` lacks.
            items: n rows, with the ID-type features of the items. Dense features are the user's where they are NaN.

        Raises:
            DataError: the batches do not fit the schema, or each other.
            ClosedError: the predictor has not started, or is closed.
            DeadlineError: a row server did not answer in time.
            PublishError: a row server does not have the rows.
        """
        view = self._view()
        with view.in_use():
            logits = rank(view, user, items).cpu().numpy()
        if self._updater.drift is not None:
            self._updater.drift.note_ranking(user, items, logits)
        return Prediction(logits, view.network.step, view.epoch, are_log_odds(view.network.module), view.schema)

    def state(self) -> ServeState:
        """Returns what is currently served, and how old it is.

        Raises:
            ClosedError: the predictor has not started, or is closed.
        """
        state = self._updater.state()
        if state is None:
            raise self._closed()
        return state._replace(problem=state.problem or self._poller.failure)

    @property
    def cached(self) -> CacheCounts:
        """Outcome of requests that have used copies of rows on the device, in distinct rows; see `device_rows`."""
        copies = self._updater.copies
        return CacheCounts() if copies is None else copies.counts

    def current(self) -> View:
        """Returns the current rows and network, for parts of a server that compute with them.

        Raises:
            ClosedError: the predictor has not started, or is closed.
        """
        return self._view()

    def listen(self, listener: ChangeListener) -> None:
        """Notifies a listener of changed rows from now on, once requests see the changes. Call it before `start`.

        Raises:
            ConfigError: the rows are at row servers, which do not report changes.
        """
        if self._options.rows:
            raise ConfigError(
                "Row servers do not report which rows have changed, so an index of items cannot follow them; start a "
                "predictor without ServeOptions.rows for it.",
                field="rows",
            )
        self._updater.listeners.append(listener)

    def unlisten(self, listener: ChangeListener) -> None:
        """Removes a listener. No-op if it is not registered."""
        with contextlib.suppress(ValueError):
            self._updater.listeners.remove(listener)

    def _view(self) -> View:
        view = self._updater.view
        if view is None:
            raise self._closed()
        return view

    def _check_table(self, view: View, table: str) -> None:
        tables = view.schema.resolved_tables()
        if table not in tables:
            raise ConfigError(f"There is no table {table!r}; the schema has {', '.join(tables)}.", field="table")

    def _closed(self) -> ClosedError:
        state = "is closed" if self._stop.is_set() else "has not started; call start(), or use it in a with statement"
        return ClosedError(f"The predictor of {self._url} {state}.")

    def note_columns(self, columns: Mapping[str, Any]) -> None:
        """Records raw columns, which have been converted, for `ServeState.inputs`. Does not block."""
        if self._updater.inputs is not None:
            self._updater.inputs.note_columns(columns)

    def _noted(self, columns: Mapping[str, Any], view: View) -> Batch:
        batch = _batch_of(columns, view)
        self.note_columns(columns)
        return batch


def _batch_of(columns: Mapping[str, Any], view: View) -> Batch:
    return Batch.from_columns(view.schema, apply_rules(view.network.input_rules, columns), require_labels=False)
