"""`persia import` and `persia export`."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from persia import checkpoint
from support.command import persia

CONFIG = """
[data]
kind = "synthetic"
batch_size = 100
options = { rows = 1_500, id_features = 2, ids_per_feature = 20, dim = 4 }

[mode]
kind = "sync"

[trainer]
progress = false
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a run, which tests copy."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "run.toml").write_text(CONFIG)
    persia("train", str(directory / "run.toml"), "--output", str(directory / "one"))
    return directory / "one"


def rows_of(directory):
    """By table: ids in order, with embeddings, state and counts of updates."""
    found = {}
    for name, table in checkpoint.open(directory).tables.items():
        parts = list(table)
        if not parts:
            continue
        columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        order = np.argsort(columns["ids"])
        found[name] = [columns[key][order] for key in ("ids", "embeddings", "state", "update_count")]
    return found


@pytest.mark.parametrize("kind", ["parquet", "safetensors", "dcp"])
def test_rows_come_back_bit_by_bit_and_train_on(folder, trained, kind):
    shutil.copytree(trained, "one")
    persia("export", "one", "files", "--format", kind, "--state")
    output = persia("import", "run.toml", "files", "--output", "two")
    assert "persia train run.toml --resume two" in output
    first, second = rows_of("one"), rows_of("two")
    assert first.keys() == second.keys()
    for name, columns in first.items():
        assert f"{name}: {len(columns[0])} rows" in output
        for ours, theirs in zip(columns, second[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    persia("train", "run.toml", "--resume", "two")


def test_a_part_of_the_tables_without_state(folder, trained):
    shutil.copytree(trained, "one")
    persia("export", "one", "files")
    name = sorted(rows_of("one"))[0]
    persia("import", "run.toml", "files", "--output", "two", "--table", name)
    columns, imported = rows_of("one")[name], rows_of("two")
    np.testing.assert_array_equal(columns[1], imported[name][1])
    assert not imported[name][3].any()
    assert list(imported) == [name]


def test_a_matrix_has_the_rows_of_the_numbers(folder):
    weight = np.random.default_rng(0).random((30, 4)).astype(np.float32)
    (folder / "files").mkdir()
    save_file({"weight": weight}, folder / "files" / "id_0.safetensors")
    persia("import", "run.toml", "files", "--output", "two")
    ids, embeddings, *_ = rows_of("two")["id_0"]
    np.testing.assert_array_equal(ids, np.arange(30))
    np.testing.assert_array_equal(embeddings, weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_checkpoints(folder):
    from torch.distributed.checkpoint import save

    weights = {f"embedding_bags.id_{i}.weight": torch.rand(20, 4) for i in range(2)}
    save(weights, checkpoint_id="dcp", no_dist=True)
    assert "id_0: 20 rows" in persia("import", "run.toml", "dcp", "--output", "two")
    np.testing.assert_array_equal(rows_of("two")["id_1"][1], weights["embedding_bags.id_1.weight"].numpy())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_is_exported_for_it(folder, trained):
    from torch.distributed.checkpoint import FileSystemReader, load

    shutil.copytree(trained, "one")
    persia("export", "one", "files", "--format", "dcp", "--table", "id_1")
    persia("export", "one", "files", "--format", "dcp", "--table", "id_1", "--state")  # In place of the other one.
    assert sorted(os.listdir("files")) == [".metadata", "__0_0.distcp"]
    ids, embeddings, state, counts = rows_of("one")["id_1"]
    found = FileSystemReader("files").read_metadata().state_dict_metadata
    tensors = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in found.items()}
    load(tensors, checkpoint_id="files", no_dist=True)
    order = np.argsort(tensors["embedding_bags.id_1.ids"].numpy().view(np.uint64))
    for key, expected in {"ids": ids, "weight": embeddings, "state": state, "update_count": counts}.items():
        np.testing.assert_array_equal(tensors[f"embedding_bags.id_1.{key}"].numpy()[order], expected)
    persia("import", "run.toml", "files", "--output", "two", "--table", "id_1")
    np.testing.assert_array_equal(rows_of("two")["id_1"][2], state)


def test_what_does_not_fit_is_refused(folder):
    files = folder / "files"
    files.mkdir()
    assert "has no file of rows; name the file of table 'id_0'" in persia(
        "import", "run.toml", "files", "--output", "two", ok=False
    )
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(15, np.float32)), 3)
    pq.write_table(pa.table({"id": pa.array(range(5), pa.uint64()), "embedding": embedding}), files / "id_0.parquet")
    refused = persia("import", "run.toml", "files", "--output", "two", ok=False)
    assert "embeddings of shape [5, 3] for table 'id_0' of dim 4; set the dim" in refused
    lists = [[1.0, 2.0, 3.0, 4.0]] * 4 + [[1.0]]
    pq.write_table(pa.table({"id": pa.array(range(5), pa.uint64()), "embedding": lists}), files / "id_0.parquet")
    assert "its lists differ in length" in persia("import", "run.toml", "files", "--output", "two", ok=False)
    (files / "id_0.parquet").write_bytes(b"not Parquet")
    assert "id_0.parquet cannot be read" in persia("import", "run.toml", "files", "--output", "two", ok=False)
    (files / "id_0.safetensors").write_bytes(b"not safetensors")
    assert "belong to the same table; remove one" in persia("import", "run.toml", "files", "--output", "two", ok=False)
    assert not (folder / "two").exists()
