"""Names of columns, tables and files with control characters: no command writes them to a terminal."""

import ast
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import persia.cli
from persia.cli.health import _table
from persia.dashboard.top import details, frame
from persia.dashboard.view import ClusterView, view
from persia.membership.observing import Answer
from persia.telemetry.metrics import Health, Metric
from persia.types import Member
from support.command import run_here

RESET = "\x1bc"
USER, ITEM, CLICK = f"user{RESET}\x07", "item\x9b31m\u202e", f"click{RESET}"
HOSTILE = f"{RESET}\x1b]0;owned\x07"


STYLES = re.compile(r"\x1b\[[0-9;]*m")
"""Of rich, such as bold; no name here has any."""


class Screen(io.StringIO):
    """A terminal, so that commands would style what they write."""

    def isatty(self):
        return True


def persia_(*arguments, ok=True):
    """Returns what a command writes to a terminal without colours."""
    screen = Screen()
    status = run_here(screen, *arguments)
    text = STYLES.sub("", screen.getvalue())
    assert (status == 0) == ok, text
    assert "Traceback" not in text
    controls = {c for c in text if c != "\n" and (not c.isprintable() or c == "\u202e")}
    assert not controls, text
    return text


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A configuration whose folder, data and columns have control characters in their names, and a run of it."""
    folder = tmp_path_factory.mktemp("run") / HOSTILE.replace("/", "")
    folder.mkdir()
    ids = np.arange(100)
    pq.write_table(pa.table({USER: ids % 7, ITEM: ids % 11, CLICK: ids % 2}), folder / f"clicks{RESET}.parquet")
    features = ", ".join(f"{{ name = {json.dumps(name)}, dim = 4 }}" for name in (USER, ITEM))
    (folder / "run.toml").write_text(
        f"""
[data]
kind = "parquet"
path = {json.dumps(f"clicks{RESET}.parquet")}
batch_size = 50
[schema]
id_features = [{features}]
labels = [{json.dumps(CLICK)}]
[model]
options = {{ hidden = [4] }}
[mode]
kind = "sync"
[trainer]
progress = false
"""
    )
    persia_("train", folder / "run.toml", "--output", folder / "out")
    return folder


def test_training_and_scoring(project, tmp_path):
    config, out = project / "run.toml", project / "out"
    assert r"\x1bc" in persia_("train", config)
    other = 'schema.id_features=[{name = "other", dim = 4}]'
    assert r"user\x1bc\x07" in persia_("train", config, "--output", out, "--set", other, ok=False)
    assert r"click\x1bc" in persia_("evaluate", config, "--checkpoint", out)
    persia_("predict", config, "--checkpoint", out, "--output", tmp_path / f"p{RESET}.csv")
    persia_("predict", config, "--checkpoint", out, "--output", tmp_path / "p.csv", "--data", f"no{RESET}", ok=False)
    persia_("train", config, "--dump-config")
    persia_("report", out)


def test_checkpoints(project, tmp_path):
    config, out = project / "run.toml", project / "out"
    shown = persia_("checkpoint", "inspect", out)
    assert r"user\x1bc\x07" in shown
    assert r"item\x9b31m\u202e" in shown
    assert r"user\x1bc\x07" in persia_("checkpoint", "diff", out, out)
    persia_("checkpoint", "verify", out)
    persia_("checkpoint", "reshard", out, tmp_path / f"shards{RESET}")
    persia_("export", out, tmp_path / "rows")
    assert r"user\x1bc\x07: 7 rows" in persia_("import", config, tmp_path / "rows", "--output", tmp_path / "new")
    persia_("checkpoint", "publish", out, "--output", tmp_path / f"log{RESET}")
    persia_("export", out, tmp_path / "none", "--table", f"none{RESET}", ok=False)


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_init(tmp_path, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    columns = {
        f"user_id{RESET}": rng.integers(0, 50, 400),
        f"price{HOSTILE}": rng.random(400),
        CLICK: rng.integers(0, 2, 400),
    }
    file = tmp_path / f"clicks{RESET}.{end}"
    if end == "csv":
        rows = zip(*columns.values(), strict=True)
        file.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    else:
        pq.write_table(pa.table(columns), file)
    assert r"click\x1bc" in persia_("init", file, "--label", CLICK, "--yes")
    persia_("init", file, "--label", f"none{RESET}", "--out", "other", ok=False)


def test_a_file_whose_name_is_not_utf_8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b.toml")
    assert r"\udcff\x1b" in persia_("train", name, ok=False)


def health(role):
    labels = [{"table": f"{name}{HOSTILE}"} for name in ("a", "b")]
    return Health(role, 0, 1, 7, f"host{RESET}", 60.0, "", [Metric("ps_rows", 5.0, each) for each in labels], [])


def test_processes_of_a_cluster():
    """What other processes say of themselves is data, too."""
    answers = [
        Answer(Member("embedding_ps", 0, 1, f"tcp://x:1{RESET}"), health("embedding_ps")),
        Answer(Member(f"role{RESET}", 0, 1, f"tcp://x:2{RESET}"), None, f"dead: {HOSTILE}"),
    ]
    seen = ClusterView(0.0, view([], answers, 1.0))
    for shown in (
        _table(answers),
        frame(seen, width=200),
        frame(ClusterView(0.0, [], HOSTILE)),
        *map(details, answers),
    ):
        console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
        console.print(shown)
        text = console.file.getvalue()
        assert not {c for c in text if c != "\n" and not c.isprintable()}, text


def test_no_command_prints_on_its_own():
    """All text goes through `persia.printable`, also that of commands to come."""
    bare = []
    for path in Path(persia.cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.echo", "Console", "Text", "print"):
                bare.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
    # The progress bar's texts are constants, and `print_toml` escapes names as TOML does.
    allowed = ("checkpoint.py", "ui.py")
    assert [place for place in bare if not place.startswith(allowed)] == []
    assert sum(place.startswith(allowed) for place in bare) <= 4
