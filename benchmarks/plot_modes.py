"""Charts of modes.md, papers/, concepts/modes.md and guide/adagrad.md in docs, as SVG, from JSON lines.

    python -m benchmarks.plot_modes [LINES] [DIRECTORY]

`python -m benchmarks 'modes.*' paper.figure6 'paper.gba_figure*' 'paper.theorem1*' 'quality.adagrad.*' --json FILE`
prints the lines. Figure 6 is that of the Persia paper (arXiv 2111.05897), figures 1, 2, 3, 4, 7 and 8 those of the GBA
paper (arXiv 2205.11048). A chart whose measures are missing is left out.
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
LEFT, RIGHT, TOP, BOTTOM = 66, 146, 34, 44
COLOURS = ("#1f4e9c", "#c8442b", "#2b8a4b", "#8a5bb5", "#c98a13", "#4b4b4b", "#159a9c", "#b5467f")
TICKS, MARKS = 5, 9
"""Heights that have a line, at least; places along x that are all named if they are round, at most."""

Lines = Mapping[str, Mapping[str, Any]]
Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Lines over a common x."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    log_x: bool = False
    log_y: bool = False

    def svg(self) -> str:
        """The picture."""
        along, upward = (math.log10 if log else float for log in (self.log_x, self.log_y))
        xs = [along(x) for points in self.series.values() for x, _ in points]
        ys = [upward(y) for points in self.series.values() for _, y in points]
        low_x, high_x = min(xs), max(xs)
        marks = sorted({x for points in self.series.values() for x, _ in points})
        if len(marks) > MARKS or any(f"{x:.4g}" != f"{x:.12g}" for x in marks):
            decades = range(math.floor(low_x), math.ceil(high_x) + 1)
            marks = [10.0**place for place in decades] if self.log_x else _ticks(low_x, high_x)
            low_x, high_x = min(low_x, along(marks[0])), max(high_x, along(marks[-1]))
        heights = range(math.floor(min(ys)), math.ceil(max(ys)) + 1)
        ticks = [10.0**height for height in heights] if self.log_y else _ticks(min(ys), max(ys))
        low_y, high_y = min(upward(ticks[0]), *ys), max(upward(ticks[-1]), *ys)

        def at(x: float, y: float) -> tuple[float, float]:
            right, up = (along(x) - low_x) / (high_x - low_x or 1), (upward(y) - low_y) / (high_y - low_y or 1)
            return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

        parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', text(LEFT, 20, self.title, weight="bold")]
        for y in ticks:
            height = at(10**low_x if self.log_x else low_x, y)[1]
            parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            parts.append(text(LEFT - 6, height + 4, f"{y:g}", anchor="end"))
        for x in marks:
            parts.append(text(at(x, ticks[0])[0], HEIGHT - BOTTOM + 16, f"{x:g}", anchor="middle"))
        parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x, anchor="middle"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(text(14, middle, self.y, anchor="middle", turn=f"rotate(-90 14 {middle})"))
        for number, (name, points) in enumerate(self.series.items()):
            colour = COLOURS[number % len(COLOURS)]
            path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for point in points:
                parts.append('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" fill="{}"/>'.format(*at(*point), colour))
            height = TOP + 14 + 18 * number
            side = WIDTH - RIGHT + 12
            parts.append(f'<path d="M{side} {height - 4}h14" stroke="{colour}" stroke-width="2"/>')
            parts.append(text(side + 20, height, name))
        style = 'font-family="sans-serif" font-size="12" fill="#222"'
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def text(x: float, y: float, said: str, anchor: str = "start", weight: str = "normal", turn: str = "") -> str:
    """An SVG element."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}{f' transform={chr(34)}{turn}{chr(34)}' if turn else ''}>{escape(said)}</text>"


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
    "to Gba": "modes.auc_sync_to_gba.mean",
    "from Gba": "modes.auc_gba_to_sync.mean",
    "to Async": "modes.auc_switch_others.to_async.mean",
    "to Bsp": "modes.auc_switch_others.to_bsp.mean",
    "to HopBw": "modes.auc_switch_others.to_hop_bw.mean",
}
LATE = {"Hybrid(4), cold": "hybrid_4", "Hybrid(4), warm-up": "hybrid_4_warm", "Hybrid(auto), cold": "auto"}
"""Without a warm-up, and with one over half of the run."""
STRAGGLING = {
    "Gba": "gba", "HopBw(2)": "hop_bw", "HopBs(2)": "hop_bs", "Async": "async", "Async, own rates": "async_own",
}  # fmt: skip
"""Without Bsp: no gradient is older than Gba's tolerance there, so its runs equal Gba's."""
DATA = "100000_1.05"
"""Ids of each feature, and the exponent of how often they occur."""


def _days(values: Sequence[float]) -> Points:
    return list(enumerate(values))


def which_mode(lines: Lines) -> Chart:
    """What each mode loses and gains, at the learning rates of Sync."""
    series: dict[str, Points] = {}
    for name, kind in LATE.items():
        gained = lines[f"modes.auc_hybrid.rate.{kind}"]["value"]
        series[name] = [(gained, lines[f"modes.auc_hybrid.{DATA}.{kind}"]["value"])]
    rate = lines[f"modes.auc_others.{DATA}.sync"]["rows_per_virtual_s"]
    for name, kind in STRAGGLING.items():
        line = lines[f"modes.auc_others.{DATA}.{kind}"]
        series[name] = [(line["rows_per_virtual_s"] / rate, line["value"])]
    return Chart("AUC and rate of each mode, beside those of Sync", "rate, over Sync's", "AUC - Sync", series)


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
    for name, kind in {"Sync": "sync", **STRAGGLING}.items():
        line = lines[f"modes.auc_others.{DATA}.{kind}"]
        series[name] = list(zip(line["virtual_s_per_day"], line["per_day"], strict=True))
    return Chart("AUC on unseen rows, 2 of 8 NN workers 4x slower", "seconds, virtual", "AUC", series)


def figure_6(lines: Lines) -> Chart:
    """AUC against time on the real roles."""
    series = {}
    for name, curve in lines["paper.figure6"]["curves"].items():
        series[name] = list(zip(curve["seconds"], curve["auc"], strict=True))
    return Chart("Figure 6 of Persia: test AUC over time", "seconds", "AUC", series)


def figure_1(lines: Lines) -> Chart:
    """Rates by hour."""
    names = {"Sync": "sync", "Hybrid(4)": "hybrid", "Gba": "gba", "Async": "async"}
    series = {name: _days(lines[f"paper.gba_figure1.{kind}"]["by_hour"]) for name, kind in names.items()}
    series["load"] = _days(lines["paper.gba_figure1.sync"]["load"])
    return Chart("Figure 1 of GBA: rate over the best one, and load", "hour", "share", series)


def figure_2(lines: Lines) -> Chart:
    """AUC by progress, with a switch after half of the data, by the learning rates after it."""
    series: dict[str, Points] = {}
    for first, then in (("Sync", "async"), ("Async", "sync")):
        areas = lines[f"paper.gba_figure2.{DATA}.to_{then}.first"]["areas"]
        base, pieces = areas["base"], len(areas["base"]) + len(areas["stay"])
        for name, kind in ((first, "stay"), ("same", f"to_{then}"), ("own", f"to_{then}_tuned")):
            points = [*base, *areas[kind]] if kind == "stay" else [base[-1], *areas[kind]]
            began = pieces - len(points)
            label = name if kind == "stay" else f"to {then.capitalize()}, {name}"
            series[label] = [(100 * (began + n + 1) / pieces, area) for n, area in enumerate(points)]
    return Chart("Figure 2 of GBA: AUC, with the same or own rates after 50 %", "% of the data", "AUC", series)


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


def figure_7(lines: Lines) -> Chart:
    """AUC by NN workers."""
    series: dict[str, list[tuple[float, float]]] = {}
    for key, line in lines.items():
        if key.startswith("modes.scaling."):
            _, _, optimizer, reduction, kind = key.split(".")
            series.setdefault(f"{optimizer}, {reduction}", []).append((int(kind.removeprefix("gba_")), line["value"]))
    if not series:
        raise KeyError("modes.scaling")
    title = "Figure 7: AUC at a global batch of 3,200 rows, minus that with 8 NN workers"
    return Chart(title, "NN workers", "AUC - AUC of 8", {name: sorted(of) for name, of in series.items()}, True)


def figure_8(lines: Lines) -> Chart:
    """AUC by local batch."""
    losses = {int(k.rpartition(".")[2]): v["value"] for k, v in lines.items() if k.startswith("modes.local_batch.")}
    if not losses:
        raise KeyError("modes.local_batch")
    series = {"gba": sorted(losses.items())}
    return Chart(
        "Figure 8: AUC of 8 NN workers, M = 8, rates of 128 rows", "rows of a local batch", "AUC", series, True
    )


def theorem1(lines: Lines) -> Chart:
    """What a delay of rows costs by alpha * tau; costs below 0 have no place on a logarithmic axis."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, label, rarest in (("paper.theorem1_one_rate", "rate 0.5", 0.0), ("paper.theorem1", "theorem", 0.1)):
        for alpha, tau, cost, _ in lines[name]["costs"]:
            if alpha >= rarest and cost > 0:
                series.setdefault(f"{label}, {alpha:g}", []).append((alpha * tau, cost))
    title = "Cost of a delay, by learning rate and alpha"
    return Chart(title, "alpha * tau", "cost", series, True, True)


def adagrad_rates(lines: Lines) -> Chart:
    """AUC by learning rate of rows, with the default accumulator and with 0.01, less the best of all."""
    series: dict[str, list[tuple[float, float]]] = {}
    for data in ("sparse", "dense", "globo", "adult"):
        areas = lines[f"quality.adagrad.{data}"]["test"]
        best = max(area for of in areas.values() for area in of.values())
        for accumulator in ("1e-06", "0.01"):
            points = [(float(rate), area - best) for rate, area in areas[accumulator].items()]
            series[f"{data}, {float(accumulator):g}"] = sorted(points)
    return Chart("Test AUC by data and accumulator, less the best", "learning rate of rows", "AUC - best", series, True)


CHARTS: Sequence[Callable[[Lines], Chart]] = (
    which_mode, switch_auc, switch_rate, time_to_auc, figure_6, figure_1, figure_2, figure_3, figure_4, figure_7,
    figure_8, theorem1, adagrad_rates,
)  # fmt: skip


def write_charts(charts: Sequence[Callable[[Lines], Chart]], assets: Path) -> None:
    """Writes charts, from the arguments of the command line: a file of lines, and a directory."""
    source, target = [*map(Path, sys.argv[1:]), *(assets / "measures.jsonl", assets)[len(sys.argv) - 1 :]]
    lines = {line["name"]: line for line in map(json.loads, source.read_text().splitlines())}
    target.mkdir(parents=True, exist_ok=True)
    for make in charts:
        try:
            chart = make(lines)
        except (KeyError, IndexError):
            print(f"{make.__name__}: its measures are not in {source}", file=sys.stderr)
            continue
        (target / f"{make.__name__}.svg").write_text(chart.svg())


if __name__ == "__main__":
    write_charts(CHARTS, ASSETS)
