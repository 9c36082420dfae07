"""The small network that tests of APMSqueeze train, and how what becomes of it is held against the reference."""

import numpy as np
import torch

from persia.optim import APMSqueeze, APMSqueezeOptions, OneBit, StochasticTernary, TopK, Uncompressed
from persia.optim.apmsqueeze_reference import ReferenceAPMSqueeze

COMPRESSORS = [OneBit(block=128), OneBit("l2", block=64), TopK(0.1), StochasticTernary(block=64), Uncompressed()]
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


def make(options, shapes=SHAPES, device="cpu", **arguments):
    parameters = [torch.nn.Parameter(torch.from_numpy(np.array(t)).to(device)) for t in tensors(0, shapes)]
    return parameters, APMSqueeze(parameters, options=APMSqueezeOptions(**options), **arguments)


def step(parameters, optimizer, number, rank, shapes=SHAPES):
    for parameter, g in zip(parameters, gradients(number, rank, shapes), strict=True):
        parameter.grad = torch.from_numpy(np.array(g)).to(parameter.device)
    optimizer.step()


def arrays(parameters):
    return [p.detach().cpu().numpy().copy() for p in parameters]


def train(parameters, optimizer, rank, steps, shapes=SHAPES, rewarm=None):
    """What a worker has after some steps: parameters, consolidated state, statistics. `rewarm`: its steps, by step."""
    for number in range(steps):
        if number in (rewarm or {}):
            optimizer.rewarm(rewarm[number])
        step(parameters, optimizer, number, rank, shapes)
    return arrays(parameters), optimizer.consolidate(), optimizer.statistics()


def equal_the_reference(results, options, steps, shapes=SHAPES, tolerance=1e-6, rewarm=None, **arguments):
    """Results of `train`, by rank."""
    lossless = isinstance(options.get("compressor", OneBit()), Uncompressed)
    reference = ReferenceAPMSqueeze(tensors(0, shapes), len(results), APMSqueezeOptions(**options), **arguments)
    for number in range(steps):
        if number in (rewarm or {}):
            reference.rewarm(rewarm[number])
        reference.step([gradients(number, rank, shapes) for rank in range(len(results))])
    for rank, (found, state, statistics) in enumerate(results):
        assert statistics["phase"] == ("compressed" if reference.frozen else "warmup")
        assert statistics["steps"] == steps
        for t, value in enumerate(found):
            np.testing.assert_array_equal(value, results[0][0][t])
            # 1e-6 of values up to 3 is a few units in the last place of float32, so it is relative as well.
            np.testing.assert_allclose(value.ravel(), reference.x[t], rtol=1e-6 if lossless else 1e-5, atol=tolerance)
            one, errors = state["state"][t], reference.worker_errors[rank][t]
            if reference.frozen:
                np.testing.assert_allclose(one["worker_error"][rank].ravel(), errors, atol=2.5 * tolerance)
                np.testing.assert_allclose(one["server_error"].ravel(), reference.server_error[t], atol=2.5 * tolerance)
            np.testing.assert_allclose(one["exp_avg"].ravel(), reference.momentum[t], atol=2.5 * tolerance)
