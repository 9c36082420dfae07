"""Calls of one table of any store."""

from __future__ import annotations

import numpy as np

from persia.store import NativeStore
from persia.types.half_floats import from_halves
from support.twins.store import ReferenceStore

STORES = {"native": NativeStore, "reference": ReferenceStore}


def widen(words, dtype, dim):
    """Returns the values of rows as stored, `[n, words of a row]`, as float32 `[n, dim]`."""
    if dtype == "float32":
        return words
    return from_halves(words.view("float16" if dtype == "float16" else "uint16")[:, :dim])


def lookup(store, ids, train=True, table=0):
    """Returns embeddings [n, dim]."""
    config = store.config(table)
    rows = np.empty((len(ids), config.row_words), np.float32)
    store.lookup_packed([table], [len(ids)], ids, rows.reshape(-1), train)
    return widen(rows, config.dtype, config.dim)


def read(store, ids, table=0):
    """Returns embeddings [n, dim], and whether each id has a row."""
    config = store.config(table)
    rows = np.empty((len(ids), config.row_words), np.float32)
    found = store.read_packed([table], [len(ids)], ids, rows.reshape(-1))
    return widen(rows, config.dtype, config.dim), found


def update(store, ids, gradients, lr=0.1, step=1, client=0, sequence=0, table=0):
    """Returns the outcome of gradients [n, dim]."""
    flat = np.ascontiguousarray(gradients, np.float32).reshape(-1)
    (counts,) = store.update_packed([table], [len(ids)], ids, flat, [lr], step, client, sequence)
    return counts


def contents(store, table=0):
    """Returns all rows by shard, in row order."""
    return dict(store.iterate_rows(table, max_rows=10**6))
