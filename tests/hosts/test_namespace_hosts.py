"""The hosts that tests and benchmarks make: their links, their ends, and what one of them sees of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from support.hosts import Hosts, Treatment, UnavailableError
from support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    while part := connection.recv(1 << 20):
        pass
"""
SEND = """
import socket, sys, time
began = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000))
for _ in range(int(sys.argv[2])):
    connection.sendall(bytes(1 << 20))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - began)
"""
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 1), 1.0)
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("silent")
"""
DATAGRAMS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
    for _ in range(4000):
        sending.sendto(bytes(100), (sys.argv[1], 9))
"""
NUMBERED = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
    for number in range(2000):
        sending.sendto(number.to_bytes(2, "big"), (sys.argv[1], 5000))
    sending.settimeout(0.1)
    while True:  # As any of them may be lost.
        sending.sendto(b"end", (sys.argv[1], 5000))
        try:
            sending.recv(1)
            break
        except TimeoutError:
            pass
"""
COUNT = """
import contextlib, json, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiving:
    receiving.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
    receiving.bind(("0.0.0.0", 5000))
    print("listens", flush=True)
    numbers = []
    with contextlib.suppress(TimeoutError):
        while True:
            data, sender = receiving.recvfrom(16)
            if data == b"end":
                receiving.sendto(b".", sender)
                receiving.settimeout(1.0)  # What was held back is there by then.
            else:
                numbers.append(int.from_bytes(data, "big"))
    print(json.dumps(numbers), flush=True)
"""
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    while part := connection.recv(1 << 20):
        connection.sendall(part)
"""
QUESTIONS = """
import hashlib, json, random, socket, sys, threading, time
data = random.Random(1).randbytes(4 << 20)
connection = socket.create_connection((sys.argv[1], 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(5):
    began = time.monotonic()
    connection.sendall(b"?")
    connection.recv(1)
    times.append(time.monotonic() - began)
thread = threading.Thread(target=connection.sendall, args=(data,))
thread.start()
answer = b""
while len(answer) < len(data):
    answer += connection.recv(1 << 20)
thread.join()
print(json.dumps({"seconds": times, "same": answer == data}))
"""
WAIT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
connection.sendall(b"?")
connection.recv(1)
print("connected", flush=True)
try:
    connection.recv(1)
except ConnectionResetError:
    print("reset")
except ConnectionAbortedError:
    print("aborted")
"""


@pytest.fixture
def two() -> Iterator[Hosts]:
    try:
        hosts = Hosts(2, 0.1)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        yield hosts


def answers(hosts: Hosts, number: int, other: int) -> bool:
    """Returns whether a connection from one host to a closed port of another is refused, within a second."""
    return hosts.run(number, sys.executable, "-c", KNOCK, hosts.addresses[other]).stdout.strip() == "refused"


def wait_for_answer(hosts: Hosts, number: int, other: int) -> None:
    """Connects until the other host answers: on a busy machine, an answer may take longer than a second."""
    wait_until(lambda: answers(hosts, number, other), f"an answer of host {other}", 120.0)


def test_a_link_carries_its_rate(two):
    mebibytes = 8
    receiving = two.start(0, sys.executable, "-c", RECEIVE, stdout=subprocess.PIPE)
    assert receiving.stdout.readline().strip() == "listens"
    seconds = float(two.run(1, sys.executable, "-c", SEND, two.addresses[0], str(mebibytes)).stdout)
    receiving.communicate()
    # Never faster, however busy this machine is, except for the burst that passes without waiting.
    assert seconds > 0.8 * mebibytes * (1 << 20) * 8 / 0.1e9
    sent, received = two.moved(1)
    assert sent > mebibytes << 20 > 20 * received
    assert two.moved(0)[1] == pytest.approx(sent, rel=0.01)


def test_links_are_cut_and_lose_packets(two):
    wait_for_answer(two, 1, 0)
    two.cut(0)
    assert not answers(two, 1, 0)
    two.join(0)
    wait_for_answer(two, 1, 0)
    two.mute(0)  # It hears the question, and cannot answer.
    before = two.moved(0)
    assert not answers(two, 1, 0)
    after = two.moved(0)
    assert after[1] > before[1]
    assert after[0] == before[0]
    two.lose(0, 0.0)
    wait_for_answer(two, 1, 0)
    two.deafen(0)
    before = two.moved(0)
    assert not answers(two, 0, 1)  # It asks, and hears no answer.
    after = two.moved(0)
    assert after[0] > before[0]
    assert after[1] == before[1]
    two.lose(0, 0.0)
    wait_for_answer(two, 0, 1)
    two.shape(1, None)
    two.lose(1, 0.25)
    before = two.moved(1)[0]  # Counted as packets leave the host, so none is still on its way when it is read.
    two.run(1, sys.executable, "-c", DATAGRAMS, two.addresses[0])
    assert (two.moved(1)[0] - before) / (4000 * 142) == pytest.approx(0.75, abs=0.05)


def listen(hosts: Hosts, number: int, program: str) -> subprocess.Popen[str]:
    """Starts a program on a host and waits until it listens."""
    listening = hosts.start(number, sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert listening.stdout is not None
    assert listening.stdout.readline().strip() == "listens"
    return listening


def test_packets_are_late_reordered_and_duplicated(two):
    two.shape(0, None)
    two.shape(1, None)
    two.treat(1, Treatment(0.02, 0.01, 0.05, 0.05))
    counting = listen(two, 0, COUNT)
    two.run(1, sys.executable, "-c", NUMBERED, two.addresses[0])
    numbers = json.loads(counting.communicate(timeout=120)[0])
    copies = len(numbers) - len(set(numbers))
    first = list(dict.fromkeys(numbers))
    overtaken = sum(number < latest for number, latest in zip(first, accumulate(first, max), strict=True))
    assert 50 < copies < 200
    assert 50 < overtaken < 200
    # TCP makes a stream of it again, and is late.
    echo = listen(two, 0, ECHO)
    answer = json.loads(two.run(1, sys.executable, "-c", QUESTIONS, two.addresses[0]).stdout)
    echo.communicate(timeout=120)
    assert answer["same"]
    assert min(answer["seconds"]) > 0.04
    two.treat(1, Treatment())  # Without a relay again.
    echo = listen(two, 0, ECHO)
    answer = json.loads(two.run(1, sys.executable, "-c", QUESTIONS, two.addresses[0]).stdout)
    echo.communicate(timeout=120)
    assert min(answer["seconds"]) < 0.04


def test_a_host_with_a_relay_dies_and_boots_without_one(two):
    two.treat(0, Treatment(delay=0.01))
    two.kill(0)
    two.boot(0)
    wait_for_answer(two, 1, 0)
    two.treat(0, Treatment(delay=0.01))
    wait_for_answer(two, 1, 0)


def test_connections_are_reset(two):
    echo = listen(two, 0, ECHO)
    waiting = two.start(1, sys.executable, "-c", WAIT, two.addresses[0], stdout=subprocess.PIPE)
    assert waiting.stdout is not None
    assert waiting.stdout.readline().strip() == "connected"
    two.reset(0)
    assert waiting.communicate(timeout=120)[0].strip() == "reset"
    echo.communicate(timeout=120)


def test_a_host_is_isolated_and_ends_with_all_its_processes(two):
    own = two.run(0, "sh", "-c", "hostname && touch /dev/shm/mine && ls /dev/shm && ls -d /proc/[0-9]* | wc -l")
    name, files, processes = own.stdout.split()
    assert (name, files) == ("host-0", "mine")
    assert int(processes) < 10
    assert two.run(1, "ls", "/dev/shm").stdout == ""
    left = two.start(0, "sh", "-c", "setsid sleep 300 & echo started; wait", stdout=subprocess.PIPE)
    assert left.stdout.readline().strip() == "started"
    two.kill(0)
    left.communicate(timeout=120)  # The detached process has the other end of the pipe until its own end.
    assert not answers(two, 1, 0)
    two.boot(0)
    assert two.run(0, "ls", "/dev/shm").stdout == ""
    wait_for_answer(two, 1, 0)


def test_nothing_is_left_in_this_process_s_namespaces():
    links = Path("/proc/net/dev").read_text().count("\n")
    try:
        hosts = Hosts(3)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        assert Path("/proc/net/dev").read_text().count("\n") == links
        firsts = [host.pid for host in hosts._hosts if host is not None]
    assert len(firsts) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in firsts)


def test_a_failing_command_is_an_error_once_hosts_are_made(two):
    """Not an `UnavailableError`, for which tests are skipped."""
    two.kill(0)
    with pytest.raises(RuntimeError, match="`ip link set h0 down` failed"):
        two.cut(0)


def test_the_error_names_missing_programs(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="setpriv, unshare, nsenter, ip, tc, ss, which is not installed"):
        Hosts(1)
