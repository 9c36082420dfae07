"""Predictors whose rows are at row servers: the bits of one process, and one version in each answer."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import batching, rpc
from persia.cli.app import app
from persia.errors import ClosedError, ConfigError, DeadlineError, PublishError, StoreError
from persia.publish import PublishOptions
from persia.serve import Predictor, RowServer, RowServerOptions, ServeOptions
from persia.serve.http.problems import response_of
from persia.serve.updates import RowPart
from persia.services import RowsVersion, ServedRows
from persia.types import BucketMap, Packed
from support.ports import lasting_port
from support.written_log import IDS, Steps, WrittenLog, batch

pytestmark = pytest.mark.processes


class Part:
    """A row server behind a port of its own, which tests refresh, end and start again."""

    def __init__(self, url, part, parts, **options):
        self.made_of = url, part, parts, RowServerOptions(poll_seconds=3600.0, **options)
        self.address = f"tcp://127.0.0.1:{lasting_port()}"
        self.start()

    def start(self):
        self.rows = RowServer(*self.made_of)
        self.server = rpc.serve(self.rows, self.address, protocol=ServedRows)
        self.address = self.server.address

    def end(self):
        self.server.close()
        self.rows.close()

    def refresh(self):
        self.rows.refresh()


@pytest.fixture
def parts(request):
    """Starts the row servers of a log."""

    def start(log, count=2, **options):
        found = [Part(log.url, part, count, **options) for part in range(count)]
        for part in found:
            request.addfinalizer(part.end)
            part.refresh()
        return found

    return start


@pytest.fixture
def sharded(serve):
    """Starts predictors of row servers."""

    def start(log, parts, seconds=30.0, **options):
        addresses = tuple(part.address for part in parts)
        return serve(log, rows=addresses, rows_seconds=seconds, **options)

    return start


def steps_of(predictor):
    """Returns the step of the rows, which is the same for all ids of both tables, and that of the network."""
    found, rows = predictor.embeddings("item", IDS)
    assert found.all()
    assert len(np.unique(rows)) == 1
    np.testing.assert_array_equal(predictor.embeddings("user", IDS)[1], rows[:, :2])
    prediction = predictor.predict(batch())
    assert (prediction.probabilities >= 0.5).all()
    return rows[0, 0], prediction.step


def refresh(*everything):
    for each in everything:
        each.refresh()


def test_parts_answer_with_the_bits_of_one_process(tmp_path, parts, serve, sharded):
    url = str(tmp_path / "trained")
    data = persia.data.synthetic(400, id_features=3, dense_features=2, dim=4, batch_size=200)
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(data.schema),
        data.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.05)),
    )
    trainer.fit(data)

    log = SimpleNamespace(url=url)
    one = serve(log, persia.nn.models.FFNN)
    rows = next(iter(data))
    names = [feature.name for feature in data.schema.id_features]
    ids = np.concatenate([rows.id_features[names[0]].values, [1 << 63]]).astype(np.uint64)
    none = rows.labels[:, :0]
    user = persia.Batch({names[0]: rows.id_features[names[0]].slice(0, 1)}, rows.dense[:1], none[:1])
    items = persia.Batch({name: rows.id_features[name] for name in names[1:]}, rows.dense, none)
    for count in (1, 2):
        many = sharded(log, parts(log, count), model=persia.nn.models.FFNN)
        for asked in (rows, rows.slice(0, 1)):
            expected, found = one.predict(asked), many.predict(asked)
            np.testing.assert_array_equal(found.probabilities, expected.probabilities)
            assert (found.step, found.epoch) == (expected.step, expected.epoch) == (trainer.global_step, 0)
        for mine, theirs in zip(one.embeddings(names[0], ids), many.embeddings(names[0], ids), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(one.rank(user, items).probabilities, many.rank(user, items).probabilities)
        state = many.state()
        assert state.rows == one.state().rows
        assert state.row_steps == dict.fromkeys(range(count), trainer.global_step)
        assert state.problem == ""


def test_each_part_has_its_ids_only_and_removed_rows_are_gone(log, parts, sharded):
    servers = parts(log, 3)
    predictor = sharded(log, servers)
    for number, part in enumerate(servers):
        (epoch,) = part.rows.state().epochs
        owned = sum(int((batching.owners(table, IDS, BucketMap.even(3)) == number).sum()) for table in ("item", "user"))
        assert epoch.rows == owned > 0
    for server in range(2):
        log.rows(server, 4, removed=[5, 6])
    refresh(*servers, predictor)
    found, rows = predictor.embeddings("item", [4, 5, 6, 7])
    assert found.tolist() == [True, False, False, True]
    assert rows[:, 0].tolist() == [4, 0, 0, 4]
    assert predictor.state().rows == 124


@pytest.mark.parametrize("buckets", [BucketMap.even(5).moved(3), BucketMap.even(3).reassigned(9, 2).emptied([1])])
def test_a_log_of_any_bucket_map_is_served(tmp_path, buckets, parts, serve, sharded):
    log = WrittenLog(tmp_path / "any", servers=3, buckets=buckets)
    log.begin(3)
    servers = parts(log)
    predictors = serve(log), sharded(log, servers)
    for predictor in predictors:
        assert steps_of(predictor) == (3, 3)
    log.publish(4)
    refresh(*servers, *predictors)
    for predictor in predictors:
        assert steps_of(predictor) == (4, 4)


def test_partitions_meet_the_servers_that_have_their_ids():
    ids = np.arange(50_000, dtype=np.uint64)  # Some for each bucket.
    moved = BucketMap.even(2).moved(5), BucketMap.even(4).emptied([0]), BucketMap.even(3).reassigned(0, 2)
    for parts in (1, 2, 3, 5):
        for buckets in (*map(BucketMap.even, (1, 2, 3, 4, 6)), *moved):
            mine, theirs = batching.owners("item", ids, BucketMap.even(parts)), batching.owners("item", ids, buckets)
            met = {(int(part), int(server)) for part, server in zip(mine, theirs, strict=True)}
            pairs = itertools.product(range(parts), range(buckets.servers))
            assert met == {(part, server) for part, server in pairs if RowPart(part, parts).meets(server, buckets)}


def test_a_network_waits_for_the_part_that_lags(log, parts, sharded):
    first, second = parts(log)
    predictor = sharded(log, (first, second))
    log.publish(5)
    refresh(first, predictor)
    assert predictor.state().network_step == 3
    assert predictor.state().row_steps == {0: 5, 1: 3}
    assert (predictor.predict(batch()).probabilities >= 0.5).all()
    refresh(second, predictor)
    assert steps_of(predictor) == (5, 5)


def test_a_new_epoch_is_adopted_once_all_parts_have_it(log, parts, sharded):
    first, second = parts(log)
    predictor = sharded(log, (first, second))
    log.publish(9)
    refresh(first, second, predictor)
    log.begin(2)  # Training goes back.
    refresh(first, predictor)
    assert [epoch.epoch for epoch in first.rows.state().epochs] == [1, 0]
    assert steps_of(predictor) == (9, 9)  # The first part has both epochs.
    assert predictor.state().epoch == 0
    refresh(second)
    assert steps_of(predictor) == (9, 9)
    predictor.refresh()
    assert steps_of(predictor) == (2, 2)
    assert predictor.state().epoch == 1
    log.publish(3)
    refresh(first, second, predictor)
    assert steps_of(predictor) == (3, 3)


def test_rows_of_the_epoch_before_go_after_the_time_of_grace(log, parts, sharded):
    servers = parts(log, grace_seconds=1e-9)
    predictor = sharded(log, servers)
    log.begin(2)
    refresh(*servers)
    with pytest.raises(PublishError, match=r"row server 0/2 at tcp://\S+ cannot answer: It does not have the epoch"):
        predictor.predict(batch())
    predictor.refresh()
    assert steps_of(predictor) == (2, 2)


def test_a_part_that_ends_and_comes_back(log, parts, sharded):
    first, second = parts(log)
    predictor = retried(lambda: sharded(log, (first, second), seconds=0.4))
    second.end()
    found = []

    def is_late():
        with pytest.raises(DeadlineError) as caught:
            predictor.predict(batch())
        found.append(caught.value)

    retried(is_late, until=lambda: f"row server 1/2 at {second.address} is late: lookup" in str(found[-1]))
    assert response_of(found[-1]).status_code == 503
    mine = IDS[batching.owners("item", IDS, BucketMap.even(2)) == 0]
    assert retried(lambda: predictor.embeddings("item", mine))[0].all()  # The other part is not needed for it.
    log.publish(4)
    first.refresh()
    late = f"row server 1/2 at {second.address} is late: state"
    retried(predictor.refresh, until=lambda: late in predictor.state().problem)
    assert predictor.state().row_steps == {0: 4, 1: 3}
    assert predictor.state().network_step == 3
    second.start()
    with pytest.raises(PublishError, match=r"row server 1/2 at \S+ cannot answer: It does not have the epoch"):
        retried(lambda: predictor.predict(batch()))
    retried(predictor.refresh, until=lambda: predictor.state().problem == "")
    assert predictor.state().row_steps == {0: 4}
    second.refresh()
    retried(predictor.refresh, until=lambda: predictor.state().problem == "")
    assert retried(lambda: steps_of(predictor)) == (4, 4)


def retried(call, until=lambda: True):
    """Calls until a row server that has come back answers."""
    for _ in range(200):
        with contextlib.suppress(DeadlineError):
            found = call()
            if until():
                return found
    raise AssertionError("it has not come back")


def test_rows_older_than_the_network_are_refused(log, parts, sharded):
    first, second = parts(log)
    predictor = sharded(log, (first, second))
    log.publish(4)
    refresh(first, second, predictor)
    for server in range(2):
        os.remove(log.path("0000000001-increment.json", server=server))
    second.end()
    second.start()
    second.refresh()  # It finds the snapshot of step 3 only.
    with pytest.raises(PublishError, match="Its rows contain step 3, and step 4 is requested"):
        retried(lambda: predictor.predict(batch()))
    log.publish(5, whole=True)
    refresh(first, second, predictor)
    assert steps_of(predictor) == (5, 5)


def test_requests_during_updates_never_see_rows_too_old(log, parts, sharded):
    servers = parts(log)
    predictor = sharded(log, servers)
    done, problems, seen = threading.Event(), [], set()

    def request():
        while not done.is_set():
            try:
                prediction = predictor.predict(batch())
            except Exception as error:
                problems.append(error)
                return
            seen.add((prediction.epoch, prediction.step))
            if (prediction.probabilities < 0.5).any():
                problems.append(prediction)

    thread = threading.Thread(target=request)
    thread.start()
    try:
        for step in range(4, 16):
            if step % 6 == 0:
                log.begin(step - 3)
            else:
                log.publish(step, whole=step % 4 == 0)
            refresh(*servers[:: 1 if step % 2 else -1], predictor)
            state, deadline = predictor.state(), time.monotonic() + 60
            while (state.epoch, state.network_step) not in seen:
                assert not problems
                assert time.monotonic() < deadline
                time.sleep(0.001)
    finally:
        done.set()
        thread.join()
    assert not problems
    assert len(seen) >= 12


def test_wrong_parts_are_refused(log, parts, sharded):
    first, second = parts(log)
    with pytest.raises(ConfigError, match=r"has part 1/2, and is given as part 0/2; give the addresses of all parts"):
        sharded(log, (second, first))
    with pytest.raises(ConfigError, match=r"has part 0/2, and is given as part 0/1"):
        sharded(log, (first,))
    predictor = sharded(log, (first, second))
    second.end()
    second.made_of = log.url, 0, 2, RowServerOptions(poll_seconds=3600.0)  # It comes back with a wrong part.
    second.start()
    second.refresh()
    with pytest.raises(PublishError, match=r"row server 1/2 at \S+ cannot answer: .* has part 0/2, not 1/2"):
        retried(lambda: predictor.predict(batch()))
    with pytest.raises(ConfigError, match="has part 0/2"):
        retried(predictor.refresh)
    for part, count in ((2, 2), (-1, 2), (0, 0), (0.0, 1)):
        with pytest.raises(ConfigError):
            RowServer(log.url, part, count)


def test_lookups_that_do_not_fit(log, parts, monkeypatch):
    (part,) = parts(log, 1)
    stub = rpc.connect(part.address, ServedRows, timeout=30.0)
    version = RowsVersion(0, 1, log.epoch.run, 3)
    found = stub.lookup(version, Packed.of({"user": np.array([3, 3, 99], np.uint64)}, np.uint64))
    assert found.found["user"].tolist() == [True, True, False]
    assert found.rows["user"].tolist() == [[3, 3], [3, 3], [0, 0]]
    with pytest.raises(StoreError, match="There is no table 'nope'; the schema has"):
        stub.lookup(version, Packed.of({"nope": IDS}, np.uint64))
    with pytest.raises(StoreError, match="one dimension"):
        stub.lookup(version, Packed.of({"item": IDS.reshape(8, 8)}, np.uint64))
    with pytest.raises(PublishError, match="does not have the epoch 'other'"):
        stub.lookup(version._replace(run="other"), Packed.of({"item": IDS}, np.uint64))
    monkeypatch.setattr("persia.serve.row_server.MAX_ANSWER_BYTES", 64 * 4 * 4 - 1)
    with pytest.raises(StoreError, match="have 1024 bytes, and 1023 are allowed"):
        stub.lookup(version, Packed.of({"item": IDS}, np.uint64))
    rpc.close(stub)


def test_an_answer_with_other_rows_is_refused(log, parts, sharded, monkeypatch):
    (part,) = parts(log, 1)
    predictor = sharded(log, [part])
    real = part.rows.lookup
    monkeypatch.setattr(part.rows, "lookup", lambda version, ids: real(version, Packed.of({}, np.uint64)))
    with pytest.raises(PublishError, match="cannot answer: Its answer has other rows"):
        predictor.predict(batch())


def test_an_update_that_does_not_fit_leaves_the_rows(log, parts, sharded):
    servers = parts(log)
    predictor = sharded(log, servers)
    log.rows(0, 4, dims={"user": 3})
    refresh(*servers, predictor)
    assert re.match(r"row server 0/2 at \S+: Table 'user' has dim 3, not 2", predictor.state().problem)
    assert (predictor.predict(batch()).probabilities >= 0.5).all()
    log.publish(5, whole=True)
    refresh(*servers, predictor)
    assert steps_of(predictor) == (5, 5)
    refresh(*servers, predictor)
    assert predictor.state().problem == ""


def test_a_restart_maps_the_rows_that_it_has_kept(log, parts, sharded, tmp_path):
    servers = parts(log, cache_dir=str(tmp_path / "cache"))
    predictor = sharded(log, servers)
    for part in servers:
        part.end()
        part.start()
        part.refresh()
        assert all(table.base_name for rows in part.rows._reader.current.source()._tables for table in rows.values())
    retried(predictor.refresh)
    assert retried(lambda: steps_of(predictor)) == (3, 3)


def test_its_threads_follow_the_log_and_end(log):
    with (
        RowServer(log.url, 0, 1, RowServerOptions(poll_seconds=0.01)) as rows,
        rpc.serve(rows, protocol=ServedRows) as server,
    ):
        options = ServeOptions(poll_seconds=0.01, rows=(server.address,), rows_seconds=30.0)
        with Predictor(log.url, Steps, options) as predictor:
            assert steps_of(predictor) == (3, 3)
            log.publish(4)
            deadline = time.monotonic() + 60
            while predictor.state().network_step < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert steps_of(predictor) == (4, 4)
            with pytest.raises(ConfigError, match="Row servers do not report"):
                predictor.listen(None)
        with pytest.raises(ClosedError):
            predictor.predict(batch())
    assert rows.state().epochs == []


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rows": "tcp://a:1"}, "addresses"), ({"rows": (1,)}, "addresses"), ({"rows_seconds": 0}, "rows_seconds")],
)
def test_options(options, said):
    with pytest.raises(ConfigError, match=said):
        ServeOptions(**options)


def test_a_process_serves_rows_until_it_is_told_to_end(log, serve):
    command = [sys.executable, "-m", "persia", "serve-rows", log.url, "--part", "0/1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            for line in process.stderr:
                said += line
                if "has the rows of epoch 0" in said and "serves part 0/1" in said:
                    break
            predictor = serve(log, rows=(re.search(r"tcp://127.0.0.1:\d+", said)[0],), rows_seconds=60.0)
            assert steps_of(predictor) == (3, 3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    found = CliRunner().invoke(app, ["serve-rows", log.url, "--part", "1"])
    assert isinstance(found.exception, ConfigError)
    assert "expected I/N" in str(found.exception)
