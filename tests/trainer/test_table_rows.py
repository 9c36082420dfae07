"""Rows that a run takes from another table of a checkpoint, freezes, and trains again."""

import logging
import re

import numpy as np
import pytest
import torch
from test_checkpointing import several

import persia
from persia.checkpoint import ReshardOptions, reshard
from persia.errors import CheckpointError
from persia.modes import Async, Gba, Hybrid, Sync
from persia.optim import SGD, Adagrad, Adam
from persia.testing import Threads

IDS = np.arange(100, dtype=np.uint64)


def schema_of(*tables, dim=4, kind="auto"):
    """A feature for each table: a Table, or the name of one with the defaults."""
    names = [table if isinstance(table, str) else table.name for table in tables]
    features = [persia.IdFeature(f"of_{name}", table=name, dim=dim, kind=kind) for name in names]
    return persia.Schema(features, labels=["label"], tables=[t for t in tables if not isinstance(t, str)])


def batches(schema, count=5):
    rng = np.random.default_rng(0)
    columns = [
        {feature.name: rng.permutation(100) for feature in schema.id_features} | {"label": rng.integers(0, 2, 100)}
        for _ in range(count)
    ]
    return [persia.Batch.from_columns(schema, each) for each in columns]


def trained(schema, path=None, servers=1, **options):
    t = several(schema, servers, **options)
    t.fit(batches(schema))
    if path is not None:
        t.save(str(path))
    return t


def values(t, table):
    return t.embeddings.rows(table, IDS).values


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_are_loaded_into_a_table_of_another_name(tmp_path, servers):
    first = trained(schema_of("a", "c"), tmp_path)
    second = several(schema_of("b", "c"), servers)
    loaded = second.load_rows(str(tmp_path), {"b": "a"})
    assert loaded["b"].rows == 100
    assert loaded["b"].state
    assert set(loaded) == {"b"}
    np.testing.assert_array_equal(values(second, "b"), values(first, "a"))
    assert not second.embeddings.rows("c", IDS).found.any()
    second.fit(batches(second.schema))


def test_two_tables_may_take_the_rows_of_one(tmp_path):
    first = trained(schema_of("a"), tmp_path)
    second = several(schema_of("a", "b"), 2)
    assert set(second.load_rows(str(tmp_path), {"b": "a", "a": "a"})) == {"a", "b"}
    for name in ("a", "b"):
        np.testing.assert_array_equal(values(second, name), values(first, "a"))


@pytest.mark.parametrize(
    ("mine", "names", "problem"),
    [
        (schema_of("b"), {"b": "x"}, r"no table 'x' in .*; it has a, c"),
        (schema_of("b"), {"x": "a"}, r"no table 'x' in the model; it has b"),
        (schema_of("b", dim=8), {"b": "a"}, r"table 'b' has dim 8, in the checkpoint table 'a' has 4"),
        (schema_of("b", kind="text"), {"b": "a"}, r"rows of table 'a' have other ids: feature 'of_b' .* 'of_a'"),
    ],
)
def test_renames_that_do_not_fit_are_refused(tmp_path, mine, names, problem):
    trained(schema_of("a", "c"), tmp_path)
    second = several(mine, 1)
    with pytest.raises(CheckpointError, match=problem):
        second.load_rows(str(tmp_path), names)
    assert not any(counts["rows"] for counts in second.embeddings.statistics().values())


@pytest.mark.parametrize("resharded", [False, True])
def test_counts_of_ids_survive_another_number_of_servers(tmp_path, resharded, caplog):
    schema = schema_of(persia.Table("a", 4, capacity=2000, admission=persia.AdmitMinFrequency(3)))
    first = several(schema, 3)
    first.fit(batches(schema, 2))
    assert not first.embeddings.rows("a", IDS).found.any()
    first.save(str(tmp_path / "saved"))
    if resharded:
        reshard(tmp_path / "saved", tmp_path / "resharded", ReshardOptions(2))
    second = several(schema, 2)
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        second.load(str(tmp_path / ("resharded" if resharded else "saved")))
    assert re.search(r"admitted early: table 'a' uses [1-9]\.\d% of its counters\.", caplog.text)
    second.fit(batches(schema, 3), max_steps=1)
    assert second.embeddings.rows("a", IDS).found.all()


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2), Async()])
def test_loaded_rows_of_a_frozen_table_stay(tmp_path, mode, caplog):
    first = trained(schema_of("a", "c"), tmp_path)
    schema = schema_of(persia.Table("b", 4, trainable=False), "c")
    second = persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(8,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode,
        options=persia.TrainerOptions(progress=False),
    )
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        assert second.load_rows(str(tmp_path), {"b": "a"})["b"] == (100, False)
    assert not caplog.text
    second.fit(batches(schema))
    np.testing.assert_array_equal(values(second, "b"), values(first, "a"))
    counts = second.embeddings.statistics()
    assert counts["b"]["applied"] == 0
    assert counts["c"]["applied"] == 500


@pytest.mark.parametrize("nn_workers", [1, 3])
def test_gba_trains_the_other_tables_only(tmp_path, nn_workers):
    first = trained(schema_of("a", "c"), tmp_path)
    schema = schema_of(persia.Table("a", 4, trainable=False), "c")

    def work(member):
        t = persia.Trainer(
            persia.nn.models.FFNN(schema, hidden=(8,)),
            schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
            embedding_optimizer=Adagrad(lr=0.1),
            mode=Gba(global_batch_size=300),
            cluster=member,
            options=persia.TrainerOptions(progress=False, timeout=60.0),
        )
        t.load_rows(str(tmp_path), {"a": "a", "c": "c"})
        t.fit(batches(schema, 12))
        return values(t, "a"), values(t, "c"), t.embeddings.statistics()["a"]["applied"]

    for frozen, moved, applied in Threads(nn_workers=nn_workers, ps=2, timeout=60.0).run(work):
        np.testing.assert_array_equal(frozen, values(first, "a"))
        assert applied == 0
        assert (moved != values(first, "c")).any(axis=1).all()


def test_a_frozen_table_is_saved_and_resumed(tmp_path):
    schema = schema_of(persia.Table("a", 4, trainable=False), "c")
    first = trained(schema, tmp_path)
    record = persia.checkpoint.CheckpointReader(tmp_path).manifest.tables["a"]
    assert (record.optimizer, record.state_width, record.rows) == (None, 0, 100)
    second = several(schema, 2)
    second.load(str(tmp_path))
    np.testing.assert_array_equal(values(second, "a"), values(first, "a"))
    second.fit(batches(schema))
    np.testing.assert_array_equal(values(second, "a"), values(first, "a"))


@pytest.mark.parametrize("thaws", [True, False])
def test_a_resumed_run_may_freeze_a_table_and_thaw_it(tmp_path, thaws):
    """In both directions the rows stay; a table that is trained again begins with the initial state."""
    schemas = [schema_of(persia.Table("a", 4, trainable=trainable), "c") for trainable in (not thaws, thaws)]
    first = trained(schemas[0], tmp_path)
    second = several(schemas[1], 1)
    second.load(str(tmp_path))
    np.testing.assert_array_equal(values(second, "a"), values(first, "a"))
    second.fit(batches(schemas[1]))
    assert (values(second, "a") == values(first, "a")).all() != thaws


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_decoupled_decay_equals_adamw_where_each_row_is_in_each_batch(decay):
    schema = schema_of("a")
    embeddings = persia.nn.EmbeddingCollection(
        schema, optimizer=Adam(lr=0.05, decoupled_weight_decay=decay), mode=Sync()
    )
    data = batches(schema, 20)
    weight = None
    targets = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    for batch, source in zip(embeddings.prefetch(data), data, strict=True):
        places = torch.from_numpy(source.id_features["of_a"].values.astype(np.int64))
        if weight is None:
            weight = torch.empty(100, 4)
            weight[places] = embeddings(batch)["of_a"].detach()
            weight.requires_grad_()
            dense = torch.optim.AdamW([weight], 0.05, weight_decay=decay)
        (embeddings(batch)["of_a"] - targets[places]).square().mean().backward()
        dense.zero_grad()
        (weight[places] - targets[places]).square().mean().backward()
        dense.step()
    rows = torch.from_numpy(embeddings.rows("a", IDS).values)
    torch.testing.assert_close(rows, weight.detach(), rtol=1e-5, atol=1e-6)


def test_clipping_by_row_equals_clip_grad_norm_of_each_row():
    schema = schema_of("a")
    embeddings = persia.nn.EmbeddingCollection(schema, optimizer=SGD(lr=1.0, clip_row_norm=0.5), mode=Sync())
    (data,) = batches(schema, 1)
    scale = torch.arange(100.0).unsqueeze(1) / 50
    for batch in embeddings.prefetch([data]):
        rows = embeddings(batch)["of_a"]
        before = rows.detach().clone()
        (rows * scale).sum().backward()
    after = torch.from_numpy(embeddings.rows("a", data.id_features["of_a"].values).values)
    moved = (before - after).norm(dim=1)
    torch.testing.assert_close(moved, (2 * scale[:, 0]).clamp(max=0.5), rtol=1e-4, atol=1e-5)


def test_a_table_may_clip_otherwise_than_the_rest():
    table = persia.Table("a", 4, optimizer=SGD(lr=1.0, clip_row_norm=0.5))
    embeddings = persia.nn.EmbeddingCollection(schema_of(table, "c"), optimizer=SGD(lr=1.0, clip_row_norm=2.0))
    server = embeddings.connection.servers[0]
    limits = {name: server.tables()[name].optimizer.clip_row_norm for name in ("a", "c")}
    assert limits == {"a": 0.5, "c": 2.0}
