"""Writes the figures of README.md, docs/performance.md and the other `PAGES` from the lines of benchmarks.

    python -m benchmarks.pages [--check]

The lines are in docs/assets/**/measures.jsonl, to which `python -m benchmarks NAME --json FILE` appends. A later line
of a name replaces an earlier one of the same kind of machine. `TOPICS` says which measures a page shows, and in which
words. A table stands between `<!-- begin NAME -->` and `<!-- end -->`, the figure of one measure, in a sentence or a
cell, between `<!-- figure MEASURE -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page_topics import HEADLINE, MACHINES, TOPICS, Machine, Row
from benchmarks.runner import Measure

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    ROOT / page
    for page in (
        "README.md",
        "docs/performance.md",
        "docs/guide/cluster.md",
        "docs/guide/features.md",
        "docs/guide/models.md",
        "docs/guide/sequences.md",
        "docs/guide/targets.md",
        "docs/concepts/fresh-rows.md",
        "docs/modes.md",
        "docs/papers.md",
        "docs/papers/persia.md",
        "docs/reference/moves.md",
        "docs/papers/gba.md",
        "docs/papers/apmsqueeze.md",
        "docs/decisions/0020-one-thread.md",
        "docs/decisions/0035-requests-in-parallel.md",
        "docs/decisions/0036-few-launches.md",
        "docs/decisions/0037-compiled-training.md",
    )
)
BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
INLINE = re.compile(r"(<!-- figure ([\w.*]+) -->).*?(<!-- end -->)")

Line = Mapping[str, Any]


class Figures(NamedTuple):
    """Lines by name, each with the newest line of every kind of machine, oldest first."""

    lines: Mapping[str, Sequence[Line]]

    @classmethod
    def read(cls, root: Path = ROOT) -> Figures:
        """Reads all lines below `docs/assets`."""
        found: dict[str, dict[Machine, Line]] = {}
        paths = sorted((root / "docs" / "assets").rglob("measures.jsonl"))
        lines = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        for line in sorted(lines, key=lambda line: "source" not in line):  # Copied lines are the oldest.
            machines = found.setdefault(line["name"], {})
            machines.pop(machine_of(line), None)
            machines[machine_of(line)] = line
        return cls({name: list(machines.values()) for name, machines in found.items()})

    def of(self, row: Row) -> list[list[Line]]:
        """Returns the lines of a row by kind of machine; several for a pattern."""
        names = [name for name in self.lines if fnmatchcase(name, row.name)]
        if not names:
            raise KeyError(f"No line of docs/assets has the name {row.name!r}.")
        machines: dict[Machine, list[Line]] = {}
        for name in names:
            for line in self.lines[name][-1:] if row.newest else self.lines[name]:
                machines.setdefault(machine_of(line), []).append(line)
        return list(machines.values())


def machine_of(line: Line) -> Machine:
    """Returns the kind of machine of a line."""
    return next(machine for machine in MACHINES if line["machine"].startswith(machine.starts))


def quantity(value: float, unit: str, signed: bool = False) -> str:
    """Returns a value with its unit, as a page shows it."""
    if unit in ("AUC", "loss"):
        value = round(value, 4) + 0.0
        return f"{value:+.4f}" if signed and value else f"{value:.4f}"
    if unit == "fraction":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.2g} ms" if value < 0.1 else f"{value:.2g} s"
    if unit in ("rows/s", "states"):
        return f"{value / 1e6:.2g} M {unit}" if value >= 1e5 else f"{value:,.3g} {unit}"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB" if value >= 2**20 else f"{value:.3g} bytes"
    if unit == "ratio":
        return f"{value:.3g}x" if value >= 10 else f"{value:.2f}x"
    return f"{value:,.3g} {unit}"


def span(low: float, high: float, unit: str, signed: bool = False) -> str:
    """Returns a range as a page shows it: a unit that follows a space once, and one value if both look the same."""
    first, last = quantity(low, unit, signed), quantity(high, unit, signed)
    if first == last:
        return first
    number, _, of_first = first.partition(" ")
    same = of_first and of_first == last.partition(" ")[2]
    return f"{number if same else first} to {last}"


def commit_of(lines: Sequence[Line]) -> str:
    """Returns the commit of the last line, followed by + if files of a line had uncommitted changes."""
    commit: str = lines[-1]["commit"]
    changed = any(line["commit"].endswith("-dirty") for line in lines)
    return commit.removesuffix("-dirty")[:7] + "+" * changed


def figure(lines: Sequence[Line]) -> str:
    """Returns the figure of a row on one kind of machine."""
    first = lines[0]
    unit = first["unit"]
    signed = first["interval"] is not None
    if len(lines) > 1:
        values = sorted(line["value"] for line in lines)
        return span(values[0], values[-1], unit, signed)
    text = quantity(first["value"], unit, signed)
    if signed:
        text += f" ({' to '.join(quantity(end, unit) for end in first['interval'])})"
    if others := sorted(first.get("others", ())):
        text += f" (also {span(others[0], others[-1], unit)})"
    return f"{text}, `{first['mode']}`" if "mode" in first else text


def misses(line: Line, newest: Line) -> bool:
    """Returns whether a line misses the target of the newest one."""
    if line["at_least"] == newest["at_least"] and line["at_most"] == newest["at_most"]:
        return line["holds"] is False
    bounds = newest["at_least"], newest["at_most"]
    return Measure(line["name"], line["value"], line["unit"], *bounds, interval=line["interval"]).holds is False


def target(lines: Sequence[Line]) -> str:
    """Returns what is aimed at, and whether lines miss it."""
    newest = lines[-1]
    unit, low, high = newest["unit"], newest["at_least"], newest["at_most"]
    parts = [f"≥ {quantity(low, unit)}"] if low is not None else []
    parts += [f"≤ {quantity(high, unit)}"] if high is not None else []
    missed = sum(misses(line, newest) for line in lines)
    if not parts or not missed:
        return ", ".join(parts)
    count = "" if missed == len(lines) else f"{missed} of {len(lines)} "
    return f"{', '.join(parts)}: **{count}missed**"


def table(rows: Sequence[Row], figures: Figures) -> str:
    """Returns the table of a topic."""
    parts = ["| measure | figure | target | at |", "|---|---|---|---|"]
    for row in rows:
        machines = figures.of(row)
        values = "; ".join(figure(lines) for lines in machines)
        at = "; ".join(f"{machine_of(lines[-1]).short} {commit_of(lines)}" for lines in machines)
        every = [line for lines in machines for line in lines]
        name = row.name.replace(".*", "", 1) if row.name.endswith(".*") else row.name
        parts.append(f"| {name}: {row.what} | {values} | {target(every)} | {at} |")
    return "\n".join(parts)


def headline(figures: Figures) -> str:
    """Returns the three figures of the README, each with its machines."""
    parts = ["| what | figure |", "|---|---|"]
    for row in HEADLINE:
        values = "; ".join(f"{figure(lines)} on {machine_of(lines[-1]).name}" for lines in figures.of(row))
        parts.append(f"| {row.what} | {values} |")
    return "\n".join(parts)


def rewritten(text: str, figures: Figures) -> str:
    """Returns a page with its tables as they are to be."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        body = headline(figures) if name == "headline" else table(TOPICS[name], figures)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    def inline(match: re.Match[str]) -> str:
        lines = [line for of_machine in figures.of(Row(match[2], "", newest=True)) for line in of_machine]
        return f"{match[1]}{figure(lines)}{match[3]}"

    return INLINE.sub(inline, BLOCK.sub(block, text))


def main(arguments: Sequence[str]) -> int:
    """Writes the pages; with `--check` only says which are not as they are to be."""
    figures = Figures.read()
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, figures)
        if new != text:
            stale.append(page)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    if stale and "--check" in arguments:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        print(f"Tables are out of date in {names}; run: python -m benchmarks.pages", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
