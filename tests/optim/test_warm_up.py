"""When APMSqueeze freezes v by itself, held against its reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.optim import APMSqueeze, APMSqueezeOptions
from support.apms_threads import together
from support.examples import examples
from support.twins.apmsqueeze import ReferenceAPMSqueeze

AUTO = APMSqueezeOptions(warmup="auto")
BETAS = (0.9, 0.875)
WINDOW = 8
"""1 / (1 - beta2)."""


def noise(step, size=4000):
    """Stationary gradients: random signs. On one worker ||v||_1 stays as it is, on several about so."""
    return np.random.default_rng(step).choice([-1.0, 1.0], size).astype(np.float32)


def frozen_at(factor, options=AUTO, steps=80, save_at=None, groups=1):
    """The number of steps before v is frozen under a learning rate of `factor(step)`; None: not within `steps`."""

    def made():
        parameters = [torch.nn.Parameter(torch.zeros(4000)) for _ in range(groups)]
        optimizer = APMSqueeze([{"params": [p]} for p in parameters], 0.01, BETAS, options=options)
        # The last group has the schedule.
        factors = [*[lambda step: 1.0] * (groups - 1), factor]
        return parameters, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factors)

    parameters, optimizer, schedule = made()
    for number in range(steps):
        if number == save_at:
            saved, position = optimizer.consolidate(), schedule.state_dict()
            parameters, optimizer, schedule = made()
            optimizer.load_state_dict(saved)
            schedule.load_state_dict(position)
        for parameter in parameters:
            parameter.grad = torch.from_numpy(noise(number))
        optimizer.step()
        schedule.step()
        if optimizer.phase == "compressed":
            return number
    return None


def rising(steps):
    return lambda step: min(1.0, (step + 1) / steps)


def test_v_is_frozen_after_two_windows_of_a_constant_rate():
    assert frozen_at(lambda step: 1.0) == 2 * WINDOW


@pytest.mark.parametrize("windows", [3, 5])
def test_v_is_not_frozen_while_a_learning_rate_rises(windows):
    steps = windows * WINDOW
    assert frozen_at(rising(steps)) == steps + WINDOW  # The rate has been constant for one window.


def test_the_rate_of_any_group_counts():
    assert frozen_at(rising(3 * WINDOW), groups=2) == 4 * WINDOW


def test_a_falling_rate_does_not_delay():
    assert frozen_at(lambda step: 0.5 * (1 + math.cos(math.pi * step / 80))) == 2 * WINDOW


def test_a_number_of_steps_holds_whatever_the_rate():
    assert frozen_at(rising(60), APMSqueezeOptions(warmup=15)) == 15


@pytest.mark.parametrize("at", [5, 20, 28])
def test_the_rates_of_the_window_are_kept(at):
    assert frozen_at(rising(3 * WINDOW), save_at=at) == 4 * WINDOW


def automatic(rank, exchange, rates):
    parameter = torch.nn.Parameter(torch.zeros(4000))
    optimizer = APMSqueeze([parameter], 0.01, BETAS, options=AUTO)
    optimizer._exchange = exchange
    for number, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.from_numpy(noise(97 * number + rank))
        optimizer.step()
        if optimizer.phase == "compressed":
            return number
    return None


@given(
    workers=st.integers(1, 3),
    edges=st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 0.01)), min_size=1, max_size=4),
)
@settings(max_examples=examples(20), deadline=None)
def test_any_schedule_ends_the_warm_up_where_the_reference_does(workers, edges):
    """Rates between edges are interpolated: they rise, fall and stay."""
    times = np.cumsum([0, *(length for length, _ in edges)])
    rates = np.interp(np.arange(60), times, [0.001, *(rate for _, rate in edges)]).tolist()
    reference = ReferenceAPMSqueeze([np.zeros(4000)], workers, AUTO, lr=0.01, betas=BETAS)
    expected = None
    for number, rate in enumerate(rates):
        reference.lr = rate
        reference.step([[noise(97 * number + rank)] for rank in range(workers)])
        if reference.frozen:
            expected = number
            break
    assert together(workers, automatic, rates) == [expected] * workers
