"""The rules that `persia init` declares: kinds of labels, weights, groups, buckets, logarithms, times and words."""

import io
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia.cli.init import init
from persia.cli.run_config import RunConfig
from persia.config import convert, dump
from persia.errors import DataError
from support.command import persia as command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    yield tmp_path
    sys.modules.pop("model", None)


def schema_of(**columns):
    """Returns the schema that `persia init` writes for columns of a Parquet file."""
    label = columns.pop("chosen", None)
    pq.write_table(pa.table(columns), "data.parquet")
    init("data.parquet", "out", label=label, yes=True, force=True)
    return tomllib.loads(Path("out/config.toml").read_text())["schema"]


def csv_schema(names, rows, label=None):
    Path("data.csv").write_text(names + "\n" + "".join(f"{row}\n" for row in rows))
    init("data.csv", "out", label=label, yes=True, force=True)
    return tomllib.loads(Path("out/config.toml").read_text())["schema"]


def features(schema):
    return {each["name"]: each for each in schema["id_features"]}


def users(rows):
    return [f"u{i % 7}" for i in range(rows)]


@pytest.mark.parametrize(
    ("name", "values", "declared"),
    [
        ("watch_time", np.arange(90) * 1.5, {"kind": "regression"}),
        ("price", np.arange(90) * 1.5, {"kind": "regression"}),
        ("clicks_count", np.arange(90) % 9, {"kind": "count"}),
        ("views", np.arange(90) % 9, {"kind": "count"}),
        ("class", np.arange(90) % 4, {"kind": "multiclass", "classes": 4}),
        ("class", np.arange(90) % 3 + 1, {"kind": "multiclass", "classes": ["1", "2", "3"]}),
        ("label", np.arange(90) % 4, {"kind": "multiclass", "classes": 4}),
        ("label", np.arange(90) % 4 + 1, {"kind": "regression"}),
        ("species", [("setosa", "virginica", "versicolor")[i % 3] for i in range(90)],
         {"kind": "multiclass", "classes": ["setosa", "versicolor", "virginica"]}),
        ("rating", np.arange(90) % 5 + 1, {"kind": "regression"}),
        ("level", np.arange(90) % 5 - 2, {"kind": "regression"}),
    ],
)  # fmt: skip
def test_kinds_of_labels(folder, name, values, declared):
    schema = schema_of(user=users(90), **{name: values}, chosen=name)
    assert schema["labels"] == [{"name": name} | declared]
    run = convert(tomllib.loads(Path("out/config.toml").read_text()), RunConfig, "config.toml")
    assert len(next(iter(run.reader())).labels)


@pytest.mark.parametrize("name", ["rating", "watch_time", "dwell_time_ms"])
def test_values_that_are_labels_without_asking(folder, name):
    assert schema_of(user=users(90), **{name: np.arange(90) % 11 + 0.5})["labels"][0]["kind"] == "regression"


def test_a_label_of_amounts_has_their_unit(folder):
    schema = csv_schema("user,paid", [f"u{i % 7},${i}.50" for i in range(90)], "paid")
    assert schema["labels"] == [{"name": "paid", "kind": "regression", "unit": "$"}]


def test_texts_that_name_ids_are_no_classes(folder):
    with pytest.raises(DataError, match="'user' has 7 different texts"):
        schema_of(user=users(90), item=users(90), chosen="user")


def test_a_label_of_classes_trains(folder):
    schema_of(user=users(300), kind=[("a", "b", "c")[i % 7 % 3] for i in range(300)], chosen="kind")
    command("train", "out/config.toml", "--set", "trainer.progress=false", "--set", "train.max_steps=3")


def test_skewed_numbers_enter_by_their_logarithm(folder):
    draw = np.random.default_rng(0)
    even, skewed = draw.normal(50, 3, 500), draw.lognormal(3, 2, 500)
    dense = schema_of(user=users(500), even=even, skewed=skewed, label=np.arange(500) % 2)["dense_features"]
    assert dense == [{"name": "even", "scale": "standard"}, {"name": "skewed", "log": True, "scale": "standard"}]
    assert "# numbers; skewed, so by its logarithm" in Path("out/config.toml").read_text()


def test_missing_numbers_and_ids_are_declared(folder):
    price = [None if i % 10 == 0 else i * 0.5 for i in range(200)]
    city = [None if i % 20 == 0 else f"c{i % 5}" for i in range(200)]
    schema = schema_of(city=city, price=price, label=np.arange(200) % 2)
    (dense,) = schema["dense_features"]
    assert (dense["fill"], dense["missing_indicator"]) == ("mean", True)
    assert features(schema)["city"]["fill"] == "missing"
    text = Path("out/config.toml").read_text()
    assert "numbers; 10% missing" in text
    assert "5% missing, with an embedding of their own" in text


def test_buckets_where_a_line_explains_less(folder):
    draw = np.random.default_rng(0)
    age, income = draw.uniform(0, 100, 3000), draw.uniform(0, 100, 3000)
    label = (np.abs(age - 50) < 20) ^ (draw.random(3000) < 0.1)
    schema = schema_of(user=users(3000), age=age, income=income, label=label.astype(int))
    assert features(schema)["age_buckets"]["bucketize"] == {"column": "age", "quantiles": 32}
    assert "income_buckets" not in features(schema)
    assert "32 buckets explain" in Path("out/config.toml").read_text()
    label = (income > 50).astype(int)
    assert "income_buckets" in features(schema_of(user=users(3000), income=income, label=label))  # A step.
    rising = (draw.random(3000) < income / 100).astype(int)
    assert "income_buckets" not in features(schema_of(user=users(3000), income=income, label=rising))


def test_parts_of_times_in_their_unit(folder):
    at = (1_700_000_000 + np.arange(300) * 50_000) * 1000
    schema = schema_of(user=users(300), timestamp=at, label=np.arange(300) % 2)
    assert features(schema)["timestamp_hour"]["time"] == {"column": "timestamp", "part": "hour", "unit": "ms"}
    dates = [f"2024-{1 + i // 30:02d}-{1 + i % 28:02d}" for i in range(300)]
    found = features(schema_of(user=users(300), day=dates, label=np.arange(300) % 2))
    assert set(found) == {"user", "day_weekday"}  # Dates have no hour.
    command("train", "out/config.toml", "--set", "trainer.progress=false", "--set", "train.max_steps=2")


def test_weights_and_groups_of_samples(folder):
    rows = 200
    columns = {
        "session_id": np.arange(rows) // 5,
        "user": users(rows),
        "sample_weight": 0.5 + np.arange(rows) % 3,
        "label": np.arange(rows) % 2,
    }
    schema = schema_of(**columns)
    assert (schema["sample_weight"], schema["group"]) == ("sample_weight", "session_id")
    assert set(features(schema)) == {"user"}
    text = Path("out/config.toml").read_text()
    assert 'by = "hash", column = "session_id"' in text
    command("train", "out/config.toml", "--set", "trainer.progress=false", "--set", "train.max_steps=2")
    heavy = schema_of(**(columns | {"sample_weight": users(rows), "weight": 60.0 + np.arange(rows) % 40 / 7}))
    assert "sample_weight" not in heavy  # Of people, and texts are none.
    alone = schema_of(**(columns | {"session_id": np.arange(rows)[::-1] * 7}))
    assert "group" not in alone


def test_a_terminal_is_asked_about_a_weight(folder, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    rows = "".join(f"u{i % 5},{i % 3 + 0.5},{i % 2}\n" for i in range(120))
    Path("data.csv").write_text(f"user,weight,label\n{rows}")
    for answer in (True, False):
        monkeypatch.setattr("typer.confirm", lambda *_, answer=answer, **__: answer)
        init("data.csv", "out", force=True)
        schema = tomllib.loads(Path("out/config.toml").read_text())["schema"]
        assert ("sample_weight" in schema, bool(schema["dense_features"])) == (answer, not answer)


def test_a_list_with_weights(folder):
    tags = ["t0", "t0|t1", "t0|t1|t2"]
    rows = [f"{tags[i % 3]},{'|'.join(['0.5'] * (i % 3 + 1))},{i % 2}" for i in range(90)]
    schema = csv_schema("tags,tag_weights,label", rows)
    assert features(schema)["tags"]["weights"] == "tag_weights"
    assert set(features(schema)) == {"tags"}
    command("train", "out/config.toml", "--set", "trainer.progress=false", "--set", "train.max_steps=2")
    rows[5] = "t0|t1,0.5,1"
    assert "weights" not in features(csv_schema("tags,tag_weights,label", rows))["tags"]


def test_ids_in_a_text_are_a_list_and_words_are_not(folder):
    rows = [f"{i} {i + 1} {i + 2},red shoe number {i},{i % 2}" for i in range(90)]
    found = features(csv_schema("seen,title,label", rows))
    assert found["seen"]["split"] == " "
    assert found["title"]["tokens"] == {"column": "title", "ngrams": [1]}
    rows = [f"{i % 9} red shoe {i},{i % 2}" for i in range(6000)]
    assert features(csv_schema("title,label", rows))["title"]["tokens"]["ngrams"] == [1, 2]


def test_derived_names_are_unique_and_short(folder):
    at = [f"2024-05-{1 + i % 28:02d} {i % 24:02d}:00" for i in range(300)]
    long = "t" * 70
    found = features(schema_of(**{long: at, "t" * 40 + "_hour": users(300), "label": np.arange(300) % 2}))
    assert len(found) == 3
    assert all(len(name) <= 64 for name in found)


def test_the_configuration_is_dumped_as_it_was_read(folder):
    draw = np.random.default_rng(0)
    at = [f"2024-05-{1 + i % 28:02d} {i % 24:02d}:00" for i in range(90)]
    csv_schema(
        "user,price,tags,rating,at",
        [f"u{i % 7},${draw.lognormal(3, 2):.2f},a|b{i % 3},{i % 3},{at[i]}" for i in range(90)],
    )
    dumped = command("train", "out/config.toml", "--dump-config", errors=False)
    Path("out/dumped.toml").write_text(dumped)
    assert command("train", "out/dumped.toml", "--dump-config", errors=False) == dumped
    texts = [Path("out/config.toml").read_text(), dumped]
    first, second = (convert(tomllib.loads(text), RunConfig, "config").schema for text in texts)
    assert dump(first) | {"tables": []} == dump(second)


EVERYTHING = """
[data]
kind = "csv"
path = "a.csv"
[schema]
sample_weight = "w"
group = "session"
labels = ["click", { name = "rating", kind = "regression", loss = { kind = "huber", delta = 2.0 }, unit = "s" },
  { name = "c", kind = "multiclass", classes = ["a", "b"], missing = "mask" }]
dense_features = ["age",
  { name = "price", fill = "mean", missing_indicator = true, clip = [0.0, 1e300], log = true, scale = "standard",
    fitted = { mean = 1.0, centre = 0.5, width = 2.0, rows = 5 } }, { name = "v", size = [2, 3], scale = [0, 100.0] }]
id_features = [
  { name = "b", dim = 8, bucketize = { column = "price", quantiles = 32 } },
  { name = "e", dim = 8, fill = 3, bucketize = { column = "price", edges = [1, 2.5] } },
  { name = "h", dim = 8, time = { column = "ts", part = "hour", zone = "Europe/Berlin" } },
  { name = "t", dim = 8, tokens = { column = "title", ngrams = [1, 2] } },
  { name = "tags", dim = 8, split = "|", weights = "tw", fill = "none", pooling = "mean" },
]
""".replace("\n  {", " {").replace("\n    ", " ")  # An inline table is on one line.


def test_every_declaration_is_dumped_and_read_again(folder):
    Path("run.toml").write_text(EVERYTHING)
    dumped = command("train", "run.toml", "--dump-config", errors=False)
    Path("dumped.toml").write_text(dumped)
    assert command("train", "dumped.toml", "--dump-config", errors=False) == dumped
    first, second = (convert(tomllib.loads(text), RunConfig, "run").schema for text in (EVERYTHING, dumped))
    assert dump(first) | {"tables": []} == dump(second)


@pytest.mark.parametrize(
    ("right", "wrong", "place", "suggested"),
    [
        ("quantiles", "quantile", "schema.id_features[0].bucketize", "quantiles"),
        ('"hour"', '"hours"', "schema.id_features[2].time.part", "hour"),
        ("ngrams", "ngram", "schema.id_features[3].tokens", "ngrams"),
        ("huber", "hubr", "schema.labels[1].loss.kind", "huber"),
        ("delta", "delt", "schema.labels[1].loss", "delta"),
        ("missing_indicator", "missing_indicater", "schema.dense_features[1]", "missing_indicator"),
        ('"regression"', '"regresion"', "schema.labels[1].kind", "regression"),
        ("sample_weight", "sample_weigth", "schema", "sample_weight"),
        ("rows = 5", "row = 5", "schema.dense_features[1].fitted", "rows"),
    ],
)
def test_a_wrong_nested_key_is_named_with_the_right_one(folder, right, wrong, place, suggested):
    Path("run.toml").write_text(EVERYTHING.replace(right, wrong))
    message = " ".join(command("train", "run.toml", "--dump-config", ok=False).split())
    assert f"run.toml: {place}: " in message
    assert f"Did you mean {suggested!r}?" in message
