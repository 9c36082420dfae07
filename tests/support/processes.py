"""Processes that torch.distributed connects, for tests of whatever communicates."""

import multiprocessing
import os
import sys
import traceback
import warnings
from unittest import mock

import torch
import torch.distributed as dist

TIMEOUT = 60.0
START_SECONDS = 200.0
"""Importing torch takes long where much else runs."""
PRELOADED = ["persia", "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "support.frozen"]
"""Imported once, by the process that the ranks of all tests are forked from. An optimizer of torch imports dynamo."""


class Processes:
    """Ranks of a process group that run functions of importable modules; used as a context."""

    def __init__(self, count, backend="gloo"):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload(PRELOADED)
        pipes = [forked.Pipe() for _ in range(count)]
        self._ours = [ours for ours, _ in pipes]
        self.processes = [
            forked.Process(target=_serve, args=(rank, count, self._store.port, backend, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # All that it finds modules by.
            for process in self.processes:
                process.start()

    def __enter__(self):
        self._answers(range(len(self._ours)), START_SECONDS)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join(TIMEOUT)

    def run(self, function, *args, ranks=None):
        """`function(rank, *args)` on all; results by rank, of `ranks` only where the others will not answer."""
        chosen = list(range(len(self._ours))) if ranks is None else ranks
        for pipe in self._ours:
            pipe.send((function, args))
        return self._answers(chosen, START_SECONDS)  # The first one imports the module of the function.

    def _answers(self, ranks, seconds):
        results = []
        for rank in ranks:
            assert self._ours[rank].poll(seconds), f"rank {rank} is late"
            results.append(self._ours[rank].recv())
        for rank, (_, trace) in zip(ranks, results, strict=True):
            assert trace is None, f"rank {rank}:\n{trace}"
        return [result for result, _ in results]


def _serve(rank, count, port, backend, pipe):
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    pipe.send((None, None))
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(rank, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
