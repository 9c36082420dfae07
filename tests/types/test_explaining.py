"""Errors of configurations say which names and values are valid."""

import pytest

import persia
from persia.checks import did_you_mean
from persia.cli.run_config import DataConfig, RunConfig
from persia.config import convert
from persia.errors import ConfigError

DATA = {"kind": "synthetic"}


@pytest.mark.parametrize(
    ("tree", "field", "message"),
    [
        ({"modell": {}}, "", "unknown field `modell`; expected one of: data, .*Did you mean 'model'"),
        ({"data": DATA | {"bach_size": 5}}, "data", "kind, path, batch_size, options. Did you mean 'batch_size'"),
        ({"data": {"kind": "parket"}}, "data.kind", "one of: adult, .*Did you mean 'parquet'"),
        ({"data": {"kind": 5}}, "data.kind", "one of: adult, .*synthetic"),
        ({"cluster": {"kind": "rey"}}, "cluster.kind", "one of: embedded, ray. Did you mean 'ray'"),
        ({"cluster": {"place": {"server": {}}}}, "cluster.place", "one of: .*nn_worker"),
        ({"cluster": {"place": {"ps": {"memori": 1}}}}, "cluster.place[...]", "Did you mean 'memory'"),
        ({"mode": {"kind": "hybird"}}, "mode.kind", "Did you mean 'hybrid'"),
        ({"mode": {"kind": "hybrid", "stalenes": 4}}, "mode", "Did you mean 'staleness'"),
        ({"mode": {"kind": "auto", "asynchronous": {"kind": "gbs"}}}, "mode.asynchronous.kind", "Did you mean 'gba'"),
        ({"embedding_optimizer": {"kind": "adagrat"}}, "embedding_optimizer.kind", "sgd.*Did you mean 'adagrad'"),
        ({"embedding_optimizer": {"kind": "adam", "beta": 1}}, "embedding_optimizer", "kind, lr"),
        ({"schema": {"id_features": [{"name": "a", "dims": 1}]}}, "schema.id_features[0]", "Did you mean 'dim'"),
        (
            {"schema": {"id_features": [{"name": "a", "dim": 1}, {"name": "b", "dim": 1, "kind": "txt"}]}},
            "schema.id_features[1].kind",
            "one of: auto, number, text. Did you mean 'text'",
        ),
        ({"trainer": {"precision": "bf61"}}, "trainer.precision", "one of: .*Did you mean 'bf16'"),
        ({"train": {"epochs": "many"}}, "train.epochs", "Expected `int`, got `str`"),
    ],
)
def test_errors_of_configurations(tree, field, message):
    with pytest.raises(ConfigError, match=message) as raised:
        convert({"data": DATA} | tree, RunConfig, "run.toml")
    assert raised.value.fields["field"] == field
    assert f"run.toml: {field or 'top level'}: " in raised.value.message


def test_errors_of_options_name_the_section():
    schema = persia.Schema([persia.IdFeature("item", dim=2)])
    for options, message in (
        ({"delimeter": ";"}, r"Unknown option data\.options\.delimeter; .*Did you mean 'delimiter'"),
        ({"day_unit": "hours"}, r"data\.options: day_unit = 'hours'; .*day, s, ms"),
        ({"split": {"part": "tset"}}, r"data\.options: split: part: .*one of: test, train\. Did you mean 'test'"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataConfig("csv", "a.csv", options=options).reader(schema, "data")


def test_questions():
    assert did_you_mean("Batch-Size", ["batch_size", "kind"]) == " Did you mean 'batch_size'?"
    assert did_you_mean("x", ["batch_size", "kind"]) == ""
