"""The live table of `persia top`: all processes, or the metrics of one."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from persia.dashboard.charts import short
from persia.dashboard.view import ClusterView, ProcessView, Watch, mean_others
from persia.membership.observing import Answer
from persia.telemetry.terminal import UNLIMITED, Grid, fitting, plain

__all__ = ["Top", "frame"]

KEYS = {
    b"q": "quit", b"\x03": "quit",
    b"k": "up", b"\x1b[A": "up",
    b"j": "down", b"\x1b[B": "down",
    b"\r": "open", b"\n": "open", b"\x1b[C": "open",
    b"\x1b": "back", b"\x7f": "back", b"\x1b[D": "back", b"b": "back",
}  # fmt: skip
"""Actions of keys."""

COLUMNS = ("process", "up", "rate", "wait", "stale", "step", "loss", "AUC", "queue", "CPU", "memory")
DROPPED_FIRST = ("up", "CPU", "step", "stale", "queue", "loss", "AUC", "memory", "wait")
"""Columns to drop on a narrow terminal, in this order; the line above the table has the means of some."""


def frame(
    seen: ClusterView, selected: int | None = None, width: int = UNLIMITED, height: int | None = None
) -> RenderableType:
    """Returns the table of all processes.

    Args:
        seen: the processes.
        selected: index of the selected process; if set, only its problem is shown.
        width: characters of a line; columns that do not fit are left out.
        height: number of lines; if there are more processes, shows the ones around the selected one.
    """
    if seen.problem:
        return plain(seen.problem, "red")
    chosen = seen.processes if selected is None else seen.processes[selected : selected + 1]
    problems = [plain(f"{p.name}: {' '.join(p.problem.split())}", "red") for p in chosen if p.problem]
    headline = _headline(seen, width)
    newest = [plain(f"scaler: {note}") for note in seen.notes[-1:]]
    first, end = 0, len(seen.processes)
    if height is not None:
        for line in (*problems, *newest):
            line.truncate(width, overflow="ellipsis")
        above = 3 + len(newest)  # Headline, names of columns and a rule take three lines.
        rows = max(1, height - above - len(problems))
        first = max(0, min((selected or 0) - rows // 2, end - rows))
        end = min(end, first + rows)
    cells = [dict(zip(COLUMNS, _cells(process), strict=True)) for process in seen.processes]
    widths = {column: max(len(column), *(len(row[column]) for row in cells), 0) for column in COLUMNS}
    columns = list(COLUMNS)
    for column in DROPPED_FIRST:
        if sum(widths[name] + 1 for name in columns) - 1 > width:
            columns.remove(column)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for column in columns:
        table.add_column(column, justify="left" if column == "process" else "right", no_wrap=True)
    for number in range(first, end):
        style = "reverse" if number == selected else "red" if seen.processes[number].problem else None
        table.add_row(*(plain(cells[number][column]) for column in columns), style=style)
    return Group(headline, *newest, table, *problems)


def _headline(seen: ClusterView, width: int) -> Text:
    auc, others = seen.mean("auc"), mean_others(seen)
    parts = [
        ("samples/s", _text(seen.total("rate"))),
        ("step", _text(seen.mean("step"), ",.0f")),
        ("loss", _text(seen.mean("loss"), ".4f")),
        *([] if auc is None and others else [("AUC", _text(auc, ".4f"))]),
        *((name, f"{value:.5g}") for name, value in others.items()),
        *((("held-out", _text(held_out, ".4f")),) if (held_out := seen.mean("held_out")) is not None else ()),
        ("waiting", _text(seen.mean("wait"), ".0%")),
        ("staleness", _text(seen.mean("staleness"), ".2f")),
    ]
    return Text(fitting([f"{name} {value}" for name, value in parts], width), "bold")


def _cells(process: ProcessView) -> list[str]:
    memory = "" if process.memory is None else f"{process.memory / 2**20:,.0f} MiB"
    return [
        process.name,
        _text(process.uptime, ",.0f", " s"),
        "no answer" if process.problem else _text(process.rate, unit=f" {process.unit}"),
        _text(process.wait, ".0%"),
        _text(process.staleness, ".2f"),
        _text(process.step, ",.0f"),
        _text(process.loss, ".4f"),
        _text(process.auc, ".4f"),
        _text(process.queue, ",.0f"),
        _text(process.cpu, ".2f"),
        memory,
    ]


def _text(value: float | None, form: str | None = None, unit: str = "") -> str:
    if value is None:
        return ""
    return (short(value) if form is None else format(value, form)) + unit


def details(answer: Answer) -> RenderableType:
    """Returns all metrics of one process."""
    member, health, problem = answer
    title = f"{member.role} {member.rank}"
    if health is None:
        return Group(plain(title, "bold"), plain(problem, "red"))
    table = Grid("metric", "labels", "value", text=("metric", "labels"))
    for metric in sorted(health.metrics, key=lambda metric: (metric.name, _labels(metric.labels))):
        table.add_row(metric.name, _labels(metric.labels), f"{metric.value:,.6g}")
    times = Grid("metric", "labels", "p50 ≤", "p99 ≤", "times", text=("metric", "labels"))
    for latency in sorted(health.latencies, key=lambda latency: -latency.seconds):
        if count := sum(latency.counts):
            bounds = (f"{latency.quantile(share):g} s" for share in (0.5, 0.99))
            times.add_row(latency.name, _labels(latency.labels), *bounds, f"{count:,}")
    return Group(plain(f"{title} at {health.host} {health.pid}, up {health.uptime:,.0f} s", "bold"), table, times)


def _labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


class Top:
    """Shows a watched cluster on a terminal, and handles keys.

    Args:
        watch: polls the cluster.
        console: console of the terminal.
    """

    def __init__(self, watch: Watch, console: Console) -> None:
        self._watch = watch
        self._console = console
        self._selected = 0
        self._open = False
        self._first = 0
        """First visible line of the metrics of a process."""

    def once(self, timeout: float) -> ClusterView | None:
        """Prints the second view, which has rates, and returns it; None if it does not arrive within `timeout`."""
        end = time.monotonic() + timeout
        number, seen = 0, None
        while number < 2 and time.monotonic() < end:
            number, seen = self._watch.next(number, end - time.monotonic())
        if seen is not None:
            if not self._console.is_terminal:  # A pipe has no width: its reader gets whole lines.
                self._console.width = UNLIMITED
            self._console.print(frame(seen, width=self._console.width))
        return seen

    def run(self) -> None:
        """Shows the cluster until `q` is pressed. Blocks. Needs a terminal."""
        with _keys(sys.stdin.fileno()) as pressed, Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(self._render(), refresh=True)
                for action in pressed(0.2):
                    if action == "quit":
                        return
                    self._act(action)

    def _act(self, action: str) -> None:
        step = {"up": -1, "down": 1}.get(action, 0)
        if self._open:
            self._first = max(0, self._first + step)
        else:
            self._selected = max(0, min(self._selected + step, len(self._watch.answers) - 1))
        if action in ("open", "back"):
            self._open, self._first = action == "open", 0

    def _render(self) -> RenderableType:
        _, seen = self._watch.next(0, 0.0)
        keys = Text("arrows or j, k: move   enter: metrics of a process   esc or b: back   q: quit", "dim")
        if seen is None:
            return Group(Text("Waiting for the first answers ..."), keys)
        answers = self._watch.answers
        if not self._open or self._selected >= len(answers) or seen.problem:
            marked = min(self._selected, max(0, len(seen.processes) - 1))
            return Group(frame(seen, marked, self._console.width, self._console.height - 1), keys)
        lines = self._console.render_lines(details(answers[self._selected]), pad=False)
        height = max(1, self._console.height - 2)
        self._first = min(self._first, max(0, len(lines) - height))
        shown = lines[self._first : self._first + height]
        return Group(*(Text.assemble(*((s.text, s.style or "") for s in line)) for line in shown), keys)


@contextmanager
def _keys(terminal: int) -> Iterator[Callable[[float], list[str]]]:
    """Reads single keys; yields a function that waits for keys and returns their actions."""
    settings = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def pressed(timeout: float) -> list[str]:
        readable, _, _ = select.select([terminal], [], [], timeout)
        if not readable:
            return []
        typed = os.read(terminal, 64)
        if not typed:  # The terminal is gone.
            return ["quit"]
        return [KEYS[key] for key in re.findall(rb"\x1b\[.|.", typed, re.DOTALL) if key in KEYS]

    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
