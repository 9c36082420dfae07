"""The programs of examples/online: what counts as served, the wait for training, and that they end."""

import contextlib
import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from persia.serve import Client, Predictor, ServeOptions
from persia.serve.http.options import HttpOptions
from persia.serve.http.run import run_server
from support import written_log
from support.written_log import WrittenLog

pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia-recsys[kafka]"')

EXAMPLE = Path(__file__).parents[2] / "examples" / "online"
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def modules(monkeypatch):
    """The modules `run` and `news` of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("run"), importlib.import_module("news")
    for name in ("run", "news"):
        del sys.modules[name]


@contextlib.contextmanager
def serving(predictor):
    """Runs a server in a thread; yields its URL."""
    found, listens = [], threading.Event()

    def listening(at):
        found.append(at)
        listens.set()

    thread = threading.Thread(target=run_server, args=(predictor, HttpOptions(port=0), listening), daemon=True)
    thread.start()
    assert listens.wait(60)
    try:
        yield found[0].url
    finally:
        found[0].stop()
        thread.join(60)


def clicks(news, *users):
    columns = {name: np.ones(len(users), np.int32) for name in news.COLUMNS if name != "history"}
    columns |= {"user_id": np.array(users, np.int32), "history": pa.array([[1]] * len(users), pa.list_(pa.int32()))}
    return pa.table({name: columns[name] for name in news.COLUMNS})


@pytest.mark.processes
def test_a_click_counts_once_a_prediction_used_its_changed_row(modules, tmp_path, monkeypatch):
    run, news = modules
    log = WrittenLog(tmp_path / "log", schema=news.schema())

    def network(step):
        torch.manual_seed(step)
        log.network(step, **{name: each.numpy() for name, each in news.Model(news.schema()).state_dict().items()})

    log.begin(1, network=False)  # With rows of the users 0 to 63.
    network(1)
    predictor = Predictor(log.url, news.Model, ServeOptions(poll_seconds=3600.0))
    with serving(predictor) as url, Client(url) as client:
        deadline = time.monotonic() + 60
        while client.health()["status"] != "ready":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with run.Freshness(client, np.arange(64)) as freshness:
            freshness.sending(clicks(news, 5, 5, 100, 100))
            assert {user: each.kind for user, each in freshness._waiting.items()} == {5: "known", 100: "new"}
            with monkeypatch.context() as same:
                same.setattr(log, "values", lambda ids, dim, step: np.ones((len(ids), dim), np.float32))
                log.rows(0, 2)
                network(2)  # Which changes answers, but no row.
            predictor.refresh()
            assert client.predict(news.columns(clicks(news, 5))).step == 2
            time.sleep(0.3)
            assert freshness.seconds == {"known": [], "new": []}
            monkeypatch.setattr(written_log, "IDS", np.arange(128, dtype=np.uint64))
            log.rows(0, 3)
            predictor.refresh()
            freshness.end()
            assert [len(each) for each in freshness.seconds.values()] == [1, 1]
            assert all(0.3 < each[0] < 10 for each in freshness.seconds.values())


def test_a_user_is_watched_from_the_first_click_of_the_stream_on(modules):
    """A later click would not tell which one has changed the row."""
    run, news = modules
    with Client(NOWHERE) as client, run.Freshness(client, np.arange(64)) as freshness:
        freshness._last = dict.fromkeys(run.KINDS, time.monotonic() + 60)  # Nobody is asked for.
        freshness.sending(clicks(news, 5, 100))
        freshness._last = dict.fromkeys(run.KINDS, 0.0)
        freshness.sending(clicks(news, 5, 100))
        assert freshness._waiting == {}


def test_the_watching_thread_ends_if_sending_fails(modules):
    run, _ = modules
    watched = run.Freshness(Client(NOWHERE), np.arange(64))
    with pytest.raises(KeyboardInterrupt), watched._client, watched:
        assert watched._thread.is_alive()
        raise KeyboardInterrupt
    assert not watched._thread.is_alive()


@contextlib.contextmanager
def printing(*lines, then="time.sleep(60)"):
    """Runs a program that prints lines, half a second apart, once it has got one."""
    source = f"import time\ninput()\nfor line in {lines!r}:\n    time.sleep(0.5)\n    print(line, flush=True)\n{then}"
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", source], text=True, **ends) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_clicks_wait_while_training_lags_behind(modules, monkeypatch):
    run, _ = modules
    row = 1_000  # bytes
    most = run.PARTITIONS * run.LAG_BYTES // row
    pauses = []
    with printing("trained 7 clicks", "read 100") as process:

        def sleep(seconds):
            pauses.append(seconds)
            if len(pauses) == 3:  # It waits: the program may go on.
                print(file=process.stdin, flush=True)
            time.sleep(0.01)

        # Time passes in pauses only, however slow the machine is.
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=sleep))
        monkeypatch.setattr(run, "LAG_SECONDS", 600.0)
        training = run.Training(process)
        training.await_lag(0, 0)
        training.await_lag(most, most * row)
        assert (pauses, training.waited) == ([], 0)
        training.await_lag(most + 100, (most + 100) * row)
        assert training.started
        assert len(pauses) >= 3
        assert training.waited == sum(pauses)
        monkeypatch.setattr(run, "LAG_SECONDS", 0.2)
        with pytest.raises(SystemExit, match="has read 100 of"):
            training.await_lag(most + 101, (most + 101) * row)


@pytest.mark.processes
def test_clicks_do_not_wait_for_training_that_has_ended(modules):
    run, _ = modules
    with printing("read 1", then="") as process, pytest.raises(SystemExit, match="ended early"):
        print(file=process.stdin, flush=True)
        run.Training(process).await_lag(1_000_000, 1 << 30)
