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
from rich.console import Console, RenderableType
from typer.testing import CliRunner

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia[ray]"')

import persia
from persia.cli.app import app
from persia.dashboard.top import COLUMNS, Top, frame
from persia.dashboard.view import ClusterView, ProcessView, Watch
from persia.membership.observing import Answer
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
