"""A predictor serves one version of the network with rows of at least its step, whatever happens to the log."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import persia
from persia.checks import without_userinfo
from persia.errors import ClosedError, DeadlineError, PublishError
from persia.publish.format import MODEL_FILE, epoch_name
from persia.serve import Predictor, ServeOptions
from persia.serve.serving_drift import ServingDrift
from persia.store.served import ServedTable
from support.written_log import IDS, SCHEMA, Steps, WrittenLog, batch


def steps_of(predictor):
    """Returns the steps of rows, which are the same for all ids, and of the network; checks both tables."""
    found, rows = predictor.embeddings("item", IDS)
    assert found.all()
    assert len(np.unique(rows)) == 1
    np.testing.assert_array_equal(predictor.embeddings("user", IDS)[1], rows[:, :2])
    prediction = predictor.predict(batch())
    assert (prediction.probabilities >= 0.5).all()
    assert prediction.step == predictor.state().network_step
    return rows[0, 0], prediction.step


def test_it_follows_snapshots_and_increments(log, serve):
    predictor = serve(log)
    assert msgspec.json.encode(predictor.schema) == msgspec.json.encode(SCHEMA)
    for step in range(4, 8):
        assert steps_of(predictor) == (step - 1, step - 1)
        log.publish(step, whole=step == 6)
        predictor.refresh()
    state = predictor.state()
    assert state.row_steps == {0: 7, 1: 7}
    assert (state.epoch, state.rows, state.problem) == (0, 128, "")
    assert (state.updates, state.snapshots) == (3 + 4 * 3, 2 + 2)
    assert 0 <= state.rows_age_seconds < 3600
    assert 0 <= state.network_age_seconds < 3600


def test_removed_rows_are_gone(log, serve):
    predictor = serve(log)
    for server in range(2):
        log.rows(server, 4, removed=[5, 6])
    predictor.refresh()
    found, rows = predictor.embeddings("item", [4, 5, 6, 7])
    assert found.tolist() == [True, False, False, True]
    assert rows[:, 0].tolist() == [4, 0, 0, 4]
    assert predictor.state().rows == 124


def test_rows_that_are_evicted_and_readmitted_never_disappear(log, serve, monkeypatch):
    predictor, gone, told = serve(log), set(), []

    class Listener:
        def note_changes(self, table, ids, removed):
            told.extend(removed.tolist())

    monkeypatch.setattr(ServedTable, "remove", lambda _table, ids: gone.update(ids.tolist()))
    predictor.listen(Listener())
    for server in range(2):
        log.rows(server, 4, removed=[5, 6, 1000], readmitted=True)
    predictor.refresh()
    assert gone == {1000}
    assert told.count(1000) == 2
    assert set(told) == {1000}
    found, rows = predictor.embeddings("item", [5, 6])
    assert found.all()
    assert (rows == 4).all()


def test_rows_come_with_the_step_and_epoch_of_their_view(log, serve, monkeypatch):
    predictor = serve(log)
    lookup = ServedTable.lookup

    def slow(table, *arguments):
        monkeypatch.undo()
        log.begin(9)
        predictor.refresh()
        return lookup(table, *arguments)

    monkeypatch.setattr(ServedTable, "lookup", slow)
    found = predictor.table_rows("item", IDS)
    assert found.found.all()
    assert (found.step, found.epoch, {*found.rows.flat}) == (3, 0, {3})
    assert predictor.table_rows("item", IDS)[2:] == (9, 1)


def test_passwords_of_urls_are_not_shown(tmp_path):
    with pytest.raises(DeadlineError) as error:
        Predictor("memory://me:secret@/nothing", Steps).start(timeout=0.0)
    assert "secret" not in f"{error.value} {error.value.fields}"
    closed = Predictor("memory://me:secret@/nothing", Steps)
    with pytest.raises(ClosedError, match="has not started") as error:
        closed.state()
    assert "secret" not in str(error.value)
    assert without_userinfo("simplecache::s3://a:b@c@host/x@y") == "simplecache::s3://host/x@y"


def test_a_network_waits_for_the_rows_of_all_servers(log, serve):
    predictor = serve(log)
    log.network(5)
    log.rows(0, 6)
    predictor.refresh()
    assert predictor.state().network_step == 3
    log.network(7)
    log.network(8)
    predictor.refresh()
    log.rows(1, 5)
    predictor.refresh()
    assert predictor.state().network_step == 5  # Later versions must not keep it from its turn.
    log.publish(9)
    predictor.refresh()
    assert steps_of(predictor) == (9, 9)


def test_a_new_epoch_replaces_all_rows_and_the_network_at_once(log, serve):
    predictor = serve(log)
    log.publish(9)
    predictor.refresh()
    log.begin(2, rows=False)  # Training goes back.
    log.rows(0, 2, whole=True)
    predictor.refresh()
    assert steps_of(predictor) == (9, 9)
    assert predictor.state().epoch == 0
    log.rows(1, 2, whole=True)
    part = Path(log.path("0000000000.00000.safetensors", server=1))
    content = part.read_bytes()
    damage(part, "flipped")
    predictor.refresh()
    assert steps_of(predictor) == (9, 9)
    part.write_bytes(content)
    predictor.refresh()
    assert steps_of(predictor) == (2, 2)
    assert predictor.state().epoch == 1
    log.end_older_epochs()
    log.publish(3)
    predictor.refresh()
    assert steps_of(predictor) == (3, 3)


def test_a_log_that_begins_again_from_epoch_0_is_another_epoch(log, serve):
    predictor = serve(log)
    shutil.rmtree(log.url)
    log = WrittenLog(log.url, servers=1)
    log.begin(1)
    assert log.epoch.epoch == 0
    predictor.refresh()
    assert steps_of(predictor) == (1, 1)


def damage(path, how):
    if how == "missing":
        os.remove(path)
    elif how == "truncated":
        os.truncate(path, os.path.getsize(path) // 2)
    else:
        data = bytearray(Path(path).read_bytes())
        data[len(data) // 2] ^= 4
        Path(path).write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("file", ["0000000001-increment.json", "0000000001.00000.safetensors"])
def test_after_a_gap_it_reads_the_next_snapshot_and_serves_on(log, serve, file, how):
    predictor = serve(log)
    log.publish(4)
    damage(log.path(file, server=1), how)
    predictor.refresh()
    state = predictor.state()
    assert bool(state.problem) == ((file[-4:], how) != ("json", "missing"))  # It may be on its way.
    assert state.row_steps == {0: 4, 1: 3}
    assert state.network_step == 3
    assert (predictor.predict(batch()).probabilities >= 0.5).all()
    log.publish(5)
    predictor.refresh()
    assert predictor.state().problem
    assert predictor.state().row_steps == {0: 5, 1: 3}
    log.rows(1, 6, whole=True)
    log.publish(7)
    predictor.refresh()
    assert predictor.state().row_steps[1] >= 6  # The snapshot, then what follows.
    predictor.refresh()
    assert steps_of(predictor) == (7, 7)
    assert predictor.state().problem == ""


def test_an_increment_of_another_schema_is_not_applied_in_part(log, serve):
    predictor = serve(log)
    log.rows(0, 4, dims={"user": 3})
    log.rows(1, 4)
    predictor.refresh()
    state = predictor.state()
    assert "dim 3, not 2" in state.problem
    assert state.row_steps == {0: 3, 1: 4}
    rows = predictor.embeddings("item", IDS)[1]
    assert set(rows[:, 0]) == {3, 4}
    log.publish(5, whole=True)
    predictor.refresh()
    assert steps_of(predictor) == (5, 5)


def test_a_network_that_does_not_fit_leaves_the_one_before(log, serve):
    predictor = serve(log)
    for server in range(2):
        log.rows(server, 4)
    log.network(4, other=np.zeros(3, np.float32))
    predictor.refresh()
    assert "does not fit the model" in predictor.state().problem
    predictor.refresh()
    assert "does not fit the model" in predictor.state().problem  # Until there is a better one.
    assert predictor.state().network_step == 3
    log.publish(5)
    predictor.refresh()
    assert steps_of(predictor) == (5, 5)
    assert predictor.state().problem == ""


CHANGED = {
    "dim": persia.Schema([persia.IdFeature("item", 8), persia.IdFeature("user", 2)]),
    "pooling": persia.Schema([persia.IdFeature("item", 4, pooling="mean"), persia.IdFeature("user", 2)]),
    "'user' is not in the new epoch": persia.Schema([persia.IdFeature("item", 4)]),
    "dense_features": persia.Schema(SCHEMA.id_features, ["age"]),
    "labels": persia.Schema(SCHEMA.id_features, labels=["buy"]),
}


@pytest.mark.parametrize("said", CHANGED)
def test_an_epoch_of_another_schema_is_refused(log, serve, said):
    predictor = serve(log)
    log.schema = CHANGED[said]
    log.begin(9)
    for _ in range(2):
        predictor.refresh()
        state = predictor.state()
        assert "Epoch 1 is not served: its schema differs" in state.problem
        assert said in state.problem
        assert (state.epoch, state.row_steps, state.network_step) == (0, {0: 3, 1: 3}, 3)
    log.schema = SCHEMA
    log.begin(11)
    predictor.refresh()
    assert steps_of(predictor) == (11, 11)


def test_an_epoch_of_a_compatible_schema_is_served(log, serve):
    predictor = serve(log)
    tables = [persia.Table("item", 4, capacity=1000, initializer=persia.Zeros()), persia.Table("user", 2)]
    log.schema = persia.Schema(SCHEMA.id_features, tables=tables)
    log.begin(9)
    predictor.refresh()
    assert steps_of(predictor) == (9, 9)
    assert msgspec.json.encode(predictor.schema) == msgspec.json.encode(log.schema)


def test_what_cannot_be_served_is_said_at_once(log, tmp_path):
    os.remove(f"{log.url}/{epoch_name(0)}/{MODEL_FILE}")
    with pytest.raises(DeadlineError, match=r"model\.json is missing"):
        Predictor(log.url, Steps).start(timeout=0.01)
    with pytest.raises(DeadlineError, match="there is no epoch"):
        Predictor(str(tmp_path / "nothing"), Steps).start(timeout=0.01)
    log.begin(3)
    with pytest.raises(PublishError, match="the log does not describe it"):
        Predictor(log.url).start()
    with pytest.raises(PublishError, match="RuntimeError: no such layer"):
        Predictor(log.url, lambda schema: _fail("no such layer")).start()
    with pytest.raises(DeadlineError, match="does not fit the model"):
        Predictor(log.url, persia.nn.models.FFNN).start(timeout=0.01)


def _fail(message):
    raise RuntimeError(message)


def test_a_log_names_no_code_unless_its_module_is_allowed(log, serve):
    log.model = ("support.written_log:Steps",)
    log.begin(4)
    with pytest.raises(PublishError, match="allow its module"):
        Predictor(log.url).start()
    predictor = serve(log, None, imports=("support.written_log",))
    assert steps_of(predictor) == (4, 4)
    log.model = ("os:system", {})
    log.begin(5)
    predictor.refresh()
    assert "allow its module" in predictor.state().problem
    assert steps_of(predictor) == (4, 4)


def test_it_is_used_between_start_and_close(log):
    predictor = Predictor(log.url, Steps(), ServeOptions(poll_seconds=0.01))
    with pytest.raises(ClosedError, match="has not started"):
        predictor.predict(batch())
    with predictor:
        log.publish(5)
        deadline = time.monotonic() + 60
        while predictor.state().network_step < 5:  # By its thread.
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert steps_of(predictor) == (5, 5)
    for call in (lambda: predictor.predict(batch()), lambda: predictor.schema, predictor.state):
        with pytest.raises(ClosedError, match="is closed"):
            call()


def test_requests_during_updates_never_see_rows_too_old(log, serve, monkeypatch):
    monkeypatch.setattr(ServingDrift, "note", lambda *_: None)  # An update would count all these requests.
    predictor = serve(log)
    done, asking, problems, seen = threading.Event(), threading.Event(), [], set()

    def request():
        while asking.wait() and not done.is_set():
            prediction = predictor.predict(batch())
            seen.add((prediction.epoch, prediction.step))
            if (prediction.probabilities < 0.5).any():
                problems.append(prediction)

    threads = [threading.Thread(target=request) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(4, 24):
            if step % 10 == 0:
                log.begin(step - 5)
            elif step % 4 == 0:
                log.publish(step, whole=True)
            else:
                log.publish(step)
            asking.set()
            predictor.refresh()
            wanted, deadline = (log.epoch.epoch, predictor.state().network_step), time.monotonic() + 60
            while wanted not in seen:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            asking.clear()  # So that they take no time from what writes the log.
    finally:
        done.set()
        asking.set()
        for thread in threads:
            thread.join()
    assert not problems
    assert len(seen) > 15


def test_model_json_has_what_a_server_needs(log):
    data = msgspec.json.decode(Path(f"{log.url}/{epoch_name(0)}/{MODEL_FILE}").read_bytes())
    assert data["format"] == "persia-changes"
    assert [feature["name"] for feature in data["schema"]["id_features"]] == ["item", "user"]
    assert (data["precision"], data["model"], data["run"]) == ("float32", None, log.epoch.run)


BROKEN = [np.nan, np.inf, -np.inf]


def publish_network(log, at_step, /, **tensors):
    log.networks.add_part(tensors)
    log.networks.commit("network", at_step, time.monotonic(), [])


@pytest.mark.parametrize("value", BROKEN)
def test_a_network_that_is_not_finite_leaves_the_one_before(log, serve, value):
    predictor = serve(log)
    for server in range(2):
        log.rows(server, 4)
    publish_network(log, 4, step=np.full(1, value, np.float32))
    predictor.refresh()
    assert "network of step 4 is not finite, in 'step'" in predictor.state().problem
    assert predictor.state().network_step == 3
    assert np.isfinite(predictor.predict(batch()).probabilities).all()
    log.publish(5)
    predictor.refresh()
    assert steps_of(predictor) == (5, 5)
    assert predictor.state().problem == ""


class Masked(Steps):
    def __init__(self, schema=None):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def test_buffers_may_have_infinities_and_no_nan(log, serve):
    publish_network(log, 4, step=np.full(1, 3, np.float32), mask=np.array([0, -np.inf], np.float32))
    for server in range(2):
        log.rows(server, 4)
    predictor = serve(log, Masked)
    assert predictor.state().network_step == 4
    log.publish(5)
    publish_network(log, 6, step=np.full(1, 3, np.float32), mask=np.array([0, np.nan], np.float32))
    for server in range(2):
        log.rows(server, 6)
    predictor.refresh()
    assert "not finite, in 'mask'" in predictor.state().problem


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("whole", [False, True])
def test_rows_that_are_not_finite_leave_those_before(log, serve, monkeypatch, whole, value):
    predictor = serve(log)
    values = log.values

    def broken(ids, dim, step):
        return np.where(ids[:, None] == ids[-1], np.float32(value), values(ids, dim, step))

    with monkeypatch.context() as patched:
        patched.setattr(log, "values", broken)
        log.rows(0, 4, whole=whole)
    log.rows(1, 4)
    log.network(4)
    predictor.refresh()
    problem = predictor.state().problem
    assert re.search(r"Table 'item' has a row that is not finite at step 4, of id \d+", problem)
    assert set(predictor.embeddings("item", IDS)[1].reshape(-1)) == {3, 4}
    assert (predictor.state().row_steps, predictor.state().network_step) == ({0: 3, 1: 4}, 3)
    log.publish(5, whole=True)
    predictor.refresh()
    assert steps_of(predictor) == (5, 5)
    predictor.refresh()
    assert predictor.state().problem == ""


def test_a_log_that_begins_with_what_is_not_finite_is_not_served(tmp_path):
    log = WrittenLog(tmp_path / "log")
    log.begin(3, network=False)
    publish_network(log, 3, step=np.full(1, np.nan, np.float32))
    with pytest.raises(DeadlineError, match="network of step 3 is not finite"):
        Predictor(log.url, Steps).start(timeout=0.0)
