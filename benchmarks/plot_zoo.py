"""Charts of docs/guide/models.md, as SVG, from JSON lines: accuracy and rate of each model and of plain PyTorch.

    python -m benchmarks.plot_zoo [LINES] [DIRECTORY]

`python -m benchmarks 'zoo.auc.*' 'zoo.rate.*' --json FILE` prints the lines; a later line of a name replaces an earlier
one. There is a chart for each data set with measures, `DATA.svg`, with 95 % intervals where there are some.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plot_modes import text

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets" / "zoo"
WIDTH, LEFT, PANEL, GAP, TOP, STEP = 480, 92, 176, 24, 58, 24
HOLDS, MISSES = "#1f4e9c", "#c8442b"

Lines = Mapping[str, Mapping[str, Any]]


class Estimate(NamedTuple):
    """A measured value, and both ends of its interval."""

    value: float
    low: float
    high: float


class Panel(NamedTuple):
    """Estimates by model over a common scale.

    Attributes:
        title: of the panel.
        estimates: by name of the model.
        target: what the lower ends are compared with.
        ticks: places with a label, the first and the last of which bound the scale; intervals are cut there.
        log: whether the scale is logarithmic.
    """

    title: str
    estimates: Mapping[str, Estimate]
    target: float
    ticks: Sequence[float]
    log: bool = False

    def parts(self, left: float, names: Sequence[str]) -> list[str]:
        """Returns the elements of the panel, which begins at `left`."""
        along = math.log if self.log else float
        first, last = along(self.ticks[0]), along(self.ticks[-1])

        def at(value: float) -> float:
            clipped = min(max(value, self.ticks[0]), self.ticks[-1])
            return left + (along(clipped) - first) / (last - first) * PANEL

        bottom = TOP + STEP * len(names)
        parts = [text(left + PANEL / 2, TOP - 16, self.title, anchor="middle", weight="bold")]
        for tick in self.ticks:
            parts.append(f'<path d="M{at(tick):.1f} {TOP - 6}V{bottom}" stroke="#ddd"/>')
            parts.append(text(at(tick), bottom + 16, f"{tick:g}", anchor="middle"))
        parts.append(f'<path d="M{at(self.target):.1f} {TOP - 6}V{bottom}" stroke="#222" stroke-dasharray="3 3"/>')
        for number, name in enumerate(names):
            if name not in self.estimates:
                continue
            value, low, high = self.estimates[name]
            colour = HOLDS if low >= self.target else MISSES
            y = TOP + STEP * number + STEP / 2 - 3
            parts.append(f'<path d="M{at(low):.1f} {y}H{at(high):.1f}" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<circle cx="{at(value):.1f}" cy="{y}" r="4" fill="{colour}"/>')
        return parts


def estimates(lines: Lines, kind: str, source: str) -> dict[str, Estimate]:
    """Returns the measures `zoo.KIND.SOURCE.*` by model."""
    prefix = f"zoo.{kind}.{source}."
    estimates = {}
    for name, line in lines.items():
        if name.startswith(prefix):
            low, high = line.get("interval") or (line["value"], line["value"])
            estimates[name.removeprefix(prefix)] = Estimate(line["value"], low, high)
    return estimates


def chart(lines: Lines, source: str) -> str | None:
    """Returns the picture of a data set; None without measures."""
    gaps, rates = estimates(lines, "auc", source), estimates(lines, "rate", source)
    names = sorted({*gaps, *rates}, key=lambda name: -rates.get(name, Estimate(0, 0, 0)).value)
    if not names:
        return None
    widest = max([0.002, *(abs(end) for estimate in gaps.values() for end in estimate)])
    bound = math.ceil(widest * 1000) / 1000
    panels = [
        Panel("AUC less PyTorch's", gaps, -0.001, [-bound, 0.0, bound]),
        Panel("rows/s over PyTorch's", rates, 1.0, [0.5, 1.0, 2.0, 4.0], log=True),
    ]
    height = TOP + STEP * len(names) + 28
    parts = [
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(10, 20, f"Models on {source}", weight="bold"),
    ]
    parts += [text(LEFT - 8, TOP + STEP * i + STEP / 2 + 1, name, anchor="end") for i, name in enumerate(names)]
    for number, panel in enumerate(panels):
        parts += panel.parts(LEFT + 8 + number * (PANEL + GAP), names)
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def main(source: Path, target: Path) -> None:
    """Writes the charts."""
    lines = {line["name"]: line for line in map(json.loads, source.read_text().splitlines())}
    target.mkdir(parents=True, exist_ok=True)
    for data in ("adult", "globo", "sequences"):
        picture = chart(lines, data)
        if picture is None:
            print(f"{data}: its measures are not in {source}", file=sys.stderr)
        else:
            (target / f"{data}.svg").write_text(picture)


if __name__ == "__main__":
    source, target = [*map(Path, sys.argv[1:]), *(ASSETS / "measures.jsonl", ASSETS)[len(sys.argv) - 1 :]]
    main(source, target)
