"""Options that are out of range are refused when they are made, by name, whatever their type."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia import modes
from persia.checks import MAX_COUNT, MAX_SECONDS, MAX_SEED, MAX_STEPS, check_integer, check_number, check_seconds
from persia.cluster import Embedded, RayOptions
from persia.data import Split
from persia.data.reader import Order
from persia.dense import AllReduce, AllReduceOptions
from persia.errors import ConfigError
from persia.nn import CollectionOptions
from persia.optim import Adagrad, APMSqueezeOptions, OneBit, StochasticTernary, TopK
from persia.replay import Setting, steady
from persia.schema import AdmitMinFrequency, Uniform
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
    modes.Auto: ["gain", "back", "windows", "seconds"],
    Split: ["seed"],
    Setting: ["compute", "local_batch", "lookup", "push"],
    TopK: ["ratio"],
    OneBit: ["block"],
    StochasticTernary: ["block", "seed"],
}  # fmt: skip
REQUIRED = {Adagrad: {"lr": 0.1}, modes.Gba: {"global_batch_size": 8}, modes.Auto: {"asynchronous": modes.Gba(8)}}
REQUIRED |= {Split: {"part": "train"}, Setting: {"trace": steady([1.0])}}
LARGE = {"compute", "lookup", "push", "clip_norm", "lr", "initial_accumulator", "eps", "weight_decay", "gain", "back"}
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
    with pytest.raises(ConfigError, match=rf"^Invalid .*{field} = .*; expected ") as caught:
        record(**{**REQUIRED.get(record, {}), field: wrong})
    assert caught.value.fields["field"].rpartition(".")[2] == field


OTHERS = {
    persia.TrainerOptions: {
        "precision": "fp8", "keep_best": "loss", "checkpoint_consistent": "no", "progress": 1, "allow_empty": None,
        "schedule": 5, "checkpoint_dir": 5, "log_dir": b"logs", "record_dir": 1.5, "mode_schedule": 5,
    },
    RayOptions: {
        "compression": "fp8", "log_level": "all", "backend": "mpi", "overcommit": "no", "regions": 5,
        "address": 5,
    },
    Embedded: {"overcommit": "no"},
    WorkerOptions: {"compression": "fp8"},
    APMSqueezeOptions: {"communicate": "rows", "track_scale": 1, "debug": "no", "compressor": "one_bit"},
    OneBit: {"scale": "l1"},
    persia.Schedule: {"decay": "square"},
    Adagrad: {"schedule": 5},
    persia.Table: {"name": "", "optimizer": "adam", "initializer": "zeros", "admission": 3, "dtype": "int8"},
    persia.IdFeature: {"name": "a\ud800", "table": 5, "cross": "ab", "kind": "id", "pooling": "max", "dtype": "int8"},
    persia.Schema: {"id_features": ["a"], "tables": ["a"], "dense_features": "x", "labels": 5},
    modes.Hybrid: {"combine": "no", "reduction": "mean"},
    modes.Sync: {"reduction": "mean"},
}  # fmt: skip
REQUIRED |= {persia.Table: {"name": "t", "dim": 4}, persia.IdFeature: {"name": "a", "dim": 4}}
REQUIRED |= {persia.Schema: {"id_features": [persia.IdFeature("a", 4)]}}


@pytest.mark.parametrize(
    ("record", "field", "wrong"),
    [
        pytest.param(record, field, wrong, id=f"{record.__name__}.{field}")
        for record, fields in OTHERS.items()
        for field, wrong in fields.items()
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(record, field, wrong):
    with pytest.raises(
        ConfigError, match=rf"^Invalid .*{field} = ?.*; expected |^Invalid \w+ name .*; expected "
    ) as caught:
        record(**{**REQUIRED.get(record, {}), field: wrong})
    assert caught.value.fields["field"]


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (persia.TrainerOptions, {"seed": 3, "timeout": 0.5, "progress": False, "clip_norm": 2.0}),
        (CollectionOptions, {"seed": 3, "timeout": 0.5}),
        (RayOptions, {"cpus": 0.5, "threads": 2, "prometheus_port": 4000}),
        (WorkerOptions, {"capacity": 3, "expiry": 0.5}),
        (APMSqueezeOptions, {"warmup": 3, "clip_norm": 0.5, "debug": True}),
        (OneBit, {"block": 64}),
        (TopK, {"ratio": 0.5}),
        (StochasticTernary, {"block": 4, "seed": 2}),
        (persia.Schedule, {"warmup_steps": 3, "floor": 0.5}),
        (Adagrad, {"lr": 0.5, "eps": 0.25}),
        (Uniform, {"low": -0.5, "high": 0.5}),
        (AdmitMinFrequency, {"count": 3}),
        (persia.Table, {"name": "t", "dim": 4, "capacity": 9, "value_bound": 0.5}),
        (persia.IdFeature, {"name": "a", "dim": 4, "max_length": 3}),
        (modes.Hybrid, {"staleness": 3, "warmup": 7, "combine": False}),
        (modes.Gba, {"global_batch_size": 8, "tolerance": 2}),
        (modes.Bsp, {"batches": 3}),
        (modes.HopBs, {"bound": 3}),
        (modes.HopBw, {"backup": 3}),
    ],
)
def test_numpy_scalars_are_taken_and_recorded_as_numbers(record, fields):
    """A learning rate from numpy ended a run where it wrote its first checkpoint, which cannot record one."""
    scalars = {name: np.array([value])[0] for name, value in fields.items()}
    assert all(isinstance(scalar, np.generic) for scalar in scalars.values())
    made, plain = record(**scalars), record(**fields)
    assert made == plain
    assert [type(getattr(made, name)) for name in fields] == [type(value) for value in fields.values()]
    assert msgspec.json.encode(made) == msgspec.json.encode(plain)


def test_sizes_of_batches_may_come_from_numpy():
    made = Order(np.int64(3), np.int64(0), np.uint64(7))
    assert made == Order(3, 0, 7)
    assert [type(value) for value in (made.batch_size, made.shuffle_rows, made.seed)] == [int] * 3


@pytest.mark.parametrize("options", [{"timeout": 0}, {"bucket_megabytes": math.inf}, {"average": "no"}])
def test_options_of_all_reduce_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"^Invalid {name} = .*; expected "):
        AllReduce(torch.nn.Linear(1, 1), options=AllReduceOptions(**options))


def test_steps_of_the_schedule_of_modes_may_come_from_numpy():
    options = persia.TrainerOptions(mode_schedule=[(np.int64(3), modes.Sync()), (9, modes.Async())])
    assert options == persia.TrainerOptions(mode_schedule=[(3, modes.Sync()), (9, modes.Async())])
    assert msgspec.json.encode(options)


def test_names_from_numpy_are_taken_and_recorded_as_texts():
    names = list(np.array(["price", "age"]))
    schema = persia.Schema([persia.IdFeature(names[1], 4)], dense_features=names[:1])
    assert msgspec.json.encode(schema) == msgspec.json.encode(persia.Schema([persia.IdFeature("age", 4)], ["price"]))


def test_paths_are_taken_and_recorded_as_texts(tmp_path):
    options = persia.TrainerOptions(checkpoint_dir=tmp_path, log_dir=tmp_path)
    assert (options.checkpoint_dir, options.log_dir) == (str(tmp_path), str(tmp_path))
    assert RayOptions(regions=tmp_path).regions == str(tmp_path)


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
