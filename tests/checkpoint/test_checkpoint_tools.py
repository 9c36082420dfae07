"""Rows without a cluster: as numpy, as Arrow, as files; and what differs between two checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import persia
from persia.checkpoint import CheckpointWriter, ReshardOptions, diff, export, reshard
from persia.errors import CheckpointError, ConfigError
from support.checkpoint_samples import OPTIMIZER, SCHEMA, make_rows, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", 12)
    return tmp_path / "run"


def expected() -> tuple[np.ndarray, np.ndarray]:
    parts = [make_rows(7, seed=12), make_rows(3, seed=13)]
    return tuple(np.concatenate([part[name] for part in parts]) for name in ("ids", "embeddings"))  # type: ignore[return-value]


def test_numpy_and_arrow(run: Path) -> None:
    checkpoint = persia.checkpoint.open(run)
    assert checkpoint.global_step == 12
    assert set(checkpoint.tables) == {"item", "user"}
    table = checkpoint["item"]
    ids, embeddings = expected()
    assert (len(table), table.dim, table.state_width, len(checkpoint["user"])) == (10, 4, 4, 0)
    np.testing.assert_array_equal(np.concatenate([arrays["ids"] for arrays in table]), ids)
    found, rows = table.find(np.array([ids[8], 12345, ids[0]], np.uint64))
    assert found.tolist() == [True, False, True]
    np.testing.assert_array_equal(rows, np.stack([embeddings[8], np.zeros(4, np.float32), embeddings[0]]))
    arrow = table.arrow(state=True).read_all()
    assert arrow.column_names == ["id", "embedding", "state", "update_count", "last_step"]
    assert arrow["id"].to_pylist() == ids.tolist()
    np.testing.assert_array_equal(np.array(arrow["embedding"].to_pylist(), np.float32), embeddings)


def test_files(run: Path, tmp_path: Path) -> None:
    ids, embeddings = expected()
    counted: list[int] = []
    files = export(run, tmp_path / "out", progress=counted.append)
    assert [Path(file).name for file in files] == ["item.parquet", "user.parquet"]
    assert sum(counted) == 10
    table = pq.read_table(files[0])
    assert table.schema.field("embedding").type == pa.list_(pa.field("element", pa.float32()), 4)
    assert table["id"].to_pylist() == ids.tolist()
    files = export(run, tmp_path / "out", "npy", tables=["item"], state=True)
    assert [Path(file).name for file in files] == ["item.ids.npy", "item.embeddings.npy", "item.state.npy"]
    np.testing.assert_array_equal(np.load(files[0]), ids)
    np.testing.assert_array_equal(np.load(files[1]), embeddings)
    with pytest.raises(CheckpointError, match="no table 'nobody'"):
        export(run, tmp_path / "out", tables=["nobody"])


def test_safetensors(run: Path, tmp_path: Path) -> None:
    """Read by the library; `user` has no rows."""
    ids, embeddings = expected()
    files = export(run, tmp_path / "out", "safetensors")
    assert [Path(file).name for file in files] == ["item.safetensors", "user.safetensors"]
    found = load_file(files[0])
    assert found.keys() == {"ids", "embeddings"}
    np.testing.assert_array_equal(found["ids"], ids)
    np.testing.assert_array_equal(found["embeddings"], embeddings)
    assert load_file(files[1])["ids"].shape == (0,)
    found = load_file(export(run, tmp_path / "out", "safetensors", tables=["item"], state=True)[0])
    parts = [make_rows(7, seed=12), make_rows(3, seed=13)]
    assert found.keys() == {"ids", "embeddings", "state", "update_count", "last_step"}
    for name, array in found.items():
        whole = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(array, whole)
        assert array.dtype == whole.dtype


def test_an_unknown_kind_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parquet, npy, safetensors"):
        export(run, tmp_path / "out", "csv")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["parquet", "npy", "safetensors"])
def test_an_export_that_fails_leaves_the_one_before(run: Path, tmp_path: Path, kind: str) -> None:
    files = export(run, tmp_path / "out", kind, tables=["item"])
    before = [Path(file).read_bytes() for file in files]
    (part, *_) = (path for path in run.rglob("*") if path.is_file() and "item" in str(path.relative_to(run)))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=part.name):
        export(run, tmp_path / "out", kind, tables=["item"])
    assert [Path(file).read_bytes() for file in files] == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(Path(file).name for file in files)


def test_differences(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_rows(100, seed=3)
    second = {name: array[10:].copy() for name, array in first.items()}
    second["embeddings"][5:15, 2] += 0.5
    for name, rows in (("a", first), ("b", second)):
        with CheckpointWriter(tmp_path / name, 1) as writer:
            writer.add_rows("item", 0, rows)
            writer.commit(schema=SCHEMA, optimizer=OPTIMIZER)
    for memory in (256 << 20, 1000):  # A share at a time gives the same.
        monkeypatch.setattr("persia.checkpoint.comparing.MEMORY_BYTES", memory)
        counted: list[int] = []
        item, user = diff(tmp_path / "a", tmp_path / "b", progress=counted.append)
        assert sum(counted) == 190
        assert (item.only_first, item.only_second, item.same, item.changed) == (10, 0, 80, 10)
        assert item.largest == pytest.approx(0.5, rel=1e-5)
        assert item.mean == pytest.approx(0.5, rel=1e-5)
        assert (user.name, user.same) == ("user", 0)


def test_float16_refuses_what_does_not_fit(tmp_path: Path) -> None:
    rows = make_rows(3)
    rows["embeddings"][1, 1] = 70000
    with CheckpointWriter(tmp_path / "a", 1) as writer:
        writer.add_rows("item", 0, rows)
        writer.commit(schema=SCHEMA, optimizer=OPTIMIZER)
    with pytest.raises(CheckpointError, match="65504"):
        reshard(tmp_path / "a", tmp_path / "b", ReshardOptions(dtype="float16"))
    assert not list((tmp_path / "b").rglob("manifest.json"))
