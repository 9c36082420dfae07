"""Weights and checkpoints as TorchRec writes them, read where TorchRec is not installed."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from persia import IdFeature, Schema, Table
from persia.errors import CheckpointError, ConfigError
from persia.interop import table_ids
from persia.interop.torchrec import export_weights, import_dcp, import_weights
from persia.modes import Sync
from persia.nn import EmbeddingCollection
from persia.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from support.several_ps import Several

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # Of `save` in one process.

ROWS, DIM = 20, 4
SCHEMA = Schema(
    [IdFeature("a", table="shop"), IdFeature("b", table="shop"), IdFeature("c", dim=8)], tables=[Table("shop", DIM)]
)


def collection_of(optimizer, ps=1, schema=SCHEMA):
    return EmbeddingCollection(schema, optimizer=optimizer, mode=Sync(), cluster=Several(ps))


def bags():
    """Modules whose weights have the names of an `EmbeddingBagCollection`'s."""
    torch.manual_seed(0)
    tables = nn.ModuleDict({"shop": nn.EmbeddingBag(ROWS, DIM), "c": nn.EmbeddingBag(ROWS, 8)})
    return nn.ModuleDict({"ebc": nn.ModuleDict({"embedding_bags": tables})})


def accumulators(width):
    """The state of TorchRec's fused optimizer: Adagrad with one number for each weight, or for each row."""
    shapes = {"shop": (ROWS, DIM), "c": (ROWS, 8)} if width else {"shop": (ROWS,), "c": (ROWS,)}
    draw = torch.Generator().manual_seed(1)
    return {
        "state": {
            f"ebc.embedding_bags.{table}.weight": {f"{table}.momentum1": torch.rand(shape, generator=draw)}
            for table, shape in shapes.items()
        }
    }


@pytest.mark.parametrize(("ours", "width"), [(Adagrad(0.1), True), (RowwiseAdagrad(0.1), False)])
@pytest.mark.parametrize("ps", [1, 3])
def test_weights_and_accumulators_come_along_and_go_back(ours, width, ps):
    model, state, collection = bags(), accumulators(width), collection_of(ours, ps)
    assert import_weights(collection, model.state_dict(), state) == {"shop": (ROWS, 0, 0), "c": (ROWS, 0, 0)}
    for table in ("shop", "c"):
        found = collection.rows(table, np.arange(ROWS), state=True)
        np.testing.assert_array_equal(found.values, model["ebc"]["embedding_bags"][table].weight.detach())
        (momentum,) = state["state"][f"ebc.embedding_bags.{table}.weight"].values()
        np.testing.assert_array_equal(found.state.values.reshape(momentum.shape), momentum)
    back, zeros = bags(), accumulators(width)
    for each in (*back.state_dict().values(), *(m for part in zeros["state"].values() for m in part.values())):
        each.zero_()
    assert export_weights(collection, back.state_dict(), zeros) == {"shop": (ROWS, 0), "c": (ROWS, 0)}
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight)
        (mine,), (theirs,) = zeros["state"][name].values(), state["state"][name].values()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("second", ["momentum2", "exp_avg_sq"])
def test_moments_of_adam_are_no_accumulators(second, tmp_path):
    """They have the names and shapes of Adagrad's."""
    weights = {"embedding_bags.shop.weight": torch.zeros(ROWS, DIM)}
    state = {"shop.momentum1": torch.ones(ROWS, DIM), f"shop.{second}": torch.ones(ROWS, DIM)}
    moments = {"state": {"embedding_bags.shop.weight": state}}
    collection = collection_of(Adagrad(0.1))
    for work in (import_weights, export_weights):
        with pytest.raises(ConfigError, match=second):
            work(collection, weights, moments, tables=["shop"])
    torch.distributed.checkpoint.save({**weights, **moments}, checkpoint_id=str(tmp_path), no_dist=True)
    with pytest.raises(ConfigError, match=second):
        import_dcp(collection, tmp_path, tables=["shop"])
    assert not len(table_ids(collection, "shop"))
    assert import_dcp(collection, tmp_path, tables=["shop"], state=False)["shop"] == (ROWS, 0, 0)


def test_a_step_is_no_second_state():
    weights = {"embedding_bags.shop.weight": torch.zeros(ROWS, DIM)}
    state = {"shop.step": torch.tensor(3.0), "shop.momentum1": torch.full((ROWS, DIM), 2.0)}
    collection = collection_of(Adagrad(0.1))
    import_weights(collection, weights, {"state": {"embedding_bags.shop.weight": state}}, tables=["shop"])
    assert (collection.rows("shop", np.arange(ROWS), state=True).state.values == 2.0).all()


def test_negative_values_are_no_accumulators():
    weights = {"embedding_bags.shop.weight": torch.zeros(ROWS, DIM)}
    first = torch.ones(ROWS, DIM)
    first[3, 1] = -1e-6
    collection = collection_of(Adagrad(0.1))
    for work in (import_weights, export_weights):
        with pytest.raises(ConfigError, match="negative"):
            work(collection, weights, {"shop.weight": {"shop.momentum1": first}}, tables=["shop"])
    assert not len(table_ids(collection, "shop"))


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ({}, "no key ending"),
        ({"embedding_bags.shop.weight": torch.zeros(2, 5)}, "dim 4"),
        ({"a.embedding_bags.shop.weight": 0, "b.embedding_bags.shop.weight": 0}, "2 keys"),
        ({"embedding_bags.shop.weight": torch.zeros(2, 4).as_subclass(type("Part", (torch.Tensor,), {}))}, "Part"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, error):
    with pytest.raises(ConfigError, match=error):
        import_weights(collection_of(SGD(0.1)), weights)
    with pytest.raises(ConfigError, match="no table 'gone'"):
        import_weights(collection_of(SGD(0.1)), weights, tables=["gone"])


@pytest.mark.parametrize(("ours", "width"), [(Adagrad(0.1), True), (RowwiseAdagrad(0.1), False)])
def test_a_checkpoint_has_weights_and_accumulators(ours, width, tmp_path):
    model, state = bags(), accumulators(width)
    saved = {"model": model.state_dict(), "optimizer": state}
    torch.distributed.checkpoint.save(saved, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    collection = collection_of(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_dcp(collection, tmp_path / "dcp") == {"shop": (ROWS, 0, 0), "c": (ROWS, 0, 0)}
    for table in ("shop", "c"):
        found = collection.rows(table, np.arange(ROWS), state=True)
        np.testing.assert_array_equal(found.values, model["ebc"]["embedding_bags"][table].weight.detach())
        (momentum,) = state["state"][f"ebc.embedding_bags.{table}.weight"].values()
        np.testing.assert_array_equal(found.state.values.reshape(momentum.shape), momentum)
    with pytest.raises(ConfigError, match="does not match"):
        import_dcp(collection_of(Adam(0.1)), tmp_path / "dcp")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        import_dcp(collection_of(SGD(0.1)), tmp_path)
    state = {"embedding_bags.shop.weight": torch.zeros(2, DIM), "embedding_bags.c.weight": torch.zeros(2, 8)}
    torch.distributed.checkpoint.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    (shards,) = tmp_path.glob("*.distcp")
    shards.write_bytes(shards.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_dcp(collection_of(SGD(0.1)), tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_sharded_tensors(tmp_path):
    """As sharded TorchRec tables are saved: rows over two processes, unequally."""
    script = Path(__file__).parents[1] / "support" / "dcp_sharded.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "dcp")], check=True, timeout=120)
    collection = collection_of(RowwiseAdagrad(0.1), ps=3)
    assert import_dcp(collection, tmp_path / "dcp", tables=["shop"]) == {"shop": (11, 0, 0)}
    found = collection.rows("shop", np.arange(11), state=True)
    np.testing.assert_array_equal(found.values, np.arange(44, dtype=np.float32).reshape(11, 4))
    np.testing.assert_array_equal(found.state.values[:, 0], np.arange(11))
