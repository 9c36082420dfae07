"""TorchRec's jagged tensors as batches, also where TorchRec is not installed."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from persia import Batch, Buckets, DenseFeature, HashTo, IdColumn, IdFeature, Schema, Table, TimePart, Tokens
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.interop.torchrec import from_batch, keyed_jagged_tensor, to_batch
from support.jagged import KINDS, Jagged, parts

pytestmark = pytest.mark.filterwarnings("ignore")  # Of TorchRec and FBGEMM.

KEYS = ("a", "b", "c")
SCHEMA = Schema(
    [IdFeature("a", table="shop"), IdFeature("b", table="shop"), IdFeature("c", pooling="mean", dim=8)],
    ["price", "age"],
    tables=[Table("shop", 4)],
)
LENGTHS = torch.tensor([1, 1, 1, 2, 0, 3, 0, 0, 1])
"""Three samples; a has one id in each."""


def jagged(kind, dtype=torch.int64, keys=KEYS, lengths=LENGTHS):
    return kind(list(keys), torch.arange(5, 5 + int(lengths.sum())).to(dtype), lengths=lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_batch_has_the_ids_of_the_jagged_tensor(kind, dtype):
    ids, labels = jagged(kind, dtype), torch.tensor([0.0, 1.0, 0.0])
    batch = to_batch(SCHEMA, ids, torch.ones(3, 2), labels)
    batch.validate(SCHEMA)
    columns = parts(KEYS, ids.values(), LENGTHS) | {"price": [1, 1, 1], "age": [1, 1, 1], "label": labels}
    expected = Batch.from_columns(SCHEMA, columns).id_features
    for name, column in batch.id_features.items():
        assert column.values.tolist() == expected[name].values.tolist()
        if name == "a":
            assert column.offsets is None
        else:
            assert column.offsets.tolist() == expected[name].offsets.tolist()
    assert batch.labels[:, 0].tolist() == labels.tolist()
    if dtype == torch.int64:
        assert all(np.shares_memory(column.values, ids.values().numpy()) for column in batch.id_features.values())


@pytest.mark.parametrize("kind", KINDS)
def test_ids_keep_their_bits(kind):
    ids = kind(["a", "b", "c"], torch.tensor([-1, 5, 7]), lengths=torch.tensor([1, 1, 1]))
    batch = to_batch(SCHEMA, ids, torch.zeros(1, 2))
    assert batch.id_features["a"].values.tolist() == [2**64 - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_negative_int32_ids_are_those_of_int64(kind):
    ids = kind(["a", "b", "c"], torch.tensor([-1, 5, 7], dtype=torch.int32), lengths=torch.tensor([1, 1, 1]))
    assert to_batch(SCHEMA, ids, torch.zeros(1, 2)).id_features["a"].values.tolist() == [2**64 - 1]


COMPUTED = Schema(
    [
        IdFeature("a", dim=4),
        IdFeature("b", dim=4),
        IdFeature("a_b", dim=4, cross=("a", "b")),
        IdFeature("bucket", dim=4, of="b", mapping=HashTo(5, seed=1)),
    ],
    labels=[],
)


@pytest.mark.parametrize("kind", KINDS)
def test_computed_features_are_those_of_readers(kind):
    lengths = torch.tensor([1, 0, 1, 1, 1, 1])
    ids = kind(["a", "b"], torch.tensor([3, 4, 5, 6, 7]), lengths=lengths)
    batch = to_batch(COMPUTED, ids)
    expected = Batch.from_columns(COMPUTED, parts(["a", "b"], ids.values(), lengths))
    for name in ("a_b", "bucket"):
        mine, other = batch.id_features[name], expected.id_features[name]
        assert mine.values.tolist() == other.values.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_computed_features_may_be_keys(kind):
    keys = ["a", "b", "a_b", "bucket"]
    ids = kind(keys, torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    batch = to_batch(COMPUTED, ids)
    assert [batch.id_features[key].values.tolist() for key in keys] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "option",
    [
        {"age_since": "now"},
        {"kind": "text"},
        {"bucketize": Buckets("x", width=1.0)},
        {"time": TimePart("x", "hour")},
        {"tokens": Tokens("x")},
        {"split": "|"},
        {"fill": 0},
    ],
)
def test_features_whose_numbers_are_no_ids_are_refused(kind, option):
    schema = Schema([IdFeature("a", dim=4, **option)], labels=[])
    ids = kind(["a"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match=next(iter(option))):
        to_batch(schema, ids)


THREE = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ids", "dense", "labels", "error"),
    [
        (lambda kind: jagged(kind, keys=("a", "b"), lengths=LENGTHS[:6]), torch.zeros(3, 2), None, "no key 'c'"),
        (jagged, torch.zeros(3, 3), None, "dense has shape"),
        (jagged, None, None, "dense has shape"),
        (jagged, torch.zeros(3, 2), torch.zeros(4), "labels has shape"),
        (lambda kind: jagged(kind, torch.float32), torch.zeros(3, 2), None, "torch.float32"),
        (lambda kind: kind(list("abc"), THREE, torch.rand(3), lengths=THREE), None, None, "weights for 'a'"),
        (lambda kind: kind(["a", "b", "a"], torch.arange(3), lengths=torch.ones(3).long()), None, None, "a key twice"),
    ],
)
def test_what_batches_lack_is_refused(kind, ids, dense, labels, error):
    with pytest.raises(DataError, match=error):
        to_batch(SCHEMA, ids(kind), dense, labels)


def test_values_without_lengths_are_refused():
    """TorchRec does not check it itself."""
    for values in (3, 5):
        ids = Jagged(["a", "b"], torch.arange(values), lengths=torch.tensor([1, 1, 1, 1]))
        with pytest.raises(DataError, match=f"has {values} values, but its lengths add up to 4"):
            to_batch(Schema([IdFeature("a", dim=2)], labels=[]), ids)


def test_a_batch_of_another_schema_is_refused():
    batch = Batch({"a": IdColumn(np.ones(1, np.uint64))}, np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32))
    with pytest.raises(DataError, match="lacks feature 'b' of the schema"):
        keyed_jagged_tensor(SCHEMA, batch)


def test_without_torchrec_its_tensors_cannot_be_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)
    one = IdColumn(np.ones(1, np.uint64))
    batch = Batch({"a": one, "b": one, "c": one}, np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32))
    with pytest.raises(MissingExtraError, match=r"pip install torchrec"):
        keyed_jagged_tensor(SCHEMA, batch)


WEIGHTED = Schema([IdFeature("a", dim=4, weights="a_weights"), IdFeature("b", dim=4)], labels=[])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_jagged_tensor(kind):
    lengths, weights = torch.tensor([2, 0, 1, 1]), torch.tensor([0.5, -2.0, 1.0, 1.0])
    batch = to_batch(WEIGHTED, kind(["a", "b"], torch.arange(4), weights, lengths=lengths))
    batch.validate(WEIGHTED)
    assert batch.id_features["a"].weights.tolist() == [0.5, -2.0]
    assert batch.id_features["b"].weights is None
    with pytest.raises(DataError, match="has weights, but the KeyedJaggedTensor has none"):
        to_batch(WEIGHTED, kind(["a", "b"], torch.arange(4), lengths=lengths))
    with pytest.raises(DataError, match="has nan at row 0"):
        bad = torch.tensor([torch.nan, 1, 1, 1])
        to_batch(WEIGHTED, kind(["a", "b"], torch.arange(4), bad, lengths=lengths))


def test_a_jagged_tensor_has_the_weights_of_a_batch(monkeypatch):
    lengths, weights = torch.tensor([2, 0, 1, 1]), torch.tensor([0.5, -2.0, 1.0, 1.0])
    batch = to_batch(WEIGHTED, Jagged(["a", "b"], torch.arange(4), weights, lengths=lengths))

    def made(keys, values, weights=None, *, lengths, stride):
        return Jagged(keys, values, weights, lengths=lengths)

    monkeypatch.setitem(sys.modules, "torchrec", SimpleNamespace(KeyedJaggedTensor=made))
    assert keyed_jagged_tensor(WEIGHTED, batch).weights_or_none().tolist() == weights.tolist()
    unweighted = Batch.from_columns(SCHEMA, {"a": [1], "b": [2], "c": [3], "price": [1], "age": [1], "label": [1]})
    assert keyed_jagged_tensor(SCHEMA, unweighted).weights_or_none() is None


def test_dense_features_keep_their_widths(monkeypatch):
    dense = [DenseFeature("v", size=3), DenseFeature("q", fill=0.0, missing_indicator=True), "lq"]
    schema = Schema([IdFeature("a", dim=4)], dense, labels=[])
    stub = SimpleNamespace(KeyedJaggedTensor=lambda *_, **__: None, KeyedTensor=lambda *arguments: arguments)
    monkeypatch.setitem(sys.modules, "torchrec", stub)
    batch = to_batch(schema, Jagged(["a"], torch.arange(3), lengths=THREE), torch.arange(18).reshape(3, 6))
    names, lengths, values = from_batch(schema, batch).dense
    assert (names, lengths) == (["v", "q", "lq"], [3, 2, 1])
    assert values.tolist() == batch.dense.tolist()


def test_declared_weights_and_groups_of_samples_are_required():
    schema = Schema([IdFeature("a", dim=4)], sample_weight="w", group="g")
    ids = Jagged(["a"], torch.arange(3), lengths=THREE)
    weights, groups, labels = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1, 1, -1]), torch.zeros(3)
    batch = to_batch(schema, ids, None, labels, weights=weights, groups=groups)
    batch.validate(schema)
    assert (batch.weights.tolist(), batch.groups.tolist()) == ([0.5, 1.0, 2.0], [1, 1, 2**64 - 1])
    assert to_batch(schema, ids).weights is None  # For prediction, as `Batch.from_columns`.
    for options, match in (
        ({"groups": groups}, "weights="),
        ({"weights": weights}, "groups="),
        ({"weights": weights[:2], "groups": groups}, "weights has shape"),
        ({"weights": weights, "groups": weights}, "groups are torch.float32"),
    ):
        with pytest.raises(DataError, match=match):
            to_batch(schema, ids, None, labels, **options)
