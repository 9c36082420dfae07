"""Objects that several threads use have their `__dict__` from the beginning: `copy.copy` and `cached_property` read it.

With CPython 3.11 a collection while one thread makes it may let another thread make a second one of the same values.
The values are freed with the object, and the first dict is not.
"""

import gc
import sys

import numpy as np
import pytest
import torch

from persia.data.item_catalogs import ItemCatalog, ItemDraws
from persia.data.negative_sampling import NegativeSampling
from persia.nn.pooling import Expander
from persia.nn.row_access import RowAccess
from persia.schema import IdFeature, Schema
from persia.types import BucketMap

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="of CPython before 3.12 only")

SCHEMA = Schema([IdFeature("item", dim=4)], labels=["click"])


def draws():
    items = np.arange(4, dtype=np.uint64)
    return ItemDraws(ItemCatalog({"item": items}, np.ones(4, np.int64)), ("item",), "uniform", 1.0)


class Rows:
    schema = SCHEMA


def has_dict(instance):
    return any(found is vars(instance) for found in gc.get_referents(instance))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BucketMap.even(2),
        lambda: Expander(SCHEMA, torch.device("cpu")),
        lambda: NegativeSampling(Rows(), ("item",), 1),
        lambda: RowAccess(SCHEMA, []),
        draws,
    ],
    ids=["buckets", "expander", "negatives", "row_access", "draws"],
)
def test_it_is_made_with_the_object(make):
    assert has_dict(make())


def test_by_default_it_is_made_at_its_first_use():
    rows = Rows()
    rows.name = "item"
    assert not has_dict(rows)
