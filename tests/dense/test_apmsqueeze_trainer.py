"""`persia.Trainer` with APMSqueeze: rows count alike, all take as many steps, and a run can be resumed."""

import numpy as np
import pytest
import torch
from test_all_reduce import SCHEMA, make_batches

import persia
from persia.batching.batch import Batch
from persia.cli.run_config import OptimizerConfig
from persia.errors import ConfigError
from persia.modes import Hybrid, Sync
from persia.optim import SGD, APMSqueeze, APMSqueezeOptions, OneBit, TopK, Uncompressed
from support.nn_processes import Model, Remote, Services, parameters
from support.processes import TIMEOUT, Processes


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


def trainer(rank, workers, addresses, compressor, resume=None, mode=None, **options):
    torch.manual_seed(rank)  # The first one's parameters count.

    def optimizer(params):
        return APMSqueeze(params, 0.01, options=APMSqueezeOptions(warmup=3, compressor=compressor, debug=True))

    cluster = Remote(rank, workers, addresses) if addresses else None
    if resume is not None:
        return persia.Trainer.resume(resume, Model(SCHEMA), optimizer=optimizer, cluster=cluster)
    return persia.Trainer(
        Model(SCHEMA),
        SCHEMA,
        optimizer=optimizer,
        embedding_optimizer=SGD(lr=0.1),
        mode=mode or (Sync("global") if workers > 1 else Sync()),
        cluster=cluster,
        options=persia.TrainerOptions(**{"progress": False, "timeout": TIMEOUT} | options),
    )


def fit(rank, addresses, compressor, resume=None, call=None, **options):
    t = trainer(rank, 2, addresses, compressor, resume, **options)
    result = t.fit(None, **(call or {}))
    return result, parameters(t.model), t.step.optimizer.statistics()


def fit_with(rank, addresses, compressor, options, call):
    return fit(rank, addresses, compressor, None, call, **options)


@pytest.mark.processes
def test_uncompressed_it_equals_one_worker_with_larger_batches(two):
    """Batches differ in size: a mean over workers would be another number."""
    batches = make_batches([5 + i % 3 for i in range(20)])
    with Services(SCHEMA, batches, 2, Sync("global")) as services:
        results = two.run(fit, services.addresses, Uncompressed())
    torch.manual_seed(0)
    one = trainer(0, 1, None, Uncompressed())
    one.fit([Batch.concat(batches[i : i + 2]) for i in range(0, 20, 2)])
    for _, found, statistics in results:
        assert statistics["phase"] == "compressed"
        assert statistics["bytes_sent"] > 0
        for name, value in parameters(one.model).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": Hybrid(2, warmup=0)},
        {"accumulation_steps": 2},
        {"precision": "bf16"},
        {"precision": "fp16", "accumulation_steps": 2},
    ],
    ids=str,
)
def test_uneven_data_and_low_precision_agree_across_workers(two, options):
    batches = make_batches([3 + i for i in range(13)])
    mode, accumulation = options.get("mode"), options.get("accumulation_steps", 1)
    with Services(SCHEMA, batches, 2, mode, accumulation=accumulation) as services:
        (first, mine, _), (second, theirs, statistics) = two.run(fit_with, services.addresses, OneBit(), options, {})
    assert first.steps == second.steps
    assert first.rows == second.rows == sum(3 + i for i in range(13))
    assert statistics["steps"] + statistics["skipped_steps"] == first.steps
    for name, value in mine.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(theirs[name], value)


@pytest.mark.processes
def test_a_resumed_run_is_the_same(two, tmp_path):
    batches = make_batches([4 + i % 3 for i in range(16)])
    with Services(SCHEMA, batches, 2, Sync("global")) as services:
        whole = two.run(fit, services.addresses, OneBit())
    directory = str(tmp_path / "checkpoints")
    options = {"checkpoint_dir": directory}
    with Services(SCHEMA, batches, 2, Sync("global")) as services:
        two.run(fit_with, services.addresses, OneBit(), options, {"max_steps": 5})
    with Services(SCHEMA, batches, 2, Sync("global")) as services:
        rest = two.run(fit, services.addresses, OneBit(), directory)
    for (_, mine, _), (_, theirs, statistics) in zip(whole, rest, strict=True):
        assert statistics["steps"] == 8
        for name, value in mine.items():
            np.testing.assert_array_equal(theirs[name], value)


def test_what_it_sends_is_written_to_tensorboard(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained = trainer(0, 1, None, OneBit(), log_dir=str(tmp_path))
    trained.fit(make_batches([4] * 8))
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    expected = trained.step.optimizer.statistics()
    assert expected.pop("phase") == "compressed"
    assert last["optimizer/phase"] == 1.0
    assert expected["steps"] == 8
    for name, value in expected.items():
        assert last[f"optimizer/{name}"] == pytest.approx(value), name


def test_clipping_belongs_to_the_optimizer():
    with pytest.raises(ConfigError, match="clip_norm"):
        trainer(0, 1, None, OneBit(), clip_norm=1.0)


def test_configuration():
    options = {"betas": [0.8, 0.9], "warmup": 7, "compressor": {"kind": "top_k", "ratio": 0.5}, "clip_norm": 2.0}
    options["refresh_variance"] = 16
    make = OptimizerConfig(kind="apmsqueeze", lr=0.5, options=options).factory()
    optimizer = make([torch.nn.Parameter(torch.zeros(3))])
    assert isinstance(optimizer, APMSqueeze)
    assert optimizer.options == APMSqueezeOptions(warmup=7, compressor=TopK(0.5), clip_norm=2.0, refresh_variance=16)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigError, match="kind"):
        OptimizerConfig(kind="apmsqueeze", options={"compressor": {"kind": "zip"}}).factory()([])
    with pytest.raises(
        ConfigError, match=r"Unknown option optimizer\.options\.warm_up; .*weight_decay, warmup, .*debug"
    ):
        OptimizerConfig(kind="apmsqueeze", options={"warm_up": 7}).factory()([])
