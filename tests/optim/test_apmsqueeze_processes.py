"""APMSqueeze between processes, over gloo."""

import numpy as np
import pytest
from apms_processes import SHAPES, Workers, arrays, gradients, make, step, tensors

from persia.optim import APMSqueezeOptions, OneBit, StochasticTernary, TopK, Uncompressed
from persia.optim.apmsqueeze_reference import ReferenceAPMSqueeze

COMPRESSORS = [OneBit(block=128), OneBit("l2", block=64), TopK(0.1), StochasticTernary(block=64), Uncompressed()]


@pytest.fixture(scope="module")
def two():
    with Workers(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def three():
    with Workers(3) as workers:
        yield workers


@pytest.fixture(scope="module")
def four():
    with Workers(4) as workers:
        yield workers


def train(rank, count, steps, options, arguments):
    parameters, optimizer = make({"debug": True, "timeout": 30.0} | options, **arguments)
    for number in range(steps):
        step(parameters, optimizer, number, rank)
    return arrays(parameters), optimizer.statistics(), optimizer.consolidate()


def equals_the_reference(workers, count, options, steps=9, **arguments):
    options = {"warmup": 4, "bucket_bytes": 4 * 2000} | options
    results = workers.run(train, steps, options, arguments)
    reference = ReferenceAPMSqueeze(tensors(0), count, APMSqueezeOptions(**options), **arguments)
    for number in range(steps):
        reference.step([gradients(number, rank) for rank in range(count)])
    for rank, (found, statistics, state) in enumerate(results):
        assert statistics["phase"] == "compressed"
        assert statistics["steps"] == steps
        for t, value in enumerate(found):
            np.testing.assert_array_equal(value, results[0][0][t])
            np.testing.assert_allclose(value.ravel(), reference.x[t], rtol=1e-5, atol=1e-6)
            one = state["state"][t]
            np.testing.assert_allclose(one["worker_error"][rank].ravel(), reference.worker_errors[rank][t], atol=2e-6)
            np.testing.assert_allclose(one["server_error"].ravel(), reference.server_error[t], atol=2e-6)
            np.testing.assert_allclose(one["exp_avg"].ravel(), reference.momentum[t], atol=2e-6)
    return results


@pytest.mark.parametrize("communicate", ["momentum", "gradient"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_three_workers_equal_the_reference(three, compressor, communicate):
    equals_the_reference(three, 3, {"compressor": compressor, "communicate": communicate})


@pytest.mark.parametrize("compressor", COMPRESSORS[::4], ids=str)
def test_two_workers_equal_the_reference(two, compressor):
    equals_the_reference(two, 2, {"compressor": compressor}, weight_decay=0.1, lr=0.01)


@pytest.mark.parametrize("compressor", COMPRESSORS[::4], ids=str)
def test_four_workers_equal_the_reference(four, compressor):
    equals_the_reference(four, 4, {"compressor": compressor, "clip_norm": 20.0})


def test_shapes_are_worth_testing():
    assert (0, 3) in SHAPES and () in SHAPES
