"""The part of a predictor that the HTTP server needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from persia.batching.batch import Batch
    from persia.schema import Schema

__all__ = ["PredictionService", "Scored", "ServedState"]


class Scored(Protocol):
    """Predictions of a batch, all made by one version of the network.

    Attributes:
        probabilities: float32 `[batch, labels]`.
        step: global step of the network.
        epoch: epoch of the log of changes.
    """

    @property
    def probabilities(self) -> NDArray[np.float32]: ...
    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...


class ServedState(Protocol):
    """State of a predictor; see `persia.serve.ServeState`.

    Attributes:
        epoch: of what is served; -1 before the first one is complete.
        network_step: global step of the network.
        row_steps: global steps that the rows of each PS contain.
        age_seconds: seconds since the oldest part of what is served was as it is.
        rows: rows by table.
        problem: why the log cannot be followed at present; empty if it can.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def network_step(self) -> int: ...
    @property
    def row_steps(self) -> Any: ...
    @property
    def age_seconds(self) -> float: ...
    @property
    def rows(self) -> Any: ...
    @property
    def problem(self) -> str: ...


class PredictionService(Protocol):
    """A predictor. All methods but `start` and `close` may be called from several threads at once."""

    @property
    def schema(self) -> Schema: ...

    def start(self) -> Any:
        """Begins to follow the log, and blocks until there is something to serve."""

    def close(self) -> None:
        """Stops to follow."""

    def predict(self, batch: Batch) -> Scored:
        """Returns the predictions of a batch."""

    def rank(self, user: Batch, items: Batch) -> Scored:
        """Returns the predictions of one user, a batch of one row, for each of some items."""

    def embeddings(self, table: str, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Returns whether each id has a row, `[n]`, and the rows, `[n, dim]`."""

    def state(self) -> ServedState:
        """Returns what is served at present."""
