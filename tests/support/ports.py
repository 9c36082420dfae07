"""Ports for servers that go away and come back."""

from __future__ import annotations

import contextlib
import random
import socket


def lasting_port() -> int:
    """Returns a free port that stays free while no server of the test has it.

    The kernel gives ports from 32768 on to whoever asks for any, in all processes of the host, and to connections. Even
    a client that looks for a server at such a port may take it: its connection then has the same port at both ends.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
