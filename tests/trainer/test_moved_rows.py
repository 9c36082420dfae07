"""Rows move to other PSs while a Trainer trains: it quiesces for a moment, and continues with the same numbers."""

import functools

import pytest

from persia.checkpoint import CheckpointReader
from persia.checkpoint.listing import complete_steps
from persia.checkpoint.storage import Storage
from persia.modes import Gba, Hybrid, Sync
from persia.publish import PublishOptions, Replica, follow
from support.moved_rows import EndlessBatches, expected_rows, make_trainer, rows_of
from support.moving_cluster import MovingCluster, training, trains_on
from support.moving_ps import until


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Makes moves end sooner."""
    monkeypatch.setattr("persia.ps.row_move.PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("persia.ps.row_move.CHECKPOINT_SECONDS", 0.02)
    monkeypatch.setattr("persia.membership.map_rounds.WATCH_SECONDS", 0.02)


@pytest.mark.parametrize("mode", [Sync(), Hybrid(4), Gba(64)], ids=["sync", "hybrid", "gba"])
def test_each_update_is_applied_once(mode):
    cluster = MovingCluster(2)
    trainer = make_trainer(cluster, mode)
    with training(trainer, EndlessBatches()):
        for change in (lambda m: m.moved(4), lambda m: m.emptied([1, 3]), lambda m: m.moved(2)):
            cluster.move(change(cluster.buckets))
            trains_on(trainer, 10)
    assert rows_of(trainer) == expected_rows(trainer.global_step)
    assert len(trainer.embeddings.connection.servers) == 2


def test_a_mode_is_adopted_by_pss_that_have_joined():
    """Also while rows move: to switch is a round, which does not end their copies."""
    cluster = MovingCluster(1)
    trainer = make_trainer(cluster, Sync())
    with training(trainer, EndlessBatches()):
        for mode, count in ((Gba(64), 3), (Hybrid(2), 2), (Gba(64), 3), (Sync(), 1)):
            after = cluster.buckets.moved(count)
            cluster.order(after)
            trainer.switch(mode)
            until(lambda mode=mode: trainer.mode == mode)
            cluster.move(after)
            trains_on(trainer, 10)
    assert rows_of(trainer) == expected_rows(trainer.global_step)


def test_the_next_checkpoint_is_a_full_one(tmp_path):
    cluster = MovingCluster(2)
    every = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 5, "checkpoint_increments": 99}
    trainer = make_trainer(cluster, keep_last=9999, **every)
    manifest_of = functools.cache(lambda step: CheckpointReader(str(tmp_path), step).manifest)

    def whole():
        """Whether each checkpoint is a full one, by version of its map."""
        found = {}
        for step in complete_steps(Storage(str(tmp_path))):
            manifest = manifest_of(step)
            assert manifest.buckets is not None
            found.setdefault(manifest.buckets.version, []).append(manifest.base is None)
        return found

    def increments_follow(version):  # The removal of rows that have left may lead to another full one.
        until(lambda: not all(whole().get(version, [True])))

    with training(trainer, EndlessBatches()):
        increments_follow(0)
        cluster.move(cluster.buckets.moved(3))
        increments_follow(1)
        cluster.move(cluster.buckets.emptied([0]))
        increments_follow(2)
    assert [of_map[0] for of_map in whole().values()] == [True, True, True]
    resumed = make_trainer(None)
    resumed.load(str(tmp_path))
    assert rows_of(resumed) == rows_of(trainer)


def test_publishing_begins_an_epoch(tmp_path):
    cluster = MovingCluster(2)
    replica = Replica(follow(str(tmp_path)))
    trainer = make_trainer(cluster, publish=PublishOptions(str(tmp_path), seconds=0.05))
    with training(trainer, EndlessBatches(pause=0.002)):
        until(lambda: replica.refresh() or replica.epoch == 0)
        cluster.move(cluster.buckets.moved(3))
        until(lambda: replica.refresh() or (replica.epoch > 0 and len(replica.steps) == 3))
    replica.refresh()
    assert not replica.problem
    assert replica.steps == dict.fromkeys(range(3), trainer.global_step)
    published = replica.rows("id")
    stored = {
        int(id_): row.tobytes()
        for server in cluster.all.values()
        for chunk in server.export_rows()
        for id_, row in zip(chunk.arrays["ids"], chunk.arrays["embeddings"], strict=True)
    }
    assert {int(id_): row.tobytes() for id_, row in published.items()} == stored


def test_moves_wait_for_a_checkpoint():
    cluster = MovingCluster(2)
    trainer = make_trainer(cluster)
    writing = True
    cluster.rounds.busy = lambda: writing and cluster.rounds._begun is not None
    after = cluster.buckets.moved(3)
    with training(trainer, EndlessBatches()):
        cluster.order(after)
        until(lambda: cluster.all[0].moving().passes > 0)
        trains_on(trainer, 20)
        assert cluster.buckets.version == 0
        writing = False
        cluster.move(after)
    assert rows_of(trainer) == expected_rows(trainer.global_step)


def test_an_order_that_is_withdrawn_leaves_rows_where_they_were():
    cluster = MovingCluster(2)
    trainer = make_trainer(cluster)
    cluster.rounds.busy = lambda: cluster.rounds._begun is not None  # So that it never ends.
    with training(trainer, EndlessBatches()):
        after = cluster.buckets.moved(3)
        cluster.order(after)
        until(lambda: cluster.all[0].moving().passes > 0)
        assert cluster.coordinator.withdraw_map(after)
        until(lambda: cluster.all[0].moving().version == -1)
        trains_on(trainer, 20)
    assert cluster.buckets.version == 0
    assert rows_of(trainer) == expected_rows(trainer.global_step)
