"""A `Scaler` on Ray: it adds an embedding PS by what was measured while a run trains, and everybody sees why."""

from __future__ import annotations

import threading

import pytest
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.cluster import Scaler
from persia.membership.observing import ask_members

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import eventually, options
from support.moved_rows import EndlessBatches, expected_rows, make_trainer, rows_of

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_here")]


def test_a_ps_is_added_by_what_was_measured(tmp_path):
    # Some of the memory of a host is always used.
    scaler = Scaler(
        ps=(1, 2), dry_run=False, memory=1e-6, waiting=1.0, processors=1.0, window_seconds=0.5, cool_down_seconds=1.0
    )
    with persia.cluster.Ray(1, 1, 1, 1, options(regions=str(tmp_path), scaler=scaler)) as cluster:
        trainer = make_trainer(cluster)
        failures: list[BaseException] = []

        def train() -> None:
            try:
                trainer.fit(EndlessBatches(pause=0.002))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            eventually(lambda: cluster._roles.service is not None or failures, "the roles are there")

            def notes() -> str:
                answers = ask_members(cluster.control_address, 10.0)
                return "\n".join(note for a in answers if a.health is not None for note in a.health.notes)

            eventually(lambda: "not done: 2 is the maximum" in notes() or failures, "the scaler has no more to do")
            assert not failures
            assert cluster.ps == cluster.buckets.servers == 2
            done, blocked = notes().splitlines()
            assert "ps 1 -> 2: " in done
            assert "of the memory of an embedding PS is used, above 0%; done" in done
            assert "ps 2 -> 4: " in blocked
            shown = CliRunner().invoke(app, ["health", cluster.control_address], env={"COLUMNS": "400"}).output
            assert "not done: 2 is the maximum" in shown
            (coordinator, *others) = [a.health for a in ask_members(cluster.control_address, 10.0)]
            measured = {m.labels["of"]: m.value for m in coordinator.metrics if m.name == "scaler_share"}
            assert 0 < measured["ps_memory"] <= 1
            assert measured["loading"] > 0  # Batches come slowly.
            assert all(
                h.total("process_processors") >= 1 for h in others if h.role in ("embedding_ps", "embedding_worker")
            )
        finally:
            trainer.stop()
            thread.join(60)
        assert not thread.is_alive()
        assert not failures
        assert rows_of(trainer) == expected_rows(trainer.global_step, nn_workers=1)
