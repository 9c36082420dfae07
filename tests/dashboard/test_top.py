"""`persia top` on a terminal of its own."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from typer.testing import CliRunner

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import persia
from persia.cli.app import app
from persia.dashboard.top import COLUMNS, Top, details, frame
from persia.dashboard.view import ClusterView, ProcessView, Watch
from persia.membership.observing import Answer
from persia.telemetry.metrics import Health, Histogram, Metric
from persia.types import Member
from support.observed_cluster import Trained, observed_cluster

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def cluster():
    trained = Trained()
    with observed_cluster(nn_worker=trained.nn_worker, embedding_ps=trained.embedding_ps) as (address, coordinator):
        yield address, coordinator, trained


class Terminal:
    """A pseudo-terminal with `persia top` on it."""

    def __init__(self, *arguments: str) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        ends = {"stdin": self.theirs, "stdout": self.theirs, "stderr": self.theirs}
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
        self.process = subprocess.Popen([sys.executable, "-m", "persia", "top", *arguments], env=environment, **ends)

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """Reads until the text matches, and returns it without escape sequences."""
        text, end = "", time.monotonic() + seconds
        while not re.search(pattern, ESCAPES.sub("", text), re.DOTALL):
            assert time.monotonic() < end, (pattern, text[-2000:])
            if select.select([self.ours], [], [], 0.1)[0]:
                text += os.read(self.ours, 1 << 16).decode(errors="replace")
        return ESCAPES.sub("", text)

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.processes
def test_keys_lead_into_a_process_and_back(cluster):
    address, _, _ = cluster
    terminal = Terminal(address, "--interval", "0.2")
    try:
        text = terminal.until(r"embedding PS 0.*ids/s")
        for shown in ("coordinator 0", "NN worker 0", "samples/s", "0.2500", "0.7500", "1.50", "MiB"):
            assert shown in text, shown
        terminal.press(b"\x1b[B\x1b[B\r")
        assert "nn_wait_seconds" in terminal.until(r"nn_worker 0 at .*nn_staleness_lookups.*nn_wait_seconds")
        terminal.press(b"\x1b")
        terminal.until(r"process .*up.*rate.*embedding PS 0")
        terminal.press(b"x k")
        terminal.press(b"\r")
        terminal.until(r"embedding_ps 0 at .*ps_hits.*table=item")
        terminal.press(b"q")
        assert terminal.process.wait(30) == 0
        assert termios.tcgetattr(terminal.theirs)[3] == terminal.before[3]  # Echo and lines are as they were.
    finally:
        terminal.close()


def test_one_frame_for_scripts(cluster):
    address, coordinator, _ = cluster
    done = CliRunner().invoke(app, ["top", address, "--once", "--interval", "0.1"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for shown in ("NN worker 0", "samples/s", "embedding PS 0", "ids/s", "AUC 0.7500"):
        assert shown in done.output, shown
    coordinator.depart("embedding_ps", 0, 1, "[bold]no room[/bold]")
    done = CliRunner().invoke(app, ["top", address, "--once", "--interval", "0.1"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "dead: [bold]no room[/bold]" in done.output


def many(servers: int) -> ClusterView:
    """A cluster of long numbers, whose last process does not answer."""
    numbers = {"cpu": 1.25, "wait": 0.22, "queue": 12, "loss": 0.6443, "auc": 0.5573, "staleness": 1.5}
    worker = ProcessView(
        "NN worker 0",
        "nn_worker",
        "host 1",
        "",
        86_400,
        27_900,
        "samples/s",
        step=123_456_789,
        memory=5 << 30,
        **numbers,
    )
    ps = [ProcessView(f"embedding PS {i}", "embedding_ps", "host 1", "", 3_600, 3e5, "ids/s") for i in range(servers)]
    return ClusterView(
        0.0, [worker, *ps, ProcessView("data loader 0", "data_loader", "tcp://x:1", "dead: " + "x" * 300)]
    )


def shown(renderable: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


def test_a_narrow_terminal_lacks_columns_and_cuts_none_off():
    lines = shown(frame(many(2), 0, 80, 23), 80)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines[1:])
    assert lines[1].split() == ["process", "rate", "wait", "stale", "loss", "AUC", "queue", "memory"]
    assert " ".join(lines[3].split()) == "NN worker 0 27.9k samples/s 22% 1.50 0.6443 0.5573 12 5,120 MiB"
    assert lines[5].split()[-2:] == ["300k", "ids/s"]
    assert shown(frame(many(2), width=160), 160)[1].split() == list(COLUMNS)


def test_the_marked_process_is_on_the_screen():
    seen = many(30)  # More than fit.
    for selected, process in enumerate(seen.processes):
        lines = shown(frame(seen, selected, 80, 23), 80)
        assert len(lines) == 23
        assert any(line.startswith(f"{process.name} ") for line in lines)
    assert lines[-1].startswith("data loader 0: dead: xxx")
    assert lines[-1].endswith("…")


def test_the_newest_decision_of_the_scaler_is_above_the_table():
    seen = many(30)
    seen = ClusterView(0.0, seen.processes, notes=["12:00 ps 1 -> 2: [red]; done", "12:10 ps 2 -> 3: " + "x" * 200])
    lines = shown(frame(seen, 0, 80, 23), 80)
    assert len(lines) == 23
    assert lines[1].startswith("scaler: 12:10 ps 2 -> 3: xx")
    assert max(map(len, lines)) <= 80
    assert not any("12:00" in line for line in lines)


def metrics_of(role: str, labels: list[dict[str, str]]) -> Answer:
    """A process with several metrics of one name and value, as tables without a row have."""
    times = Histogram()
    times.add(0.001)
    found = [Metric("ps_disk_unreadable", 0.0, each) for each in labels]
    return Answer(
        Member(role, 0, 1, "tcp://127.0.0.1:1"),
        Health(role, 0, 1, 7, "host", 60.0, "", found, [times.latency("rpc_seconds", each) for each in labels]),
    )


@given(st.lists(st.dictionaries(st.sampled_from(["table", "method", "rank"]), st.sampled_from("abc")), max_size=5))
def test_metrics_with_one_name_are_ordered_by_labels(labels):
    lines = shown(details(metrics_of("embedding_ps", labels)), 120)
    found = [line.split("│")[2].strip() for line in lines if "ps_disk_unreadable" in line]
    assert found == sorted(" ".join(f"{name}={value}" for name, value in each.items()) for each in labels)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_enter_opens_each_process(rank):
    tables = [{"table": "user"}, {"table": "item"}]
    answers = [metrics_of(role, tables) for role in ("embedding_ps", "nn_worker", "embedded")]
    watch = Watch(lambda: answers, 3600.0)
    console = Console(width=80, height=30, file=io.StringIO(), force_terminal=True, color_system=None)
    try:
        watch.next(0, 30.0)
        top = Top(watch, console)
        for action in ["down"] * rank + ["open"]:
            top._act(action)
        text = "\n".join(shown(top._render(), 80))
    finally:
        watch.close()
    assert f"{answers[rank].member.role} 0 at host 7" in text
    assert text.count("ps_disk_unreadable") == 2


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100])
def test_no_figure_of_a_process_is_cut(width):
    answer = metrics_of("embedding_ps", [{"table": "a-table-of-a-rather-long-name", "method": "lookup"}])
    health = answer.health._replace(metrics=[Metric("ps_bytes_of_some_kind", 123456789012.0, {"table": "item" * 9})])
    lines = shown(details(answer._replace(health=health)), width)
    assert max(map(len, lines)) <= width
    for figure in ("1.23457e+11", "0.001 s"):
        assert figure in "\n".join(lines)


@pytest.mark.parametrize("width", range(30, 161, 5))
def test_a_frame_of_any_width_has_whole_figures(width):
    wide, lines = shown(frame(many(2), 0, 1000, 23), 1000), shown(frame(many(2), 0, width, 23), width)
    assert max(map(len, lines)) <= width
    parts = wide[0].split("  ")
    assert all(part in parts for part in lines[0].split("  "))
    for line, whole in zip(lines[3:7], wide[3:7], strict=True):
        assert "…" not in line
        assert set(line.split()) <= set(whole.split())


def test_a_pipe_gets_whole_lines():
    watch = Watch(lambda: [Answer(Member("embedded", 0, 1, ""), persia.cluster.Embedded(1).health())] * 2, 0.01)
    console = Console(width=40, file=io.StringIO())
    try:
        assert Top(watch, console).once(30) is not None
    finally:
        watch.close()
    assert " MiB" in console.file.getvalue()


def test_a_pipe_is_no_terminal(cluster):
    done = CliRunner().invoke(app, ["top", cluster[0]])
    assert done.exit_code == 1
    assert "--once" in str(done.exception)


def test_a_cluster_that_is_gone_is_said_so():
    done = CliRunner().invoke(app, ["top", "tcp://127.0.0.1:9", "--once", "--interval", "0.1", "--timeout", "0.2"])
    assert done.exit_code == 1
    assert "coordinator" in done.output
