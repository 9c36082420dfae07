"""The part of a predictor that the HTTP server needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from persia.batching.batch import Batch
    from persia.schema import Schema
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["PredictionService", "Scored", "ServedState"]


class Scored(Protocol):
    """Predictions of a batch, all made by one version of the network."""

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """float32 `[batch, labels]`."""

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
