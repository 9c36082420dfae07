"""APMSqueeze between processes, over gloo."""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persia.errors import ConfigError, DeadlineError
from persia.optim import APMSqueeze, APMSqueezeOptions, OneBit, TopK, Uncompressed
from persia.optim.buckets import Bucket, Flat, Rule
from support.apms_case import COMPRESSORS, SHAPES, arrays, equal_the_reference, gradients, make, step, tensors, train
from support.processes import Processes
from support.twins.apmsqueeze import ReferenceAPMSqueeze

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def three():
    with Processes(3) as processes:
        yield processes


@pytest.fixture(scope="module")
def four():
    with Processes(4) as processes:
        yield processes


def trained(rank, steps, options, arguments, device="cpu"):
    parameters, optimizer = make({"debug": True, "timeout": 30.0} | options, device=device, **arguments)
    return train(parameters, optimizer, rank, steps)


def equals_the_reference(processes, options, steps=9, device="cpu", **arguments):
    options = {"warmup": 4, "bucket_bytes": 4 * 2000} | options
    equal_the_reference(processes.run(trained, steps, options, arguments, device), options, steps, **arguments)


@pytest.mark.parametrize("communicate", ["momentum", "gradient"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_three_workers_equal_the_reference(three, compressor, communicate):
    equals_the_reference(three, {"compressor": compressor, "communicate": communicate})


@pytest.mark.parametrize("compressor", COMPRESSORS[::4], ids=str)
def test_two_workers_equal_the_reference(two, compressor):
    equals_the_reference(two, {"compressor": compressor}, weight_decay=0.1, lr=0.01)


@pytest.mark.parametrize("compressor", COMPRESSORS[::4], ids=str)
def test_four_workers_equal_the_reference(four, compressor):
    equals_the_reference(four, {"compressor": compressor, "clip_norm": 20.0})


def test_shapes_are_worth_testing():
    assert {(0, 3), ()} <= set(SHAPES)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def wrapped(rank, before):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    if before:
        model = DistributedDataParallel(model)
        with pytest.raises(ConfigError, match="DistributedDataParallel"):
            APMSqueeze(model.parameters())
    else:
        optimizer = APMSqueeze(model.parameters())
        model = DistributedDataParallel(model)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ConfigError, match="DistributedDataParallel"):
            optimizer.step()
    return True


@pytest.mark.parametrize("before", [True, False])
def test_ddp_is_refused(two, before):
    assert two.run(wrapped, before) == [True, True]


def made_differently(rank):
    with pytest.raises(ConfigError, match="differently on rank 1 and on rank 0"):
        make({"warmup": 3 + rank})
    return True


def test_workers_must_be_made_alike(two):
    assert two.run(made_differently) == [True, True]


def initialised_differently(rank):
    parameter = torch.nn.Parameter(torch.full((2000,), float(rank)))
    APMSqueeze([parameter])
    return float(parameter.detach().max())


def test_parameters_become_those_of_the_first(three):
    assert three.run(initialised_differently) == [0.0, 0.0, 0.0]


def die(rank, victim, at, timeout):
    parameters, optimizer = make({"warmup": 3, "timeout": timeout})
    for number in range(20):
        if rank == victim and number == at:
            os._exit(9)
        began = time.monotonic()
        try:
            step(parameters, optimizer, number, rank)
        except DeadlineError as error:
            return number, error.fields["late"], str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize(("victim", "at"), [(1, 1), (0, 6)], ids=["warmup", "compressed"])
def test_who_died_is_named_before_the_deadline(victim, at):
    others = [rank for rank in range(3) if rank != victim]
    with Processes(3) as processes:
        results = processes.run(die, victim, at, 40.0, ranks=others)
    for number, late, message, seconds in results:
        assert number == at
        assert late == [victim]
        assert f"Silent: rank {victim}" in message
        assert seconds < 30.0


def late(rank):
    parameters, optimizer = make({"warmup": 3, "timeout": 40.0})
    if rank == 1:
        return None
    optimizer._exchange._timeout = 1.0  # They have met to make it; from here on the other one does nothing.
    with pytest.raises(DeadlineError) as caught:
        step(parameters, optimizer, 0, rank)
    return caught.value.fields["late"], caught.value.fields["operation"]


def test_who_is_late_is_named():
    with Processes(2) as processes:
        (found, operation), _ = processes.run(late)
    assert found == [1]
    assert operation == "start of step 1"


def in_a_subgroup(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    parameters, optimizer = make({"warmup": 2, "process_group": group, "debug": True})
    for number in range(5):
        step(parameters, optimizer, number, rank // 2)
    return arrays(parameters)


def test_a_process_group_may_be_a_part(three):
    first, nothing, third = three.run(in_a_subgroup)
    assert nothing is None
    for mine, theirs in zip(first, third, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    reference = ReferenceAPMSqueeze(tensors(0), 2, APMSqueezeOptions(warmup=2))
    for number in range(5):
        reference.step([gradients(number, rank) for rank in range(2)])
    for value, expected in zip(first, reference.x, strict=True):
        np.testing.assert_allclose(value.ravel(), expected, rtol=1e-5, atol=2e-6)


# --- CUDA -----------------------------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_on_cuda_it_equals_the_host(compressor):
    options = {"warmup": 3, "compressor": compressor, "bucket_bytes": 8000}
    host, device = (train(*make(options, device=where), 0, 8)[0] for where in ("cpu", "cuda"))
    for mine, theirs in zip(device, host, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_workers_on_cuda_equal_the_reference(backend):
    with Processes(min(2, torch.cuda.device_count()), backend) as processes:
        equals_the_reference(processes, {"compressor": COMPRESSORS[0]}, device="cuda")


@pytest.mark.gpu
@cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("compressor", [OneBit(block=128), TopK(0.1), Uncompressed()], ids=str)
def test_what_a_bucket_does_never_waits_for_the_device(compressor):
    parameter = torch.nn.Parameter(torch.randn(5001, device="cuda"))
    flat = Flat([parameter])
    bucket = Bucket(flat, 0, flat.size, compressor, (1, 0))
    gradient, gradients = torch.randn(2, 5001, device="cuda")
    rules = [Rule(gradient, True, 1.0, 0.9, 0.999, 1e-3, 1.0, 1e-8, 1.0)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        bucket.adam(rules, bucket.collect(rules, gradients), 1.0)
        bucket.compress(rules, True, 0)
        bucket.received.copy_(bucket.sent)
        bucket.average(1)
        bucket.gathered[0].copy_(bucket.averaged)
        bucket.apply(rules, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
