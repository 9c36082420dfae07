"""Charts of docs/capacity.md, as SVG, from JSON lines.

    python -m benchmarks.plot_capacity [LINES] [DIRECTORY]

`python -m benchmarks 'capacity.*' --json FILE` prints the lines; a later line of a name replaces an earlier one. A
chart whose measures are missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.plot_modes import Chart, Lines, write_charts

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets" / "capacity"


def size(lines: Lines) -> Chart:
    """Figure 9, left."""
    by_size = lines["capacity.simulated"]["by_size"]
    series = {kind: [(parameters, rate / 1e6) for parameters, rate in points] for kind, points in by_size.items()}
    title = "Figure 9, left, simulated: rate by size, Hybrid(4), 64 NN workers"
    return Chart(title, "trillion parameters", "million samples/s", series, log_x=True)


def modes(lines: Lines) -> Chart:
    """Figure 9, right."""
    by_step = lines["capacity.simulated.modes"]["by step"]
    names = {"Hybrid(4) over Sync": "hybrid over sync", "no barrier over Hybrid(4)": "async over hybrid"}
    series = {label: [(line["step_ms"], line[key]) for line in by_step] for label, key in names.items()}
    span = [by_step[0]["step_ms"], by_step[-1]["step_ms"]]
    series["paper, 2.6"] = [(step, 2.6) for step in span]
    series["paper, 1.2"] = [(step, 1.2) for step in span]
    return Chart("Figure 9, right, simulated: modes at 100 T", "ms of a step", "ratio of rates", series)


def measured(lines: Lines) -> Chart:
    """Figure 9, left, on one machine."""
    series = {}
    for dim in (16, 128):
        if f"capacity.flat.disk_{dim}" not in lines:
            continue
        memory, disk = (lines[f"capacity.flat.{where}_{dim}"]["by_size"] for where in ("memory", "disk"))
        for ids, key in (("Zipf", "samples_per_s"), ("uniform", "uniform_samples_per_s")):
            series[f"dim {dim}, {ids}"] = [(size["rows"] / 1e6, size[key] / 1e3) for size in [*memory, *disk]]
    return Chart(
        "Rate by size, two PSs on 2 cores, Hybrid(4)", "million rows", "thousand samples/s", series, log_x=True
    )


CHARTS: tuple[Callable[[Lines], Chart], ...] = (size, modes, measured)


if __name__ == "__main__":
    write_charts(CHARTS, ASSETS)
