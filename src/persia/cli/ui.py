"""Output of the commands: tables on the terminal, JSON and TOML."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from persia.errors import ConfigError
from persia.metrics import METRICS, Figures, LabelFigures, MetricsResult, RetrievalFigures
from persia.metrics.result import known
from persia.printable import say
from persia.schema import FittedValue
from persia.telemetry.terminal import DataConsole, Grid
from persia.trainer import FitResult

__all__ = [
    "CONSOLE",
    "check_writable",
    "fit_record",
    "metrics_record",
    "near_path",
    "print_fit",
    "print_fitted",
    "print_metrics",
    "print_retrieval",
    "print_toml",
    "write_json",
]

CONSOLE = DataConsole()

_OF_LOG_ODDS = ("log_loss", "normalized_entropy", "calibration")
"""Metrics of binary labels that mean nothing if logits are not log-odds."""


def print_fit(result: FitResult, checkpoint: str, *, log_odds: bool = True) -> None:
    """Prints the summary of a training run and its directory; only the evaluation if nothing was left to train.

    Args:
        result: of `Trainer.fit`.
        checkpoint: the directory.
        log_odds: whether logits are log-odds, without which neither log loss nor calibration mean anything.
    """
    if result.nothing_left:
        if result.evaluation is not None:
            print_metrics(f"evaluation at step {result.global_step:,}", result.evaluation, log_odds=log_odds)
        return
    table = Grid("", "result", text=[""], title="training")
    table.add_row("rows trained", f"{result.rows:,}")
    table.add_row("rows/s", f"{result.rows_per_second:,.0f}")
    table.add_row("global step", f"{result.global_step:,}")
    for name, value in _scores(result, log_odds).items():
        if not math.isnan(value[0]):  # Of labels of one class, as a next-item model has them, there is no AUC.
            table.add_row(name, format(*value))
    table.add_row("staleness mean / max", f"{result.staleness_mean:.2f} / {result.staleness_max}")
    table.add_row("rows stored", f"{result.stored_rows:,}")
    table.add_row("store memory", f"{result.stored_bytes / 2**20:,.0f} MiB")
    if result.asynchronous is not None:
        report = result.asynchronous
        rates = report.rates().values()
        table.add_row("asynchronous: rows/s, slowest to fastest", f"{min(rates):,.0f} to {max(rates):,.0f}")
        table.add_row("dropped batches", f"{report.dropped_batches:,}")
        table.add_row("lost tokens", f"{report.lost_tokens:,}")
        table.add_row("staleness of the network", f"{report.staleness_mean:.2f} / {report.staleness_max}")
        table.add_row("staleness of rows", f"{result.row_staleness_mean:.2f} / {result.row_staleness_max}")
    for table_gradients in result.non_finite:
        table.add_row(
            f"not finite: gradients of table {table_gradients.table} ({', '.join(table_gradients.features)})",
            f"{table_gradients.rows:,} rows",
        )
    CONSOLE.print(table)
    if result.evaluation is not None:
        print_metrics(f"evaluation at step {result.global_step:,}", result.evaluation, log_odds=log_odds)
    say(f"Saved in {near_path(checkpoint)}")


def _scores(result: FitResult, log_odds: bool) -> dict[str, tuple[float, str]]:
    """Returns the metrics of training by title, with the format of each; undefined ones are nan."""
    scores: dict[str, tuple[float, str]] = {}
    for name, metrics in result.scored:
        if not metrics.binary:
            for label, figures in metrics.labels.items():
                for metric, value in known(figures).items():
                    scores[f"{name} {METRICS[metric].title} of {label}"] = value, METRICS[metric].form
            continue
        scores[f"{name} AUC"] = metrics.auc, ".4f"
        if metrics.per_day:
            scores[f"{name} AUC, mean of days"] = metrics.auc_mean_of_days, ".4f"
        if log_odds:
            scores[f"{name} log-loss"] = metrics.log_loss, ".4f"
            scores[f"{name} calibration"] = metrics.calibration, ".3f"
    if result.history.binary and result.history.rows != result.progressive.rows:
        scores["progressive AUC since the first run"] = result.history.auc, ".4f"
    return scores


def near_path(path: str) -> str:
    """Returns a path relative to the working directory, if it is inside."""
    here = os.getcwd()
    return os.path.relpath(path, here) if path.startswith(f"{here}/") else path


def print_metrics(title: str, result: MetricsResult, *, log_odds: bool = True) -> None:
    """Prints metrics by label, by day if the data have days, and by the values of a column; or of retrieval.

    Args:
        title: of the table.
        result: the metrics.
        log_odds: see `print_fit`.
    """
    without = () if log_odds else _OF_LOG_ODDS
    if result.retrieval is not None:
        print_retrieval(title, result.retrieval)
        return
    lines: list[tuple[str, LabelFigures]] = list(result.labels.items())
    for day, figures in result.per_day.items():
        lines += [(f"{label}, day {day}", f) for label, f in figures.items()]
    _print_figures(title, lines, without)
    for label, grouped in result.grouped.items():
        ranks = [f"NDCG@{k} {gain:.4f}" for k, gain in grouped.ndcg.items()]
        if isinstance(result.labels[label], Figures):
            shares = [f"recall@{k} {share:.4f}" for k, share in grouped.recall.items()]
            ranks = [f"GAUC {grouped.auc:.4f}", *shares, *ranks]
        elif all(math.isnan(gain) for gain in grouped.ndcg.values()):
            continue  # Labels below 0 are no gains.
        say(f"{label}, {grouped.groups:,} groups: {', '.join(ranks)}")
    if result.by:
        several = len(result.labels) > 1
        values = [
            (f"{value}, {label}" if several else value, f)
            for value, of in result.by.items()
            for label, f in of.labels.items()
        ]
        _print_figures(f"{title} by value", values, without)


def print_retrieval(title: str, figures: RetrievalFigures) -> None:
    """Prints metrics of retrieval: a line for each k, and the number of samples and items."""
    table = Grid("k", "HR", "NDCG", "coverage", title=title)
    for k in figures.hit_rate:
        table.add_row(f"{k:,}", f"{figures.hit_rate[k]:.4f}", f"{figures.ndcg[k]:.4f}", f"{figures.coverage[k]:.4f}")
    CONSOLE.print(table)
    missing = f", {figures.missing:,} of which are not among them" if figures.missing else ""
    say(f"MRR {figures.mrr:.4f}; the items of {figures.rows:,} samples{missing}, ranked among {figures.items:,} items")


def _print_figures(title: str, lines: Sequence[tuple[str, LabelFigures]], without: Sequence[str]) -> None:
    """Prints a line for each label or part of it, with the metrics that any of them has; "-" where one is undefined."""
    of_lines = [known(figures) for _, figures in lines]
    names = [name for name in METRICS if name not in without]
    metrics = [name for name in names if any(not math.isnan(of.get(name, math.nan)) for of in of_lines)]
    table = Grid("", "rows", *(METRICS[name].title for name in metrics), text=[""], title=title)
    for (line, figures), of in zip(lines, of_lines, strict=True):
        if not of:
            continue  # A loss that only ranks values has metrics within groups alone.
        cells = ("" if n not in of else "-" if math.isnan(of[n]) else METRICS[n].text(of[n]) for n in metrics)
        table.add_row(line, f"{figures.rows:,}", *cells)
    CONSOLE.print(table)


def print_fitted(values: list[FittedValue]) -> None:
    """Prints the fitted values of features."""
    table = Grid("feature", "rule", "found", text=["feature", "rule", "found"], title="fitted")
    for value in values:
        table.add_row(*value)
    CONSOLE.print(table)


def metrics_record(result: MetricsResult) -> dict[str, Any]:
    """Converts metrics to plain data: those of its kind for each label, and means of metrics that any label has."""

    def plain(f: LabelFigures) -> dict[str, Any]:
        return dataclasses.asdict(f)

    names = ("auc", "auc_mean_of_days", "log_loss", "calibration", "normalized_entropy")
    labels = result.labels.values()
    by = {"by": {value: metrics_record(of) for value, of in result.by.items()}} if result.by else {}
    retrieval = {} if result.retrieval is None else {"retrieval": dataclasses.asdict(result.retrieval)}
    return {
        "rows": result.rows,
        **{n: getattr(result, n) for n in names if any(hasattr(f, n.removesuffix("_mean_of_days")) for f in labels)},
        "labels": {name: plain(f) for name, f in result.labels.items()},
        "per_day": {
            str(day): {name: plain(f) for name, f in figures.items()} for day, figures in result.per_day.items()
        },
        "buckets": {name: [bucket._asdict() for bucket in buckets] for name, buckets in result.buckets.items()},
        "grouped": {name: dataclasses.asdict(grouped) for name, grouped in result.grouped.items()},
        **by,
        **retrieval,
    }


def fit_record(result: FitResult) -> dict[str, Any]:
    """Converts the result of a training run to plain data."""
    record: dict[str, Any] = {name: getattr(result, name) for name in result.__struct_fields__}
    for name in ("progressive", "training", "history"):
        record[name] = metrics_record(getattr(result, name))
    record["evaluation"] = metrics_record(result.evaluation) if result.evaluation is not None else None
    if result.asynchronous is not None:
        report = result.asynchronous
        record["asynchronous"] = {
            **msgspec.to_builtins(report, str_keys=True),
            "staleness_mean": report.staleness_mean,
            "rows_per_second_by_worker": report.rates(),
        }
    record["non_finite"] = msgspec.to_builtins(result.non_finite)
    record["mode_choices"] = [{**choice._asdict(), "ratio": choice.ratio} for choice in result.mode_choices]
    return record


def check_writable(*paths: str | None) -> None:
    """Checks that files can be written, before hours of training rather than after; makes their directories.

    Raises:
        ConfigError: one cannot be written; those that exist are unchanged.
    """
    for path in paths:
        if path is None or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)):
            continue  # A pipe or device is opened once.
        new = not os.path.exists(path)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab"):
                pass
            if new:
                os.unlink(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Give another file.", path=path) from error


def write_json(path: str, record: Any) -> None:
    """Writes strict JSON; NaN (for example the AUC of a single class) becomes null."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(_finite(record), indent=2) + "\n", encoding="utf-8")


NULLS = {"pooling": "none", "staleness": "unbounded"}
"""Spellings of null, which TOML lacks, for fields in which null differs from not set."""


def print_toml(tree: dict[str, Any], prefix: str = "") -> None:
    """Prints plain data as TOML; keys without a value become comments."""
    sections: list[tuple[str, Any]] = []
    for key, value in tree.items():
        tables = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
        if tables or (isinstance(value, dict) and value):
            sections.append((key, value))
        elif value is None and key not in NULLS:
            print(f"# {_key(key)} is not set")
        else:
            print(f"{_key(key)} = {_inline(value, key)}")
    for key, value in sections:
        key = _key(key)
        for item in value if isinstance(value, list) else [value]:
            brackets = ("[[", "]]") if isinstance(value, list) else ("[", "]")
            print(f"\n{brackets[0]}{prefix}{key}{brackets[1]}")
            print_toml(item, f"{prefix}{key}.")


def _inline(value: Any, key: str = "") -> str:
    """Formats a TOML value on one line, for example a schedule's `[[0, {kind = "sync"}]]`."""
    if isinstance(value, dict):
        known = {name: item for name, item in value.items() if item is not None or name in NULLS}
        return "{" + ", ".join(f"{_key(name)} = {_inline(item, name)}" for name, item in known.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    value = NULLS[key] if value is None else value
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _key(name: str) -> str:
    """Formats a TOML key; keys include column names."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """Formats a TOML string; escapes unprintable characters."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
