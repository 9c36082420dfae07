"""The HTML report of a run: one self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from statistics import median

import msgspec

from persia.dashboard.charts import Series, bars, intervals, lines, short
from persia.metrics.result import METRICS, MetricFormat, titled
from persia.telemetry.importance import Importance
from persia.telemetry.run_record import CurvePoint, RunRecord

__all__ = ["report", "style"]

MOST_FEATURES = 20
"""Maximum number of rows in the table of features."""


def report(record: RunRecord, title: str) -> str:
    """Returns the report of a run as HTML. Names of features, tables and labels are escaped.

    Args:
        record: record of the run.
        title: title of the page, such as the name of the directory.
    """
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(record))}</p>',
        '<div class="tiles">',
        *(
            f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>'
            for name, value in _tiles(record)
        ),
        "</div>",
        '<div class="charts">',
        *_charts(record),
        "</div>",
        *_tables(record),
        *_non_finite(record),
        *_features(record),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title>"
    # Nothing is loaded and no script runs, whatever a name contains.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style()}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>' + "\n".join(body) + "</body></html>\n"


def style() -> str:
    """Returns the style sheet of all pages."""
    return resources.files("persia.dashboard").joinpath("style.css").read_text(encoding="utf-8")


def _subtitle(record: RunRecord) -> str:
    start = datetime.fromtimestamp(record.began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    workers = f"{record.nn_workers} NN worker{'s' if record.nn_workers > 1 else ''}"
    end = "" if record.complete else "; the fit call did not return, so tables and features are missing"
    return f"{record.mode}, {workers}; started {start}{end}"


def _tiles(record: RunRecord) -> Iterable[tuple[str, str]]:
    yield "global step", f"{record.step:,}"
    if record.curve:
        last = record.curve[-1]
        yield "samples/s of NN worker 0, median", short(median(point.rows_per_second for point in record.curve))
        kind = "training" if last.seen else "progressive"
        if last.auc is not None:  # Labels of one class, as a next-item model has them, have none.
            yield f"{kind} AUC of the last call, at step {last.step:,}", f"{last.auc:.4f}"
        for name, value in last.others.items():
            yield f"{kind} {titled(name)} of the last samples", "none" if value is None else f"{value:.5g}"
    for label, metrics in record.evaluation.items():
        for name, value in metrics.items():
            metric = METRICS.get(name, MetricFormat(name, ".4f", 0))
            what = f"evaluation {metric.title}"
            if len(record.evaluation) > 1:
                what += f", {label}"
            yield what, "none" if value is None else metric.text(value)
    best = next((point for point in reversed(record.held_out) if point.best), None)
    if best is not None and best.value is not None and len(record.held_out) > 1:
        yield f"best held-out {best.metric}, at step {best.step:,}", f"{best.value:.4f}"
    if record.tables:
        yield "rows stored", short(sum(table["rows"] for table in record.tables.values()))
        yield "memory of tables", f"{sum(table['bytes'] for table in record.tables.values()) / 2**20:,.0f} MiB"


def _charts(record: RunRecord) -> Iterable[str]:
    def curve(name: str) -> dict[str, Series]:
        return {name: [(point.step, getattr(point, name)) for point in record.curve]}

    yield lines("Loss of single batches", curve("loss"), "step")
    seen_parts = (("progressive", False), ("training: rows seen in an earlier pass", True))

    def windows(value: Callable[[CurvePoint], float | None]) -> dict[str, Series]:
        parts: dict[str, Series] = {
            name: [(p.step, value(p)) for p in record.curve if p.seen == seen] for name, seen in seen_parts
        }
        return {name: points for name, points in parts.items() if points}

    others = dict.fromkeys(name for point in record.curve for name in point.others)
    if not record.curve or any(point.window_auc is not None for point in record.curve):
        aucs = windows(lambda point: point.window_auc)
        yield lines("AUC of the samples since the previous point", aucs, "step")
    for other in others:
        title = f"{titled(other)} of the samples since the previous point"
        yield lines(title, windows(lambda point, name=other: point.others.get(name)), "step")  # type: ignore[misc]
    held_out = [point for point in record.held_out if point.metric == record.held_out[-1].metric]
    if len(held_out) > 1:
        points: dict[str, Series] = {"held-out": [(point.step, point.value) for point in held_out]}
        yield lines(f"{held_out[-1].metric} of held-out samples", points, "step")
    yield lines("Samples/s of NN worker 0", curve("rows_per_second"), "step")
    yield lines("Hit rate: share of looked-up ids that had a row", curve("hit_rate"), "step")
    yield lines("Rows in the store", curve("stored_rows"), "step")
    groups = {
        label: [(group.predicted, group.observed) for group in bins] for label, bins in record.calibration.items()
    }
    kind = "Training" if record.calibration_seen else "Progressive"
    title = f"{kind} calibration of the last call: mean label by mean prediction, 20 groups"
    yield lines(title, groups, "prediction", diagonal=True)
    lookups = {str(staleness): float(count) for staleness, count in sorted(record.staleness.items()) if count}
    yield bars("Staleness: lookups by own steps not yet applied", lookups, "steps")
    if record.importance is not None:
        yield _importance(record.importance)


def _importance(importance: Importance) -> str:
    shown = importance.features[:MOST_FEATURES]
    losses = {
        "permuted": {each.name: msgspec.structs.astuple(each.permuted) for each in shown},
        "emptied": {each.name: msgspec.structs.astuple(each.emptied) for each in shown},
    }
    left = len(importance.features) - len(shown)
    title = importance.title[0].upper() + importance.title[1:] + " without a feature, with 95 % intervals"
    return intervals(title + (f"; {left} features that lose less are not shown" if left else ""), losses, "lost")


def _tables(record: RunRecord) -> Iterable[str]:
    if not record.tables:
        return
    rows = [
        [
            name,
            f"{counters['rows']:,}",
            f"{counters['bytes'] / 2**20:,.1f}",
            f"{counters['hits'] / max(1, counters['lookups']):.1%}",
            *(
                f"{counters.get(counter, 0):,}"
                for counter in ("admitted", "rejected", "evicted", "applied", "absent", "nonfinite")
            ),
        ]
        for name, counters in sorted(record.tables.items(), key=lambda item: -item[1]["bytes"])
    ]
    names = [
        "table",
        "rows",
        "MiB",
        "hits",
        "admitted",
        "rejected",
        "evicted",
        "gradients applied",
        "absent",
        "non-finite",
    ]
    yield "<h2>Tables</h2>"
    yield _table(names, rows)


def _non_finite(record: RunRecord) -> Iterable[str]:
    if not record.non_finite:
        return
    rows = [[part.table, ", ".join(part.features), f"{part.rows:,}", f"{part.step:,}"] for part in record.non_finite]
    yield "<h2>Rows that the last fit call left unchanged: gradient or new value not finite</h2>"
    yield _table(["table", "features", "rows of gradients", "first global step"], rows)


def _features(record: RunRecord) -> Iterable[str]:
    if not record.features:
        return
    total = sum(cost.seconds for cost in record.features) or 1.0
    rows = [
        [
            cost.name,
            cost.table,
            f"{cost.ids / max(1, cost.samples):.2f}",
            f"{cost.seconds * 1e3:.3f}",
            f"{cost.seconds / total:.1%}",
        ]
        for cost in record.features[:MOST_FEATURES]
    ]
    yield "<h2>Slowest features</h2>"
    limit = f"; the first {MOST_FEATURES} of {len(record.features)}" if len(record.features) > MOST_FEATURES else ""
    yield f'<p class="soft">Time to pool the rows of a feature in the last batch, measured one by one{limit}.</p>'
    yield _table(["feature", "table", "ids per sample", "ms per batch", "share"], rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
