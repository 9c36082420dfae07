"""What is shown of a cluster, from health snapshots."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.dashboard import view as views
from persia.dashboard.top import _headline
from persia.dashboard.view import ClusterView, ProcessView, Watch, view
from persia.errors import DeadlineError
from persia.membership.observing import Answer, ask_members
from persia.telemetry.metrics import Health, Latency, Metric, metrics_of
from persia.types import Member
from support.observed_cluster import Trained, observed_cluster


def answer(role: str, pid: int = 7, waited: float | None = None, **counts: float) -> Answer:
    latencies = [] if waited is None else [Latency("nn_wait_seconds", {}, [1] * 14, waited)]
    found = metrics_of("", counts)
    health = Health(role, 0, 1, pid, "host", 9.0, "", [f._replace(name=f.name[1:]) for f in found], latencies)
    return Answer(Member(role, 0, 1, "tcp://h:1"), health)


def test_rates_are_those_between_two_answers():
    before = [answer("nn_worker", waited=1.0, nn_rows=100, cpu_seconds=1.0)]
    now = [
        answer(
            "nn_worker", waited=1.5, nn_rows=500, cpu_seconds=4.0, nn_step=8, nn_loss=0.5, nn_auc=0.7, nn_ready=2,
            nn_staleness_sum=6, nn_staleness_lookups=4, process_bytes=1 << 20,
        )
    ]  # fmt: skip
    (seen,) = view(before, now, 2.0)
    assert seen == ProcessView(
        "NN worker 0", "nn_worker", "host 7", uptime=9.0, rate=200.0, unit="samples/s", cpu=1.5, wait=0.25, queue=2.0,
        memory=1 << 20, step=8.0, loss=0.5, auc=0.7, staleness=1.5,
    )  # fmt: skip


def test_the_hit_rate_is_that_of_the_interval():
    before, now = ([answer("embedding_ps", ps_lookups=n, ps_hits=hits)] for n, hits in ((100, 0), (200, 80)))
    (seen,) = view(before, now, 1.0)
    assert (seen.rate, seen.unit, seen.hit_rate) == (100.0, "ids/s", 0.8)
    assert view(now, now, 1.0)[0].hit_rate is None


def test_a_process_without_an_earlier_answer_has_no_rate():
    now = [answer("nn_worker", pid=8, waited=1.0, nn_rows=50, nn_loss=float("nan"))]
    for before in ([], [answer("nn_worker", pid=7, waited=9.0, nn_rows=100)]):
        (seen,) = view(before, now, 1.0)
        assert (seen.rate, seen.wait, seen.loss) == (None, None, None)


def test_a_process_that_does_not_answer():
    gone = Answer(Member("embedding_ps", 1, 1, "tcp://h:1", "dead"), None, "dead: [red]out of memory")
    (seen,) = view([], [gone], 1.0)
    assert seen == ProcessView("embedding PS 1", "embedding_ps", "tcp://h:1", "dead: [red]out of memory")


def test_notes_of_any_process_are_those_of_the_cluster():
    (noted,) = [answer("coordinator")]
    assert noted.health is not None
    noted = noted._replace(health=noted.health._replace(notes=("ps 1 -> 2",)))
    gone = Answer(Member("embedding_ps", 1, 1, "tcp://h:1", "dead"), None, "dead: out of memory")
    watch = Watch(lambda: [noted, gone], 3600.0)
    try:
        _, seen = watch.next(0, 10.0)
    finally:
        watch.close()
    assert seen.notes == ["ps 1 -> 2"]


def test_who_has_left_is_not_among_the_processes():
    trained = Trained()
    with observed_cluster(nn_worker=trained.nn_worker, embedding_ps=trained.embedding_ps) as (address, coordinator):
        coordinator.depart("embedding_ps", 0, 1)
        assert [answer.member.role for answer in ask_members(address, 5.0)] == ["coordinator", "nn_worker"]
        coordinator.join("embedding_ps", 0, "tcp://127.0.0.1:1")
        coordinator.depart("embedding_ps", 0, 2, "killed")
        assert [answer.problem for answer in ask_members(address, 5.0)] == ["", "dead: killed", ""]


def test_sums_and_means_are_of_those_that_train():
    workers = [ProcessView(f"NN worker {n}", "nn_worker", "", rate=100.0 * n, loss=n) for n in (1, 3)]
    seen = ClusterView(0.0, [*workers, ProcessView("embedding PS 0", "embedding_ps", "", rate=7.0)])
    assert (seen.total("rate"), seen.mean("loss"), seen.mean("auc")) == (400.0, 2.0, None)


def test_a_cluster_is_watched_until_the_end(monkeypatch):
    monkeypatch.setattr(views, "MOST_VIEWS", 8)
    trained = Trained()
    with observed_cluster(nn_worker=trained.nn_worker) as (address, _):
        watch = Watch(lambda: ask_members(address, 5.0), 0.01)
        number = 0
        while number < 30:
            number, seen = watch.next(number, 10.0)
        watch.close()
        watch._thread.join(10.0)  # A question in progress adds one more view.
    assert [process.name for process in seen.processes] == ["coordinator 0", "NN worker 0"]
    assert seen.total("rate") > 0
    kept = watch.views()
    assert len(kept) <= 8
    assert sorted(kept, key=lambda v: v.time) == kept
    assert watch.views(kept[-2].time) == kept[-1:]


def test_a_coordinator_that_is_gone_is_a_problem_of_the_view():
    def ask():
        raise DeadlineError("no answer of the coordinator")

    watch = Watch(ask, 60.0)
    _, seen = watch.next(0, 10.0)
    watch.close()
    assert seen.processes == []
    assert seen.problem == "no answer of the coordinator"
    assert watch._thread.join(10.0) is None
    assert not watch._thread.is_alive()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_the_auc_is_calculated_only_while_somebody_looks(seconds, monkeypatch):
    from persia.trainer import monitor
    from support.cluster_samples import make_trainer, reader

    trainer = make_trainer(None)
    trainer.monitor.observe()
    monkeypatch.setattr(monitor, "WATCHED_SECONDS", seconds)
    trainer.fit(reader(3))
    names = [figure.name for figure in trainer.monitor.observe().metrics]
    assert ("nn_auc" in names) == (seconds > 0)


def test_metrics_of_other_labels_have_their_names():
    figures = [Metric("nn_metric", value, {"label": "watch", "metric": "rmse"}) for value in (2.0, 4.0)]
    answers = [
        Answer(Member("nn_worker", rank, 1, "tcp://h:1"), Health("nn_worker", rank, 1, 7, "host", 9.0, "", [each], []))
        for rank, each in enumerate(figures)
    ]
    seen = ClusterView(0.0, view([], answers, 1.0))
    assert [process.others for process in seen.processes] == [{"watch RMSE": 2.0}, {"watch RMSE": 4.0}]
    headline = str(_headline(seen, 200))
    assert "watch RMSE 3" in headline
    assert "AUC" not in headline
