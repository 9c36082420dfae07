"""`persia train` on a stream, and what `persia health` says of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from persia.checkpoint import CheckpointReader
from persia.cli.app import app
from persia.cli.health import _doing
from persia.cli.run_config import DataConfig
from persia.errors import ConfigError
from persia.telemetry.metrics import Health, Metric
from support.kafka import SCHEMA, Kafka, clicks

RUN = """
[data]
kind = "kafka"
path = "{topic}"
batch_size = 8
options = {{ bootstrap = "{bootstrap}", until = "now", timeout = 10.0 }}
[schema]
id_features = [{{ name = "item", dim = 4 }}]
dense_features = ["price"]
labels = ["click"]
[trainer]
progress = false
"""


def test_train_reads_topics_and_goes_on_where_it_was(tmp_path):
    kafka = Kafka()
    kafka.write(clicks(range(40)))
    config = tmp_path / "run.toml"
    config.write_text(RUN.format(topic=kafka.topic, bootstrap=kafka.bootstrap))
    runner = CliRunner()

    def train(*words):
        result = runner.invoke(app, ["train", str(config), "--json", str(tmp_path / "result.json"), *words])
        assert result.exit_code == 0, result.output
        return json.loads((tmp_path / "result.json").read_text())["rows"]

    assert train("--output", str(tmp_path / "run"), "--set", "train.max_steps=2") == 16
    kafka.write(clicks(range(40, 45)), 1)
    assert train("--resume", str(tmp_path / "run")) == 29


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (DataConfig("kafka", options={"bootstrap": "x:1"}), "data.path"),
        (DataConfig("kafka", "clicks"), "data.options.bootstrap"),
        (DataConfig("kafka", "clicks", options={"bootstrap": "x:1", "brokers": 1}), "data.options.brokers"),
    ],
)
def test_what_is_missing_is_named(data, field):
    with pytest.raises(ConfigError) as raised:
        data.reader(SCHEMA, "data")
    assert raised.value.fields["field"] == field
    with pytest.raises(ConfigError, match=r"Missing \[schema\]"):
        DataConfig("kafka", "clicks", options={"bootstrap": "x:1"}).reader(None, "data")


def test_health_says_how_far_a_process_is_behind():
    lag = [Metric("stream_lag", lag, {"topic": "clicks", "partition": str(n)}) for n, lag in enumerate((1000, 234))]
    figures = [*lag, Metric("stream_rows_per_second", 4321.0, {}), Metric("stream_late", 5, {})]

    def line(role, figures):
        return _doing(Health(role, 0, 1, 7, "host", 1.0, "", figures, []))

    assert line("data_loader", figures) == (
        "0 batches ready, 0 read; stream: 1,234 messages behind, 4,321 rows/s, 5 late"
    )
    assert line("nn_worker", figures).endswith("; stream: 1,234 messages behind, 4,321 rows/s, 5 late")
    clicks = [Metric("join_clicks_late", 2, {}), Metric("join_clicks_poison", 1, {})]  # Of a joined stream.
    assert line("nn_worker", [*figures, *clicks]).endswith(" rows/s, 7 late, 1 poison")
    assert "stream" not in line("data_loader", [])


FITTED = RUN.replace('["price"]', '[{{ name = "price", scale = "minmax" }}]')


def test_train_fits_to_a_topic_and_trains_all_of_it(tmp_path):
    kafka = Kafka()
    kafka.write(clicks(range(40)))
    config = tmp_path / "run.toml"
    config.write_text(FITTED.format(topic=kafka.topic, bootstrap=kafka.bootstrap))
    saved = str(tmp_path / "run")

    def train(*words):
        result = CliRunner().invoke(app, ["train", str(config), "--json", str(tmp_path / "result.json"), *words])
        assert result.exit_code == 0, result.output
        fitted = CheckpointReader(saved).schema.dense[0].fitted
        return json.loads((tmp_path / "result.json").read_text())["rows"], fitted

    rows, first = train("--output", saved, "--set", "train.fit_rows=21")
    assert rows == 40
    assert (first.centre, first.width, first.rows) == (0, 5, 21)
    kafka.write(clicks(range(100, 120)))
    assert train("--resume", saved) == (20, first)
    kafka.write(clicks(range(200, 220)))
    rows, again = train("--resume", saved, "--refit")
    assert rows == 20
    assert (again.centre, again.rows) == (50, 20)
