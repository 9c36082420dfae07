"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from persia.metrics.result import titled
from persia.telemetry.terminal import UNLIMITED, fitting

__all__ = ["LiveLine", "ProgressText", "Snapshot"]

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0


class Snapshot(NamedTuple):
    """Progress of a run at a point in time.

    Attributes:
        step: global step.
        rows: samples trained in this call.
        rows_per_second: speed since the last snapshot.
        loss: mean loss of the last steps.
        auc: AUC of this call so far, mean over labels; each batch is scored before training on it. nan while labels are
            of one class.
        stored_rows: rows in the embedding store.
        staleness: mean measured staleness in steps.
        hit_rate: fraction of ids looked up since the last snapshot that had a row; nan without any.
        seen: whether the rows were trained in an earlier pass over the data, so that the AUC is a training AUC.
        others: metric to watch of each label that is not binary, by "LABEL:METRIC".
        held_out: the last evaluation on held-out data; empty without one.
    """

    step: int
    rows: int
    rows_per_second: float
    loss: float
    auc: float
    stored_rows: int
    staleness: float
    hit_rate: float = math.nan
    seen: bool = False
    others: Mapping[str, float] = {}
    held_out: str = ""

    def text(self, width: int = UNLIMITED) -> str:
        """Formats the snapshot as one line, with as many metrics as fit into the width."""
        prefix = "training " if self.seen else ""
        aucs = () if math.isnan(self.auc) else (f"{prefix}AUC {self.auc:.4f}",)
        figures = (
            f"step {self.step:>7,}", f"{self.rows:>11,} rows", f"{self.rows_per_second:>9,.0f} rows/s",
            f"loss {self.loss:.4f}", *aucs,
            *(f"{prefix}{titled(name)} {value:.4g}" for name, value in self.others.items()),
            *((self.held_out,) if self.held_out else ()),
            f"store {self.stored_rows:,} rows",
            f"staleness {self.staleness:.2f}",
        )  # fmt: skip
        return fitting(figures, width)


class ProgressText(Protocol):
    """A line about progress, such as a `Snapshot`."""

    def text(self, width: int = UNLIMITED) -> str:
        """Formats it for a width."""


class LiveLine:
    """Shows snapshots: one line rewritten in place on a terminal, a line every ten seconds elsewhere.

    Args:
        enabled: False disables all output; `due` then returns False.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._inside = False
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if enabled and self._console.is_terminal else None
        self._next = time.monotonic() + (REFRESH_SECONDS if self._live else PLAIN_SECONDS)

    def __enter__(self) -> LiveLine:
        self._inside = True
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        if self._live:
            self._live.stop()

    @property
    def shown(self) -> bool:
        """Whether lines are shown now."""
        return self._enabled and self._inside

    def due(self) -> bool:
        """Whether it is time for the next snapshot. Cheap."""
        return self._enabled and time.monotonic() >= self._next

    def show(self, snapshot: ProgressText) -> None:
        """Shows a snapshot."""
        if self._live:
            self._live.update(Text(snapshot.text(self._console.width)), refresh=True)
        elif self._enabled:
            print(snapshot.text(), file=sys.stderr, flush=True)
        self._next = time.monotonic() + (REFRESH_SECONDS if self._live else PLAIN_SECONDS)
