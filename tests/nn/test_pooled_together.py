"""Features that are pooled together on a device are those that are pooled one by one; and take few operations."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_pooling import NoGradient, values_of
from test_transfer import Compressing
from torch.utils._python_dispatch import TorchDispatchMode

import persia
from persia.errors import StaleBatchError
from persia.nn.options import CollectionOptions
from persia.nn.pooled_together import FeatureGroup, PooledTogether
from persia.nn.pooling_plan import FeatureIndex, plan_group
from persia.nn.row_groups import GroupLayout, RowGroup, group_layouts
from persia.nn.torch_pooling import expand_with_torch
from persia.nn.transfer import decode
from persia.types import Packed
from support.examples import examples
from support.staging import as_on_a_gpu

POOLINGS = ["sum", "mean", "sqrtn", None]


@st.composite
def cases(draw):
    """Features of every kind on tables of several dims, some of which get no gradient, in any order."""
    samples = draw(st.integers(0, 4))
    tables = {}
    for number in range(draw(st.integers(1, 4))):
        frozen = draw(st.integers(0, 3)) == 0
        tables[f"t{number}"] = persia.Table(f"t{number}", draw(st.sampled_from([1, 2, 5])), trainable=not frozen)
    counts = {name: draw(st.integers(1, 6)) for name in tables}
    features, index = {}, FeatureIndex({}, {}, {})
    for number in range(draw(st.integers(1, 7))):
        name, table = f"f{number}", draw(st.sampled_from(list(tables)))
        pooling = draw(st.sampled_from(POOLINGS))
        features[name] = table, pooling, draw(st.integers(1, 3)) if pooling is None else None
        lengths = draw(st.lists(st.integers(0, 4), min_size=samples, max_size=samples))
        single = draw(st.booleans())
        if not single:
            index.offsets[name] = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        ids = samples if single else sum(lengths)
        rows = draw(st.lists(st.integers(0, counts[table] - 1), min_size=ids, max_size=ids))
        index.inverse[name] = np.array(rows, draw(st.sampled_from([np.uint16, np.uint32])))
        if pooling is not None and draw(st.booleans()):
            quarters = st.integers(-8 if pooling == "sum" else 0, 8)
            drawn = draw(st.lists(quarters, min_size=ids, max_size=ids))
            index.weights[name] = np.array(drawn, np.float32) / 4
    return samples, tables, counts, features, index


def together(tables, features, index, rows):
    """The features on a device, as `Transfer` makes them."""
    frozen = {name for name, table in tables.items() if not table.trainable}
    groups = []
    for layout in group_layouts(list(rows), [len(part) for part in rows.values()], tables, frozen):
        plan = plan_group(layout, features, index)
        if plan is not None:
            values = torch.cat([rows[name] for name in layout.tables])
            arrays = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
            groups.append(FeatureGroup.of(plan, RowGroup(layout, values), arrays))
    made = PooledTogether(groups, {name: table for name, (table, _, _) in features.items()}, torch.device("cpu"))
    made.leaf.requires_grad_()
    return made


def one_by_one(features, index, leaves):
    return expand_with_torch(
        features,
        leaves,
        {name: torch.from_numpy(part.astype(np.int64)) for name, part in index.inverse.items()},
        {name: torch.from_numpy(o) if (o := index.offsets.get(name)) is not None else None for name in features},
        {name: torch.from_numpy(own) for name, own in index.weights.items()},
    )


def loss_of(found, left_out, target):
    """The sum of all features times numbers; of those that are left out, no gradient comes back."""
    terms = [(values * target[i][: values.numel()].view(values.shape)).sum() for i, values in enumerate(found)]
    return sum(NoGradient.apply(term) if i in left_out else term for i, term in enumerate(terms) if term.requires_grad)


@settings(max_examples=examples(100), deadline=None)
@given(cases(), st.sets(st.integers(0, 6)), st.integers(1, 2), st.sampled_from([None, 0.5]))
def test_features_together_are_those_one_by_one(case, left_out, calls, factor):
    """Values, masks, gradients, and which tables get none."""
    _, tables, counts, features, index = case
    rows = {name: torch.randn(counts[name], table.dim) for name, table in tables.items()}
    trains = {name: table.trainable or not any(t.trainable for t in tables.values()) for name, table in tables.items()}
    leaves = {name: part.clone().requires_grad_(trains[name]) for name, part in rows.items()}
    target = torch.randn(len(features), 1000)
    made = together(tables, features, index, rows)
    expected = [one_by_one(features, index, leaves) for _ in range(calls)]
    found = [made.embeddings() for _ in range(calls)]
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(features)
        for name, other in theirs.items():
            if isinstance(other, persia.nn.SequenceEmbedding):
                assert torch.equal(ours[name].mask, other.mask)
                ours[name].mask.zero_()  # A model may.
            torch.testing.assert_close(
                values_of(ours)[list(features).index(name)], values_of(theirs)[list(features).index(name)]
            )
        for mine in values_of(ours):
            if mine.requires_grad:
                mine.mul_(1.0)  # A model may.
    for losses in (
        [loss_of(values_of(one), left_out, target) for one in found],
        [loss_of(values_of(one), left_out, target) for one in expected],
    ):
        total = sum(losses)
        if isinstance(total, torch.Tensor):
            total.backward()
    gradients = made.take_gradients({}, None if factor is None else torch.tensor(factor))
    trained = [features[name][0] for i, name in enumerate(features) if i not in left_out]
    assert set(gradients) == {name for name in trained if tables[name].trainable}
    for name, gradient in gradients.items():
        other = leaves[name].grad
        other = torch.zeros_like(rows[name]) if other is None else other * (factor or 1.0)
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
    assert made.take_gradients({}, None) == {}


def test_places_in_a_group_are_behind_the_rows_of_the_tables_before():
    """Those of rows that are refreshed, of some tables."""
    layout = GroupLayout(["a", "b", "c"], [3, 4, 2], 2, False)
    places = Packed.of({"a": np.array([1], np.uint32), "c": np.array([0, 1], np.uint32)}, np.uint32)
    assert layout.places(places).tolist() == [1, 7, 8]


# --- a step -----------------------------------------------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    """Counts the operations that this thread dispatches."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[str(function)] += 1
        return function(*args, **(kwargs or {}))


def feature_of(kind, number):
    options = {
        "single": {},
        "bags": {"pooling": "sum"},
        "mean": {"pooling": "mean"},
        "weighted": {"pooling": "sqrtn", "weights": f"w{number}"},
        "sequence": {"pooling": None, "max_length": 3},
    }
    return persia.IdFeature(f"f{number}", dim=16, **options[kind])


def batches(kinds, count, size=8):
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 3 * size + 1, 3, dtype=np.int64)
    made = []
    for _ in range(count):
        columns = {}
        for number, kind in enumerate(kinds):
            ids = rng.integers(0, 40, size if kind == "single" else 3 * size).astype(np.uint64)
            weights = rng.random(len(ids), np.float32) if kind == "weighted" else None
            columns[f"f{number}"] = persia.IdColumn(ids, None if kind == "single" else offsets, weights)
        labels = (rng.random((size, 1)) < 0.5).astype(np.float32)
        made.append(persia.Batch(columns, rng.random((size, 1), np.float32), labels))
    return made


def trained(kinds, *, on_gpu, mode=None, **options):
    """Rows of all tables after a few steps, the losses, what the last step has dispatched, and blocks that crossed."""
    schema = persia.Schema(
        [feature_of(kind, number) for number, kind in enumerate(kinds)], dense_features=["x"], labels=["y"]
    )
    embeddings = persia.nn.EmbeddingCollection(
        schema,
        optimizer=persia.optim.Adagrad(lr=0.1),
        mode=mode or persia.modes.Sync(),
        options=CollectionOptions(**options),
    )
    staging = as_on_a_gpu(embeddings) if on_gpu else None
    losses, dispatched = [], Dispatched()
    for batch in embeddings.prefetch(batches(kinds, 4)):
        dispatched = Dispatched()
        with dispatched:
            found = embeddings(batch)
        values = values_of(found)
        loss = sum((value - batch.labels.mean()).square().mean() for value in values)
        gradients = torch.autograd.grad(loss, values, retain_graph=True)
        with dispatched:
            torch.autograd.backward(values, gradients)
        losses.append(loss.item())
    embeddings.flush()
    ids = np.arange(40, dtype=np.uint64)
    rows = {name: embeddings.rows(name, ids).values for name in schema.resolved_tables()}
    return rows, losses, dispatched.names, staging


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        (["single"] * 26, 14),
        (["bags"] * 26, 15),
        (["mean"] * 26, 17),
        (["weighted"] * 26, 19),
        (["sequence"] * 26, 21),
        (["single", "bags", "mean", "weighted", "sequence"] * 5, 30),
    ],
    ids=["single", "bags", "mean", "weighted", "sequence", "mixed"],
)
def test_a_step_dispatches_few_operations_for_any_number_of_features(kinds, most):
    _, _, names, _ = trained(kinds, on_gpu=True)
    assert names.total() <= most, names
    few = list(dict.fromkeys(kinds))
    _, _, of_few, _ = trained(few, on_gpu=True)
    assert of_few.total() == names.total()


@pytest.mark.parametrize("options", [{}, {"clip_embedding_norm": 0.5}, {"accumulation_steps": 2}])
def test_a_step_as_on_a_gpu_trains_what_a_step_on_a_cpu_does(options):
    kinds = ["single", "mean", "sequence", "weighted", "bags", "single"]
    (rows, losses, _, _), (others, expected, _, _) = (trained(kinds, on_gpu=way, **options) for way in (True, False))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, values in rows.items():
        np.testing.assert_allclose(values, others[name], rtol=1e-4, atol=1e-6)


def test_dense_features_and_labels_may_be_changed_in_place():
    """And are not the block of the batch, which whoever keeps labels would keep."""
    schema = persia.Schema([feature_of("mean", 0), feature_of("single", 1)], dense_features=["x"], labels=["y"])
    embeddings = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.SGD(lr=0.1))
    as_on_a_gpu(embeddings)
    for batch in embeddings.prefetch(batches(["mean", "single"], 2)):
        found = embeddings(batch)
        batch.dense.mul_(2.0)
        batch.labels.clamp_(0.1, 0.9)
        sum(((value - batch.labels.mean()) * batch.dense).square().sum() for value in values_of(found)).backward()
        for part in (batch.dense, batch.labels):
            assert part.untyped_storage().nbytes() == part.nbytes
    assert embeddings.statistics()["f0"]["applied"] > 0


def test_a_refused_second_backward_leaves_no_gradients():
    schema = persia.Schema([feature_of("mean", 0)], dense_features=["x"], labels=["y"])
    embeddings = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.SGD(lr=0.1))
    as_on_a_gpu(embeddings)
    for batch in embeddings.prefetch(batches(["mean"], 1)):
        loss = embeddings(batch)["f0"].square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(StaleBatchError):
            loss.backward()
        assert batch.pooled._sums.flat is None


def test_a_whole_step_is_that_of_features_one_by_one(monkeypatch):
    """Several dims, a table that is not trained, 16 bits on the wire, and a loss that uses rows directly."""
    schema = persia.Schema(
        [
            persia.IdFeature("item", dim=4),
            persia.IdFeature("tags", dim=4, table="item", pooling="mean"),
            persia.IdFeature("kept", dim=4, pooling="sum"),
            persia.IdFeature("words", dim=4, pooling="sqrtn", weights="scores"),
            persia.IdFeature("last", dim=6, pooling=None, max_length=2),
        ],
        dense_features=["x"],
        labels=["y"],
        tables=[persia.Table("kept", 4, trainable=False)],
    )
    embeddings = persia.nn.EmbeddingCollection(
        schema, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Sync(), cluster=Compressing()
    )
    as_on_a_gpu(embeddings)
    sent, gradients_of = [], embeddings._transfer.gradients
    monkeypatch.setattr(
        embeddings._transfer, "gradients", lambda *arguments: sent.append(gradients_of(*arguments)) or sent[-1]
    )
    features = {
        feature.name: (feature.table_name, feature.pooling, feature.max_length) for feature in schema.id_features
    }
    target = torch.randn(len(features), 1000)

    def loss_with(found, rows):
        return loss_of(values_of(found), set(), target) + rows["item"].square().sum() + rows["last"].sum()

    made = batches(["single", "mean", "bags", "weighted", "sequence"], 3)
    data = [persia.Batch(dict(zip(features, b.id_features.values(), strict=True)), b.dense, b.labels) for b in made]
    for batch in embeddings.prefetch(data):
        leaves = {name: rows.detach().clone().requires_grad_(name != "kept") for name, rows in batch.rows.items()}
        index = FeatureIndex(batch.inverse, {n: o for n, o in batch.offsets.items() if o is not None}, batch.id_weights)
        expected, found = one_by_one(features, index, leaves), embeddings(batch)
        for mine, other in zip(values_of(found), values_of(expected), strict=True):
            torch.testing.assert_close(mine, other)
        loss_with(expected, leaves).backward()
        loss_with(found, batch.rows).backward()
        halves, scales = sent[-1]()
        assert halves.buffer.dtype == np.float16
        gradients = decode(halves, scales)
        assert set(gradients) == {"item", "words", "last"}
        for name, gradient in gradients.items():
            other = leaves[name].grad.numpy()
            np.testing.assert_allclose(gradient, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
    assert len(sent) == 3


def test_a_batch_crosses_in_one_block_each_way():
    _, _, _, staging = trained(["single", "mean", "sequence"], on_gpu=True)
    assert len(staging.blocks) == 2 * 4
