"""Trackers: what a run sends to MLflow, Weights & Biases and others."""

import logging
import sys
import threading
import time

import pytest
import torch

import persia
from persia.config import convert
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.telemetry import tracking
from persia.telemetry.tracking import BackgroundTracker, MLflow, Wandb
from persia.trainer.options import TrainerOptions

ROWS = 2_000
NAMES = ("rows_per_second", "loss", "stored_rows", "staleness", "progressive_auc", "progressive_auc_of_window")


def reader():
    return persia.data.synthetic(ROWS, id_features=2, ids_per_feature=30, batch_size=20)


def trainer(schema, *trackers, **options):
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(8,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=persia.modes.Sync(),
        options=TrainerOptions(progress=False, trackers=list(trackers), **options),
    )


class Recorded:
    """A tracker that keeps what it gets, and may fail."""

    def __init__(self, fails=False):
        self.calls = []
        self.fails = fails

    def begin(self, parameters):
        self.calls.append(("begin", dict(parameters)))

    def log(self, values, step):
        self.calls.append(("log", step, dict(values)))
        if self.fails:
            raise ConnectionError("no route to host")

    def end(self, failed):
        self.calls.append(("end", failed))


@pytest.fixture
def recorded(monkeypatch):
    made = Recorded()
    monkeypatch.setattr(MLflow, "tracker", lambda _: made)
    return made


def test_a_tracker_gets_parameters_metrics_and_the_end(recorded):
    data = reader()
    result = trainer(data.schema, MLflow()).fit(data, data)
    first, *logged, last = recorded.calls
    assert first[0] == "begin"
    assert first[1]["model"] == "FFNN"
    assert first[1]["lr"] == "0.001"
    assert "Adagrad(lr=0.05" in first[1]["embedding_optimizer"]
    assert last == ("end", False)
    assert [step for _, step, _ in logged] == [1, 2, 4, 8, 16, 32, 51, 100, 100]
    assert set(logged[0][2]) == {f"train/{n}" for n in NAMES}
    assert logged[-2][2]["train/progressive_auc"] == result.progressive.auc
    assert logged[-1][2]["eval/auc"] == result.evaluation.auc


def test_a_tracker_gets_each_evaluation(recorded, tmp_path):
    data = reader()
    t = trainer(data.schema, MLflow(), eval_every_steps=40, keep_best="log_loss", checkpoint_dir=str(tmp_path))
    result = t.fit(data, data)
    values = {step: values for _, step, values in recorded.calls[1:-1] if "eval/auc" in values}
    assert list(values) == [40, 80, 100]
    assert values[100]["eval/log_loss"] == result.evaluation.log_loss
    assert min(each["eval/log_loss"] for each in values.values()) == result.best


def test_a_failed_run_is_marked(recorded):
    data = reader()
    batches = list(data)
    bad = persia.Batch({}, batches[0].dense, batches[0].labels)
    with pytest.raises(DataError):
        trainer(data.schema, MLflow()).fit([batches[0], bad])
    assert recorded.calls[-1] == ("end", True)


def test_a_tracker_that_fails_does_not_end_the_training(recorded, caplog):
    recorded.fails = True
    data = reader()
    with caplog.at_level(logging.WARNING, "persia.tracking"):
        assert trainer(data.schema, MLflow()).fit(data).rows == ROWS
    assert "Recorded: metrics were lost (no route to host)." in caplog.text
    assert recorded.calls[-1] == ("end", False)


class Away(Recorded):
    """A tracker whose server stops answering after the first point."""

    def __init__(self):
        super().__init__()
        self.stuck, self.back = threading.Event(), threading.Event()

    def log(self, values, step):
        if self.calls[-1][0] != "begin":
            self.stuck.set()
            self.back.wait(60)
        super().log(values, step)


def test_training_does_not_wait_for_a_tracker(monkeypatch, caplog):
    away = Away()
    monkeypatch.setattr(MLflow, "tracker", lambda _: away)
    monkeypatch.setattr(tracking, "END_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "MAX_WAITING", 5)
    data = reader()
    t = trainer(data.schema, MLflow())

    def wait_until_it_is_stuck(*_):
        if t.global_step == 2:
            assert away.stuck.wait(30)

    t.model.register_forward_pre_hook(wait_until_it_is_stuck)
    try:
        begin = time.monotonic()
        with caplog.at_level(logging.WARNING, "persia.tracking"):
            assert t.fit(data, max_steps=60).steps == 60
            assert t.fit(data).global_step == 100
        assert time.monotonic() - begin < 30
        assert "Away has not taken the last metrics within 0.1 s" in caplog.text
        assert "Away took metrics too slowly; points lost: 1." in caplog.text
    finally:
        away.back.set()
    t._components.trackers[0]._thread.join(30)
    assert [name for name, *_ in away.calls if name != "log"] == ["begin", "end", "begin", "end"]
    assert [call[1] for call in away.calls if call[0] == "log"] == [1, 2, 4, 8, 16, 32, 51, 61, 62, 64, 68]


def test_a_tracker_that_does_not_open_a_run_is_refused(monkeypatch):
    refused = threading.Event()

    class Mute(Recorded):
        def begin(self, parameters):
            super().begin(parameters)
            assert refused.wait(30)

    monkeypatch.setattr(tracking, "BEGIN_SECONDS", 0.1)
    mute = BackgroundTracker(Mute())
    with pytest.raises(ConfigError, match=r"Mute has not opened a run within 0\.1 s; correct its address"):
        mute.begin({})
    refused.set()


def test_a_run_that_cannot_be_opened_again_costs_its_metrics(caplog):
    class Once(Recorded):
        def begin(self, parameters):
            super().begin(parameters)
            if len(self.calls) > 1:
                raise ConnectionError("no route to host")

    once = BackgroundTracker(Once())
    once.begin({})
    once.end(False)
    with caplog.at_level(logging.WARNING, "persia.tracking"):
        once.begin({})
        once.end(False)
    assert "Once: metrics were lost (no route to host)." in caplog.text


def test_trackers_in_configurations():
    tree = {"trackers": [{"kind": "mlflow", "uri": "sqlite:///x.db"}, {"kind": "wandb", "project": "clicks"}]}
    options = convert(tree, TrainerOptions, "trainer")
    assert options.trackers == [MLflow("sqlite:///x.db"), Wandb("clicks")]
    with pytest.raises(ConfigError, match="trackers"):
        TrainerOptions(trackers=["mlflow"])


@pytest.mark.parametrize(("tracker", "package"), [(MLflow(), "mlflow"), (Wandb(), "wandb")])
def test_a_missing_package_is_named(monkeypatch, tracker, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    data = reader()
    with pytest.raises(MissingExtraError, match=rf'pip install "persia-recsys\[{package}\]"'):
        trainer(data.schema, tracker).fit(data)


@pytest.mark.processes  # Importing MLflow starts one.
@pytest.mark.filterwarnings("default")  # MLflow's own.
def test_mlflow_records_one_run_over_several_calls(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking", reason="needs the extra mlflow")
    pytest.importorskip("sqlalchemy", reason="MLflow needs sqlalchemy for a local store")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    data = reader()
    t = trainer(data.schema, MLflow(uri, "clicks", "first"))
    t.fit(data, max_steps=60)
    result = t.fit(data, data)
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["mode"] == "Sync(reduction='global')"
    assert run.data.metrics["eval/auc"] == pytest.approx(result.evaluation.auc)
    points = [point.step for point in client.get_metric_history(run.info.run_id, "train/progressive_auc")]
    assert points == [1, 2, 4, 8, 16, 32, 51, 60, 61, 62, 64, 68, 76, 92, 100]


@pytest.mark.filterwarnings("default")  # wandb's own.
def test_wandb_records_a_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    data = reader()
    t = trainer(data.schema, Wandb("clicks", "first", str(tmp_path)))
    t.fit(data, max_steps=60)
    t.fit(data, data)
    runs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({path.stem for path in runs}) == 1  # Both calls have the same id.
    assert wandb.run is None
