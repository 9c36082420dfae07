"""`persia init` on files of several kinds: what it writes trains as it is, and hostile files are refused.

    python -m benchmarks 'init.*' [--preset smoke|laptop|full] [--json FILE]

Adult and Globo are skipped where PERSIA_DATA does not have them.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks import runner
from benchmarks.elsewhere import run_python
from persia.data import find

ROWS = {"smoke": 1_000, "laptop": None, "full": None}
CRITEO_ROWS = {"smoke": 1_000, "laptop": 50_000, "full": 200_000}
STEPS = {"smoke": ["--set", "train.max_steps=20"], "laptop": [], "full": []}


def persia(*arguments: str, ok: bool = True) -> str:
    """Runs a command; returns its output."""
    done = run_python(["-m", "persia", *arguments])
    if (done.returncode == 0) != ok or "Traceback" in done.stderr:
        raise RuntimeError(f"persia {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stderr


def trained(data: Path, folder: Path, preset: str) -> float:
    """Returns the AUC on held-out rows of a run without edits."""
    persia("init", str(data), "--yes", "--out", str(folder))
    config, result = folder / "config.toml", folder / "result.json"
    persia("train", str(config), "--json", str(result), "--set", "trainer.progress=false", *STEPS[preset])
    return float(json.loads(result.read_text())["evaluation"]["auc"])


def write_criteo(path: Path, rows: int) -> None:
    """Writes clicks in the format of Criteo: label, 13 counts, 26 hashed categories, some missing; no header."""
    draw = np.random.default_rng(0)
    counts = draw.lognormal(2, 1.5, (rows, 13)).astype(int)
    ids = draw.zipf(1.3, (rows, 26)) % 5_000
    logits = 0.3 * (np.log1p(counts[:, 0]) - 2) + 2.0 * (ids[:, 0] % 3 == 0) + (ids[:, 1] % 2) - 2.5
    labels = draw.random(rows) < 1 / (1 + np.exp(-logits))
    missing = draw.random((rows, 39)) < 0.05
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            values = [
                *map(str, counts[i]),
                *(f"{(7 * j + 1) * 2654435761 * int(k) % 2**32:08x}" for j, k in enumerate(ids[i])),
            ]
            fields = ("" if gap else value for value, gap in zip(values, missing[i], strict=True))
            file.write(f"{int(labels[i])}\t" + "\t".join(fields) + "\n")


def files(folder: Path, preset: str) -> Iterator[tuple[str, Path]]:
    """Yields name and path of each good file; the real ones are cut to the size of the preset."""
    rows = ROWS[preset]
    adult, globo = find("adult"), find("globo_ctr")
    if preset == "smoke":  # A file is three processes, which import torch: one of each kind of outcome.
        globo = None
    if adult is not None:
        with (adult / "adult.data").open(encoding="utf-8") as source:
            (folder / "adult.data").write_text("".join(itertools.islice(source, rows)), encoding="utf-8")
        yield "adult", folder / "adult.data"
    if globo is not None:
        table = pq.ParquetFile(globo / "day=00.parquet").read()
        pq.write_table(table.slice(0, rows), folder / "globo.parquet")
        yield "globo", folder / "globo.parquet"
    write_criteo(folder / "criteo.txt", CRITEO_ROWS[preset])
    yield "criteo", folder / "criteo.txt"


HOSTILE = {
    "ragged": ("id,x,label\n" + "1,a,0\n2,b,1\n" * 50 + "1,2\n", "line 102 has 2 fields instead of 3"),
    "constant label": ("id,x,label\n" + "1,a,0\n2,b,0\n" * 50, "column 'label' has one value only"),
    "only a header": ("id,x,label\n", "has only one line"),
}
"""By name, a file and the reason to refuse it."""


@runner.measures("init.rows", "init.auc")
def init(preset: str) -> Iterator[runner.Measure]:
    """Fraction of files with the right outcome: trained without editing, or refused; and the AUC on adult."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        aucs = {name: trained(path, folder / f"{name}_model", preset) for name, path in files(folder, preset)}
        refusals = {}
        hostile = list(HOSTILE.items())[: 1 if preset == "smoke" else None]
        for number, (name, (text, reason)) in enumerate(hostile):
            path = folder / f"hostile{number}.csv"
            path.write_text(text, encoding="utf-8")
            refusals[name] = persia("init", str(path), "--yes", "--out", str(folder / f"out{number}"), ok=False).strip()
            if reason not in refusals[name]:
                raise RuntimeError(f"{name}: refused for another reason: {refusals[name]}")
            if (folder / f"out{number}").exists():
                raise RuntimeError(f"{name}: files were left behind")
        right = sum(map(math.isfinite, aucs.values())) + len(refusals)
        details = {"auc": aucs, "refusals": {name: text.replace(directory, "") for name, text in refusals.items()}}
        target = None if preset == "smoke" else 1.0
        yield runner.Measure("init.rows", right / (len(aucs) + len(refusals)), "fraction", target, details=details)
        if "adult" in aucs:
            yield runner.Measure("init.auc", aucs["adult"], "AUC", None if preset == "smoke" else 0.88)
        else:
            print("init.auc is skipped: PERSIA_DATA has no adult.", file=sys.stderr)
