"""Charts of docs/performance.md, as SVG, from JSON lines: lookups, updates, steps, and memory by size.

    python -m benchmarks.plot_performance [LINES] [DIRECTORY]

`python -m benchmarks 'store.*' 'peers.*' 'step.*' --json FILE` prints the lines; a later line of a name replaces an
earlier one. A bar whose measure is missing is left out, and so is a chart without any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plot_modes import Chart, text

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets" / "performance"
WIDTH, LEFT, RIGHT, TOP, BAR, STEP = 480, 170, 60, 40, 20, 32
FASTER, SLOWER = "#1f4e9c", "#c8442b"

Lines = Mapping[str, Mapping[str, Any]]

LOOKUP = {
    "store.lookup_uniform": "index_select, uniform ids",
    "store.lookup_zipf": "index_select, Zipf ids",
    "peers.tfra.lookup_1": "TensorFlow Rec. Addons",
    "peers.paddle.lookup_1": "PaddlePaddle's server",
}
UPDATES = {
    "store.update_adagrad": "index_add_, Adagrad",
    "store.update_rowwise": "index_add_, row-wise",
    "peers.tfra.train_1": "TensorFlow Rec. Addons",
    "peers.paddle.train_1": "PaddlePaddle's server",
}
STEPS = {
    "step.vs_torch": "plain PyTorch",
    "step.vs_torch.sync": "plain PyTorch, in Sync()",
    "step.vs_torchrec": "TorchRec (FBGEMM)",
    "step.vs_torchrec.sync": "TorchRec, in Sync()",
    "step.vs_dense_only": "the network alone",
    "step.vs_dense_only.sync": "the network, in Sync()",
}
SIZES = {
    "store.bytes_per_row": "dim 16, Adagrad",
    "store.bytes_per_row.dim_8": "dim 8, Adagrad",
    "store.bytes_per_row.rowwise": "dim 16, row-wise",
}


class Ratios(NamedTuple):
    """Horizontal bars of ratios, and a line where both sides are alike."""

    title: str
    bars: Mapping[str, float]

    def svg(self) -> str:
        """The picture."""
        height = TOP + STEP * len(self.bars) + 12
        scale = (WIDTH - LEFT - RIGHT) / max(1.0, *self.bars.values())
        parts = [f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', text(10, 20, self.title, weight="bold")]
        for number, (label, ratio) in enumerate(self.bars.items()):
            top = TOP + STEP * number
            colour = FASTER if ratio >= 1 else SLOWER
            parts.append(text(LEFT - 8, top + 14, label, anchor="end"))
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{ratio * scale:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(text(LEFT + max(1.0, ratio) * scale + 6, top + 14, f"{ratio:.2g}x"))
        even = LEFT + scale
        parts.append(f'<path d="M{even:.1f} {TOP - 6}V{height - 8}" stroke="#222" stroke-dasharray="3 3"/>')
        style = 'font-family="sans-serif" font-size="12" fill="#222"'
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def ratios(lines: Lines, title: str, labels: Mapping[str, str]) -> Ratios | None:
    """The chart of those measures that there are."""
    values = {label: lines[name]["value"] for name, label in labels.items() if name in lines}
    return Ratios(title, values) if values else None


def sizes(lines: Lines) -> Chart | None:
    """Memory beyond values and state, while tables grow."""
    measures = {label: lines[name] for name, label in SIZES.items() if name in lines}
    series = {label: [(rows / 1e6, each) for rows, each in line["by_size"]] for label, line in measures.items()}
    title = "Bytes per row beyond values and optimizer state"
    return Chart(title, "million rows", "bytes", series) if series else None


def main(source: Path, target: Path) -> None:
    """Writes the charts."""
    lines = {line["name"]: line for line in map(json.loads, source.read_text().splitlines())}
    target.mkdir(parents=True, exist_ok=True)
    charts = {
        "lookup": ratios(lines, "Lookups/s of persia over", LOOKUP),
        "update": ratios(lines, "Updates/s of persia over", UPDATES),
        "step": ratios(lines, "Samples/s of persia over", STEPS),
        "size": sizes(lines),
    }
    for name, chart in charts.items():
        if chart is None:
            print(f"{name}: its measures are not in {source}", file=sys.stderr)
        else:
            (target / f"{name}.svg").write_text(chart.svg())


if __name__ == "__main__":
    source, target = [*map(Path, sys.argv[1:]), *(ASSETS / "measures.jsonl", ASSETS)[len(sys.argv) - 1 :]]
    main(source, target)
