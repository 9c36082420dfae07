"""Batches, weights and checkpoints beside TorchRec itself; skipped where it is not installed."""

import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

from persia import Batch, IdColumn, IdFeature, Schema, Table, Uniform
from persia.errors import ConfigError, DataError
from persia.interop import table_ids
from persia.interop.torchrec import (
    export_weights,
    from_batch,
    import_dcp,
    import_weights,
    keyed_jagged_tensor,
    keyed_tensor,
    schema_of,
    to_batch,
)
from persia.modes import Sync
from persia.nn import EmbeddingCollection
from persia.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from support.several_ps import Several

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec", reason="TorchRec is not installed; docs/guide/from-torchrec.md")
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad as TheirRowwiseAdagrad

pytestmark = pytest.mark.filterwarnings("ignore")  # Of TorchRec and FBGEMM.

ROWS, DIM, BATCH, STEPS = 20, 4, 8, 10
SCHEMA = Schema(
    [IdFeature("a", table="shop"), IdFeature("b", table="shop"), IdFeature("c", pooling="mean", dim=8)],
    ["price", "age"],
    tables=[Table("shop", DIM)],
)


def tables():
    return [
        torchrec.EmbeddingBagConfig(name="shop", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["a", "b"]),
        torchrec.EmbeddingBagConfig(
            name="c", embedding_dim=8, num_embeddings=ROWS, feature_names=["c"], pooling=torchrec.PoolingType.MEAN
        ),
    ]


def fused(kind, **options):
    torch.manual_seed(0)
    return FusedEmbeddingBagCollection(tables(), kind, {"lr": 0.1, **options}, device=torch.device("cpu"))


def jagged(step=0, keys=("a", "b", "c")):
    """Feature a has one id in each sample, b up to 3, c up to 2."""
    draw = np.random.default_rng(step)
    most = {"a": (1, 2), "b": (0, 4), "c": (0, 3)}
    lengths = np.concatenate([draw.integers(*most.get(key, (0, 3)), BATCH) for key in keys])
    ids = torch.from_numpy(draw.integers(0, ROWS, lengths.sum()))
    return torchrec.KeyedJaggedTensor(list(keys), ids, lengths=torch.from_numpy(lengths))


def labels_of(step):
    return torch.from_numpy(np.random.default_rng(step).integers(0, 2, (BATCH, 1)).astype(np.float32))


def collection_of(optimizer, ps=1, schema=SCHEMA):
    return EmbeddingCollection(schema, optimizer=optimizer, mode=Sync(), cluster=Several(ps))


# --- batches ----------------------------------------------------------------------------------------------------


def test_memory_is_shared_both_ways():
    ids, labels = jagged(), labels_of(0)
    dense = torchrec.KeyedTensor(["price", "age"], [1, 1], torch.ones(BATCH, 2))
    batch = to_batch(SCHEMA, ids, dense, labels)
    assert all(np.shares_memory(column.values, ids.values().numpy()) for column in batch.id_features.values())
    assert np.shares_memory(batch.dense, dense.values().numpy())
    assert np.shares_memory(batch.labels, labels.numpy())
    back = from_batch(SCHEMA, batch)
    assert back.ids.values().data_ptr() == ids.values().data_ptr()
    assert back.dense.values().data_ptr() == dense.values().data_ptr()
    assert back.labels.data_ptr() == labels.data_ptr()
    assert back.ids.keys() == ids.keys()
    assert torch.equal(back.ids.lengths(), ids.lengths())
    assert torch.equal(back.ids.values(), ids.values())
    assert back.dense.keys() == ["price", "age"]


def test_features_in_another_order_are_copied():
    ids = jagged(keys=("other", "c", "b", "a"))
    batch = to_batch(SCHEMA, ids, torch.zeros(BATCH, 2))
    assert batch.labels.shape == (BATCH, 0)
    back = keyed_jagged_tensor(SCHEMA, batch)
    assert back.keys() == ["a", "b", "c"]
    for name in back.keys():  # noqa: SIM118
        assert torch.equal(back[name].values(), ids[name].values())
        assert torch.equal(back[name].lengths(), ids[name].lengths())


def test_there_may_be_no_dense_features():
    """Those of a KeyedTensor are left out, as others that the schema does not have."""
    schema = Schema([IdFeature("a", dim=4)], labels=[])
    batch = to_batch(schema, jagged(), torchrec.KeyedTensor(["price"], [1], torch.ones(BATCH, 1)))
    assert batch.dense.shape == (BATCH, 0)


def test_a_keyed_tensor_needs_embeddings():
    with pytest.raises(ConfigError, match="no embeddings"):
        keyed_tensor({})


def test_a_batch_of_a_reader_becomes_a_jagged_tensor():
    """Its arrays lie apart, and may be read-only."""
    columns = {"a": [1, 2], "b": [[3, 4], []], "c": [[], [5]], "price": [1.0, 2.0], "age": [3.0, 4.0], "label": [0, 1]}
    batch = Batch.from_columns(SCHEMA, columns)
    for column in batch.id_features.values():
        column.values.flags.writeable = False
    batch.dense.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Torch warns of arrays that it cannot write to.
        ids, dense, labels = from_batch(SCHEMA, batch)
    assert ids.values().tolist() == [1, 2, 3, 4, 5]
    assert ids.lengths().tolist() == [1, 1, 2, 0, 0, 1]
    assert dense["age"].tolist() == [[3.0], [4.0]]
    assert labels.tolist() == [[0.0], [1.0]]


def test_adjacent_views_in_another_order_are_not_joined():
    values = np.arange(6, dtype=np.uint64)
    apart = {"a": IdColumn(values[4:6]), "b": IdColumn(values[0:2]), "c": IdColumn(values[2:4])}
    batch = Batch(apart, np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32))
    assert keyed_jagged_tensor(SCHEMA, batch).values().tolist() == [4, 5, 0, 1, 2, 3]


def test_a_keyed_tensor_without_a_dense_feature_is_refused():
    dense = torchrec.KeyedTensor(["price"], [1], torch.zeros(BATCH, 1))
    with pytest.raises(DataError, match="no key 'age'"):
        to_batch(SCHEMA, jagged(), dense)


def test_the_schema_is_that_of_the_collection():
    ebc = torchrec.EmbeddingBagCollection(tables=tables(), device=torch.device("cpu"))
    schema = schema_of(ebc.embedding_bag_configs(), ["price"], ["click"])
    assert [(f.name, f.table_name, f.pooling) for f in schema.id_features] == [
        ("a", "shop", "sum"),
        ("b", "shop", "sum"),
        ("c", "c", "mean"),
    ]
    assert {name: table.dim for name, table in schema.resolved_tables().items()} == {"shop": 4, "c": 8}
    assert schema.tables[0].initializer == Uniform(-(ROWS**-0.5), ROWS**-0.5)
    assert (schema.dense_features, schema.labels) == (["price"], ["click"])
    int8 = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"], data_type=torchrec.DataType.INT8
    )
    with pytest.raises(ConfigError, match="INT8"):
        schema_of([int8])
    weighted = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"], need_pos=True
    )
    with pytest.raises(ConfigError, match="need_pos"):
        schema_of([weighted])


# --- weights ----------------------------------------------------------------------------------------------------


def networks():
    """The same network twice: on 2 x 4 + 8 pooled numbers."""
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(nn.Sequential(nn.Linear(2 * DIM + 8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return found


def train(net, embed, batches):
    """`batches`: what `embed` takes, and labels."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    losses = []
    for batch, labels in batches:
        loss = loss_of(net(embed(batch)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "options", "ours"),
    [
        (TheirRowwiseAdagrad, {"eps": 1e-8}, RowwiseAdagrad(0.1, initial_accumulator=0.0, eps=1e-8)),
        (torch.optim.Adagrad, {"eps": 1e-8}, Adagrad(0.1, initial_accumulator=0.0, eps=1e-8)),
    ],
)
def test_training_continues_as_in_torchrec(kind, options, ours):
    """N steps there and N here are 2 N steps there; and again N there after the way back."""
    ebc, (net, here) = fused(kind, **options), networks()

    def values(features):
        return ebc(features).values()

    def steps(first):
        return [(jagged(step), labels_of(step)) for step in range(first, first + STEPS)]

    train(net, values, steps(0))
    collection = collection_of(ours, ps=2, schema=schema_of(tables()))
    done = import_weights(collection, ebc.state_dict(), ebc.fused_optimizer().state_dict())
    assert done == {"shop": (ROWS, 0, 0), "c": (ROWS, 0, 0)}
    here.load_state_dict(net.state_dict())
    batches = [to_batch(collection.schema, ids, None, labels) for ids, labels in steps(STEPS)]
    prepared = ((batch, batch.labels) for batch in collection.prefetch(batches))
    mine = train(here, lambda batch: keyed_tensor(collection(batch)).values(), prepared)
    theirs = train(net, values, steps(STEPS))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert max(theirs) - min(theirs) > 1e-3

    back = fused(kind, **options)
    state = back.fused_optimizer().state_dict()
    assert export_weights(collection, back.state_dict(), state) == {"shop": (ROWS, 0), "c": (ROWS, 0)}
    mine = train(here, lambda ids: back(ids).values(), steps(2 * STEPS))
    theirs = train(net, values, steps(2 * STEPS))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_weights_alone():
    """Of a model around a collection that is not fused; rows begin with the first state."""
    model = nn.ModuleDict({"ebc": torchrec.EmbeddingBagCollection(tables=tables(), device=torch.device("cpu"))})
    collection = collection_of(Adam(0.1))
    assert set(import_weights(collection, model.state_dict(), tables=["shop"])) == {"shop"}
    found = collection.rows("shop", np.arange(ROWS))
    np.testing.assert_array_equal(found.values, model.state_dict()["ebc.embedding_bags.shop.weight"])
    assert not len(table_ids(collection, "c"))


def test_rows_that_a_collection_has_no_place_for():
    collection = collection_of(SGD(0.1))
    collection.set_rows("shop", np.array([3, 10**9], np.uint64), np.ones((2, DIM)))
    ebc = torchrec.EmbeddingBagCollection(tables=tables(), device=torch.device("cpu"))
    before = ebc.state_dict()["embedding_bags.shop.weight"].clone()
    assert export_weights(collection, ebc.state_dict(), tables=["shop"]) == {"shop": (1, ROWS - 1)}
    after = ebc.embedding_bags["shop"].weight
    assert after[3].tolist() == [1.0] * DIM
    others = torch.arange(ROWS) != 3
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("ours", [Adam(0.1), SGD(0.1), RowwiseAdagrad(0.1)])
def test_state_of_another_optimizer_is_refused(ours):
    ebc = fused(torch.optim.Adagrad)
    collection = collection_of(ours)
    for work in (import_weights, export_weights):
        with pytest.raises(ConfigError, match=r"does not match"):
            work(collection, ebc.state_dict(), ebc.fused_optimizer().state_dict())


def test_state_of_other_rows_is_refused():
    ebc = fused(torch.optim.Adagrad)
    turned = {"state": {"shop.weight": {"shop.momentum1": torch.zeros(DIM, ROWS)}}}
    with pytest.raises(ConfigError, match=r"shape \[4, 20\]"):
        import_weights(collection_of(Adagrad(0.1)), ebc.state_dict(), turned)


def test_a_state_that_is_missing_is_told():
    ebc = fused(torch.optim.Adagrad)
    for work in (import_weights, export_weights):
        with pytest.raises(ConfigError, match="no state momentum1"):
            work(collection_of(Adagrad(0.1)), ebc.state_dict(), {"state": {}})
    assert import_weights(collection_of(SGD(0.1)), ebc.state_dict(), {"state": {}})["c"] == (ROWS, 0, 0)


# --- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_one_process(tmp_path):
    ebc = fused(TheirRowwiseAdagrad)
    train(networks()[0], lambda ids: ebc(ids).values(), [(jagged(0), labels_of(0))])
    state = {"model": ebc.state_dict(), "optimizer": ebc.fused_optimizer().state_dict()}
    torch.distributed.checkpoint.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    ours, theirs = collection_of(RowwiseAdagrad(0.1)), collection_of(RowwiseAdagrad(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_dcp(ours, tmp_path / "dcp") == {"shop": (ROWS, 0, 0), "c": (ROWS, 0, 0)}
    import_weights(theirs, ebc.state_dict(), ebc.fused_optimizer().state_dict())
    for table in ("shop", "c"):
        mine, other = (each.rows(table, np.arange(ROWS), state=True) for each in (ours, theirs))
        np.testing.assert_array_equal(mine.values, other.values)
        np.testing.assert_array_equal(mine.state.values, other.state.values)
        assert mine.state.values.any()
    with pytest.raises(ConfigError, match="does not match"):
        import_dcp(collection_of(Adam(0.1)), tmp_path / "dcp")
    assert import_dcp(collection_of(Adam(0.1)), tmp_path / "dcp", state=False)["c"] == (ROWS, 0, 0)


@pytest.mark.slow
def test_a_checkpoint_of_sharded_tables(tmp_path):
    """One table row-wise over two processes, one on the second process alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    script = Path(__file__).parents[1] / "support" / "torchrec_sharded.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "dcp"), port], check=True, timeout=120)
    schema = Schema([IdFeature("a", table="shop", dim=4), IdFeature("c", table="user", dim=4)])
    collection = collection_of(RowwiseAdagrad(0.05), ps=3, schema=schema)
    assert import_dcp(collection, tmp_path / "dcp") == {"shop": (10, 0, 0), "user": (10, 0, 0)}
    seen = 0
    for rank in torch.load(tmp_path / "dcp.pt"):
        for key, shards in [item for part in rank for item in part.items()]:
            table = "shop" if "shop" in key else "user"
            for (first, *_), shard in shards:
                found = collection.rows(table, np.arange(first, first + len(shard)), state=True)
                mine = found.state.values[:, 0] if "momentum" in key else found.values
                np.testing.assert_array_equal(mine, shard)
                seen += shard.numel()
    assert seen == 2 * 10 * 5
