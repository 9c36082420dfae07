"""The small network that tests of APMSqueeze train, and how what becomes of it is held against the reference."""

import functools

import numpy as np
import torch

from persia.checkpoint.packing import pack, unpack
from persia.optim import APMSqueeze, APMSqueezeOptions, OneBit, StochasticTernary, TopK, Uncompressed
from support.twins.apmsqueeze import ReferenceAPMSqueeze

COMPRESSORS = [OneBit(block=128), OneBit("l2", block=64), TopK(0.1), StochasticTernary(block=64), Uncompressed()]
SHAPES = [(70, 33), (5,), (1500,), (), (0, 3), (40, 40), (300,)]


@functools.lru_cache(512)
def _tensors(seed, shapes):
    rng = np.random.default_rng(seed)
    found = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    for tensor in found:
        tensor.flags.writeable = False
    return found


def tensors(seed, shapes=SHAPES):
    """Read-only: every worker, the reference and many tests share them."""
    return list(_tensors(tuple(seed) if isinstance(seed, list) else seed, tuple(shapes)))


def gradients(step, rank, shapes=SHAPES):
    """Of one worker in one step: a part that all share, and noise. Read-only, as `tensors`."""
    return list(_gradients(step, rank, tuple(shapes)))


@functools.lru_cache(512)
def _gradients(step, rank, shapes):
    found = [
        np.asarray(a + 0.5 * b, np.float32)
        for a, b in zip(tensors([step // 3, 9], shapes), tensors([step, rank, 8], shapes), strict=True)
    ]
    for gradient in found:
        gradient.flags.writeable = False
    return found


def make(options, shapes=SHAPES, device="cpu", **arguments):
    parameters = [torch.nn.Parameter(torch.from_numpy(np.array(t)).to(device)) for t in tensors(0, shapes)]
    return parameters, APMSqueeze(parameters, options=APMSqueezeOptions(**options), **arguments)


def joined(exchange, options, shapes=SHAPES, native=True, **arguments):
    """`make` for one of several workers."""
    parameters, optimizer = make(options, shapes, **arguments)
    optimizer._exchange = exchange
    if not native:
        optimizer._pool = None  # The path of other devices.
    return parameters, optimizer


def changing(number, rank, rates):
    """Gradients that grow or shrink by a rate per step, another one for each tensor."""
    return [(g * rates[t % len(rates)] ** number).astype(np.float32) for t, g in enumerate(gradients(number, rank))]


def feed(parameters, optimizer, grads):
    for parameter, g in zip(parameters, grads, strict=True):
        parameter.grad = torch.from_numpy(np.array(g)).to(parameter.device)
    optimizer.step()


def step(parameters, optimizer, number, rank, shapes=SHAPES):
    feed(parameters, optimizer, gradients(number, rank, shapes))


def arrays(parameters):
    return [p.detach().cpu().numpy().copy() for p in parameters]


def train(parameters, optimizer, rank, steps, shapes=SHAPES, rewarm=None):
    """What a worker has after some steps: parameters, consolidated state, statistics. `rewarm`: its steps, by step."""
    for number in range(steps):
        if number in (rewarm or {}):
            optimizer.rewarm(rewarm[number])
        step(parameters, optimizer, number, rank, shapes)
    return arrays(parameters), optimizer.consolidate(), optimizer.statistics()


def resumed(rank, exchange, options, at, consolidate, steps, of=gradients, rewarm=None, **arguments):
    """A run from the state that another one had after `at` steps has the parameters of the other one, to the bit.

    `of`: gradients by step and rank. `rewarm`: as in `train`; a state before the same step is saved right after it.
    """
    whole, optimizer = joined(exchange, options, **arguments)
    for number in range(steps):
        if number in (rewarm or {}):
            optimizer.rewarm(rewarm[number])
        if number == at:
            state = optimizer.consolidate() if consolidate else optimizer.state_dict()
            state = unpack(pack(state), "memory") if consolidate else state
            saved, phase = arrays(whole), optimizer.phase
        feed(whole, optimizer, of(number, rank))
    rest, other = joined(exchange, options, **arguments | {"lr": 0.5})
    with torch.no_grad():
        for parameter, value in zip(rest, saved, strict=True):
            parameter.copy_(torch.from_numpy(value))
    other.load_state_dict(state)
    assert other.phase == phase
    for number in range(at, steps):
        if number > at and number in (rewarm or {}):
            other.rewarm(rewarm[number])
        feed(rest, other, of(number, rank))
    for mine, theirs in zip(arrays(whole), arrays(rest), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert other.statistics()["steps"] == steps


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
