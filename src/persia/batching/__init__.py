"""Processes the ids and rows of a batch between data and network; every loop runs natively, without the GIL.

`tests/support/twins/batching.py` has a slow, readable twin of every function here.
"""

from persia.batching.change_filter import LAST_VERSION, ChangeFilter
from persia.batching.copying import copy_array
from persia.batching.duplicates import average_gradients, merge_gradients, unique
from persia.batching.hashing import hash_cross
from persia.batching.native import RowSums, Scratch, ThreadPool, borrow, default_threads
from persia.batching.owners import buckets_of, group_by_owner, owners
from persia.batching.packed_batch import (
    RoutedBatch,
    check_rows,
    decode_packed,
    encode_packed,
    plain_packed,
    put_part,
    route_batch,
    take_part,
)
from persia.batching.places import (
    check_places,
    complement,
    flag_places,
    keep,
    places_included,
    places_of,
    put_places,
    take_places,
)
from persia.batching.pooling import FeaturePlan, Pooled, Pooler, pool_backward, pool_forward
from persia.batching.row_codec import decode_rows, encode_rows
from persia.batching.row_copies import CopiedTable, plan_copies
from persia.batching.texts import TextBuffers, TextIds, TextNumbers, text_ids, text_numbers

__all__ = [
    "LAST_VERSION",
    "ChangeFilter",
    "CopiedTable",
    "FeaturePlan",
    "Pooled",
    "Pooler",
    "RoutedBatch",
    "RowSums",
    "Scratch",
    "TextBuffers",
    "TextIds",
    "TextNumbers",
    "ThreadPool",
    "average_gradients",
    "borrow",
    "buckets_of",
    "check_places",
    "check_rows",
    "complement",
    "copy_array",
    "decode_packed",
    "decode_rows",
    "default_threads",
    "encode_packed",
    "encode_rows",
    "flag_places",
    "group_by_owner",
    "hash_cross",
    "keep",
    "merge_gradients",
    "owners",
    "places_included",
    "places_of",
    "plain_packed",
    "plan_copies",
    "pool_backward",
    "pool_forward",
    "put_part",
    "put_places",
    "route_batch",
    "take_part",
    "take_places",
    "text_ids",
    "text_numbers",
    "unique",
]
