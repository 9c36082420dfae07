"""`persia.cluster.Ray`: the same numbers as in one process, and what happens when processes end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import rpc
from persia.cli.run_config import RunConfig
from persia.config import convert, load
from persia.errors import ClosedError, ConfigError, RoleDiedError, UnequalStepsError
from persia.services import EmbeddingPS

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import ray

from support.cluster_samples import eventually, killing, losses, make_trainer, options, pids, reader, watched

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_numbers(ps: int, embedding_workers: int, data_loaders: int, tmp_path: Path) -> None:
    data, test = reader(12), reader(3, 2)
    here = make_trainer(persia.cluster.Embedded(1))
    expected = [here.fit(data, test, max_steps=7), here.fit(data, test)]
    with persia.cluster.Ray(ps, embedding_workers, data_loaders, 1, options()) as cluster:
        there = make_trainer(cluster)
        found = [there.fit(data, test, max_steps=7), there.fit(data, test)]
        for mine, theirs in zip(expected, found, strict=True):
            for name in ("progressive", "evaluation", "rows", "steps", "global_step", "stored_rows", "staleness_max"):
                assert getattr(mine, name) == getattr(theirs, name), name
        for a, b in zip(here.model.parameters(), there.model.parameters(), strict=True):
            assert torch.equal(a, b)
        assert here.evaluate(test) == there.evaluate(test)
        for p, q in zip(here.predict(test), there.predict(test), strict=True):
            np.testing.assert_array_equal(p, q)
        roles = {name.rpartition("-")[0] for name in cluster.statistics()}
        assert roles == {"embedding_ps", "embedding_worker", "data_loader", "nn_worker"}
        assert there.save(str(tmp_path)).endswith("step-000000000012")
        still_running = watched(cluster)
    eventually(lambda: not still_running(), "all processes have ended")
    with pytest.raises(ClosedError):
        cluster.run(lambda: 0)


@pytest.mark.usefixtures("one_thread")
def test_the_same_numbers_as_in_one_process(tmp_path):
    same_numbers(3, 2, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("ps", "embedding_workers", "data_loaders"), [(1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_no_number_of_processes_changes_a_number(ps, embedding_workers, data_loaders, tmp_path):
    same_numbers(ps, embedding_workers, data_loaders, tmp_path)


def test_two_nn_workers_a_bare_loop_resizing_and_deaths(one_thread):
    """One cluster for all, as processes take long to start."""
    with persia.cluster.Ray(2, 1, 1, 2, options(regions="")) as cluster:
        trainer = make_trainer(cluster, persia.modes.Hybrid(2, warmup=0))

        # All rows are trained once, though 301 batches do not divide by 2; while processes come and go.
        resized = threading.Thread(target=cluster.scale, kwargs={"embedding_workers": 3, "data_loaders": 2})
        resized.start()
        result = trainer.fit(reader(301))
        resized.join(60)
        assert result.rows == 301 * 64
        assert result.lost_batches == result.lost_gradients == 0
        assert result.steps == 151
        assert len(pids(cluster, "embedding_worker")) == 3
        cluster.scale(embedding_workers=1, data_loaders=1)
        assert len(pids(cluster, "embedding_worker")) == len(pids(cluster, "data_loader")) == 1

        # An embedding worker that dies takes its batches with it; training goes on.
        (victim,) = pids(cluster, "embedding_worker")
        with killing(cluster, "embedding_worker", "looked_up") as gated:
            result = trainer.fit(gated(reader(300)))
        assert result.rows + result.lost_batches * 64 == 300 * 64
        eventually(lambda: pids(cluster, "embedding_worker") not in ([], [victim]), "it is started again")

        # What an NN worker raises is raised here, and the next run has new NN workers.
        with pytest.raises(ZeroDivisionError) as caught:
            cluster.run(lambda: 1 // (torch.distributed.get_rank() - 1))
        assert "NN worker 1" in caught.value.__notes__[0]
        assert cluster.run(torch.distributed.get_rank) == [0, 1]

        # A PS without regions that dies ends the run.
        with (
            killing(cluster, "embedding_ps") as gated,
            pytest.raises(RoleDiedError, match=r"embedding PS 0 \(process \d+ on .*has died"),
        ):
            trainer.fit(gated(reader(100_000)))
        still_running = watched(cluster)
    eventually(lambda: not still_running(), "all processes have ended")


@pytest.mark.usefixtures("one_thread")
def test_a_bare_loop_has_the_same_losses():
    expected = losses(persia.cluster.Embedded(1), 10)
    with persia.cluster.Ray(2, 1, options=options()) as cluster:
        assert cluster.run(lambda: losses(cluster, 10)) == [expected]
        assert imports_torch(cluster, "nn_worker")
        with pytest.raises(ConfigError, match="another schema"):
            cluster.run(lambda: losses(cluster, 10, persia.modes.Hybrid(1, warmup=0)))
        assert not imports_torch(cluster, "embedding_ps")
        assert not imports_torch(cluster, "embedding_worker")


def uneven(cluster: Any, equal: bool) -> int:
    """A loop of one's own over 13 batches on two NN workers; returns the steps of one of them."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = reader(13)
    embeddings = persia.nn.EmbeddingCollection(
        data.schema, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Hybrid(2, warmup=0), cluster=cluster
    )
    net = torch.nn.Linear(4 * 8 + 2, 1)
    replicas = persia.dense.AllReduce(net) if equal else None
    model = replicas.model if replicas else torch.nn.parallel.DistributedDataParallel(net)
    steps = 0
    for batch in embeddings.prefetch(list(data)[rank::count], equal_steps=replicas):
        with replicas.batch(batch.dummy) if replicas else contextlib.nullcontext():
            logits = model(torch.cat([*embeddings(batch).values(), batch.dense], 1))
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        steps += 1
    return steps


def late(cluster: Any) -> int:
    """A loop of one's own without collectives, over 6 batches each; NN worker 1 is late with its last ones."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = reader(12)
    embeddings = persia.nn.EmbeddingCollection(
        data.schema, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Hybrid(2, warmup=0), cluster=cluster
    )
    steps = 0
    for batch in embeddings.prefetch(list(data)[rank::count]):
        if (rank, steps) == (1, 3):
            time.sleep(2)  # NN worker 0 returns meanwhile.
        sum(e.sum() for e in embeddings(batch).values()).backward()
        steps += 1
    return steps


def test_an_own_loop_with_uneven_data_ends():
    with persia.cluster.Ray(nn_workers=2, options=options()) as cluster:
        with pytest.raises(UnequalStepsError, match=r"NN worker 1 ran out of batches after 6\. NN worker 0 still had"):
            cluster.run(lambda: uneven(cluster, equal=False))
        assert cluster.run(lambda: uneven(cluster, equal=True)) == [7, 7]
        assert cluster.run(lambda: late(cluster)) == [6, 6]


def imports_torch(cluster: Any, role: str) -> bool:
    """Whether a process has imported torch. (Files of it are mapped in any process of `support.ray_forks`.)"""
    (process, *_) = cluster._roles.processes.of(role)
    return bool(ray.get(process.handle.__ray_call__.remote(lambda _: "torch" in sys.modules), timeout=60.0))


@pytest.mark.slow
def test_without_keys_a_cluster_with_keys_answers_nobody(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    rpc.make_keys(keys)
    monkeypatch.setenv("PERSIA_CURVE_KEYS", str(keys))
    with persia.cluster.Ray(options=options()) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(reader(3))
        monkeypatch.delenv("PERSIA_CURVE_KEYS")
        (address,) = [p.info.address for p in cluster._roles.processes.of("embedding_ps")]
        stranger = rpc.connect(address, EmbeddingPS, peer="embedding PS 0", timeout=2.0)
        with pytest.raises(persia.PersiaError, match="embedding PS 0"):
            stranger.statistics()
        rpc.close(stranger)


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match="nn_workers = 0"):
        persia.cluster.Ray(nn_workers=0)
    with pytest.raises(ConfigError, match="compression"):
        persia.cluster.RayOptions(compression="zip")  # type: ignore[arg-type]


def test_persia_imports_no_ray():
    code = "import sys, persia, persia.cluster, persia.trainer; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_line_knows_it():
    changes = ["cluster.kind=ray", "cluster.ps=2", "cluster.ray.compression=fp16", "cluster.threads=1"]
    path = str(ROOT / "examples" / "synthetic.toml")
    cluster = convert(load(path, changes), RunConfig, path).cluster.build()
    assert isinstance(cluster, persia.cluster.Ray)
    assert (cluster.ps, cluster.options.compression, cluster.options.threads) == (2, "fp16", 1)
