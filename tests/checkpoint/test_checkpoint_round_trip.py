from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from rich.console import Console

from persia.checkpoint import CheckpointReader, CheckpointWriter, format_inspection, inspect, list_checkpoints
from persia.errors import CheckpointError
from persia.schema import IdFeature, Schema
from support.checkpoint_samples import OPTIMIZER, SCHEMA, make_rows, write


def test_rows_tensors_state_come_back(url: str) -> None:
    path = write(url, 12)
    assert path.endswith("/step-000000000012")
    for reader in (CheckpointReader(url), CheckpointReader(url, 12), CheckpointReader(f"{url}/step-000000000012")):
        parts = list(reader.rows("item"))
        assert [shard for shard, _ in parts] == [0, 1]
        for (_, found), expected in zip(parts, (make_rows(7, seed=12), make_rows(3, seed=13)), strict=True):
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array, strict=True)
                assert found[name].flags.writeable
        assert list(reader.rows("user")) == []
        assert torch.equal(reader.tensors("dense")["weight"], torch.full((2, 3), 12.0))
        np.testing.assert_array_equal(reader.tensors("dense", "numpy")["weight"], np.full((2, 3), 12, np.float32))
        assert reader.state("trainer") == {"step": 12, 1: (None, [1.5])}
        assert msgspec.json.encode(reader.schema) == msgspec.json.encode(SCHEMA)
        assert reader.config == {"lr": 0.1}
        assert reader.extra == {"note": "x"}
        table = reader.manifest.tables["item"]
        assert (table.dim, table.rows, table.shards, table.state_width, table.optimizer) == (4, 10, 2, 4, OPTIMIZER)
        assert reader.manifest.tables["user"].rows == 0
        assert reader.manifest.span == (12, 12)
        assert reader.verify() == sum(part.bytes for part in reader.manifest.parts)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [0, 1, 9])
def test_any_number_of_rows_and_width(tmp_path: Path, rows: int, width: int) -> None:
    with CheckpointWriter(tmp_path, 0) as writer:
        for shard in (3, 1, 3):
            writer.add_rows("item", shard, make_rows(rows, width=width, seed=shard))
        writer.commit(schema=SCHEMA)
    found = list(CheckpointReader(tmp_path).rows("item"))
    assert [shard for shard, _ in found] == [1, 3, 3]
    for shard, arrays in found:
        np.testing.assert_array_equal(arrays["state"], make_rows(rows, width=width, seed=shard)["state"], strict=True)


@pytest.mark.parametrize("table", ["..", ".", "a b", "ü%2F", "LATEST", "manifest.json", "x" * 64, "é" * 32, "c:\\d"])
def test_any_table_name_is_one_safe_file_name(url: str, table: str) -> None:
    schema = Schema([IdFeature(table, 4)])
    with CheckpointWriter(url, 1) as writer:
        writer.add_rows(table, 0, make_rows(2))
        writer.add_state(f"{table[:30]}/..", 1)
        writer.commit(schema=schema)
    reader = CheckpointReader(url)
    assert len(next(reader.rows(table))[1]["ids"]) == 2
    assert reader.state(f"{table[:30]}/..") == 1
    assert all(part.path.count("/") <= 2 for part in reader.manifest.parts)


def test_order_and_memory_layout_of_input_do_not_matter(tmp_path: Path) -> None:
    rows = make_rows(6)
    odd = {name: np.asfortranarray(array) for name, array in reversed(rows.items())}
    odd["ids"] = np.repeat(rows["ids"], 2)[::2]
    odd["stamp"] = rows["stamp"].astype(">u4").astype("<u4")
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.add_rows("item", 0, odd)
        writer.commit(schema=SCHEMA)
    found = next(CheckpointReader(tmp_path).rows("item"))[1]
    for name, array in rows.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_parts_are_compatible_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.int8),
        "half": torch.randn(2, 2, dtype=torch.bfloat16),
        "wide": torch.tensor(1.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
    }
    path = Path(write(tmp_path, 1))
    rows = safetensors.numpy.load_file(path / "rows/item/0-0.safetensors")
    np.testing.assert_array_equal(rows["embeddings"], make_rows(7, seed=1)["embeddings"])
    with CheckpointWriter(tmp_path, 2) as writer:
        writer.add_tensors("dense", tensors)
        path = Path(writer.commit(schema=SCHEMA))
    file = path / "dense/dense.safetensors"
    loaded = safetensors.torch.load_file(file)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    theirs = safetensors.torch.save(tensors, {"made": "by the library"})
    from persia.checkpoint.tensors import decode

    ours = decode(memoryview(bytearray(theirs)), "x")
    assert all(torch.equal(ours[name].torch(), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("offset", range(8))
def test_unaligned_files_are_read(offset: int) -> None:
    from persia.checkpoint.tensors import decode

    data = bytearray(offset) + bytearray(
        safetensors.numpy.save({"a": np.arange(3.0), "b": np.arange(3, dtype=np.int8)})
    )
    views = decode(memoryview(data)[offset:], "x")
    np.testing.assert_array_equal(views["a"].numpy(), np.arange(3.0))
    assert torch.equal(views["a"].torch(), torch.arange(3, dtype=torch.float64))


@pytest.mark.processes
def test_no_torch_is_imported_for_rows(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np\n"
        "from persia.checkpoint import CheckpointWriter, CheckpointReader, inspect\n"
        "from persia.schema import Schema, IdFeature\n"
        "u = lambda: np.zeros(2, np.uint32)\n"
        "with CheckpointWriter(sys.argv[1], 1) as w:\n"
        "    w.add_rows('a', 0, dict(ids=np.zeros(2, np.uint64), embeddings=np.zeros((2, 4), np.float32),\n"
        "        state=np.zeros((2, 4), np.float32), update_count=u(), last_step=u(), stamp=u()))\n"
        "    w.add_state('s', {'a': np.ones(3)}); w.add_tensors('t', {'b': np.ones(2)})\n"
        "    w.commit(schema=Schema([IdFeature('a', 4)]))\n"
        "r = CheckpointReader(sys.argv[1]); r.verify(); r.state('s'); r.tensors('t', 'numpy'); list(r.rows('a'))\n"
        "inspect(sys.argv[1]); assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


def test_inspect_reads_no_rows_and_prints(url: str) -> None:
    path = write(url, 12)
    fs, root = fsspec.core.url_to_fs(url)
    found = inspect(url)
    assert (found.global_step, found.parts) == (12, 4)
    item = found.tables[0]
    assert (item.name, item.rows, item.dim, item.optimizer, item.parts) == ("item", 10, 4, "Adagrad", 2)
    assert found.bytes == sum(
        fs.size(f"{root}/step-000000000012/{p.path}") for p in CheckpointReader(url).manifest.parts
    )
    assert [(t.part, t.name, t.dtype, t.shape, t.bytes) for t in found.tensors] == [
        ("dense", "weight", "F32", (2, 3), 24)
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(format_inspection(found))
    text = capture.get()
    for word in ("item", "10", "Adagrad", "weight", "2x3", "24 B", "step 12", "trainer"):
        assert word in text
    assert path.rpartition("/")[2] in text.replace("\n", "")


def test_names_are_not_markup(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.commit(schema=Schema([IdFeature("[red]item[", 4)]))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(format_inspection(inspect(tmp_path)))
    assert "[red]item[" in capture.get()


def test_list_and_keep_last(url: str) -> None:
    assert list_checkpoints(url) == []
    for step in (10, 20, 30):
        write(url, step)
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(f"{root}/step-000000000015/rows", exist_ok=True)
    fs.pipe_file(f"{root}/step-000000000015/rows/x", b"left by a kill")
    fs.makedirs(f"{root}/mine", exist_ok=True)
    fs.pipe_file(f"{root}/mine/notes.txt", b"not ours")
    assert [(e.step, e.latest) for e in list_checkpoints(url)] == [(10, False), (20, False), (30, True)]
    write(url, 40, keep_last=2)
    assert [(e.step, e.latest) for e in list_checkpoints(url)] == [(30, False), (40, True)]
    assert not fs.exists(f"{root}/step-000000000015")
    assert fs.exists(f"{root}/mine/notes.txt")
    write(url, 35, keep_last=1)  # went on from an older step: what is newer is not ours to remove
    assert [(e.step, e.latest) for e in list_checkpoints(url)] == [(35, True), (40, False)]
    assert CheckpointReader(url).manifest.global_step == 35


def test_a_step_can_be_written_again(url: str) -> None:
    write(url, 5)
    for value in (1, 2, 3):
        with CheckpointWriter(url, 5) as writer:
            writer.add_rows("item", 0, make_rows(value))
            if value == 2:
                continue  # aborted: the one before stays
            writer.commit(schema=SCHEMA, extra={"value": value})
        reader = CheckpointReader(url)
        reader.verify()
        assert reader.extra == {"value": value}
    fs, root = fsspec.core.url_to_fs(url)
    files = fs.find(f"{root}/step-000000000005")
    assert len(files) == 2  # manifest and one part, nothing of the earlier ones


def test_leaving_without_commit_removes_everything(url: str) -> None:
    write(url, 1)
    with pytest.raises(ZeroDivisionError), CheckpointWriter(url, 2) as writer:
        writer.add_rows("item", 0, make_rows(3))
        raise ZeroDivisionError
    fs, root = fsspec.core.url_to_fs(url)
    assert not fs.exists(f"{root}/step-000000000002")
    assert CheckpointReader(url).manifest.global_step == 1
    with pytest.raises(CheckpointError, match="closed"):
        writer.add_rows("item", 0, make_rows(3))
    with pytest.raises(CheckpointError, match="closed"):
        writer.commit(schema=SCHEMA)


def test_manifest_is_plain_json(saved: Path) -> None:
    manifest = json.loads((saved / "step-000000000012" / "manifest.json").read_bytes())
    assert manifest["format"] == "persia-checkpoint"
    assert manifest["parts"][0] == {
        "kind": "rows",
        "path": "rows/item/0-0.safetensors",
        "bytes": manifest["parts"][0]["bytes"],
        "checksum": manifest["parts"][0]["checksum"],
        "table": "item",
        "shard": 0,
        "rows": 7,
        "steps": [int(make_rows(7, seed=12)["last_step"].min()), int(make_rows(7, seed=12)["last_step"].max())],
    }
    assert (saved / "LATEST").read_text() == "step-000000000012\n"


def test_memory_is_that_of_few_parts(tmp_path: Path) -> None:
    rows = make_rows(1 << 18)
    size = sum(array.nbytes for array in rows.values())
    tracemalloc.start()
    with CheckpointWriter(tmp_path, 1) as writer:
        for shard in range(4):
            writer.add_rows("item", shard, rows)
        writer.commit(schema=SCHEMA)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    for _, arrays in CheckpointReader(tmp_path).rows("item"):
        del arrays
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 8 << 20
    assert written < 3 << 20  # nothing of the rows is copied
    assert read < 3.2 * size  # One is in use, two are read and checked meanwhile.
