"""Weights and optimizer state of `nn.EmbeddingBag` and `nn.Embedding`, in and out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

import persia
from persia import Batch, IdColumn, IdFeature, Schema, Table
from persia.errors import ConfigError, DataError
from persia.interop import embedding_optimizer, export_embedding, import_embedding, row_transfer, table_ids
from persia.modes import Sync
from persia.nn import EmbeddingCollection, RowsSet
from persia.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from support.several_ps import Several

ROWS, DIM, BATCH, STEPS = 12, 5, 16, 10
ALL = np.arange(ROWS)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.2),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.02),
}


def samples(step):
    """Ids of all rows, in bags of two: optimizers that go on without a gradient have none to go on without."""
    draw = np.random.default_rng(step)
    ids = np.concatenate([np.arange(ROWS), draw.integers(0, ROWS, 2 * BATCH - ROWS)])
    return draw.permutation(ids), draw.integers(0, 2, (BATCH, 1)).astype(np.float32)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))


def bag_of(sparse=False, **options):
    torch.manual_seed(0)
    return nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=sparse, **options)


def train_torch(bag, net, optimizers, steps):
    losses = []
    for step in steps:
        ids, labels = samples(step)
        loss = loss_of(net(bag(torch.from_numpy(ids).view(BATCH, 2))), torch.from_numpy(labels))
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return losses


def train_persia(collection, net, optimizer, steps, kind=np.uint64):
    batches = []
    for step in steps:
        ids, labels = samples(step)
        column = IdColumn(ids.astype(kind), np.arange(0, 2 * BATCH + 1, 2))
        batches.append(Batch({"item": column}, np.zeros((BATCH, 0), np.float32), labels))
    losses = []
    for batch in collection.prefetch(batches):
        loss = loss_of(net(collection(batch)["item"]), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def collection_of(optimizer, ps=1, **table):
    tables = [Table("item", DIM, **table)]
    schema = Schema([IdFeature("item", pooling="mean")], tables=tables)
    return EmbeddingCollection(schema, optimizer=optimizer, mode=Sync(), cluster=Several(ps))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_as_in_torch(name):
    """N steps there and N here are 2 N steps there; and again 2 N there after the way back."""
    sparse = name == "sparse_adam"
    bag, net = bag_of(sparse), network()
    make = OPTIMIZERS[name]
    optimizer, dense = make(bag.parameters()), torch.optim.SGD(net.parameters(), lr=0.2)
    train_torch(bag, net, [optimizer, dense], range(STEPS))

    collection = collection_of(embedding_optimizer(optimizer, bag.weight), ps=2)
    assert import_embedding(collection, "item", bag, optimizer=optimizer) == RowsSet(ROWS, 0, 0)
    here = network()
    here.load_state_dict(net.state_dict())
    ours = train_persia(collection, here, torch.optim.SGD(here.parameters(), lr=0.2), range(STEPS, 2 * STEPS))
    theirs = train_torch(bag, net, [optimizer, dense], range(STEPS, 2 * STEPS))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(collection.rows("item", ALL).values, bag.weight.detach(), atol=1e-5)

    back = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=sparse)
    fresh = make(back.parameters())
    assert export_embedding(collection, "item", back, optimizer=fresh) == (ROWS, 0)
    dense_here = torch.optim.SGD(here.parameters(), lr=0.2)
    ours = train_torch(back, here, [fresh, dense_here], range(2 * STEPS, 3 * STEPS))
    theirs = train_torch(bag, net, [optimizer, dense], range(2 * STEPS, 3 * STEPS))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_rows_are_moved_in_parts(monkeypatch):
    monkeypatch.setattr(row_transfer, "PART_VALUES", 5 * DIM)
    optimizer = torch.optim.Adam((bag := bag_of()).parameters(), lr=0.02)
    train_torch(bag, network(), [optimizer], range(3))
    collection = collection_of(Adam(0.02))
    assert import_embedding(collection, "item", bag, optimizer=optimizer) == RowsSet(ROWS, 0, 0)
    found = collection.rows("item", ALL, state=True)
    state = optimizer.state[bag.weight]
    np.testing.assert_array_equal(found.values, bag.weight.detach())
    np.testing.assert_array_equal(found.state.values, torch.cat([state["exp_avg"], state["exp_avg_sq"]], 1))
    assert found.state.update_count.tolist() == [3] * ROWS
    back = nn.EmbeddingBag(ROWS, DIM)
    fresh = torch.optim.Adam(back.parameters(), lr=0.02)
    export_embedding(collection, "item", back, optimizer=fresh)
    assert torch.equal(back.weight, bag.weight)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(fresh.state[back.weight][key], state[key])


def test_a_vocabulary_names_the_rows():
    """Row 0 is of unknown values and row 3 of padding: tables need neither."""
    vocabulary = {"shop-1": 1, "shop-2": 2, "pad": 3, "shop-4": 4}
    bag = nn.Embedding(5, DIM, padding_idx=3)
    collection = collection_of(SGD(0.1))
    assert import_embedding(collection, "item", bag, vocabulary=vocabulary) == RowsSet(3, 0, 0)
    found = collection.rows("item", ["shop-4", "shop-1", "pad", "shop-2"])
    assert found.found.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(found.values[[0, 1, 3]], bag.weight.detach()[[4, 1, 2]])

    collection.set_rows("item", ["shop-9", "pad"], np.ones((2, DIM)))  # Neither has a place in the module.
    other = nn.Embedding(5, DIM, padding_idx=3)
    before = other.weight.detach().clone()
    wider = {**vocabulary, "shop-7": 0}
    assert export_embedding(collection, "item", other, vocabulary=wider) == (3, 1)
    assert torch.equal(other.weight[[1, 2, 4]], bag.weight[[1, 2, 4]])
    assert torch.equal(other.weight[[0, 3]], before[[0, 3]])


@pytest.mark.parametrize("kind", ["auto", "number", "text"])
def test_rows_are_those_that_batches_look_up(kind):
    """Features of texts hash numbers as well."""
    schema = Schema([IdFeature("item", dim=DIM, kind=kind)], labels=[])
    collection = EmbeddingCollection(schema, optimizer=SGD(0.1), mode=Sync(), cluster=Several(1))
    bag = bag_of()
    import_embedding(collection, "item", bag)
    batch = Batch.from_columns(schema, {"item": [7, 0, 11]})
    ids = batch.id_features["item"].values
    np.testing.assert_array_equal(collection.rows("item", ids).values, bag.weight.detach()[[7, 0, 11]])
    other = nn.EmbeddingBag(ROWS, DIM)
    assert export_embedding(collection, "item", other) == (ROWS, 0)
    assert torch.equal(other.weight, bag.weight)


def test_rows_of_mapped_ids_are_those_of_a_hashed_module():
    """Row i of such a module is bucket i; the ids of the table are buckets."""
    features = [IdFeature("item", dim=2), IdFeature("bucket", dim=DIM, of="item", mapping=persia.Remainder(ROWS))]
    schema = Schema(features, labels=[])
    collection = EmbeddingCollection(schema, optimizer=SGD(0.1), mode=Sync(), cluster=Several(1))
    import_embedding(collection, "bucket", bag := bag_of())
    ids = Batch.from_columns(schema, {"item": [7 + ROWS, 0, 11 + 5 * ROWS]}).id_features["bucket"].values
    np.testing.assert_array_equal(collection.rows("bucket", ids).values, bag.weight.detach()[[7, 0, 11]])


def test_a_table_without_end_becomes_a_module_of_its_rows():
    collection = collection_of(Adagrad(0.1), ps=3)
    ids = np.array([2**64 - 1, 7, 10**15], np.uint64)
    collection.set_rows("item", ids, np.arange(15).reshape(3, 5))
    there = table_ids(collection, "item")
    assert there.tolist() == [7, 10**15, 2**64 - 1]
    bag = nn.EmbeddingBag(3, DIM)
    assert export_embedding(collection, "item", bag, vocabulary=there) == (3, 0)
    assert bag.weight.tolist() == [[*range(5, 10)], [*range(10, 15)], [*range(5)]]


def test_without_an_optimizer_rows_begin_with_the_first_state():
    optimizer = torch.optim.Adagrad((bag := bag_of()).parameters(), lr=0.1)
    train_torch(bag, network(), [optimizer], range(3))
    collection = collection_of(RowwiseAdagrad(0.1, initial_accumulator=0.5))
    import_embedding(collection, "item", bag)
    state = collection.rows("item", ALL, state=True).state
    assert (state.values == 0.5).all()
    assert not state.update_count.any()


def test_a_module_that_was_not_trained_has_no_state():
    optimizer = torch.optim.Adam((bag := bag_of()).parameters(), lr=0.02)
    collection = collection_of(Adam(0.02))
    import_embedding(collection, "item", bag, optimizer=optimizer)
    assert not collection.rows("item", ALL, state=True).state.update_count.any()


def test_a_step_that_is_ahead_stays():
    bag = bag_of()
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.02)
    train_torch(bag, network(), [optimizer], range(3))
    collection = collection_of(Adam(0.02))
    import_embedding(collection, "item", bag)  # Rows without updates.
    export_embedding(collection, "item", bag, optimizer=optimizer)
    assert optimizer.state[bag.weight]["step"] == 3


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1), "lr_decay"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, maximize=True), "maximize"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.RMSprop(p), "optimizer"),
    ],
)
def test_options_that_rows_lack_are_refused(make, field):
    bag = bag_of()
    with pytest.raises(ConfigError) as refused:
        embedding_optimizer(make(bag.parameters()), bag.weight)
    assert refused.value.fields["field"] == field


def test_weight_decay_of_adamw_is_decoupled_in_older_torch_too():
    """Its groups do not say so there."""
    bag = bag_of()
    optimizer = torch.optim.AdamW(bag.parameters(), weight_decay=0.1)
    optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    assert embedding_optimizer(optimizer, bag.weight) == Adam(1e-3, decoupled_weight_decay=0.1)


def test_options_are_those_of_the_group_of_the_weight():
    bag = bag_of()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([{"params": other.parameters()}, {"params": [bag.weight], "lr": 0.5, "eps": 1e-3}])
    assert embedding_optimizer(optimizer, bag.weight) == Adam(0.5, eps=1e-3)
    with pytest.raises(ConfigError, match="does not have the weight"):
        embedding_optimizer(torch.optim.Adam(other.parameters()), bag.weight)


@pytest.mark.parametrize(
    ("make", "declared"),
    [
        ("adagrad", Adam(0.1)),
        ("adagrad", RowwiseAdagrad(0.1)),
        ("momentum", SGD(0.1)),
        ("sgd", SGD(0.1, momentum=0.9)),
        ("momentum", Adagrad(0.1)),
    ],
)
def test_state_of_another_optimizer_is_refused(make, declared):
    """Also where it would fit: a momentum is as wide as an accumulator."""
    bag = bag_of()
    optimizer = OPTIMIZERS[make](bag.parameters())
    train_torch(bag, network(), [optimizer], range(1))
    collection = collection_of(declared)
    for work in (import_embedding, export_embedding):
        with pytest.raises(ConfigError, match="declare the table with"):
            work(collection, "item", bag, optimizer=optimizer)
    assert not len(table_ids(collection, "item"))


@pytest.mark.parametrize(
    ("module", "vocabulary", "error"),
    [
        (nn.Linear(2, 2), None, "expected nn.EmbeddingBag"),
        (nn.Embedding(3, DIM + 1), None, "embedding_dim 6"),
        (nn.Embedding(3, DIM, max_norm=1.0), None, "max_norm"),
        (nn.Embedding(3, DIM, scale_grad_by_freq=True), None, "scale_grad_by_freq"),
        (nn.Embedding(3, DIM), ["a", "b"], "2 values for a weight of 3 rows"),
        (nn.Embedding(3, DIM), ["a", "b", "a"], "position 2"),
        (nn.Embedding(3, DIM), {"a": 3}, "rows 3 to 3"),
        (nn.Embedding(3, DIM), {"5": 1, 5: 2}, "position 1"),
        (nn.Embedding(3, DIM), {"a": 1, "b": 1.5}, "row 1.5"),
        (nn.Embedding(3, DIM), {"a": "first"}, "row 'first'"),
        (nn.Embedding(3, DIM), {"a": 0, "b": True}, "row True"),
        (nn.Embedding(3, DIM), {"a": 1, "b": 2, "c": 1}, "row 1 for several values"),
        (nn.EmbeddingBag(3, DIM, mode="max"), None, "'max'"),
    ],
)
def test_what_does_not_fit_is_refused(module, vocabulary, error):
    collection = collection_of(SGD(0.1))
    for work in (import_embedding, export_embedding):
        with pytest.raises((ConfigError, DataError), match=error):
            work(collection, "item", module, vocabulary=vocabulary)
    with pytest.raises(ConfigError, match="no table 'gone'"):
        import_embedding(collection, "gone", nn.Embedding(3, DIM))
    with pytest.raises(ConfigError, match="no table 'gone'"):
        table_ids(collection, "gone")


def test_rows_beyond_the_capacity_are_told():
    collection = collection_of(SGD(0.1), capacity=8)
    done = import_embedding(collection, "item", bag_of())
    assert done.evicted == ROWS - 8


def test_it_is_a_package_of_persia():
    assert persia.interop.import_embedding is import_embedding
