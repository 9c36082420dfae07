"""Fitting of rules: exact moments, quantiles near the exact ones, the same values from each kind of reader."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia import Buckets, DenseFeature, IdFeature, Label, Schema
from persia.data import fit
from persia.errors import CheckpointError, ConfigError, DataError
from persia.schema import fitted_values, with_values_of, without_values

RNG = np.random.default_rng(0)
PRICE = RNG.lognormal(size=1000).round(3)
AGE = [None if RNG.random() < 0.2 else float(x) for x in RNG.integers(18, 80, 1000)]
TABLE = pa.table({"user": RNG.integers(0, 9, 1000), "price": PRICE, "age": AGE, "label": RNG.integers(0, 2, 1000)})
SCHEMA = Schema(
    [IdFeature("user", dim=4), IdFeature("band", dim=4, bucketize=Buckets("price", quantiles=4))],
    dense_features=[
        DenseFeature("price", log=True, scale="standard"),
        DenseFeature("age", fill="mean", scale="quantile"),
    ],
)
DENSE = msgspec.structs.replace(SCHEMA, id_features=SCHEMA.id_features[:1])


def readers(schema, folder, **options):
    pq.write_table(TABLE, folder / "rows.parquet", row_group_size=300)
    pc.write_csv(TABLE, folder / "rows.csv")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    return [
        persia.data.csv(folder / "rows.csv", schema, **options),
        persia.data.parquet(folder / "rows.parquet", schema, **options),
        persia.data.jsonl(folder / "rows.jsonl", schema, **options),
        persia.data.arrow(TABLE, schema, **options),
        persia.data.negatives(persia.data.parquet(folder / "rows.parquet", schema, **options), ["user"], 1),
    ]


def test_moments_are_exact_and_quantiles_are_numpys(tmp_path):
    for reader in readers(SCHEMA, tmp_path):
        price, age = persia.fit_features(SCHEMA, reader).dense
        np.testing.assert_allclose(
            [price.fitted.centre, price.fitted.width], [np.log1p(PRICE).mean(), np.log1p(PRICE).std()]
        )
        present = [x for x in AGE if x is not None]
        np.testing.assert_allclose(age.fitted.mean, np.mean(present))
        np.testing.assert_allclose(age.fitted.quantiles, np.quantile(present, np.linspace(0, 1, 257)))
        assert age.fitted.rows == 1000


def test_blocks_are_merged_and_pieces_make_no_difference(monkeypatch):
    monkeypatch.setattr(fit, "BLOCK_VALUES", 64)
    values = np.sort(RNG.lognormal(size=1000))
    schema = Schema([IdFeature("user", dim=4)], [DenseFeature("x", fill="mean", scale="standard")], labels=[])
    results = set()
    for size in (7, 100, 1000):
        pieces = [pa.table({"user": part, "x": part}) for part in np.split(values, range(size, 1000, size))]
        results.add(persia.fit_features(schema, persia.data.arrow(pa.concat_tables(pieces), schema)).dense[0].fitted)
    (found,) = results
    np.testing.assert_allclose([found.mean, found.centre, found.width], [values.mean(), values.mean(), values.std()])


def test_all_readers_take_the_fitted_schema(tmp_path):
    batches = []
    for reader in readers(DENSE, tmp_path):
        with pytest.raises(ConfigError, match=r"persia\.fit_features"):
            next(iter(reader))
        fitted = reader.with_schema(persia.fit_features(DENSE, reader))
        assert fitted.schema.needs_fit == ()
        batches.append(next(iter(fitted)))
    for batch in batches[1:4]:
        np.testing.assert_array_equal(batch.dense, batches[0].dense)


def test_edges_split_the_rows_equally_and_are_distinct():
    edges = persia.fit_features(SCHEMA, TABLE.to_pydict()).id_features[1].bucketize.fitted
    np.testing.assert_allclose(edges, np.quantile(PRICE, [0.25, 0.5, 0.75]))
    ties = {**TABLE.to_pydict(), "price": [0.0] * 900 + PRICE[:100].tolist()}
    assert persia.fit_features(SCHEMA, ties).id_features[1].bucketize.fitted == (0.0,)


BANDS = Schema([IdFeature("band", dim=4, bucketize=Buckets("x", quantiles=2))], labels=[])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_edges_are_read_like_the_numbers_of_buckets(kind):
    columns = {"x": np.array([0.1] * 4 + [0.2] * 6, kind)}
    fitted = persia.fit_features(BANDS, columns)
    assert fitted.id_features[0].bucketize.fitted == (0.2,)
    assert persia.Batch.from_columns(fitted, columns).id_features["band"].values.tolist() == [0] * 4 + [1] * 6


def test_edges_are_fitted_to_lists():
    pair = (np.array([1.0, 2.0, np.nan, 3.0]), np.array([0, 2, 4]))
    for column in ([[1, 2], [None, 3]], pa.array([[1, 2], [None, 3]]), pair, ["1", "2", "", "3"]):
        assert persia.fit_features(BANDS, {"x": column}).id_features[0].bucketize.fitted == (2.0,)
    assert persia.fit_features(BANDS, {"x": [[1, 2], [30]]}, rows=1).id_features[0].bucketize.fitted == (1.5,)
    with pytest.raises(DataError, match="a pair of values and offsets, which `rows` cannot bound"):
        persia.fit_features(BANDS, {"x": pair}, rows=1)


def test_a_large_sample_is_near_the_exact_quantiles():
    values = np.sort(np.random.default_rng(1).normal(size=1_000_000))
    feature = persia.fit_features(
        Schema([IdFeature("user", dim=4)], [DenseFeature("x", scale="quantile")]), {"x": values}
    )
    ranks = np.searchsorted(values, feature.dense[0].fitted.quantiles) / len(values)
    assert np.abs(ranks - np.linspace(0, 1, 257)).max() < 0.005


def test_the_reader_applies_its_selection_renames_and_fill(tmp_path):
    schema = Schema(
        [IdFeature("user", dim=4)], [DenseFeature("years", scale="minmax"), DenseFeature("price", scale="minmax")]
    )
    pc.write_csv(TABLE, tmp_path / "rows.csv")
    reader = persia.data.csv(
        tmp_path / "rows.csv",
        schema,
        rename={"years": "age"},
        fill={"years": 200},
        where="price < 1",
        units={"price": "$"},
    )
    years, price = persia.fit_features(schema, reader).dense
    assert years.fitted.centre + years.fitted.width == 200
    assert price.fitted.centre + price.fitted.width == PRICE[PRICE < 1].max()


def test_rows_bound_what_is_read(tmp_path):
    for reader in readers(SCHEMA, tmp_path):
        fitted = persia.fit_features(SCHEMA, reader, rows=10).dense[0].fitted
        assert fitted.rows == 10
        np.testing.assert_allclose(fitted.centre, np.log1p(PRICE[:10]).mean())


def test_fitted_values_are_kept_unless_refitted():
    first = persia.fit_features(SCHEMA, TABLE.to_pydict())
    other = TABLE.slice(0, 10).to_pydict()
    assert persia.fit_features(first, other) == first
    assert persia.fit_features(SCHEMA, other, keep=first) == first
    again = persia.fit_features(first, other, refit=True)
    assert again.dense[0].fitted.rows == 10
    assert without_values(first) == without_values(again) == SCHEMA
    changed = msgspec.structs.replace(
        SCHEMA, dense_features=[DenseFeature("price", scale="standard"), SCHEMA.dense_features[1]]
    )
    assert with_values_of(changed, first).needs_fit == ("price",)


def test_the_fitted_schema_survives_json():
    fitted = persia.fit_features(SCHEMA, TABLE.to_pydict())
    again = msgspec.json.decode(msgspec.json.encode(fitted), type=Schema)
    assert again.dense == fitted.dense
    assert again.id_features[1] == fitted.id_features[1]
    assert [value.feature for value in fitted_values(again)] == ["price", "age", "band"]


def test_a_constant_column_has_width_one():
    schema = Schema(
        [IdFeature("user", dim=4)], [DenseFeature("x", scale="standard"), DenseFeature("z", scale="quantile")]
    )
    fitted = persia.fit_features(schema, {"x": [0.1] * 7, "z": [0.1] * 7})
    assert fitted.dense[0].fitted.width == 1
    batch = persia.Batch.from_columns(fitted, {"user": [1], "x": [0.1], "z": [0.1], "label": [0]})
    np.testing.assert_allclose(batch.dense, 0, atol=1e-7)


def test_errors():
    with pytest.raises(DataError, match="'price' has no values"):
        persia.fit_features(SCHEMA, {"price": [None], "age": [1]})
    with pytest.raises(DataError, match="no column 'price'"):
        persia.fit_features(SCHEMA, {"age": [1]})
    with pytest.raises(ConfigError, match="list gives batches"):
        persia.fit_features(SCHEMA, [])


def test_a_rule_of_a_label_works_as_the_readers(tmp_path):
    schema = Schema([IdFeature("user", dim=4)], labels=[Label("cheap", rule="price < 1")])
    for reader in readers(schema, tmp_path, batch_size=1000)[:4]:
        np.testing.assert_array_equal(next(iter(reader)).labels[:, 0], PRICE < 1)
    for reader in readers(schema, tmp_path, batch_size=1000, labels={"cheap": "price < 2"})[:4]:
        np.testing.assert_array_equal(next(iter(reader)).labels[:, 0], PRICE < 2)


def test_a_continued_run_needs_the_rules_and_values_of_its_checkpoint(tmp_path):
    def trainer(schema):
        return persia.Trainer(
            persia.nn.models.FFNN(schema, hidden=(4,)),
            schema,
            optimizer=torch.optim.Adam,
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            options=persia.TrainerOptions(progress=False),
        )

    fitted = persia.fit_features(DENSE, TABLE.to_pydict())
    first = trainer(fitted)
    first.fit(persia.data.arrow(TABLE, fitted))
    first.save(tmp_path)
    assert persia.checkpoint.CheckpointReader(str(tmp_path)).schema.dense == fitted.dense
    other = persia.fit_features(DENSE, TABLE.slice(0, 10).to_pydict())
    with pytest.raises(CheckpointError, match=r"'price' has other fitted values.*refit=True"):
        trainer(other).load(tmp_path)
    trainer(other).load(tmp_path, refit=True)
    trainer(persia.fit_features(DENSE, TABLE.slice(0, 10).to_pydict(), keep=fitted)).load(tmp_path)
    price = msgspec.structs.replace(fitted.dense_features[0], clip=(0, 5))
    changed = msgspec.structs.replace(fitted, dense_features=[price, fitted.dense_features[1]])
    with pytest.raises(CheckpointError, match=r"'price' has clip \(0.0, 5.0\), in the checkpoint None"):
        trainer(changed).load(tmp_path)
