"""Workers in processes of their own, with gloo between them, that train small networks with APMSqueeze."""

import multiprocessing
import os
import traceback

import numpy as np
import torch
import torch.distributed as dist

from persia.optim import APMSqueeze, APMSqueezeOptions

TIMEOUT = 60.0


class Workers:
    """Processes that run functions of importable modules; used as a context."""

    def __init__(self, count):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(count)]
        self._ours = [ours for ours, _ in pipes]
        self.processes = [
            spawn.Process(target=_serve, args=(rank, count, self._store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join(TIMEOUT)

    def run(self, function, *args, ranks=None):
        """`function(rank, count, *args)` on all; results by rank."""
        chosen = list(range(len(self._ours))) if ranks is None else ranks
        for pipe in self._ours:
            pipe.send((function, args))
        results = []
        for rank in chosen:
            assert self._ours[rank].poll(TIMEOUT), f"worker {rank} is late"
            results.append(self._ours[rank].recv())
        for rank, (_, trace) in zip(chosen, results, strict=True):
            assert trace is None, f"worker {rank}:\n{trace}"
        return [result for result, _ in results]


def _serve(rank, count, port, pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(rank, count, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


SHAPES = [(70, 33), (5,), (1500,), (), (0, 3), (40, 40), (300,)]


def tensors(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def gradients(step, rank, shapes=SHAPES):
    """Of one worker in one step: a part that all share, and noise."""
    return [
        (a + 0.5 * b).astype(np.float32)
        for a, b in zip(tensors([step // 3, 9], shapes), tensors([step, rank, 8], shapes), strict=True)
    ]


def make(options, shapes=SHAPES, **arguments):
    parameters = [torch.nn.Parameter(torch.from_numpy(np.array(t))) for t in tensors(0, shapes)]
    return parameters, APMSqueeze(parameters, options=APMSqueezeOptions(**options), **arguments)


def step(parameters, optimizer, number, rank, shapes=SHAPES):
    for parameter, g in zip(parameters, gradients(number, rank, shapes), strict=True):
        parameter.grad = torch.from_numpy(np.array(g))
    optimizer.step()


def arrays(parameters):
    return [p.detach().numpy().copy() for p in parameters]
