"""The updates of a frozen v, held against the reference and against their formula."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.optim import APMSqueeze, APMSqueezeOptions, OneBit, Uncompressed
from persia.optim.variance_refresh import VarianceRefresh
from support.apms_case import COMPRESSORS, arrays, changing, feed, gradients, joined, make, resumed, step, tensors
from support.apms_threads import together
from support.examples import examples
from support.twins.apmsqueeze import ReferenceAPMSqueeze

BETAS = (0.9, 0.97)
OPTIONS = {"warmup": 4, "bucket_bytes": 4 * 2000, "refresh_variance": 2}
STEPS = 30
REFERENCE_STEPS = 20
"""The reference is slow. With kappa 1, v is updated three times in these before and after a new warm-up."""


def trained(rank, exchange, options, native, rates, rewarm, steps=STEPS):
    parameters, optimizer = joined(exchange, OPTIONS | {"debug": True} | options, native=native, betas=BETAS)
    full = []
    for number in range(steps):
        if number == rewarm:
            optimizer.rewarm(3)
        before = exchange.sent
        feed(parameters, optimizer, changing(number, rank, rates))
        full.append(exchange.sent - before == 4 * (exchange.size - 1) * sum(p.numel() for p in parameters))
    return arrays(parameters), optimizer.consolidate(), full


@pytest.mark.parametrize("communicate", ["momentum", "gradient"])
@pytest.mark.parametrize("compressor", COMPRESSORS[::2], ids=str)
@given(
    workers=st.integers(2, 4),
    kappa=st.integers(1, 4),
    rates=st.lists(st.sampled_from([0.9, 0.97, 1.0, 1.05]), min_size=1, max_size=4),
    rewarm=st.sampled_from([None, 9]),
    native=st.booleans(),
    others=st.fixed_dictionaries({"clip_norm": st.sampled_from([None, 20.0]), "track_scale": st.booleans()}),
)
@settings(max_examples=examples(4), deadline=None, derandomize=True)
def test_it_equals_the_reference(compressor, communicate, workers, kappa, rates, rewarm, native, others):
    options = {"compressor": compressor, "communicate": communicate, "refresh_variance": kappa, **others}
    reference = ReferenceAPMSqueeze(tensors(0), workers, APMSqueezeOptions(**OPTIONS | options), betas=BETAS)
    for number in range(REFERENCE_STEPS):
        if number == rewarm:
            reference.rewarm(3)
        reference.step([changing(number, rank, rates) for rank in range(workers)])
    results = together(workers, trained, options, native, rates, rewarm, REFERENCE_STEPS)
    for rank, (found, state, _) in enumerate(results):
        for t, (value, wanted) in enumerate(zip(found, reference.x, strict=True)):
            np.testing.assert_allclose(value.ravel(), wanted, rtol=3e-5, atol=6e-6)
            errors = state["state"][t]["worker_error"][rank].ravel()
            np.testing.assert_allclose(errors, reference.worker_errors[rank][t], atol=2e-5)


@pytest.mark.parametrize("kappa", [1, 2, 3])
def test_the_distance_doubles_after_every_kappa_updates(kappa):
    def check(rank, exchange):
        _, state, full = trained(rank, exchange, {"refresh_variance": kappa}, True, [1.0], None)
        found = [number + 1 for number in range(STEPS) if full[number] and number >= 4]
        wanted, at = [], 4
        for j in range(STEPS):
            at += 2 ** (j // kappa)
            wanted.append(at)
        assert found == [at for at in wanted if at <= STEPS]
        assert state["apmsqueeze"]["cohorts"][0]["refresh"] == [len(found), found[-1]]
        assert all(full[:4])

    together(2, check)


def test_an_update_has_the_weight_of_its_distance_up_to_a_limit():
    schedule = VarianceRefresh(16)
    schedule.restart(100)
    assert schedule.weight(0.999, 101, 101) == pytest.approx(0.001 / (1 - 0.999**101))
    assert schedule.weight(0.999, 108, 10**6) == pytest.approx(1 - 0.999**8)
    assert schedule.weight(0.999, 10_000, 10_000) == 0.05
    assert schedule.weight(0.9, 108, 10**6) == pytest.approx(0.1)  # As much as Adam.
    assert schedule.weight(0.999, 108, 0) == 0.05  # It has never had a gradient.


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_v_follows_gradients_that_change(native):
    """v of constant gradients in closed form, after they have become three times as large."""

    def check(rank, exchange):
        options = OPTIONS | {"warmup": 59, "compressor": OneBit(block=64)}
        parameters, optimizer = joined(exchange, options, native=native, betas=(0.9, 0.99))
        ones = [np.ones(p.shape, np.float32) for p in parameters]
        for number in range(67):
            feed(parameters, optimizer, [(1.0 if number < 59 else 3.0) * g for g in ones])
        expected = 1.0
        for at, distance in ((60, 1), (61, 1), (63, 2), (65, 2)):
            weight = (1 - 0.99**distance) / (1 - 0.99**at)
            expected = (1 - weight) * expected + weight * 9.0
        for values in optimizer.state_dict()["state"].values():
            torch.testing.assert_close(values["exp_avg_sq"], torch.full_like(values["exp_avg_sq"], expected))

    together(2, check)


def test_with_an_update_in_every_step_it_is_adam():
    options = {"warmup": 20, "compressor": Uncompressed(), "variance_floor": 1e-12, "refresh_variance": 100}
    parameters, optimizer = make(options, lr=0.01)
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    adam = torch.optim.Adam(others, lr=0.01)
    for number in range(60):
        step(parameters, optimizer, number, 0)
        for other, parameter in zip(others, parameters, strict=True):
            other.grad = parameter.grad.clone()
        adam.step()
    assert optimizer.phase == "compressed"
    for mine, theirs in zip(parameters, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def test_errors_wait_for_the_next_compressed_step():
    """An update neither uses nor changes them, and its momentum is the exact one."""
    parameters, optimizer = make(OPTIONS | {"refresh_variance": 1}, betas=BETAS)
    for number in range(6):  # Updates in steps 5, 7 and 11.
        step(parameters, optimizer, number, 0)
    before = optimizer.state_dict()["state"]
    assert optimizer.statistics()["worker_error_norm"] > 0
    step(parameters, optimizer, 6, 0)
    for t, values in optimizer.state_dict()["state"].items():
        assert torch.equal(values["worker_error"], before[t]["worker_error"])
        assert torch.equal(values["server_error"], before[t]["server_error"])
        wanted = 0.9 * before[t]["exp_avg"] + 0.1 * torch.from_numpy(np.array(gradients(6, 0)[t]))
        torch.testing.assert_close(values["exp_avg"], wanted)


def test_v_keeps_its_floor():
    parameter = torch.nn.Parameter(torch.zeros(4096))
    options = APMSqueezeOptions(warmup=2, variance_floor=0.1, refresh_variance=2)
    optimizer = APMSqueeze([parameter], 1e-3, BETAS, options=options)
    for number in range(20):
        parameter.grad = torch.randn(4096) * 2.0**number
        parameter.grad[7] = 0.0
        optimizer.step()
    v = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert float(v[7]) == pytest.approx(float(v.mean()) * 0.1, rel=0.05)


def test_elements_without_v_move_once_they_have_gradients():
    parameter = torch.nn.Parameter(torch.zeros(4096))
    options = APMSqueezeOptions(warmup=4, compressor=Uncompressed(), variance_floor=0.0, refresh_variance=1)
    optimizer = APMSqueeze([parameter], 1e-3, options=options)
    for number in range(20):
        parameter.grad = torch.ones(4096)
        if number < 8:
            parameter.grad[7] = 0.0
        optimizer.step()
        assert (parameter[7] == 0.0) == (number < 10)  # v is updated in steps 5, 7, 11 and 19.
    assert parameter.isfinite().all()


def test_it_is_off_by_default():
    parameters, optimizer = make({"warmup": 4})
    for number in range(6):
        step(parameters, optimizer, number, 0)
    assert optimizer._cohorts[0].refresh is None
    assert "refresh" not in optimizer.state_dict()["apmsqueeze"]["cohorts"][0]


@pytest.mark.parametrize("consolidate", [True, False], ids=["consolidated", "own"])
@pytest.mark.parametrize("at", [3, 4, 6, 9, 13])
def test_a_resumed_run_is_the_same_to_the_bit(at, consolidate):
    options = OPTIONS | {"track_scale": True}
    together(2, partial(resumed, rewarm={9: 2}, betas=BETAS), options, at, consolidate, 20)


def test_a_run_that_had_no_updates_begins_with_them():
    parameters, old = make({"warmup": 4}, betas=BETAS)
    for number in range(10):
        step(parameters, old, number, 0)
    others, optimizer = make(OPTIONS, betas=BETAS)
    optimizer.load_state_dict(old.state_dict())
    step(others, optimizer, 10, 0)
    assert optimizer.state_dict()["apmsqueeze"]["cohorts"][0]["refresh"] == [1, 11]


def test_on_dense_pss_v_stays_and_is_updated_afterwards():
    def check(rank, exchange):
        parameters, optimizer = joined(exchange, OPTIONS, betas=BETAS)
        for number in range(5):  # Updates in steps 5, 6, 8, 10, 14.
            step(parameters, optimizer, number, rank)
        before = optimizer.state_dict()["state"]
        averaged = optimizer.hand_over()
        for number in range(5, 12):
            for t, parameter in enumerate(parameters):
                every = [torch.from_numpy(np.array(gradients(number, other)[t])) for other in range(exchange.size)]
                parameter.grad = torch.stack(every).mean(0)
            averaged.step()
        for t, parameter in enumerate(parameters):
            assert torch.equal(averaged.state[parameter]["exp_avg_sq"], before[t]["exp_avg_sq"])
        optimizer.take_back()
        step(parameters, optimizer, 12, rank)
        assert optimizer.consolidate()["apmsqueeze"]["cohorts"][0]["refresh"] == [2, 13]
        return arrays(parameters)

    for mine, theirs in zip(*together(2, check), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_late_parameter_has_a_schedule_of_its_own():
    parameters, optimizer = make(OPTIONS, betas=BETAS)
    for number in range(16):
        for t, (parameter, g) in enumerate(zip(parameters, gradients(number, 0), strict=True)):
            parameter.grad = None if t == 2 and number < 5 else torch.from_numpy(np.array(g))
        optimizer.step()
    cohorts = optimizer.state_dict()["apmsqueeze"]["cohorts"]
    assert [cohort["refresh"] for cohort in cohorts] == [[5, 14], [4, 10]]
