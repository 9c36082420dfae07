"""The protocol between `peers.py` and the processes of other libraries, with a library that is numpy."""

import sys

import numpy as np
import pytest
from benchmarks.baselines import peer

from benchmarks import peers

TABLE = f"""
import sys
sys.path.insert(0, {str(peers.BASELINES)!r})
import peer


class Dictionary(peer.Peer):
    rows = {{}}

    def fill(self, ids):
        self.rows.update((each, 0.0) for each in ids.tolist())

    def lookup(self, ids):
        print("a library that talks")
        return [self.rows[each] for each in ids.tolist()]


peer.serve(Dictionary)
"""
WORK = peer.Work(rows=100, batch=10, batches=2)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSIA_PEERS", sys.executable)
    monkeypatch.setattr(peers, "BASELINES", tmp_path)
    return tmp_path


@pytest.mark.processes
def test_a_process_is_measured_and_ends(scripts):
    (scripts / "peer_numpy.py").write_text(TABLE)
    process = peers.Process("numpy", WORK)
    assert process.rate("lookup") > 0
    process.close()
    assert process.process.returncode == 0


@pytest.mark.processes
def test_a_process_that_fails_is_an_error(scripts):
    (scripts / "peer_broken.py").write_text("raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="has not answered 'ready'"):
        peers.Process("broken", WORK)


def test_without_an_environment_the_peers_are_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PERSIA_PEERS", str(tmp_path / "none"))
    assert list(peers.compare("tfra", "smoke")) == []
    assert "peers.tfra is skipped" in capsys.readouterr().err


def test_the_store_trains_the_same_ids():
    table = peers.Persia(WORK)
    for ids in peer.fills(WORK):
        table.fill(table.prepare(ids))
    assert table.store.size(0) == WORK.rows
    for ids in peer.batches(WORK):
        before = table.train(table.prepare(ids))
        assert len(np.unique(ids)) == len(ids)
        assert np.all(table.lookup(table.prepare(ids)) != before)
    assert table.store.size(0) == WORK.rows
