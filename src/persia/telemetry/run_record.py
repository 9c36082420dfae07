"""The record of a run, `run.json`: its curves and final state, which `persia report` shows."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from persia.errors import DataError

__all__ = [
    "RUN_FILE",
    "CalibrationBin",
    "CurvePoint",
    "FeatureCost",
    "NonFiniteRows",
    "RunRecord",
    "read_run",
    "write_run",
]

RUN_FILE = "run.json"

MOST_POINTS = 2000
"""Points of the curves that are kept; with more, every second one is dropped."""


class CurvePoint(msgspec.Struct, frozen=True):
    """Progress at one moment.

    Attributes:
        step: global step.
        seconds: since the call of `fit` began.
        rows_per_second: samples trained by NN worker 0 per second, since the point before.
        loss: of the last batch; None if it was not a number, as are the next two.
        auc: AUC of the call of `fit` so far: progressive, or where `seen` is set, that of its later passes.
        hit_rate: fraction of ids looked up since the point before that had a row.
        staleness: mean over all lookups so far.
        stored_rows: rows in the embedding store.
        window_auc: AUC of the rows since the point before; None if unknown.
        seen: whether the last rows were trained in an earlier pass over the data, so that these are training AUCs.
    """

    step: int
    seconds: float
    rows_per_second: float
    loss: float | None
    auc: float | None
    hit_rate: float | None
    staleness: float
    stored_rows: int
    window_auc: float | None = None
    seen: bool = False


class CalibrationBin(msgspec.Struct, frozen=True):
    """Samples with similar predictions.

    Attributes:
        predicted: mean predicted probability.
        observed: mean label.
        rows: number of samples.
    """

    predicted: float
    observed: float
    rows: float


class FeatureCost(msgspec.Struct, frozen=True):
    """Work that a feature caused in the last batch.

    Attributes:
        name: of the feature.
        table: of its rows.
        ids: number of ids.
        samples: rows of the batch.
        seconds: to pool its rows.
    """

    name: str
    table: str
    ids: int
    samples: int
    seconds: float


class NonFiniteRows(msgspec.Struct, frozen=True):
    """Rows of a table that stay as they are, because their gradient, or a value after it, is not finite.

    Attributes:
        table: name of the table.
        features: the features with such gradients; all of the table if that is not known.
        rows: number of rows of gradients.
        step: first global step.
    """

    table: str
    features: list[str]
    rows: int
    step: int


class RunRecord(msgspec.Struct):
    """A run, as NN worker 0 has recorded it.

    Attributes:
        mode: at the end.
        nn_workers: number of NN workers.
        began: Unix time at which the last call of `fit` began.
        step: last global step.
        curve: by step; continues over calls of `fit` and resumes.
        calibration: by label, bins in ascending order of predictions, of the training logits of the last call of `fit`:
            in its first pass over the data, or else in later ones.
        staleness: number of lookups by staleness.
        tables: counters of each table, such as `rows`, `bytes`, `hits` and `evicted`.
        features: most expensive first.
        non_finite: rows that the last call of `fit` has left as they are, by table.
        evaluation: AUC and log-loss by label on `eval_data`.
        complete: whether `fit` returned.
    """

    mode: str
    nn_workers: int
    began: float
    step: int
    curve: list[CurvePoint] = []
    calibration: dict[str, list[CalibrationBin]] = {}
    staleness: dict[int, int] = {}
    tables: dict[str, dict[str, int]] = {}
    features: list[FeatureCost] = []
    non_finite: list[NonFiniteRows] = []
    evaluation: dict[str, dict[str, float | None]] = {}
    complete: bool = False

    def add(self, point: CurvePoint) -> None:
        """Adds a point to the curves, in place of those of later steps, which an earlier attempt has left."""
        while self.curve and self.curve[-1].step >= point.step:
            self.curve.pop()
        self.curve.append(point)
        if len(self.curve) > MOST_POINTS:
            del self.curve[1:-1:2]


def read_run(directory: str | os.PathLike[str]) -> RunRecord:
    """Reads the record of a run.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = Path(directory) / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise DataError(
            f"There is no {RUN_FILE} in {directory}. Give the log_dir of a run, or its checkpoint_dir where it has no "
            "log_dir.",
            path=str(path),
        ) from None
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is not the record of a run: {error}. Train again to write another.") from error


def write_run(directory: str | os.PathLike[str], record: RunRecord) -> None:
    """Writes the record of a run, at once or not at all. Creates the directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{RUN_FILE}.part"
    part.write_bytes(msgspec.json.encode(record))
    part.replace(folder / RUN_FILE)
