"""What `persia health` prints."""

import io
import re
import threading

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cli.app import app
from persia.cli.health import _doing, _server_table, _table
from persia.membership.observing import Answer
from persia.modes import Hybrid
from persia.ps import EmbeddingServer
from persia.schema import SGD, Table
from persia.telemetry.metrics import Health, Metric
from persia.types import Member
from support.cluster_samples import eventually
from support.disks import freezing_disk, frozen
from support.observed_cluster import observed_cluster


def test_the_last_lines_of_the_dead_are_printed_as_they_are():
    """A log is no markup."""
    dead = Member("embedding_ps", 1, 1, "tcp://h:1", "dead")
    text = io.StringIO()
    Console(file=text, width=200).print(_table([Answer(dead, None, "dead: no room in [/dev/shm] for table [item]")]))
    assert "no room in [/dev/shm] for table [item]" in text.getvalue()


def test_a_ps_with_rows_on_disk_says_what_is_there():
    counts = {
        "ps_rows": 900, "ps_lookups": 1000, "ps_hits": 800, "ps_disk_rows": 700, "ps_disk_bytes": 2 << 30,
        "ps_spilled": 500, "ps_disk_reads": 250, "ps_promoted": 200, "ps_compacted": 150,
    }  # fmt: skip
    figures = [Metric(name, float(count), {"table": "item"}) for name, count in counts.items()]
    health = Health("embedding_ps", 0, 1, 7, "h", 9.0, "", figures, [])
    expected = "on disk 700 rows, 2.0 GiB, 75.0% of hits in memory, 250 read, write amplification 1.30"
    assert expected in _doing(health)
    assert "on disk" not in _doing(health._replace(metrics=figures[:3]))


def test_the_coordinator_has_the_last_decision_of_the_scaler():
    health = Health("coordinator", 0, 1, 7, "h", 9.0, "", [], [], ("ps 1 -> 2: [red]; done", "ps 2 -> 3: [red]; done"))
    text = io.StringIO()
    Console(file=text, width=200).print(_table([Answer(Member("coordinator", 0, 1, "tcp://h:1"), health)]))
    assert "ps 2 -> 3: [red]; done" in text.getvalue()
    assert "ps 1 -> 2" not in text.getvalue()


def test_a_server_says_what_arrives_unlike_in_training():
    text = io.StringIO()
    state = {
        "status": "ready", "epoch": 3, "rows_age_seconds": 0.5, "psi": {"user": 0.3},
        "inputs": {"[user]": {"missing": 0.5, "missing_in_training": 0.0}},
    }  # fmt: skip
    Console(file=text, width=200).print(_server_table(state))
    lines = [" ".join(line.replace("│", " ").split()) for line in text.getvalue().splitlines()]
    for line in ("status ready", "epoch 3", "rows age seconds 0.5", "drift of user PSI 0.30"):
        assert line in lines
    assert "column [user] missing 50.0%, missing in training 0.0%" in lines


def ps_on_disk(spill):
    tables = {"item": Table("item", 16, capacity=100_000, memory_rows=500, spill=str(spill))}
    return EmbeddingServer(tables, SGD(lr=1.0), Hybrid(4), 3, 1)


def look_up(ps, ids):
    ps.lookup({"item": np.asarray(ids, np.uint64)}, True)


def health_of(address):
    done = CliRunner().invoke(app, ["health", address, "--timeout", "30"], env={"COLUMNS": "600"})
    return done.exit_code, " ".join(done.output.split())


def present_health_of(address):
    """Like `health_of`, of metrics of now: a PS answers with earlier ones if a reading takes more than a second."""
    found = []

    def present():
        found[:] = health_of(address)
        return "waiting for" not in found[1]

    eventually(present, "metrics of now")
    return tuple(found)


def test_health_of_a_real_ps_with_rows_on_disk(tmp_path):
    ps = ps_on_disk(tmp_path)
    for start in (*range(0, 3000, 500), 0):
        look_up(ps, range(start, start + 500))
    counts = ps.statistics()["item"]
    assert counts["disk_rows"] >= 2500
    assert counts["disk_reads"] >= counts["promoted"] > 0
    with observed_cluster(embedding_ps=ps.observe) as (address, _):
        code, text = present_health_of(address)
    assert code == 0
    assert f"3,000 rows, {counts['bytes'] / 2**20:,.0f} MiB, {500 / 3500:.1%} hits, 0 evicted" in text
    in_memory = 1 - counts["promoted"] / 500
    assert (
        f"on disk {counts['disk_rows']:,} rows, {counts['disk_bytes'] / 2**30:,.1f} GiB, {in_memory:.1%} of hits in "
        f"memory, {counts['disk_reads']:,} read, write amplification"
    ) in text


@pytest.mark.processes
def test_a_ps_whose_disk_stalls_is_alive(tmp_path):
    with freezing_disk(tmp_path) as place:
        ps = ps_on_disk(place)
        look_up(ps, range(2000))
        with observed_cluster(embedding_ps=ps.observe) as (address, _):
            assert "2,000 rows" in present_health_of(address)[1]
            working = threading.Thread(
                target=lambda: [look_up(ps, range(n, n + 500)) for n in range(2000, 40_000, 500)], daemon=True
            )
            with frozen(place):
                working.start()
                code, text = health_of(address)
                while "waiting for its disk or a lock for" not in text:  # The first writes may go to what is free.
                    assert working.is_alive()
                    assert code == 0
                    code, text = health_of(address)
            assert code == 0
            expected = r"waiting for its disk or a lock for \d+ s; until then [\d,]+ rows, .* on disk [1-9][\d,]+ rows"
            assert re.search(expected, text)
            working.join(60.0)
            assert not working.is_alive()
            assert "40,000 rows" in present_health_of(address)[1]
        ps = working = None  # Their files keep the disk.


def test_a_ps_that_publishes_says_how_old_that_is():
    figures = [Metric("ps_publish_age_seconds", 1234.0, {}), Metric("ps_publish_failing", 1.0, {})]
    health = Health("embedding_ps", 0, 1, 7, "h", 9.0, "", figures, [])
    assert "published 1,234 s ago, cannot publish" in _doing(health)
    assert "published" not in _doing(health._replace(metrics=[]))
