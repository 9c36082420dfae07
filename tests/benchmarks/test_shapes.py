"""Shapes of real click logs: numbers of ids, fitted exponents, rates of clicks, and the logs that they give."""

import numpy as np
import pytest

from benchmarks import shapes


def test_the_fitted_exponent_gives_the_first_id_its_share():
    for ids, top in ((2, 0.62), (7, 0.92), (4_737, 0.361), (6_729_486, 0.0052)):
        exponent = shapes.fitted_exponent(ids, top)
        assert 1 / (np.arange(1, ids + 1) ** -exponent).sum() == pytest.approx(top, rel=1e-4)


def test_published_totals():
    assert len(shapes.CRITEO.fields) == 26
    assert sum(field.ids for field in shapes.CRITEO.fields) == 33_762_577  # as public loaders of the set state it
    assert shapes.AVAZU.positive_rate == pytest.approx(0.16980562476404604, abs=1e-12)
    rates = {name: round(shape.positive_rate, 3) for name, shape in shapes.SHAPES.items()}
    assert rates == {"criteo": 0.256, "avazu": 0.170, "taobao": 0.051}


def test_large_fields_shrink_with_the_rows_and_small_ones_stay():
    real = [field.ids for field in shapes.TAOBAO.fields]
    assert shapes.TAOBAO.ids(shapes.TAOBAO.rows) == shapes.TAOBAO.ids(10**9) == real
    small = dict(zip((field.name for field in shapes.TAOBAO.fields), shapes.TAOBAO.ids(2_655_796), strict=True))
    assert small["user"] == pytest.approx(114_173, abs=1)
    assert small["brand"] == shapes.KEPT
    assert small["cate_id"] == 6_769


@pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=lambda shape: shape.name)
def test_the_log_has_the_shape(shape):
    rows = 40_000
    reader = shape.reader(rows, batch_size=8_192, seed=1)
    batches = list(reader)
    assert np.concatenate([b.labels for b in batches]).mean() == pytest.approx(shape.positive_rate, rel=0.08)
    assert {b.dense.shape[1] for b in batches} == {shape.dense}
    for i, (field, ids) in enumerate(zip(shape.fields, shape.ids(rows), strict=True)):
        values = np.concatenate([b.id_features[f"id_{i}"].values for b in batches])
        assert values.max() < ids
        if field.top is not None and ids == field.ids:
            assert (values == 0).mean() == pytest.approx(field.top, abs=0.015), field.name
    assert 0.6 < reader.best_auc(rows) < 0.95
