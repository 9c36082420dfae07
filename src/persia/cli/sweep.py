"""`persia train --sweep`: trials with other values of a configuration, one after the other."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import optuna

from persia.cli import ui
from persia.cli.fitted import fitted_run
from persia.cli.run_config import Range, RunConfig, SweepConfig
from persia.config import convert, dump
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import watched_metric
from persia.telemetry.terminal import Grid

if TYPE_CHECKING:
    from persia.schema import Schema
    from persia.trainer import Trainer

__all__ = ["Sweep", "TrialRecord", "with_values"]

STARTUP_TRIALS = 3
"""Number of first trials that are never pruned, as there is little to compare them with."""


class TrialRecord(NamedTuple):
    """Result of a trial.

    Attributes:
        number: its number, from 0.
        values: value by path in the configuration.
        state: "done", "pruned", or "diverged".
        metric: metric of the sweep; the progressive one so far if the trial was pruned, NaN if it diverged.
        rows: samples trained.
    """

    number: int
    values: dict[str, Any]
    state: str
    metric: float
    rows: int


class Sweep:
    """The trials of a sweep.

    Args:
        tree: the configuration as plain data.
        output: directory for a folder of each trial; must not exist, or be empty.
        close: context that closes the cluster of a trainer.

    Raises:
        ConfigError: there is no section `sweep`, a value does not fit the configuration or makes no network, or
            `output` is not empty.
    """

    def __init__(
        self, tree: dict[str, Any], output: str, close: Callable[[Trainer], AbstractContextManager[None]]
    ) -> None:
        run = convert(tree, RunConfig, "the configuration")
        config = run.sweep
        if config is None or not config.values:
            raise ConfigError("Missing [sweep.values]; --sweep needs at least one path with values.", field="sweep")
        self._config: SweepConfig = config
        self._tree = {key: value for key, value in tree.items() if key != "sweep"}
        for kind in ("embedding_optimizer", "mode"):  # Their fields need the kind, which may be the default.
            self._tree.setdefault(kind, {k: v for k, v in dump(getattr(run, kind)).items() if v is not None})
        self._output = Path(output)
        if self._output.exists() and any(self._output.iterdir()):
            raise ConfigError(f"{output} is not empty; give another directory as --output.", field="output")
        self._close = close
        self._watched = watched_metric(run.reader().schema, config.metric, "sweep.metric")
        watches = run.trainer.keep_best == self._watched.name and run.eval_data is not None
        if self._watched.retrieval and (not watches or config.prune_every_steps is not None):
            raise ConfigError(
                f"sweep.metric = {self._watched.name!r} is measured on eval_data only, where trainer.keep_best watches "
                "it; set both, and leave sweep.prune_every_steps out.",
                field="sweep.metric",
            )
        self.records: list[TrialRecord] = []
        self._fits: list[tuple[object, Schema]] = []
        """Rows to which rules of features were fitted, and the fitted schema."""
        for path, values in config.values.items():
            for value in [values.low, values.high] if isinstance(values, Range) else values:
                convert(with_values(self._tree, {path: value}), RunConfig, f"sweep.values.{path!r} = {value!r}")
        self._check_networks(config.values)

    @property
    def best(self) -> TrialRecord | None:
        """The best trial that is done; None without any."""
        done = [record for record in self.records if record.state == "done" and not math.isnan(record.metric)]
        return max(done, key=lambda record: self._watched.score(record.metric), default=None)

    def run(self, report: Callable[[TrialRecord], object]) -> None:
        """Runs all trials; keeps the checkpoint of the best one, and its configuration as `best.toml`.

        Rules of features are fitted before the first trial. A trial with other rules or data fits these.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # Each trial is reported here.
        config = self._config
        grid = {path: values for path, values in config.values.items() if not isinstance(values, Range)}
        complete = len(grid) == len(config.values) and config.trials is None
        sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=config.seed)
        if complete:
            choices = {path: [json.dumps(value) for value in values] for path, values in grid.items()}
            sampler = optuna.samplers.GridSampler(choices, seed=config.seed)
        trials = math.prod(map(len, grid.values())) if complete else config.trials or 20
        study = optuna.create_study(
            direction="maximize",  # Of scores, which are higher for better values.
            sampler=sampler,
            pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS) if config.prune_every_steps else None,
        )

        self._fitted(convert(with_values(self._tree, self._first_values()), RunConfig, "the first values of the sweep"))

        def objective(trial: optuna.Trial) -> float:
            record = self._run_trial(trial)
            self.records.append(record)
            self._keep_best()
            report(record)
            if record.state == "pruned":
                raise optuna.TrialPruned
            return self._watched.score(record.metric)  # NaN marks the trial as failed.

        study.optimize(objective, n_trials=trials)

    def table(self) -> Grid:
        """Formats the trials, the best first."""
        table = Grid("trial", *self._config.values, self._watched.name, "rows", "", text=[""], title="sweep")
        order = {"done": 0, "pruned": 1, "diverged": 2}
        for record in sorted(self.records, key=lambda r: (order[r.state], -self._watched.score(r.metric))):
            shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in record.values.values()]
            state = "best" if record is self.best else record.state
            table.add_row(str(record.number), *shown, f"{record.metric:.4f}", f"{record.rows:,}", state)
        return table

    def folder(self, number: int) -> Path:
        """Returns the directory of a trial."""
        return self._output / f"trial-{number:03}"

    def _check_networks(self, values: dict[str, Range | list[Any]]) -> None:
        """Builds a network with each value of a list, and the first values of the other lists.

        Other checks do not detect whether a network can be built.

        Raises:
            ConfigError: a network cannot be built, or its data cannot be opened.
        """
        first = self._first_values()
        for path, space in values.items():
            for value in [space.low] if isinstance(space, Range) else space:
                where = f"sweep.values.{path!r} = {value!r}"
                run = convert(with_values(self._tree, first | {path: value}), RunConfig, where)
                try:
                    run.model.build(run.reader().schema)
                except (ConfigError, DataError) as error:
                    raise ConfigError(f"{where}: {error}", field="sweep.values") from error

    def _first_values(self) -> dict[str, Any]:
        values = self._config.values.items()
        return {path: space.low if isinstance(space, Range) else space[0] for path, space in values}

    def _fitted(self, run: RunConfig) -> RunConfig:
        """Returns a configuration with fitted rules of features; takes those that are fitted to the same rows."""
        rows = (msgspec.structs.replace(run.data.in_order(), batch_size=1), run.train.fit_rows)
        for fitted_rows, schema in self._fits:
            if fitted_rows == rows:
                run = run.fitted_as(schema)
        fitted = fitted_run(run)
        if fitted is not run and fitted.schema is not None:
            self._fits.append((rows, fitted.schema))
        return fitted

    def _run_trial(self, trial: optuna.Trial) -> TrialRecord:
        number = trial.number
        values = {path: _suggest(trial, path, space) for path, space in self._config.values.items()}
        tree = with_values(self._tree, values)
        run = convert(tree, RunConfig, f"trial {number}")
        folder = self.folder(number)
        folder.mkdir(parents=True)
        _write_toml(folder / "config.toml", tree)
        # Checkpoints of a trial that may be pruned are not worth their time, except its best one.
        saved = str(folder / "checkpoint") if run.trainer.keeps_best and run.eval_data is not None else None
        own = with_values(tree, {"trainer.checkpoint_dir": saved})
        steers = ("keep_best", "patience", "eval_every_steps", "eval_every_epochs") if run.eval_data is None else ()
        for name in ("checkpoint_every_steps", *steers):
            own["trainer"].pop(name, None)
        own["trainer"]["checkpoint_every_seconds"] = None  # Without it, a cluster of processes writes some.
        run = self._fitted(run)
        reader = run.reader()
        trainer = convert(own, RunConfig, f"trial {number}").build_trainer(reader.schema)
        with self._close(trainer):
            state, metric, rows = self._train(run, trainer, reader, trial)
            if state == "done" and saved is None:
                trainer.save(folder / "checkpoint")
        record = TrialRecord(number, values, state, metric, rows)
        ui.write_json(str(folder / "result.json"), record._asdict())
        return record

    def _train(self, run: RunConfig, trainer: Trainer, reader: Any, trial: optuna.Trial) -> tuple[str, float, int]:
        """Trains in parts, after each of which the trial may be pruned; returns its state, its metric and its rows."""
        watched, every = self._watched, self._config.prune_every_steps
        remaining = run.train.max_steps
        progressive, rows = math.nan, 0
        steered = trainer.options.evaluates or trainer.options.keeps_best
        held_out = None
        if run.eval_data is not None:
            held_out = run.eval_data.in_order().reader(reader.schema, "eval_data")
        while True:
            steps = min((n for n in (every, remaining) if n is not None), default=None)
            try:
                result = trainer.fit(reader, held_out if steered else None, epochs=run.train.epochs, max_steps=steps)
            except DivergedError:
                return "diverged", math.nan, rows + trainer.trained_here.rows
            progressive = watched.figure(result.history)  # Over all parts.
            rows += result.rows
            remaining = None if remaining is None else remaining - result.steps
            if trainer.finished or remaining == 0 or result.stopped_early:
                break
            trial.report(watched.score(progressive), trainer.global_step)
            if trial.should_prune():
                return "pruned", progressive, rows
        if held_out is None:
            return "done", progressive, rows
        if trainer.options.keeps_best and result.watched == watched.name and result.best is not None:
            return "done", result.best, rows  # Its checkpoint is kept.
        groups = reader.schema.group if watched.grouped else None
        return "done", watched.figure(trainer.evaluate(held_out, group_by=groups, at=(watched.at,))), rows

    def _keep_best(self) -> None:
        best = self.best
        if best is None:
            return
        for record in self.records:
            if record is not best:
                shutil.rmtree(self.folder(record.number) / "checkpoint", ignore_errors=True)
        shutil.copyfile(self.folder(best.number) / "config.toml", self._output / "best.toml")


def with_values(tree: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration with other values; a value of None removes the field.

    A path is as in `--set`. In a list of named records, a part of the path is the name of a record, or `*` for all
    records: `schema.id_features.item.dim`.

    Raises:
        ConfigError: a path leads through a value, or names no record.
    """
    tree = copy.deepcopy(tree)
    for path, value in values.items():
        *parts, last = path.split(".")
        nodes: list[Any] = [tree]
        for part in parts:
            nodes = list(itertools.chain.from_iterable(_inside(node, part, path) for node in nodes))
        for node in nodes:
            if not isinstance(node, dict):
                raise ConfigError(f"Invalid sweep.values.{path!r}: it leads through a value.", field="sweep.values")
            if value is None:
                node.pop(last, None)
            else:
                node[last] = value
    return tree


def _inside(node: Any, part: str, path: str) -> Iterable[Any]:
    if isinstance(node, list):
        children = [item for item in node if isinstance(item, dict) and part in ("*", item.get("name"))]
    else:
        children = [node.setdefault(part, {})] if isinstance(node, dict) else []
    if not children:
        raise ConfigError(f"Invalid sweep.values.{path!r}: there is no {part!r}.", field="sweep.values")
    return children


def _suggest(trial: optuna.Trial, path: str, space: Range | list[Any]) -> Any:
    if not isinstance(space, Range):
        return json.loads(trial.suggest_categorical(path, [json.dumps(value) for value in space]))
    if isinstance(space.low, int) and isinstance(space.high, int):
        return trial.suggest_int(path, space.low, space.high, log=space.log)
    return trial.suggest_float(path, float(space.low), float(space.high), log=space.log)


def _write_toml(path: Path, tree: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        ui.print_toml(tree)
