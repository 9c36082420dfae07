"""The roles as processes.

python benchmarks/cluster.py [--only NAME] [--preset smoke|laptop|full] [--json FILE]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness

from persia import rpc
from persia.services import EmbeddingPS

ROUNDS = {"smoke": 2, "laptop": 11, "full": 31}
DEADLINE = 30.0

SERVE = """
import sys
from persia import rpc
from persia.modes import Hybrid
from persia.ps import EmbeddingServer
from persia.schema import Adagrad, Table
from persia.services import EmbeddingPS

tables = {name: Table(name, dim=16) for name in ("item", "user")}
server = rpc.serve(EmbeddingServer(tables, Adagrad(0.05), Hybrid(4), 0, 2), sys.argv[1], protocol=EmbeddingPS)
sys.stdin.read()
assert "torch" not in sys.modules
server.close()
"""


def restart_seconds() -> float:
    """From the start of the interpreter to the first answer, the reconnection of a waiting client included."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    stub = rpc.connect(address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)  # type: ignore[type-abstract]
    source = Path(__file__).resolve().parents[1] / "src"
    paths = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, address], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        try:
            stub.statistics()
            return time.perf_counter() - began
        finally:
            rpc.close(stub)
            process.communicate(timeout=DEADLINE)


def restart(preset: str):
    """Import and start of a PS process to its first rpc answer, files in the page cache."""
    restart_seconds()
    values = [restart_seconds() for _ in range(ROUNDS[preset])]
    return harness.quantity("ps.restart_s", values, "s", 0.5, at_least=False, details={"slowest": max(values)})


MEASURES = {
    "ps.restart_s": restart,
}

if __name__ == "__main__":
    harness.main(MEASURES)
