"""Codes of items by residual k-means, and features that map items to prefixes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import persia
from persia import CodePrefix, IdFeature, Schema
from persia.batching import item_codes
from persia.batching.batch import Batch
from persia.batching.item_codes import ItemCodes, prefix_ids
from persia.cli.app import app
from persia.data import SemanticIds, read_semantic_ids, semantic_ids, write_semantic_ids
from persia.data.semantic_ids import item_vectors
from persia.errors import ConfigError, DataError, PersiaError

CENTRES = np.array([[0, 0], [0, 1], [10, 0], [10, 1]], np.float32)
"""Two clusters of two each."""


def planted(items: int, noise: float = 0.01) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(1)
    cluster = draw.integers(0, 4, items)
    return cluster, (CENTRES[cluster] + draw.normal(0, noise, (items, 2))).astype(np.float32)


def written(path: Path, ids: list[int], codes: list[list[int]], per_level: int = 4) -> str:
    levels = len(codes[0])
    found = SemanticIds(tuple(np.zeros((per_level, 2), np.float32) for _ in range(levels)), per_level)
    write_semantic_ids(path, found, np.array(ids, np.uint64), np.array(codes, np.int32))
    return str(path)


def test_levels_find_planted_clusters() -> None:
    pytest.importorskip("sklearn")
    cluster, vectors = planted(400)
    found = semantic_ids(vectors, levels=2, codes=2)
    codes = found.assign(vectors)
    for level, groups in ((0, [(0, 1), (2, 3)]), (1, [(0,), (1,), (2,), (3,)])):
        prefixes = [tuple(code) for code in codes[:, : level + 1].tolist()]
        by_group = [{prefixes[i] for i in np.flatnonzero(np.isin(cluster, group))} for group in groups]
        assert all(len(of_group) == 1 for of_group in by_group)
        assert len(set.union(*by_group)) == len(groups)
    first, second = found.explained(vectors, codes)
    assert 0.98 < first < second
    assert second > 0.9999
    again = semantic_ids(vectors, levels=2, codes=2)
    assert all(np.array_equal(a, b) for a, b in zip(found.codebooks, again.codebooks, strict=True))


def test_fewer_vectors_than_codes() -> None:
    pytest.importorskip("sklearn")
    found = semantic_ids(np.array([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]], np.float32), levels=3, codes=256)
    assert [len(codebook) for codebook in found.codebooks] == [2, 1, 1]
    assert found.assign(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))[:, 1:].tolist() == [[0, 0], [0, 0]]


@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 5), st.integers(0, 9))
def test_codes_are_those_of_the_closest_entries(items: int, levels: int, entries: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Small whole numbers: all distances are exact.
    books = tuple(draw.integers(-4, 5, (entries, 3)).astype(np.float32) for _ in range(levels))
    vectors = draw.integers(-9, 10, (items, 3)).astype(np.float32)
    codes = SemanticIds(books, entries).assign(vectors)
    for vector, of_vector in zip(vectors, codes, strict=True):
        left = vector.copy()
        for book, code in zip(books, of_vector, strict=True):
            distances = [float(((left - entry) ** 2).sum()) for entry in book]
            assert int(code) == distances.index(min(distances))
            left = left - book[code]


@given(st.integers(1, 5), st.integers(1, 4))
def test_prefixes_are_different_ids(per_level: int, levels: int) -> None:
    every = np.indices([per_level] * levels).reshape(levels, -1).T.astype(np.int32)
    codes = ItemCodes(np.arange(len(every), dtype=np.uint64), every, per_level)
    seen: dict[int, tuple[int, ...]] = {}
    for length in range(1, levels + 1):
        for prefix, of_item in zip(codes.prefixes(length).tolist(), every.tolist(), strict=True):
            assert prefix > 0
            assert seen.setdefault(prefix, tuple(of_item[:length])) == tuple(of_item[:length])
    assert len(seen) == sum(per_level**length for length in range(1, levels + 1))


def test_features_read_prefixes(tmp_path: Path) -> None:
    file = written(tmp_path / "codes.parquet", [30, 10, 20], [[1, 3], [1, 2], [0, 0]])
    schema = Schema(
        [
            IdFeature("item", 2),
            IdFeature("item_1", 2, of="item", mapping=CodePrefix(file, 1), table="kinds"),
            IdFeature("item_2", 2, of="item", mapping=CodePrefix(file, 2), table="kinds"),
            IdFeature("past", 2, pooling=None, max_length=3, table="item"),
            IdFeature("past_1", 2, of="past", mapping=CodePrefix(file, 1), pooling=None, max_length=3, table="kinds"),
        ]
    )
    columns = {"item": [10, 30, 20, 99], "past": [[10, 99], [], [30], [20, 10]], "label": [0, 1, 0, 1]}
    ids = Batch.from_columns(schema, columns).id_features
    assert ids["item_1"].values.tolist() == [2, 2, 1, 0]  # Ids without codes share one.
    assert ids["item_2"].values.tolist() == [5 + 1 * 4 + 2, 5 + 1 * 4 + 3, 5, 0]
    assert ids["past_1"].values.tolist() == [2, 0, 2, 1, 2]
    assert ids["past_1"].offsets is not None
    assert ids["past_1"].offsets.tolist() == [0, 2, 2, 3, 5]


def test_new_items_come_while_a_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "codes.parquet", [1], [[3]])
    asked = np.array([1, 2], np.uint64)
    assert prefix_ids(file, 1, asked).tolist() == [4, 0]
    written(tmp_path / "codes.parquet", [1, 2], [[3], [1]])
    assert prefix_ids(file, 1, asked).tolist() == [4, 0]  # Looked at less than 10 s ago.
    monkeypatch.setattr(item_codes, "REREAD_SECONDS", 0.0)
    reads: list[str] = []
    read = item_codes.read_codes

    def counted(path: str) -> Any:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(item_codes, "read_codes", counted)
    assert prefix_ids(file, 1, asked[:1]).tolist() == [4]
    assert not reads  # All are known.
    assert mapped_after_a_look(file, asked) == [4, 2]
    assert mapped_after_a_look(file, np.array([7], np.uint64)) == [0]
    assert len(reads) == 1  # The file has not changed since.


def mapped_after_a_look(file: str, ids: np.ndarray[Any, Any]) -> list[int]:
    """Maps ids of which some are unknown, waits until the file has been looked at, and maps them again."""
    prefix_ids(file, 1, ids)
    looking = item_codes._file(file).rereading
    assert looking is not None
    looking.join(10)
    mapped: list[int] = prefix_ids(file, 1, ids).tolist()
    return mapped


@pytest.mark.parametrize("change", ["other codebooks", "damaged"])
def test_codes_stay_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    path = tmp_path / "codes.parquet"
    file = written(path, [1], [[3]])
    asked = np.array([1, 2], np.uint64)
    assert prefix_ids(file, 1, asked).tolist() == [4, 0]
    monkeypatch.setattr(item_codes, "REREAD_SECONDS", 0.0)
    if change == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        found = SemanticIds((np.ones((4, 2), np.float32),), 4)
        with pytest.raises(ConfigError, match="has other codebooks, on which models may be trained"):
            write_semantic_ids(path, found, np.array([1, 2], np.uint64), np.zeros((2, 1), np.int32))
        path.unlink()
        write_semantic_ids(path, found, np.array([1, 2], np.uint64), np.zeros((2, 1), np.int32))
    assert mapped_after_a_look(file, asked) == [4, 0]
    assert "stay in use" in caplog.text


def test_a_new_item_scores_as_its_neighbours(tmp_path: Path) -> None:
    """Trained on items of two kinds, without rows of their own; a third item of a kind is new."""
    file = written(tmp_path / "codes.parquet", [1, 2, 3, 4, 5], [[0], [0], [1], [1], [1]])
    schema = Schema([IdFeature("item", 4), IdFeature("kind", 4, of="item", mapping=CodePrefix(file, 1))])
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(8,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.1),
        embedding_optimizer=persia.optim.Adagrad(lr=0.5),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(progress=False),
    )
    columns = {"item": [1, 2, 3, 4] * 8, "label": [0, 0, 1, 1] * 8}
    trainer.fit([Batch.from_columns(schema, columns)] * 60)
    (scores,) = trainer.predict([Batch.from_columns(schema, {"item": [1, 5], "label": [0, 0]})])
    known, new = scores.ravel().tolist()
    assert known < 0.4
    assert new > 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("absent", r"cannot be read .*persia semantic-ids"),
        ("text", r"cannot be read"),
        ("other", r"is no file of codes"),
        ("unsorted", r"its ids do not ascend"),
        ("large", r"a code is not in \[0, 2\)"),
        ("null", "a value is null"),
        ("many", "3 levels of 1099511627776 codes"),
        ("short", r"has 1 codes for each item; give at most 1"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / f"{change}.parquet"
    if change == "text":
        path.write_text("id,code_1")
    elif change == "other":
        pq.write_table(pa.table({"id": [1]}), path)
    elif change != "absent":
        written(path, [1, 2], [[1], [1]], per_level=2)
        table = pq.read_table(path)
        if change == "unsorted":
            table = table.take([1, 0])
        elif change == "null":
            table = table.set_column(1, "code_1", pa.array([1, None], pa.int32()))
        elif change == "many":
            said = b'{"levels": 3, "codes": 1099511627776}'
            table = table.replace_schema_metadata({item_codes.CODEBOOKS: said})
        elif change == "large":
            table = table.set_column(1, "code_1", pa.array([1, 2], pa.int32()))
        pq.write_table(table, path)
    with pytest.raises(DataError, match=message):
        prefix_ids(str(path), 2 if change == "short" else 1, np.array([1], np.uint64))


def test_codebooks_are_kept(tmp_path: Path) -> None:
    books = (np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6]], np.float32))
    codes = np.array([[1, 0], [0, 0]], np.int32)
    write_semantic_ids(tmp_path / "codes.parquet", SemanticIds(books, 7), np.array([9, 2], np.uint64), codes)
    assert [path.name for path in tmp_path.iterdir()] == ["codes.parquet"]
    found, read = read_semantic_ids(str(tmp_path / "codes.parquet"))
    assert [book.tolist() for book in found.codebooks] == [book.tolist() for book in books]
    assert (found.codes, read.codes_per_level) == (7, 7)
    assert (read.ids.tolist(), read.codes.tolist()) == ([2, 9], [[0, 0], [1, 0]])
    with pytest.raises(DataError, match="length 3, the codebooks 2"):
        found.assign(np.zeros((1, 3), np.float32))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": [1], "vector": [[1.0]]}, "has no column 'item', only 'id', 'vector'"),
        ({"item": [1, None], "vector": [[1.0], [2.0]]}, "has no id, or several, at row 1"),
        ({"item": [7, 7], "vector": [[1.0], [2.0]]}, "id 7 of 'item' occurs 2 times"),
        ({"item": [1], "vector": [1.0]}, "holds double; give lists"),
        ({"item": [1, 2], "vector": [[1.0], [2.0, 3.0]]}, "another count of them, at row 1"),
        ({"item": [1, 2], "vector": [[1.0], None]}, "at row 1"),
        ({"item": [1], "vector": [[None]]}, "without nulls"),
    ],
)
def test_bad_vectors_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    table = pa.table(columns)
    if columns["vector"] == [[None]]:
        table = table.set_column(1, "vector", pa.array([[None]], pa.list_(pa.float32())))
    pq.write_table(table, tmp_path / "vectors.parquet")
    with pytest.raises(DataError, match=message):
        item_vectors(str(tmp_path / "vectors.parquet"), item="item", vector="vector")


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="more combinations than ids"):
        semantic_ids(np.zeros((1, 1), np.float32), levels=8, codes=256)
    with pytest.raises(ConfigError, match="have 16,000,000 numbers"):
        semantic_ids(np.zeros((4_000, 2_000), np.float32), levels=2, codes=4_000)
    with pytest.raises(DataError, match="Vector 1 has a value that is not finite"):
        semantic_ids(np.array([[0.0], [np.nan]], np.float32))
    with pytest.raises(DataError, match=r"shape \[3\]"):
        semantic_ids(np.zeros(3, np.float32))
    with pytest.raises(ConfigError, match="codes is empty"):
        CodePrefix("", 1)
    with pytest.raises(ConfigError, match=r"CodePrefix\.length"):
        CodePrefix("codes.parquet", 17)


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["semantic-ids", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_and_new_items(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    _, vectors = planted(40)
    names = [f"sku{number}" for number in range(40)]
    old, new = str(tmp_path / "old.parquet"), str(tmp_path / "new.parquet")
    pq.write_table(pa.table({"sku": names[:30], "v": vectors[:30].tolist()}), old)
    pq.write_table(pa.table({"sku": names[20:], "v": vectors[20:].astype(np.float64).tolist()}), new)
    codes = str(tmp_path / "codes.parquet")
    said = command(old, "--output", codes, "--item", "sku", "--vector", "v", "--levels", "2", "--codes", "2")
    assert "2 codes: 100.0 % of the variance, 4 prefixes" in said
    assert "30 items" in said
    before = read_semantic_ids(codes)
    said = command(new, "--output", codes, "--item", "sku", "--vector", "v", "--like", codes)
    assert "40 items" in said
    found, after = read_semantic_ids(codes)
    assert len(after.ids) == 40
    assert all(np.array_equal(a, b) for a, b in zip(found.codebooks, before[0].codebooks, strict=True))
    kept = np.isin(after.ids, before[1].ids)
    assert np.array_equal(after.codes[kept], before[1].codes)  # Both ascend by id.
    schema = Schema([IdFeature("sku", 2), IdFeature("sku_2", 2, of="sku", mapping=CodePrefix(codes, 2))], labels=[])
    mapped = Batch.from_columns(schema, {"sku": names}).id_features["sku_2"].values
    assert 0 not in mapped
    cluster, _ = planted(40)
    assert len(set(zip(cluster.tolist(), mapped.tolist(), strict=True))) == 4 == len(set(mapped.tolist()))
    with pytest.raises(ConfigError, match=r"--like takes the codebooks of .*; leave out levels"):
        command(new, "--output", codes, "--item", "sku", "--vector", "v", "--like", codes, "--levels", "2")
    with pytest.raises(PersiaError, match="--kind"):
        command(old, "--output", codes, "--item", "sku", "--vector", "v", "--kind", "word")
