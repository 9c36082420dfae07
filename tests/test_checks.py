"""Options that are out of range are refused when they are made, by name, whatever their type."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia import modes
from persia.checks import MAX_COUNT, MAX_SECONDS, MAX_SEED, MAX_STEPS, check_integer, check_number, check_seconds
from persia.cluster import Embedded, RayOptions
from persia.data.reader import Order
from persia.errors import ConfigError
from persia.nn import CollectionOptions
from persia.optim import Adagrad, APMSqueezeOptions
from persia.worker import WorkerOptions

WRONG = [-1, 2**70, 10**400, -(2**70), math.nan, math.inf, -math.inf, True, "1", [1], 1j]

FIELDS = {
    persia.TrainerOptions: [
        "seed", "accumulation_steps", "clip_norm", "checkpoint_every_steps", "checkpoint_every_seconds",
        "checkpoint_share", "checkpoint_increments", "keep_last", "timeout", "recovery_point_every_seconds",
        "max_failures",
    ],
    CollectionOptions: ["seed", "accumulation_steps", "timeout"],
    RayOptions: ["cpus", "gpus", "threads", "dense_ps", "restarts", "timeout"],
    Embedded: ["threads"],
    WorkerOptions: ["capacity", "timeout", "expiry"],
    APMSqueezeOptions: [
        "warmup", "clip_norm", "bucket_bytes", "variance_floor", "refresh_variance", "timeout",
    ],
    Order: ["batch_size", "shuffle_rows", "seed"],
    persia.Schedule: ["warmup_steps", "total_steps", "floor"],
    Adagrad: ["lr", "initial_accumulator", "eps", "weight_decay"],
    modes.Hybrid: ["staleness", "warmup"],
    modes.Gba: ["global_batch_size", "tolerance"],
    modes.Bsp: ["batches"],
    modes.HopBs: ["bound"],
    modes.HopBw: ["backup"],
    modes.Async: ["staleness"],
}  # fmt: skip
REQUIRED = {Adagrad: {"lr": 0.1}, modes.Gba: {"global_batch_size": 8}}
LARGE = {"clip_norm", "lr", "initial_accumulator", "eps", "weight_decay"}
"""Fields that may have 2^70."""
CASES = [
    pytest.param(record, field, wrong, id=f"{record.__name__}.{field}-{str(wrong)[:20]}")
    for record, fields in FIELDS.items()
    for field in fields
    for wrong in WRONG
    if not (field in LARGE and wrong == 2**70)
]


@pytest.mark.parametrize(("record", "field", "wrong"), CASES)
def test_a_value_out_of_range_is_refused_by_name(record, field, wrong):
    with pytest.raises(ConfigError, match=field) as caught:
        record(**{**REQUIRED.get(record, {}), field: wrong})
    assert caught.value.fields["field"].rpartition(".")[2] == field


def test_the_largest_values_are_recorded_and_read_again():
    """As checkpoints do."""
    options = persia.TrainerOptions(
        seed=MAX_SEED,
        accumulation_steps=MAX_COUNT,
        clip_norm=1e308,
        schedule=persia.Schedule(MAX_STEPS - 1, "linear", MAX_STEPS),
        checkpoint_every_steps=MAX_STEPS,
        checkpoint_every_seconds=MAX_SECONDS,
        keep_last=MAX_COUNT,
        timeout=MAX_SECONDS,
    )
    assert msgspec.json.decode(msgspec.json.encode(options), type=persia.TrainerOptions) == options
    assert 0 < options.schedule.factor(10**6) < 1


def test_a_step_of_the_schedule_of_modes_is_a_number_of_steps():
    for step in (-1, 2**70, 1.5, "1"):
        with pytest.raises(ConfigError, match="mode_schedule"):
            persia.TrainerOptions(mode_schedule=[(step, modes.Sync())])


@given(st.integers(), st.integers(-5, 5), st.integers(0, 1 << 66))
def test_whole_numbers(value, low, width):
    check = lambda: check_integer("field", value, low, low + width)  # noqa: E731
    if low <= value <= low + width:
        check()
    else:
        with pytest.raises(ConfigError, match="field"):
            check()


@given(st.floats() | st.integers(), st.booleans(), st.booleans())
def test_numbers(value, open_low, open_high):
    def check():
        check_number("field", value, -1, 2.5, open_low=open_low, open_high=open_high)

    if (value > -1 or (value == -1 and not open_low)) and (value < 2.5 or (value == 2.5 and not open_high)):
        check()
    else:
        with pytest.raises(ConfigError, match="field"):
            check()


def test_times():
    for value in (1e-9, 1, MAX_SECONDS):
        check_seconds("timeout", value)
    for value in (0, 0.0, math.nextafter(MAX_SECONDS, math.inf)):
        with pytest.raises(ConfigError, match="timeout"):
            check_seconds("timeout", value)
