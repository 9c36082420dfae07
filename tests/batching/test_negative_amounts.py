"""Labels of losses of amounts."""

from __future__ import annotations

import pytest

from persia import Batch, IdFeature, Label, Schema
from persia.errors import DataError
from persia.schema import Huber, Poisson, Tweedie


@pytest.mark.parametrize("loss", [Tweedie(), Poisson()])
def test_negative_amounts_are_refused_by_row(loss):
    columns = {"user": [1, 2], "spent": [3.0, -5.0]}
    schema = Schema([IdFeature("user", dim=2)], labels=[Label("spent", kind="regression", loss=loss)])
    with pytest.raises(DataError, match=r"'spent' is -5.0 at row 1, negative, which \w+ does not take"):
        Batch.from_columns(schema, columns)
    huber = Schema([IdFeature("user", dim=2)], labels=[Label("spent", kind="regression", loss=Huber())])
    assert Batch.from_columns(huber, columns).labels[1, 0] == -5
