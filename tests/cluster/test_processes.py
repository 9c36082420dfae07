"""Processes on Ray that end: each is told of, with its last lines, and what has ended is left alone."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import persia
from persia.data.loader import FRESH_SECONDS
from persia.errors import ConfigError, RoleDiedError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from ray.exceptions import ActorUnavailableError

from persia.cluster.ray import processes as on_ray
from persia.cluster.ray.hosts import worker_options
from persia.cluster.ray.processes import Processes, make_plan
from persia.cluster.ray.scaling import free_ranks
from support.cluster_samples import bare_host, eventually, killing, make_trainer, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")


def test_all_deaths_are_told():
    told: list[int] = []
    bare = bare_host()
    processes = Processes(lambda process, _: told.append(process.rank), lambda _: None, 60.0)
    try:
        started = [processes.start(bare, "embedding_ps", rank, (), num_cpus=0) for rank in range(3)]
        processes.await_ready(started, 60.0)
        first, second, third = started
        os.kill(first.info.pid, signal.SIGKILL)
        # Not before all of it is done: each death has a thread of its own.
        eventually(lambda: processes.all() == [second, third], "the first death is noticed")
        assert told == [0]
        os.kill(second.info.pid, signal.SIGKILL)
        eventually(lambda: processes.all() == [third], "the second one, too")
        with pytest.raises(RoleDiedError, match=r"embedding PS 0 .*(.|\n)*After that, embedding PS 1") as caught:
            processes.check()
        assert caught.value.fields["rank"] == 0
        assert [later["rank"] for later in caught.value.fields["later"]] == [1]
        assert "bare 0 says hello" in caught.value.message
        assert told == [0, 1]  # Once each.
        processes.forget_failures("nn_worker")
        with pytest.raises(RoleDiedError):
            processes.check()
        processes.forget_failures("embedding_ps")
        processes.check()
    finally:
        processes.close()


@pytest.mark.parametrize("answers", [True, False])
def test_a_process_that_answers_is_not_dead(answers, monkeypatch):
    """Ray says "unavailable" both when a connection is lost, and when a process is dead that restarts."""
    told: list[int] = []
    processes = Processes(lambda process, _: told.append(process.rank), lambda _: None, 60.0)
    try:
        process = processes.start(bare_host(), "embedding_ps", 0, (), num_cpus=0)
        processes.await_ready([process], 60.0)
        pid = process.info.pid
        monkeypatch.setattr(on_ray, "_error_of", lambda _: ActorUnavailableError("reset by peer", None))
        if not answers:  # What does is its successor.
            process.info = process.info._replace(pid=1)
        before = process.watching
        processes._ended(process)
        assert told == ([] if answers else [0])
        assert bool(processes.failures()) != answers
        assert (process.watching is not before, process in processes.all()) == (answers, answers)
        monkeypatch.undo()
        os.kill(pid, signal.SIGKILL)  # If it counts as dead, nothing else ends it.
        if answers:
            eventually(lambda: bool(told), "it is watched again")  # Twice, if the first call is still watched.
    finally:
        processes.close()


@pytest.mark.parametrize("role", ["embedding_ps", "embedding_worker"])
def test_a_process_that_was_out_of_reach_joins_again(role, monkeypatch):
    """As Ray cannot reach its host for a while, it counts as dead, and others are told. Then it answers, unchanged.

    An embedding worker restarts, as others have batch ids of its incarnation.
    """
    died: list[int] = []
    back: list[int] = []
    monkeypatch.setattr(on_ray, "ANSWER_SECONDS", 0.0)
    processes = Processes(lambda process, _: died.append(process.rank), lambda of: back.append(of.rank), 60.0)
    try:
        process = processes.start(bare_host(role), role, 0, (), num_cpus=0, max_restarts=1)
        processes.await_ready([process], 60.0)
        info = process.info
        monkeypatch.setattr(on_ray, "_error_of", lambda _: ActorUnavailableError("its host is out of reach", None))
        process.ended = process.watching  # As noted when the connection is lost.
        processes._ended(process)
        assert (died, back, processes.failures()) == ([0], [0], [])
        if role == "embedding_ps":
            assert process.info == info._replace(incarnation=2)
        else:
            assert process.info.pid != info.pid
    finally:
        processes.close()


def test_ranks_are_reused_and_end():
    assert free_ranks("embedding_worker", {0, 2}, 3) == [1, 3, 4]
    assert free_ranks("embedding_worker", set(range(255)), 1) == [255]
    assert free_ranks("data_loader", {0, 1}, -1) == []
    with pytest.raises(ConfigError, match=r"2 more processes of the role embedding worker .* 255 are running"):
        free_ranks("embedding_worker", set(range(255)), 2)


@pytest.mark.parametrize("seconds", [30.0, 600.0, 7200.0])
def test_batches_outlive_a_push_that_waits(seconds):
    plan = make_plan(1, 1, persia.cluster.RayOptions(timeout=seconds))
    waiting = worker_options(plan._replace(compression="fp16"))
    assert waiting.expiry > 2 * waiting.timeout == 2 * seconds
    assert waiting.expiry > FRESH_SECONDS  # Which data loaders rely on.
    assert waiting.compression == "fp16"


def test_what_is_ready_fits_the_embedding_workers():
    persia.cluster.Ray(embedding_workers=100, data_loaders=100, nn_workers=64)
    with pytest.raises(ConfigError, match="1 embedding workers hold 4096"):
        persia.cluster.Ray(embedding_workers=1, data_loaders=256, nn_workers=64)
    cluster = persia.cluster.Ray(embedding_workers=2, data_loaders=16, nn_workers=64)
    with pytest.raises(ConfigError, match="33 data loaders may have 8448 batches ready"):
        cluster.scale(data_loaders=33)
    cluster.scale(embedding_workers=3, data_loaders=33)  # Nothing has been started.


@pytest.mark.parametrize(
    ("role", "counter", "title", "late"),
    [
        pytest.param("data_loader", "taken", "data loader", 0.0, marks=pytest.mark.slow),
        ("nn_worker", None, "NN worker", 5.0),
        pytest.param("embedding_worker", "looked_up", "embedding worker", 0.0, marks=pytest.mark.slow),
        pytest.param("embedding_ps", "rpc.calls", "embedding PS", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_death_for_good_ends_the_run_and_is_named(role, counter, title, late, monkeypatch):
    """With its last lines, also if they are read slowly, as on another host.

    An embedding worker or data loader that may be started again is another test's.
    """
    last_lines = on_ray.last_lines

    def slowly(process):
        time.sleep(late)
        return last_lines(process)

    monkeypatch.setattr(on_ray, "last_lines", slowly)
    with persia.cluster.Ray(2, 1, 1, 2, options(restarts=0, log_level="info")) as cluster:
        trainer = make_trainer(cluster, persia.modes.Hybrid(2, warmup=0), max_failures=0)
        with (
            killing(cluster, role, counter) as gated,
            pytest.raises(RoleDiedError, match=rf"{title} 0 \(process \d+ on .*has died") as caught,
        ):
            trainer.fit(gated(reader(100_000)))
        assert caught.value.fields["role"] == role
        assert f"{title} 0: joined as incarnation" in caught.value.message


@pytest.mark.slow
def test_the_next_run_after_a_death_gets_batches_of_its_own():
    """It begins at the same batch, with another generation of NN workers."""
    with persia.cluster.Ray(nn_workers=1, options=options()) as cluster:
        trainer = make_trainer(cluster, max_failures=0)
        with killing(cluster, "nn_worker") as gated, pytest.raises(RoleDiedError):
            trainer.fit(gated(reader(100_000)))
        result = trainer.fit(reader(20))
        assert (result.rows, result.lost_batches, result.lost_gradients) == (20 * 64, 0, 0)


@pytest.mark.slow
def test_functions_read_what_the_cluster_was_fed():
    """Each run of a function gets all batches, the first one too, whose connection starts the data loaders."""

    def train() -> Any:
        data = reader(6)
        embeddings = persia.nn.EmbeddingCollection(
            data.schema, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Sync(), cluster=cluster
        )
        seen = 0
        for batch in embeddings.prefetch(embeddings.registered()):
            sum(e.sum() for e in embeddings(batch).values()).backward()
            seen += len(batch)
        return seen, embeddings.pushed.lost_batches

    with persia.cluster.Ray(options=options()) as cluster:
        cluster.feed(list(reader(6)))
        assert [cluster.run(train) for _ in range(2)] == [[(6 * 64, 0)]] * 2
