"""Calls from one host to another.

    python -m support.rpc_over_hosts serve ADDRESS    prints where it listens, ends with its input
    python -m support.rpc_over_hosts call ADDRESS     makes calls as each line of the input says

A line has the number of calls, the bytes of each and of its answer, and the seconds that a call may take. What came of
them is one line of JSON: how many answers were what was sent, the errors, and the counters of the connection.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from persia import rpc
from persia.errors import PersiaError
from support.rpc_samples import Sample, Service

IN_FLIGHT = 4


def serve(address: str) -> None:
    with rpc.serve(Service(), address, protocol=Sample) as server:
        print(server.address, flush=True)
        sys.stdin.read()


def call(address: str) -> None:
    for line in sys.stdin:
        count, size, seconds = line.split()
        stub = rpc.connect(address, Sample, timeout=float(seconds))

        def same(number: int, stub: Sample = stub, words: int = int(size) // 4) -> str:
            sent = np.random.default_rng(number).integers(0, 1 << 32, words, np.uint32)
            try:
                return "" if np.array_equal(stub.array(sent), sent) else "another answer"
            except PersiaError as error:
                return f"{type(error).__name__}: {error.message}"

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            errors = list(filter(None, threads.map(same, range(int(count)))))
        print(json.dumps({"same": int(count) - len(errors), "errors": errors, **rpc.statistics(stub)}), flush=True)
        rpc.close(stub)


if __name__ == "__main__":
    {"serve": serve, "call": call}[sys.argv[1]](sys.argv[2])
