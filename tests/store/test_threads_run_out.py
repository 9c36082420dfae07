"""A machine that has no more threads gives an error, and the process goes on."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import resource
from persia._core import ThreadPool

status = open("/proc/self/status").read()
used = int(next(line for line in status.splitlines() if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))  # A thread has 8 MiB of stack.
try:
    ThreadPool(10_000)
except RuntimeError as error:
    print(error)
"""


def test_threads_run_out():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert "of 10000 threads could be started" in done.stdout
    assert "ulimit -u" in done.stdout
