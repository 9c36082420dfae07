"""The part of a predictor that the HTTP server needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from persia.batching.batch import Batch
    from persia.schema import InputRules, Schema
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["FeatureNames", "Found", "IndexState", "PredictionService", "RetrievalService", "Scored", "ServedState"]


class Scored(Protocol):
    """Predictions of a batch, all made by one version of the network."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits, float32 `[batch, labels]`."""

    @property
    def are_log_odds(self) -> bool:
        """Whether the scores have probabilities."""

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """float32 `[batch, labels]`, of log-odds."""

    @property
    def step(self) -> int:
        """Global step of the network."""

    @property
    def epoch(self) -> int:
        """Epoch of the log of changes."""


class ServedState(Protocol):
    """State of a predictor; `persia.serve.ServeState` is one, and describes the attributes."""

    @property
    def epoch(self) -> int:
        """See `ServeState`."""

    @property
    def network_step(self) -> int:
        """See `ServeState`."""

    @property
    def row_steps(self) -> Mapping[int, int]:
        """See `ServeState`."""

    @property
    def rows_age_seconds(self) -> float:
        """See `ServeState`."""

    @property
    def network_age_seconds(self) -> float:
        """See `ServeState`."""

    @property
    def rows(self) -> int:
        """See `ServeState`."""

    @property
    def problem(self) -> str:
        """See `ServeState`."""

    @property
    def drift(self) -> Mapping[str, float]:
        """PSI of requests against training, by feature."""


class PredictionService(Protocol):
    """A predictor. All methods but `start` and `close` may be called from several threads at once.

    `persia.serve.Predictor` is one.
    """

    @property
    def schema(self) -> Schema:
        """The input of the network, once started. Another object, of the same features, in a new epoch."""

    @property
    def input_rules(self) -> InputRules:
        """Rules for missing values and lists of the columns that batches are made from, once started."""

    def start(self, timeout: float) -> Any:
        """Begins to follow the log, and blocks until there is something to serve.

        Raises:
            PersiaError: there was nothing within `timeout` seconds; it is called again, unless this is a ConfigError.
        """

    def stop(self) -> None:
        """Stops to follow, and makes a `start` in another thread give up. Returns at once; `close` follows."""

    def close(self) -> None:
        """Stops to follow, and frees the rows."""

    def predict(self, batch: Batch) -> Scored:
        """Returns the predictions of a batch."""

    def rank(self, user: Batch, items: Batch) -> Scored:
        """Returns the predictions of one user, a batch of one row, for each of some items.

        Each has the ID-type features that the other one lacks, and all dense features, NaN where the other has them.
        """

    def table_rows(self, table: str, ids: NDArray[np.uint64]) -> TableEmbeddings:
        """Returns the rows of some ids, and the step and epoch that they are of."""

    def state(self) -> ServedState:
        """Returns what is served at present."""


class Found(Protocol):
    """The nearest items of users."""

    @property
    def ids(self) -> NDArray[np.uint64]:
        """uint64 `[users, k]`, nearest first."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """float32 `[users, k]`."""

    @property
    def step(self) -> int:
        """Global step of the network that made both vectors."""


class FeatureNames(Protocol):
    """Names of features."""

    @property
    def ids(self) -> Sequence[str]:
        """Of ID-type features."""

    @property
    def dense(self) -> Sequence[str]:
        """Of dense features."""


class IndexState(Protocol):
    """State of an index of items; `persia.serve.RetrieverState` is one, and describes the attributes."""

    @property
    def step(self) -> int:
        """See `RetrieverState`."""

    @property
    def items(self) -> int:
        """See `RetrieverState`."""

    @property
    def waiting(self) -> int:
        """See `RetrieverState`."""

    @property
    def problem(self) -> str:
        """See `RetrieverState`."""


class RetrievalService(Protocol):
    """Finds the nearest items of users. All methods but `start` and `close` may be called from several threads at once.

    `persia.serve.Retriever` is one.
    """

    @property
    def user_features(self) -> FeatureNames:
        """The features that the vector of a user is computed from, once the predictor has started."""

    def start(self) -> None:
        """Builds the index, once the predictor has started. Blocks.

        Raises:
            Exception: it cannot be built.
        """

    def stop(self) -> None:
        """Makes a `start` in another thread give up. Returns at once; `close` follows."""

    def close(self) -> None:
        """Stops to follow the predictor."""

    def state(self) -> IndexState | None:
        """Returns the state of the index; None before it has been built."""

    def search(self, users: Batch, k: int) -> Found:
        """Returns the `k` nearest items of users.

        Raises:
            ClosedError: the index has not been built.
            DataError: the batch does not fit the model.
        """
