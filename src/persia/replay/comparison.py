"""A table that compares runs, with the columns of the GBA paper's Tables 5.2 and 5.3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from persia.replay.schedule import Summary

__all__ = ["ReportLine", "record", "table"]


class ReportLine(NamedTuple):
    """A run, which is a line of the table.

    Attributes:
        name: name of the run, such as its mode.
        summary: summary of its timeline.
        auc: AUC of the trained model; None if it was only simulated.
    """

    name: str
    summary: Summary
    auc: float | None = None


def record(line: ReportLine) -> dict[str, Any]:
    """Returns a line as plain values, for JSON."""
    s = line.summary
    return {
        "name": line.name,
        "auc": line.auc,
        "rows_per_second": s.rate,
        "rows_per_second_by_worker": list(s.rates),
        "batches": s.batches,
        "dropped_batches": s.dropped + s.decayed,
        "lost_tokens": s.lost,
        "dense_staleness_mean": s.staleness_mean,
        "dense_staleness_max": s.staleness_max,
        "row_staleness_mean": s.row_staleness_mean,
        "row_staleness_max": s.row_staleness_max,
    }


def table(lines: Sequence[ReportLine]) -> str:
    """Formats lines as text, with the rates of the slowest and the fastest NN worker, and staleness as mean (max)."""
    head = ("", "AUC", "rows/s", "slowest", "fastest", "dropped", "lost", "dense staleness", "row staleness")
    rows = [head]
    for name, s, auc in lines:
        rows.append(
            (
                name,
                "" if auc is None else f"{auc:.4f}",
                f"{s.rate:,.0f}",
                f"{min(s.rates, default=0.0):,.0f}",
                f"{max(s.rates, default=0.0):,.0f}",
                f"{s.dropped + s.decayed:,}",
                f"{s.lost:,}",
                f"{s.staleness_mean:.2f} ({s.staleness_max})",
                f"{s.row_staleness_mean:.2f} ({s.row_staleness_max})",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
