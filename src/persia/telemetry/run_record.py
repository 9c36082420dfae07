"""The record of a run, `run.json`: its curves and final state, which `persia report` shows."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from persia.errors import DataError
from persia.telemetry.importance import Importance

__all__ = [
    "RUN_FILE",
    "CalibrationBin",
    "CurvePoint",
    "FeatureCost",
    "HeldOutPoint",
    "NonFiniteRows",
    "RunRecord",
    "read_run",
    "record_importance",
    "write_run",
]

RUN_FILE = "run.json"

MOST_POINTS = 2000
"""Maximum number of points in the curves; beyond it every second one is dropped."""


class CurvePoint(msgspec.Struct, frozen=True):
    """Progress at a point in time.

    Attributes:
        step: global step.
        seconds: seconds since the start of the `fit` call.
        rows_per_second: samples trained by NN worker 0 per second, since the previous point.
        loss: loss of the last batch; None if it was NaN. The same holds for `auc` and `hit_rate`.
        auc: AUC of the `fit` call so far: progressive, or if `seen` is set, the AUC of its later passes.
        hit_rate: fraction of ids looked up since the previous point that had a row.
        staleness: mean staleness over all lookups so far.
        stored_rows: rows in the embedding store.
        window_auc: AUC of the rows since the previous point; None if unknown.
        seen: whether the last rows were trained in an earlier pass over the data, so that these are training AUCs.
        others: of the rows since the previous point, a metric of each label that is not binary, by "LABEL:METRIC".
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
    others: dict[str, float | None] = {}


class HeldOutPoint(msgspec.Struct, frozen=True):
    """An evaluation on held-out data during training.

    Attributes:
        step: global step.
        metric: name of the metric that decides which state is the best.
        value: its value; None if it was not finite.
        best: whether it was the best one so far.
    """

    step: int
    metric: str
    value: float | None
    best: bool = False


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
        name: name of the feature.
        table: table of its rows.
        ids: number of ids.
        samples: number of samples in the batch.
        seconds: seconds to pool its rows.
    """

    name: str
    table: str
    ids: int
    samples: int
    seconds: float


class NonFiniteRows(msgspec.Struct, frozen=True):
    """Rows of a table that were left unchanged because their gradient or their updated value is not finite.

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
    """A run, as recorded by NN worker 0.

    Attributes:
        mode: mode at the end.
        nn_workers: number of NN workers.
        began: Unix time at the start of the last `fit` call.
        step: last global step.
        curve: points by step; continues over `fit` calls and resumes.
        calibration: by label, bins of the training logits of the last `fit` call, in ascending order of predictions.
            Covers the first pass over the data, or later passes if there was no first one.
        staleness: number of lookups by staleness.
        tables: counters of each table, such as `rows`, `bytes`, `hits` and `evicted`.
        features: costs of features, most expensive first.
        non_finite: rows that the last `fit` call left unchanged, by table.
        evaluation: by label, metrics on `eval_data`: AUC and log-loss of binary ones.
        complete: whether `fit` returned.
        held_out: evaluations on `eval_data` by step; continues like `curve`.
        calibration_seen: whether the rows of `calibration` were trained in an earlier pass over the data.
        importance: importance of features, of the last call of `Trainer.importance`; None without one.
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
    calibration_seen: bool = False
    held_out: list[HeldOutPoint] = []
    importance: Importance | None = None

    def add_held_out(self, point: HeldOutPoint) -> None:
        """Adds an evaluation. Replaces those of later steps, which an earlier attempt left."""
        while self.held_out and self.held_out[-1].step >= point.step:
            self.held_out.pop()
        self.held_out.append(point)
        if len(self.held_out) > MOST_POINTS:
            del self.held_out[1:-1:2]

    def add(self, point: CurvePoint) -> None:
        """Adds a point to the curves. Replaces points of later steps, which an earlier attempt left."""
        while self.curve and self.curve[-1].step >= point.step:
            self.curve.pop()
        self.curve.append(point)
        if len(self.curve) > MOST_POINTS:
            del self.curve[1:-1:2]


def read_run(directory: str | os.PathLike[str]) -> RunRecord:
    """Reads the record of a run.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = Path(directory) / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise DataError(
            f"There is no {RUN_FILE} in {directory}. Pass the log_dir of a run, or its checkpoint_dir if it has no "
            "log_dir.",
            path=str(path),
        ) from None
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is not the record of a run: {error}. Train again to write a new one.") from error


def write_run(directory: str | os.PathLike[str], record: RunRecord) -> None:
    """Writes the record of a run atomically. Creates the directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{RUN_FILE}.part"
    part.write_bytes(msgspec.json.encode(record))
    part.replace(folder / RUN_FILE)


def record_importance(directory: str | os.PathLike[str], importance: Importance) -> None:
    """Adds the importance of features to the record of a run; no-op in a directory without one.

    Raises:
        OSError: the record cannot be written.
    """
    try:
        record = read_run(directory)
    except DataError:
        return
    record.importance = importance
    write_run(directory, record)
