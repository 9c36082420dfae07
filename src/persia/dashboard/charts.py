"""Charts as inline SVG. Colors come from CSS variables of the page, so that they follow its dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["Series", "bars", "intervals", "lines", "short"]

Series = Sequence[tuple[float, float | None]]
"""Points (x, y) in ascending order of x; None for a gap."""

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 28
MOST_DOTS = 60
"""Maximum number of points of a line that show their values on hovering."""


def short(value: float) -> str:
    """Formats a number with three significant digits: "12.3k", "0.742", "1.2e-05"."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


def lines(title: str, series: Mapping[str, Series], x_name: str, diagonal: bool = False) -> str:
    """Returns a chart of lines.

    Args:
        title: title above the chart.
        series: points by name; the names are shown if there are several.
        x_name: name of the horizontal axis.
        diagonal: whether to also draw y = x, with equal axes, for calibration.
    """
    points = [(x, y) for line in series.values() for x, y in line if y is not None and math.isfinite(y)]
    if not points:
        return _figure(title, '<p class="none">No data.</p>')
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if diagonal:
        xs = ys = [0.0, *xs, *ys]
    across, up = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT), _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [_grid(across, up, x_name)]
    if diagonal:
        corner = (across.low, max(up.low, across.low)), (across.high, min(up.high, across.high))
        (x0, y0), (x1, y1) = corner
        ends = f'x1="{across(x0):.1f}" y1="{up(y0):.1f}" x2="{across(x1):.1f}" y2="{up(y1):.1f}"'
        parts.append(f'<line class="diagonal" {ends}/>')
    for number, (name, line) in enumerate(series.items()):
        shown = [(x, y) for x, y in line if y is not None and math.isfinite(y)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in shown)
        parts.append(f'<polyline class="line c{number % 6}" points="{path}"/>')
        every = max(1, len(shown) // MOST_DOTS)
        for x, y in shown[::every]:
            hint = f"{name}: {short(y)} at {x_name} {short(x)}"
            place = f'cx="{across(x):.1f}" cy="{up(y):.1f}"'
            size = 2.5 if diagonal else 4
            visible = "" if diagonal else " hidden"
            parts.append(
                f'<circle class="dot c{number % 6}{visible}" {place} r="{size}"><title>{escape(hint)}</title></circle>'
            )
    keys = "".join(f'<span class="key c{n % 6}">{escape(name)}</span>' for n, name in enumerate(series))
    return _figure(title, _svg(title, "".join(parts)) + (f'<p class="keys">{keys}</p>' if len(series) > 1 else ""))


def bars(title: str, values: Mapping[str, float], x_name: str) -> str:
    """Returns a chart of columns by name; `x_name` describes the names."""
    if not values:
        return _figure(title, '<p class="none">No data.</p>')
    up = _Axis(0.0, max(values.values()), HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(values)
    across = _Axis(0, len(values), LEFT, WIDTH - RIGHT)
    parts = [_grid(across, up, x_name, ticks=False)]
    every = math.ceil(len(values) / 12)
    for number, (name, value) in enumerate(values.items()):
        x = LEFT + number * step
        top = up(value)
        box = f'x="{x + step * 0.1:.1f}" y="{top:.1f}" width="{step * 0.8:.1f}" height="{up(0) - top:.1f}"'
        hint = escape(f"{x_name} {name}: {short(value)}")
        parts.append(f'<rect class="bar" {box}><title>{hint}</title></rect>')
        if number % every == 0:
            where = f'x="{x + step / 2:.1f}" y="{HEIGHT - BOTTOM + 14}"'
            parts.append(f'<text class="tick" text-anchor="middle" {where}>{escape(name)}</text>')
    return _figure(title, _svg(title, "".join(parts)))


def intervals(title: str, series: Mapping[str, Mapping[str, Sequence[float | None]]], x_name: str) -> str:
    """Returns a chart with a line for each name, and on it a dot and an interval of each series.

    Args:
        title: title above the chart.
        series: by its name, value, lower and upper end by name; all have the same names. None is left out.
        x_name: name of the horizontal axis.
    """
    names = list(next(iter(series.values()), {}))
    known = [x for points in series.values() for point in points.values() for x in point if x is not None]
    if not known:
        return _figure(title, '<p class="none">No data.</p>')
    left, step = 140, 22
    height = TOP + step * len(names) + BOTTOM
    across = _Axis(min(0.0, *known), max(0.0, *known), left, WIDTH - RIGHT)
    parts = []
    for value in across.ticks():
        x = across(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}"/>')
        place = f'x="{x:.1f}" y="{height - BOTTOM + 14}"'
        parts.append(f'<text class="tick" text-anchor="middle" {place}>{short(value)}</text>')
    place = f'x="{WIDTH - RIGHT}" y="{height - 2}"'
    parts.append(f'<text class="tick" text-anchor="end" {place}>{escape(x_name)}</text>')
    for row, name in enumerate(names):
        label = name if len(name) <= 22 else f"{name[:21]}…"
        y = TOP + (row + 0.5) * step
        place = f'x="{left - 8}" y="{y + 3.5:.1f}"'
        parts.append(f'<text class="tick" text-anchor="end" {place}>{escape(label)}</text>')
        for number, (kind, points) in enumerate(series.items()):
            middle, low, high = points[name]
            at = y + 4 * (2 * number - len(series) + 1)
            if low is not None and high is not None:
                ends = f'x1="{across(low):.1f}" y1="{at:.1f}" x2="{across(high):.1f}" y2="{at:.1f}"'
                parts.append(f'<line class="line c{number % 6}" {ends}/>')
            if middle is not None:
                hint = f"<title>{escape(f'{name}, {kind}: {short(middle)}')}</title>"
                place = f'cx="{across(middle):.1f}" cy="{at:.1f}"'
                parts.append(f'<circle class="dot c{number % 6}" {place} r="3">{hint}</circle>')
    keys = "".join(f'<span class="key c{n % 6}">{escape(name)}</span>' for n, name in enumerate(series))
    return _figure(title, _svg(title, "".join(parts), height) + f'<p class="keys">{keys}</p>')


class _Axis:
    """Maps values to pixels, from `begin` at `low` to `end` at `high`."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        if high <= low:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        self.low, self.high, self._begin, self._end = low, high, begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Returns about five round values."""
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _grid(across: _Axis, up: _Axis, x_name: str, ticks: bool = True) -> str:
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{short(value)}</text>')
    for value in across.ticks() if ticks else []:
        place = f'x="{across(value):.1f}" y="{HEIGHT - BOTTOM + 14}"'
        parts.append(f'<text class="tick" text-anchor="middle" {place}>{short(value)}</text>')
    place = f'x="{WIDTH - RIGHT}" y="{HEIGHT - 2}"'
    parts.append(f'<text class="tick" text-anchor="end" {place}>{escape(x_name)}</text>')
    return "".join(parts)


def _svg(title: str, content: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{content}</svg>'


def _figure(title: str, content: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"
