"""Rows from Parquet and safetensors files as other libraries write them."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import persia
from persia.errors import CheckpointError, PersiaError
from persia.interop import import_rows

LISTS = [[float(row)] * 4 for row in range(3)]
TEXTS = ["a", "b", "-1"]


def collection():
    schema = persia.Schema([persia.IdFeature("item", dim=4)])
    return persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.Adagrad(lr=0.05))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: pd.DataFrame({"id": TEXTS, "embedding": LISTS}).to_parquet(path),
        lambda path: pd.DataFrame({"id": pd.Categorical(TEXTS), "embedding": LISTS}).to_parquet(path),
        lambda path: pl.DataFrame({"id": TEXTS, "embedding": LISTS}).write_parquet(path),
        lambda path: pq.write_table(pa.table({"id": TEXTS, "embedding": LISTS}), path),
    ],
    ids=["pandas", "pandas, categories", "polars", "pyarrow"],
)
def test_texts_are_mapped_as_readers_do_whatever_wrote_them(write, tmp_path):
    write(tmp_path / "item.parquet")
    tables = collection()
    assert import_rows(tables, tmp_path)["item"].inserted == 3
    read = tables.rows("item", TEXTS)
    assert read.found.all()
    np.testing.assert_array_equal(read.values, LISTS)


def test_numbers_are_ids_also_as_categories_of_a_table_of_texts(tmp_path):
    pd.DataFrame({"id": pd.Categorical([7, 9, 2]), "embedding": LISTS}).to_parquet(tmp_path / "item.parquet")
    schema = persia.Schema([persia.IdFeature("item", dim=4, kind="text")])
    tables = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.Adagrad(lr=0.05))
    import_rows(tables, tmp_path)
    np.testing.assert_array_equal(tables.rows("item", np.array([7, 9, 2], np.uint64)).values, LISTS)


def test_other_tensors_do_not_matter(tmp_path):
    ids = torch.tensor([4, 5, 6])
    tensors = {"ids": ids, "embeddings": torch.tensor(LISTS), "version": torch.tensor(3)}
    save_file(tensors, tmp_path / "item.safetensors")
    assert import_rows(collection(), tmp_path)["item"].inserted == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_matrix_of_any_float_type(dtype, tmp_path):
    save_file({"weight": torch.tensor(LISTS, dtype=dtype)}, tmp_path / "item.safetensors")
    tables = collection()
    import_rows(tables, tmp_path)
    np.testing.assert_array_equal(tables.rows("item", np.arange(3, dtype=np.uint64)).values, LISTS)


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"id": [1, -2, 3], "embedding": LISTS}, "it has the id -2; ids must be whole numbers from 0 on"),
        ({"id": [1, None, 3], "embedding": LISTS}, "it has the id nan"),
        ({"id": [1, 2.5, 3], "embedding": LISTS}, r"it has the id 2\.5"),
        ({"id": [1, 2.0**53, 3], "embedding": LISTS}, "it has the id 9007199254740992"),
        ({"id": ["a", None, "c"], "embedding": LISTS}, "need one id each"),
        ({"key": [1, 2, 3], "embedding": LISTS}, "it has key, embedding, but no 'id'"),
        ({"id": [1, 2, 3], "vector": LISTS}, "it has id, vector, but no 'embedding'"),
        ({"id": [1, 2, 3], "embedding": [1.0, 2.0, 3.0]}, "'embedding' holds double, not a list"),
        ({"id": [1, 2, 3], "embedding": LISTS, "state": LISTS}, "but no 'update_count'"),
    ],
)
def test_columns_that_are_no_rows_are_refused(columns, error, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "item.parquet")
    with pytest.raises(PersiaError, match=error):
        import_rows(collection(), tmp_path)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"ids": torch.tensor([1.5, 2.0, 3.0])}, r"it has the id 1\.5"),
        ({"ids": torch.tensor([1, -1, 3])}, "it has the id -1"),
        ({"ids": torch.tensor([True, False, True])}, "its ids are bool"),
        ({"ids": torch.tensor([1, 2])}, "differ in the number of rows"),
        ({"keys": torch.tensor([1, 2, 3])}, "it has embeddings, keys, but no 'ids'"),
        ({"ids": torch.tensor([1, 2, 3]), "state": torch.ones(3, 4)}, "but no 'update_count'"),
    ],
)
def test_tensors_that_are_no_rows_are_refused(tensors, error, tmp_path):
    save_file({"embeddings": torch.tensor(LISTS), **tensors}, tmp_path / "item.safetensors")
    with pytest.raises(CheckpointError, match=error):
        import_rows(collection(), tmp_path)
