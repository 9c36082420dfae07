"""Setting rows by id: native store and reference agree to the last bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_against_reference import compare, configs

from persia.ps.row_chunks import set_rows
from persia.store import NativeStore
from persia.types import RowState
from support.examples import examples
from support.stores import lookup, update
from support.twins.store import ReferenceStore


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_native_and_reference_agree(data):
    """Whatever came before, and in a full shard too: rows, state, recency, counters."""
    config = data.draw(configs())
    store, reference = NativeStore(data.draw(st.sampled_from([1, 3]))), ReferenceStore()
    store.create_table(config)
    reference.create_table(config)
    if data.draw(st.booleans()):
        store.keep_last_steps(0)
        reference.keep_last_steps(0)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, data.draw(st.integers(1, 120)), dtype=np.uint64)
    for step in range(data.draw(st.integers(1, 10))):
        action = data.draw(st.sampled_from(["train", "update", "set", "set with state"]))
        keys = np.unique(random.choice(universe, random.integers(0, 100)))
        random.shuffle(keys)
        rows = random.normal(size=(len(keys), config.dim)).astype(np.float32)
        if action == "train":
            for s in (store, reference):
                lookup(s, keys)
        elif action == "update":
            for s in (store, reference):
                update(s, keys, rows, 0.1, step)
        else:
            state = None
            if action == "set with state":
                width = random.random((len(keys), config.state_width), np.float32)
                state = RowState(width, np.full(len(keys), 7, np.uint32), np.full(len(keys), step, np.uint32))
            assert set_rows(store, 0, keys, rows, state) == set_rows(reference, 0, keys, rows, state)
    compare(store, reference)
