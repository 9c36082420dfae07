"""`Scoring`: the methods of a trainer that score data without training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.checks import MAX_STEPS, check_integer, plain
from persia.metrics import Answers, MetricsResult, RetrievalFigures, answers_of
from persia.nn.output import are_log_odds
from persia.schema import Schema
from persia.services import Cluster, ProcessCluster
from persia.telemetry.importance import Importance
from persia.telemetry.logs import get_logger
from persia.telemetry.run_record import record_importance
from persia.trainer.components import Components
from persia.trainer.importance import ImportanceOptions, importance
from persia.trainer.retrieval_evaluation import RetrievalOptions

__all__ = ["Scoring"]

LOG = get_logger("persia.trainer")


class Scoring:
    """Scores data with the state of a run, read-only: a base class of `Trainer`."""

    schema: Schema
    model: torch.nn.Module
    cluster: Cluster | None
    _components: Components

    def evaluate(
        self,
        data: Iterable[Batch],
        *,
        group_by: str | None = None,
        at: Sequence[int] = (10,),
        metrics_by: str | None = None,
        max_values: int = 20,
    ) -> MetricsResult:
        """Returns metrics on data. Read-only: the store and the model stay as they are.

        Several NN workers score the batches in turn, and all return the metrics of all.

        Args:
            data: batches with labels.
            group_by: an ID-type feature with one id for each sample, such as the user: `grouped` of the result then has
                GAUC, recall@k and NDCG@k. They need 16 bytes per sample and label. None for `Schema.group`, if it is
                set.
            at: values of k.
            metrics_by: a column, such as the country: `by` of the result then has all metrics for each of its values.
                Of a reader of files it is any column of the file; of other batches an ID-type feature with one id for
                each sample, or a label. It keeps logits and labels of all samples in memory.
            max_values: number of values with metrics of their own, the most frequent ones; the others are "(other)".

        Raises:
            ConfigError: there is no such feature or column, or `at` or `max_values` is invalid.
            DataError: a batch does not fit the schema, has no labels, or has no groups.
            DivergedError: logits are not finite.
        """
        check_integer("max_values", max_values, 1)
        return self._components.evaluator.evaluate(data, group_by, at, metrics_by, max_values)

    def evaluate_retrieval(
        self,
        data: Iterable[Batch],
        *,
        items: Batch | Iterable[Batch] | None = None,
        key: str | None = None,
        at: Sequence[int] = (10,),
        leave_out: Sequence[str] = (),
    ) -> RetrievalFigures:
        """Returns how high each sample's item ranks among all items: HR@k, NDCG@k, MRR and coverage. Read-only; blocks.

        The model has towers, as `TwoTower` and `NextItem` have (see `persia.nn.item_catalogue.Towers`): the score of an
        item is the dot product of the user's and the item's vector, as in retrieval. Ranks are exact: every item is
        scored for every sample. Equal scores share their ranks; see `RetrievalFigures`.

        Cost: `2 * samples * items * dim` operations in float64, on the network's device, and one lookup of all items
        for each 65,536 samples. Memory: for each of these samples 16 bytes per dimension, 8 per k and 16 per left-out
        id; 8 bytes for each item, or its features if `items` are given; at most 64 MiB of scores. Several NN workers
        score the batches in turn, and all return the metrics of all.

        Args:
            data: batches; samples whose first label is above 0 count, weighted by it and by `Schema.sample_weight`. All
                samples of batches without labels count. They need only features of the user, the item's id and
                `leave_out`; dense features may be missing from the end of the schema's.
            items: the items that compete: rows with the item's features, as one batch or several, or a reader. Those
                without a row of their own do not, as in `persia.serve.Retriever`. None for all rows of the item's
                table, if the id is all that the model reads of an item.
            key: ID-type feature that identifies an item; by default the item's only one.
            at: values of k.
            leave_out: ID-type features of the item's table, such as the history: their ids do not compete for their
                sample, unless one of them is the item of the sample. As they are read: ids beyond `max_length`, too.

        Raises:
            ConfigError: the model has no towers, needs `items`, or there is no such feature.
            DataError: a batch does not fit the schema, no sample counts, or no item has a row.
            DivergedError: a vector is not finite.
        """
        with self._rows_kept():
            return self._components.retrieval.evaluate(data, items, RetrievalOptions(key, at, leave_out))

    def importance(
        self,
        data: Iterable[Batch],
        *,
        metric: str | None = None,
        group_by: str | None = None,
        rows: int = 50_000,
        repeats: int = 5,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Importance:
        """Returns the metric lost without each feature: permuted among the rows, and carrying nothing.

        Read-only; blocks. Sources: Breiman, Random Forests, 2001, section 10; Fisher, Rudin and Dominici, JMLR 2019. A
        feature that another one can stand in for loses little. Features that read a column together, or are aligned,
        change together, and crossed and mapped features follow their sources; a crossed feature is also changed alone.
        See docs/guide/evaluate-and-tune.md. It takes `1 + features * (repeats + 1)` passes over the rows.

        If the run has a record (`run.json` in `log_dir`, or else `checkpoint_dir`), the result is added to it, for the
        report. Several NN workers share the passes, and all return the same result.

        Args:
            data: batches with labels, best of rows that were not trained.
            metric: name, see `TrainerOptions.keep_best`; None for its default: "auc", "rmse" or "log_loss" by the kind
                of the first label.
            group_by: ID-type feature whose ids group the rows, for "gauc", "recall@K" and "ndcg@K"; None for
                `Schema.group`.
            rows: number of rows, the first ones of the data. They are kept in memory.
            repeats: permutations of each feature.
            seed: of permutations and intervals.
            progress: whether to show a live line; None for `TrainerOptions.progress`.

        Raises:
            ConfigError: an argument is invalid, or no label has the metric.
            DataError: see `evaluate`.
            DivergedError: logits are not finite; the message names the feature that was changed.
        """
        for name, value, least in (("rows", rows, 2), ("repeats", repeats, 1), ("seed", seed, 0)):
            check_integer(name, plain(value), least, MAX_STEPS)
        parts, options = self._components, self._components.declared.options
        shown = options.progress if progress is None else progress
        asked = ImportanceOptions(metric, group_by, rows, repeats, seed, shown)
        result = importance(parts.evaluator, parts.embeddings, parts.network.replicas, data, asked)
        directory = options.log_dir or options.checkpoint_dir
        if directory and "://" not in directory and parts.embeddings.connection.rank == 0:
            try:
                record_importance(directory, result)
            except OSError as error:
                LOG.warning("The importance of features could not be added to the record in %s: %s", directory, error)
        return result

    def predict(self, data: Iterable[Batch]) -> Iterator[NDArray[np.float32]]:
        """Yields answers float32 `[batch, columns]`, batch by batch; read-only. The data need no labels.

        `answers` names the columns, and says what they are: of binary labels a probability, of a regression or count
        the value, of labels with classes a probability for each. Of a model whose logits are no log-odds, such as
        `TwoTower`, the answers for binary labels are the logits, which keep the order.
        They come in the order of the data: a reader with `shuffle_rows` gives its rows shuffled.
        """
        answers = self.answers
        for _, logits in self._components.evaluator.scored(data):
            yield answers.answers(logits)

    @property
    def answers(self) -> Answers:
        """The columns of the answers of `predict`: label, kind, unit and classes of each."""
        return answers_of(self.schema, log_odds=are_log_odds(self.model))

    def _rows_kept(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no rows move to other PSs, if other processes train."""
        return self.cluster.keeping_rows() if isinstance(self.cluster, ProcessCluster) else contextlib.nullcontext()
