"""`persia top` on a terminal of its own."""

from __future__ import annotations

import fcntl
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
from typer.testing import CliRunner

from persia.cli.app import app
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


def test_a_pipe_is_no_terminal(cluster):
    done = CliRunner().invoke(app, ["top", cluster[0]])
    assert done.exit_code == 1
    assert "--once" in str(done.exception)


def test_a_cluster_that_is_gone_is_said_so():
    done = CliRunner().invoke(app, ["top", "tcp://127.0.0.1:9", "--once", "--interval", "0.1", "--timeout", "0.2"])
    assert done.exit_code == 1
    assert "coordinator" in done.output
