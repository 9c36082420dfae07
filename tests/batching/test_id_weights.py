"""Weights of ids: any form of a column gives the weights that a loop over the samples gives."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import Batch, IdColumn, IdFeature, Schema
from persia.batching.id_weights import with_weights
from persia.errors import DataError
from support.examples import examples


def schema_of(**options):
    return Schema([IdFeature("tags", dim=2, weights="w", **options)], labels=[])


def read(tags, weights, **options):
    return Batch.from_columns(schema_of(**options), {"tags": tags, "w": weights}).id_features["tags"]


def as_lists(column):
    """Ids and weights of each sample."""
    bounds = range(len(column.values) + 1) if column.offsets is None else column.offsets
    return [
        list(zip(column.values[a:b].tolist(), column.weights[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(bounds)
    ]


def twin(tags, weights):
    """The pairs of ids and weights of each sample, without missing ids."""
    samples = []
    for ids, numbers in zip(tags, weights, strict=True):
        pairs = zip(ids or [], numbers or [], strict=ids is not None and numbers is not None)
        samples.append([(id_, weight) for id_, weight in pairs if id_ is not None])
    return samples


WEIGHT = st.integers(-64, 64).map(lambda n: n / 8)


@st.composite
def samples(draw):
    """Lists of ids, some missing, with the weights of each; some samples without any."""
    tags, weights = [], []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()) and draw(st.booleans()):
            tags.append(draw(st.sampled_from([None, []])))
            weights.append(draw(st.sampled_from([None, []])))
            continue
        ids = draw(st.lists(st.none() | st.integers(0, 9), max_size=4))
        tags.append(ids)
        weights.append([draw(WEIGHT if id_ is not None else st.none() | WEIGHT) for id_ in ids])
    return tags, weights


def pair_of(lists, kind):
    counts = [len(each or []) for each in lists]
    flat = [np.nan if value is None else float(value) for each in lists for value in each or []]
    return kind(np.array(flat, np.float64)), np.concatenate(([0], np.cumsum(counts)))


@settings(max_examples=examples(200), deadline=None)
@given(samples())
def test_any_form_gives_the_weights_of_a_loop(drawn):
    tags, weights = drawn
    expected = twin(tags, weights)
    forms = [
        (tags, weights),
        (pa.array(tags, pa.list_(pa.int64())), pa.array(weights, pa.list_(pa.float32()))),
        (pa.chunked_array([pa.array(tags, pa.large_list(pa.int32()))]), pa.array(weights, pa.list_(pa.float64()))),
        (pair_of(tags, np.asarray), pair_of(weights, np.asarray)),
        (pair_of(tags, pa.array), pair_of(weights, pa.array)),
        (tags, pa.array(weights, pa.list_(pa.float64()))),
        ([None if x is None else np.array(x, object) for x in tags], weights),
    ]
    for ids, numbers in forms:
        assert as_lists(read(ids, numbers)) == expected


@settings(max_examples=examples(100), deadline=None)
@given(samples())
def test_texts_are_split_like_their_ids(drawn):
    tags, weights = drawn

    def texts(lists):
        return [None if x is None else "|".join("" if v is None else str(v) for v in x) for x in lists]

    feature = schema_of(split="|").feature("tags")
    ids = Batch.from_columns(Schema([IdFeature("tags", dim=2)], labels=[]), {"tags": [x or [] for x in tags]})
    column = ids.id_features["tags"]
    for kind in (list, pa.array):
        found = with_weights(feature, column, kind(texts(tags)), kind(texts(weights)))
        assert as_lists(IdColumn(found.values, found.offsets, found.weights)) == twin(tags, weights)


@pytest.mark.parametrize("kind", [list, np.array, pa.array])
def test_single_ids_have_a_number_each(kind):
    column = read(kind([5, 6, 7]), kind([0.5, 2.0, -1.0]))
    assert column.offsets is None
    assert column.weights.dtype == np.float32
    assert as_lists(column) == [[(5, 0.5)], [(6, 2.0)], [(7, -1.0)]]


def test_arrays_of_two_dimensions_have_a_weight_for_each_entry():
    column = read(np.array([[1, 2], [3, 4]]), np.array([[0.5, 1.0], [1.5, 2.0]]))
    assert as_lists(column) == [[(1, 0.5), (2, 1.0)], [(3, 1.5), (4, 2.0)]]


def test_a_missing_single_id_loses_its_weight():
    assert as_lists(read([5, None, 7], [0.5, 9.0, 2.0])) == [[(5, 0.5)], [], [(7, 2.0)]]
    assert as_lists(read(["a", "", "a"], [0.5, None, 2.0]))[1] == []


def test_ids_bring_their_own_weights():
    mine = IdColumn(np.array([5, 6], np.uint64), None, np.array([0.5, 2], np.float32))
    assert Batch.from_columns(schema_of(), {"tags": mine}).id_features["tags"] is mine
    with pytest.raises(DataError, match="which the schema does not declare"):
        Batch.from_columns(Schema([IdFeature("tags", dim=2)], labels=[]), {"tags": mine})
    plain = IdColumn(np.array([5, 6], np.uint64))
    assert read(plain, [0.5, 2.0]).weights.tolist() == [0.5, 2.0]


def test_an_id_that_is_filled_in_weighs_one_unless_a_weight_is_given():
    feature = schema_of(fill=9).feature("tags")
    found = read([[1, None], None, None, 4], [[0.5, None], None, 3.0, 2.0], fill=9)
    assert as_lists(found) == [[(1, 0.5)], [(9, 1.0)], [(9, 3.0)], [(4, 2.0)]]
    single = IdColumn(np.array([1, 9], np.uint64))
    assert as_lists(with_weights(feature, single, [1, None], [0.5, None])) == [[(1, 0.5)], [(9, 1.0)]]
    with pytest.raises(DataError, match="has nan at row 0"):
        with_weights(feature, single, [1, None], [None, None])


def filled_twin(tags, weights):
    """As `twin`, with id 9 in samples without ids; its weight is that of a single missing entry, or 1."""
    result = twin(tags, weights)
    for at, (ids, numbers) in enumerate(zip(tags, weights, strict=True)):
        if not result[at]:
            given = numbers[0] if ids is not None and len(ids) == 1 else None
            result[at] = [(9, 1.0 if given is None else given)]
    return result


@settings(max_examples=examples(100), deadline=None)
@given(samples())
def test_samples_are_filled_in_like_by_a_loop(drawn):
    tags, weights = drawn
    expected = filled_twin(tags, weights)
    forms = [
        (tags, weights),
        (pa.array(tags, pa.list_(pa.int64())), pa.array(weights, pa.list_(pa.float32()))),
        (pair_of(tags, np.asarray), pair_of(weights, np.asarray)),
    ]
    for ids, numbers in forms:
        assert as_lists(read(ids, numbers, fill=9)) == expected


@pytest.mark.parametrize("kind", [list, pa.array])
def test_missing_parts_of_texts_are_dropped_with_their_weights(kind):
    for weights in ("0.5||1", "0.5|7|1"):
        found = read(kind(["1||2", "", "||"]), kind([weights, "3", "1||2"]), fill=7, split="|")
        assert [[weight for _, weight in sample] for sample in as_lists(found)] == [[0.5, 1.0], [3.0], [1.0]]


ERRORS = {
    "fewer": ([[1, 2], [3]], [[1.0], [1.0]], {}, "1 weights at row 0, but 'tags' has 2 ids there"),
    "none": ([[1], [3]], [[1.0], None], {}, "0 weights at row 1, but 'tags' has 1 ids there"),
    "more": ([5, 6], [1.0, [1.0, 2.0]], {}, "2 weights at row 1, but 'tags' has 1 ids there"),
    "for no id": ([[1], []], [[1.0], [2.0]], {}, "1 weights at row 1, but 'tags' has 0 ids there"),
    "rows": ([5, 6], [1.0], {}, "has 1 rows, but 'tags' has 2"),
    "missing": ([[1], [2, 3]], [[1.0], [2.0, None]], {}, "has nan at row 1; give a finite number"),
    "missing single": ([5, 6], [1.0, None], {}, "has nan at row 1"),
    "infinite": ([5, 6], [float("inf"), 1.0], {}, "has inf at row 0"),
    "beyond float32": ([5, 6], [1.0, 1e39], {}, "has inf at row 1"),
    "no number": ([[1], [2, 3]], [[1.0], ["2", "x"]], {}, "(weights of 'tags') has 'x' at row 1; give numbers"),
    "negative mean": ([5, 6], [1.0, -2.0], {"pooling": "mean"}, "has -2.0 at row 1; 'mean' divides by them"),
    "negative sqrtn": ([5, 6], [1.0, -2.0], {"pooling": "sqrtn"}, "'sqrtn' divides by them"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_weights_that_do_not_fit_are_refused(name):
    tags, weights, options, message = ERRORS[name]
    with pytest.raises(DataError) as error:
        read(tags, weights, **options)
    assert message in str(error.value)
    assert error.value.fields["column"] == "w"
    assert "row" in error.value.fields


def test_the_column_of_weights_is_required():
    with pytest.raises(DataError, match=r"Column 'w' \(weights of 'tags'\) is missing"):
        Batch.from_columns(schema_of(), {"tags": [5]})


def test_a_batch_made_by_hand_is_checked():
    def batch(weights):
        column = IdColumn(np.array([5, 6], np.uint64), None, weights)
        return Batch({"tags": column}, np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32))

    batch(None).validate(schema_of())
    batch(np.array([0.5, 1], np.float32)).validate(schema_of())
    with pytest.raises(DataError, match="must be float32"):
        batch(np.array([0.5], np.float32)).validate(schema_of())
    with pytest.raises(DataError, match="has nan at row 1"):
        batch(np.array([0.5, np.nan], np.float32)).validate(schema_of())
    with pytest.raises(DataError, match="does not declare"):
        batch(np.array([0.5, 1], np.float32)).validate(Schema([IdFeature("tags", dim=2)], labels=[]))
