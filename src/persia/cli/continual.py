"""Day-by-day training, `persia continual`: each day is tested before it is trained on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from persia.checkpoint import StepChoice, list_checkpoints
from persia.checkpoint.storage import Storage
from persia.cli.run_config import RunConfig
from persia.coordinator import TokenReport
from persia.data import Span, days
from persia.errors import CheckpointError, ConfigError
from persia.metrics.result import headlines, titled
from persia.modes import Auto, Mode
from persia.telemetry.terminal import Grid
from persia.trainer import Trainer
from persia.trainer.progress import FitResult
from persia.types.decoding import decode_hook

__all__ = ["STEERING", "DayRecord", "Recipe", "continued", "parse_days", "table"]

FILE = "continual.json"

STEERING = ("keep_best", "eval_every_steps", "eval_every_epochs", "patience")
"""Options of the trainer that do not apply: each day is evaluated before it is trained, and none ends early."""


class DayRecord(msgspec.Struct, frozen=True):
    """Result of training one day.

    Fields from `global_step` on are set once the day has been trained.

    Attributes:
        day: day number in the data.
        mode: training mode.
        first_row: row of the data at which the day starts.
        rows: samples of the day.
        step: global step before the day.
        global_step: global step after the day.
        rows_per_second: training speed since the start of this command, or since the last resume.
        progressive_auc: AUC on the day itself; each batch is scored before it is trained on.
        test_day: next day in the data; None if there is none.
        auc: AUC on `test_day`, before training on it; None if undefined.
        log_loss: log-loss on `test_day`; None if undefined.
        calibration: calibration on `test_day`; None if undefined.
        others: metrics on `test_day` of labels that are not binary, by "LABEL:METRIC".
        dropped_batches: gradients dropped or weighted 0 (asynchronous modes).
        staleness_mean: mean number of steps between the parameters that a gradient was computed with and those that
            it was applied to (asynchronous modes).
        lost_tokens: tokens of dead NN workers (asynchronous modes).
    """

    day: int
    mode: Mode
    first_row: int
    rows: int
    step: int
    global_step: int | None = None
    rows_per_second: float | None = None
    progressive_auc: float | None = None
    test_day: int | None = None
    auc: float | None = None
    log_loss: float | None = None
    calibration: float | None = None
    dropped_batches: int = 0
    staleness_mean: float = 0.0
    lost_tokens: int = 0
    others: dict[str, float | None] = {}


def continued(output: str, inherit: str | None, step: StepChoice = None) -> tuple[str | None, StepChoice]:
    """Returns the directory and the step of the checkpoint that a recipe starts from; no directory for a new model.

    Args:
        output: directory of the recipe, whose latest checkpoint comes first.
        inherit: directory of another run.
        step: which checkpoint of the other run; None for the latest.
    """
    return (output, None) if list_checkpoints(output) else (inherit, step)


def parse_days(text: str) -> range:
    """Parses `a..b`, both included.

    Raises:
        ConfigError: the text has another form.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"Invalid --days {text}; expected the first and the last day, as in 0..6.", field="days")
    return range(int(first), int(last) + 1)


class Recipe:
    """The days of one output directory.

    Args:
        config: configuration of the run.
        output: directory of the checkpoints and of `continual.json`, the records of the days so far.
    """

    def __init__(self, config: RunConfig, output: str) -> None:
        if config.data.options.get("shuffle_rows"):
            raise ConfigError(
                "data.options.shuffle_rows mixes days, but continual training needs them in order; remove the option.",
                field="data.options.shuffle_rows",
            )
        for name in ("tokens_per_batch", "group_rows"):
            if config.data.options.get(name):
                raise ConfigError(
                    f"data.options.{name} makes batches of different sizes, but continual training finds days by the "
                    "number of batches; remove the option.",
                    field=f"data.options.{name}",
                )
        if config.trainer.mode_schedule:
            raise ConfigError(
                "trainer.mode_schedule is not supported in continual training; give modes by day, as continual.modes.",
                field="trainer.mode_schedule",
            )
        if isinstance(config.mode, Auto):
            raise ConfigError(
                "mode.kind = 'auto' is not supported in continual training; give modes by day, as continual.modes.",
                field="mode",
            )
        self._mode: Mode = config.mode
        self._config = config
        self._output = output
        self._storage = Storage(output)
        size = self._storage.size(FILE)
        self.records: list[DayRecord] = []
        """The records of the days so far; the last one may be unfinished."""
        if size is not None:
            text = self._storage.head(FILE, 0, size)
            try:
                self.records = msgspec.json.decode(text, type=list[DayRecord], dec_hook=decode_hook)
            except msgspec.MsgspecError as error:
                raise CheckpointError(f"{output}/{FILE} cannot be read: {error}.", path=output) from error
        elif checkpoints := list_checkpoints(output):
            raise CheckpointError(
                f"{output} holds another run, trained to step {checkpoints[-1].step}. To continue from its checkpoint, "
                f"give --inherit {output} and another directory as --output.",
                path=output,
            )
        self._reported = TokenReport()

    def run(
        self,
        trainer: Trainer,
        requested: range,
        inherit: str | None = None,
        *,
        step: StepChoice = None,
        restart_data: bool = False,
        new_optimizer: bool = False,
    ) -> Iterator[DayRecord]:
        """Trains the requested days that are not trained yet; yields the record of each.

        Args:
            trainer: a new trainer.
            requested: days to train.
            inherit: directory of another run, from whose checkpoint the first day starts. Ignored if the output
                directory has a checkpoint.
            step: which checkpoint of `inherit`; None for the latest.
            restart_data: begin an interrupted day at its first batch.
            new_optimizer: see `Trainer.load`.

        Raises:
            ConfigError: the output has later days, or no requested day has rows.
            CheckpointError: a checkpoint does not match the configuration.
        """
        unfinished = self._resume(trainer, inherit, step, new_optimizer)
        # A checkpoint has the batch size of its run, which another cluster need not have.
        trainer.state.local_batch = self._config.data.batch_size
        requested = self._missing(requested, unfinished)
        if not requested:
            return
        row = self.records[-1].first_row if self.records else 0
        spans = days(self._config.reader(), self._config.data.batch_size, requested[0], requested[-1], row=row)
        for day, test_day in itertools.zip_longest(spans, [*spans][1:]):
            if day in requested:
                resumed = unfinished is not None and unfinished.day == day
                record = unfinished if unfinished is not None and resumed else self._begin(trainer, day, spans[day])
                restart = restart_data and resumed
                yield self._finish(trainer, record, resumed, restart, spans[day], spans.get(test_day), test_day)
        if not any(day in requested for day in spans):
            raise ConfigError(
                f"The data have no rows of the days {requested[0]} to {requested[-1]}; correct --days or data.path.",
                field="days",
            )

    def _missing(self, requested: range, unfinished: DayRecord | None) -> range:
        """Returns the requested days that are not trained yet."""
        done = [record.day for record in self.records if record is not unfinished]
        if done and requested[-1] <= done[-1]:
            if not set(requested) & set(done):
                raise ConfigError(
                    f"{self._output} is trained to day {done[-1]}, and days {requested[0]} to {requested[-1]} come "
                    "before it. Give another directory as --output.",
                    field="days",
                )
            return range(0)
        missing = range(max(requested[0], done[-1] + 1 if done else 0), requested[-1] + 1)
        if unfinished is not None and unfinished.day != missing[0]:
            raise ConfigError(
                f"{self._output} was interrupted in the middle of day {unfinished.day}; start --days with that day.",
                field="days",
            )
        return missing

    # --- one day ------------------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer, day: int, span: Span) -> DayRecord:
        mode = self._config.continual.mode(day) or self._mode
        record = DayRecord(day, mode, span.first, span.rows, trainer.global_step)
        self._write([*self.records, record])
        return record

    def _finish(
        self,
        trainer: Trainer,
        record: DayRecord,
        resumed: bool,
        restart: bool,
        span: Span,
        test: Span | None,
        test_day: int | None,
    ) -> DayRecord:
        if trainer.mode != record.mode:
            trainer.switch(record.mode)
        epochs = self._config.train.epochs
        changes: dict[str, Any] = {}
        if not resumed or trainer.epoch < epochs:  # Else the run was interrupted between training and testing.
            # Another run may have trained the day, or a part of it.
            changes = self._measured(trainer.fit(span, epochs=epochs, again=not resumed, restart_data=restart))
        changes["progressive_auc"] = _known(trainer.metrics.result().auc_per_day.get(record.day, math.nan))
        if test is not None:
            scores = trainer.evaluate(test)
            changes |= {
                "test_day": test_day,
                "auc": _known(scores.auc),
                "log_loss": _known(scores.log_loss),
                "calibration": _known(scores.calibration),
                "others": {name: _known(value) for name, value in headlines(scores.labels).items()},
            }
        record = msgspec.structs.replace(record, global_step=trainer.global_step, **changes)
        self._write([*self.records[:-1], record])
        return record

    def _measured(self, result: FitResult) -> dict[str, Any]:
        before, now = self._reported, result.asynchronous or TokenReport()
        self._reported = now
        return {
            "rows_per_second": result.rows_per_second,
            "dropped_batches": now.dropped_batches - before.dropped_batches,
            "staleness_mean": (now.staleness_sum - before.staleness_sum) / max(1, now.batches - before.batches),
            "lost_tokens": now.lost_tokens - before.lost_tokens,
        }

    # --- from day to day ----------------------------------------------------------------------------------------

    def _resume(self, trainer: Trainer, inherit: str | None, step: StepChoice, new_optimizer: bool) -> DayRecord | None:
        """Loads the checkpoint to start from; returns the record of an unfinished day, if it has one.

        Drops the records of days after the checkpoint.
        """
        directory, step = continued(self._output, inherit, step)
        if directory is not None:
            trainer.load(directory, step=step, new_optimizer=new_optimizer)
        if directory != self._output:
            self.records = []
            return None
        self._write([record for record in self.records if record.step < trainer.global_step])
        last = self.records[-1] if self.records else None
        if last is None or last.global_step == trainer.global_step:
            return None
        self._write([*self.records[:-1], msgspec.structs.replace(last, global_step=None)])
        return self.records[-1]

    def _write(self, records: list[DayRecord]) -> None:
        self.records = records
        self._storage.put(FILE, msgspec.json.format(msgspec.json.encode(records), indent=2) + b"\n")


def table(records: list[DayRecord]) -> Grid:
    """Formats one row per day."""
    others = list(dict.fromkeys(name for record in records for name in record.others))
    binary = not others or any(record.auc is not None for record in records)
    columns = ["day", "mode", "rows", "rows/s", *(["progressive AUC"] if binary else []), "tested on"]
    columns += [*(["AUC", "log-loss", "calibration"] if binary else []), *map(titled, others)]
    grid = Grid(*columns, "dropped", "staleness", "lost tokens", text=["mode"], title="continual training")
    for r in records:
        grid.add_row(
            str(r.day),
            type(r.mode).__name__,
            f"{r.rows:,}",
            _text(r.rows_per_second, ",.0f"),
            *([_text(r.progressive_auc, ".4f")] if binary else []),
            _text(r.test_day, "d"),
            *([_text(r.auc, ".4f"), _text(r.log_loss, ".4f"), _text(r.calibration, ".3f")] if binary else []),
            *(_text(r.others.get(name), ".5g") for name in others),
            f"{r.dropped_batches:,}",
            f"{r.staleness_mean:.2f}",
            f"{r.lost_tokens:,}",
        )
    return grid


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _known(value: float) -> float | None:
    """Replaces NaN by None, as JSON has no NaN."""
    return value if math.isfinite(value) else None
