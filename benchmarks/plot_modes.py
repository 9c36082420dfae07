"""Charts of docs/modes.md, as SVG, from the JSON lines of `python -m benchmarks 'modes.*'`.

    python -m benchmarks.plot_modes [LINES] [DIRECTORY]

Figures 3, 4, 7 and 8 are those of the GBA paper (arXiv 2205.11048). A chart whose measures are missing is left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets" / "modes"
WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 66, 128, 34, 44
COLOURS = ("#1f4e9c", "#c8442b", "#2b8a4b", "#8a5bb5", "#c98a13", "#4b4b4b", "#159a9c", "#b5467f")
TICKS = 5

Lines = Mapping[str, Mapping[str, Any]]
Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Lines over a common x."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    log_x: bool = False

    def svg(self) -> str:
        """The picture."""
        along = math.log10 if self.log_x else float
        xs = [along(x) for points in self.series.values() for x, _ in points]
        ys = [y for points in self.series.values() for _, y in points]
        low_x, high_x = min(xs), max(xs)
        ticks = _ticks(min(ys), max(ys))
        low_y, high_y = min(ticks[0], *ys), max(ticks[-1], *ys)

        def at(x: float, y: float) -> tuple[float, float]:
            right, up = (along(x) - low_x) / (high_x - low_x or 1), (y - low_y) / (high_y - low_y or 1)
            return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

        parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', _text(LEFT, 20, self.title, weight="bold")]
        for y in ticks:
            height = at(10**low_x if self.log_x else low_x, y)[1]
            parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            parts.append(_text(LEFT - 6, height + 4, f"{y:g}", anchor="end"))
        marks = sorted({x for points in self.series.values() for x, _ in points})
        for x in marks if self.log_x or len(marks) <= 8 else _ticks(low_x, high_x):
            parts.append(_text(at(x, low_y)[0], HEIGHT - BOTTOM + 16, f"{x:g}", anchor="middle"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x, anchor="middle"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(_text(14, middle, self.y, anchor="middle", turn=f"rotate(-90 14 {middle})"))
        for number, (name, points) in enumerate(self.series.items()):
            colour = COLOURS[number % len(COLOURS)]
            path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for point in points:
                parts.append('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" fill="{}"/>'.format(*at(*point), colour))
            height = TOP + 14 + 18 * number
            side = WIDTH - RIGHT + 12
            parts.append(f'<path d="M{side} {height - 4}h14" stroke="{colour}" stroke-width="2"/>')
            parts.append(_text(side + 20, height, name))
        style = 'font-family="sans-serif" font-size="12" fill="#222"'
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", turn: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}{f' transform={chr(34)}{turn}{chr(34)}' if turn else ''}>{escape(text)}</text>"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / TICKS
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]


# --- the charts -------------------------------------------------------------------------------------------------------

SWITCHES = {
    "to Gba": "modes.auc_sync_to_gba",
    "from Gba": "modes.auc_gba_to_sync",
    "to Async": "modes.auc_switch_others.to_async",
    "to Bsp": "modes.auc_switch_others.to_bsp",
    "to HopBw": "modes.auc_switch_others.to_hop_bw",
}
MODES = ("sync", "hybrid_own", "gba", "async_own", "async", "bsp", "hop_bs", "hop_bw")


def _days(values: Sequence[float]) -> Points:
    return list(enumerate(values))


def switch_auc(lines: Lines) -> Chart:
    """By day of training, tested on the next one."""
    series = {name: _days(lines[key]["per_day"]) for name, key in SWITCHES.items()}
    return Chart("AUC, minus that of Sync throughout; the mode changes before day 8", "day", "AUC - Sync", series)


def switch_rate(lines: Lines) -> Chart:
    """Rows per virtual second by day."""
    series = {name: _days(lines[key]["rate_per_day"]) for name, key in SWITCHES.items()}
    return Chart("Rate, 2 of 8 NN workers 4x slower; the mode changes before day 8", "day", "rows/s, virtual", series)


def time_to_auc(lines: Lines) -> Chart:
    """AUC against virtual time."""
    series = {}
    for mode in MODES:
        line = lines[f"modes.auc_{mode}"]
        series[mode] = list(zip(line["virtual_s_per_day"], line["per_day"], strict=True))
    return Chart("AUC on unseen rows, 2 of 8 NN workers 4x slower", "seconds, virtual", "AUC", series)


def sparse(lines: Lines) -> Chart:
    """AUC that delays cost, by how often rows change meanwhile."""
    found: dict[str, list[tuple[float, float]]] = {"hybrid_4": [], "async": []}
    for key, line in lines.items():
        kind = key.rpartition(".")[2]
        if key.startswith("modes.sparse.") and kind in found:
            found[kind].append((line["changes_under_way"], line["value"]))
    if not found["async"]:
        raise KeyError("modes.sparse")
    series = {kind: sorted(points) for kind, points in found.items()}
    return Chart(
        "AUC minus Sync's, by changes of a row while a gradient is under way", "changes", "AUC - Sync", series, True
    )


def figure_3(lines: Lines) -> Chart:
    """Norms of applied gradients."""
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if f"modes.gradients.bsp_{n}" in lines]
    quantiles = {n: lines[f"modes.gradients.bsp_{n}"]["quantiles"] for n in sizes}
    series: dict[str, Points] = {
        f"{float(q):.0%} of steps": [(128 * n, quantiles[n][q]) for n in sizes] for q in quantiles[sizes[0]]
    }
    series |= {mode: [(1024, lines[f"modes.gradients.{mode}"]["value"])] for mode in ("sync", "gba")}
    return Chart("Figure 3: L2 norm of the applied dense gradient", "rows aggregated", "norm", series, True)


def figure_4(lines: Lines) -> Chart:
    """How often ids occur."""
    series = {
        name: [(float(limit), share) for limit, share in lines[f"modes.occurrences.{name}"]["ids_within"].items()]
        for name in ("synthetic", "globo")
        if f"modes.occurrences.{name}" in lines
    }
    return Chart(
        "Figure 4: ids that occur in at most so many batches", "share of batches", "share of ids", series, True
    )


def _by_workers(lines: Lines, name: str) -> dict[int, Mapping[str, Any]]:
    found = {
        int(key.rpartition("_")[2]): line for key, line in lines.items() if key.startswith(f"modes.scaling.{name}_")
    }
    if not found:
        raise KeyError(name)
    return dict(sorted(found.items()))


def figure_7_auc(lines: Lines) -> Chart:
    """AUC by NN workers."""
    gba = _by_workers(lines, "gba")
    series: dict[str, Points] = {"gba": [(n, line["value"]) for n, line in gba.items()]}
    series["sync, 8"] = [(n, lines["modes.scaling.sync_8"]["value"]) for n in gba]
    return Chart("Figure 7: AUC at a global batch of 3,200 rows", "NN workers", "AUC", series, True)


def figure_7_rate(lines: Lines) -> Chart:
    """Rate by NN workers."""
    gba = _by_workers(lines, "gba")
    series = {
        "gba": [(n, line["rows_per_virtual_s"]) for n, line in gba.items()],
        "sync": [(n, line["sync_rows_per_virtual_s"]) for n, line in gba.items()],
    }
    return Chart("Figure 7: rate at a global batch of 3,200 rows", "NN workers", "rows/s, virtual", series, True)


def figure_8(lines: Lines) -> Chart:
    """AUC by local batch."""
    found = {int(k.rpartition(".")[2]): v["value"] for k, v in lines.items() if k.startswith("modes.local_batch.")}
    if not found:
        raise KeyError("modes.local_batch")
    series = {"gba": sorted(found.items())}
    return Chart(
        "Figure 8: AUC of 8 NN workers, M = 8, rates of 128 rows", "rows of a local batch", "AUC", series, True
    )


CHARTS: Sequence[Callable[[Lines], Chart]] = (
    switch_auc, switch_rate, time_to_auc, sparse, figure_3, figure_4, figure_7_auc, figure_7_rate, figure_8,
)  # fmt: skip


def main(source: Path, target: Path) -> None:
    """Writes all charts."""
    lines = {line["name"]: line for line in map(json.loads, source.read_text().splitlines())}
    target.mkdir(parents=True, exist_ok=True)
    for make in CHARTS:
        try:
            chart = make(lines)
        except (KeyError, IndexError):
            print(f"{make.__name__}: its measures are not in {source}", file=sys.stderr)
            continue
        (target / f"{make.__name__}.svg").write_text(chart.svg())


if __name__ == "__main__":
    source, target = [*map(Path, sys.argv[1:]), *(ASSETS / "measures.jsonl", ASSETS)[len(sys.argv) - 1 :]]
    main(source, target)
