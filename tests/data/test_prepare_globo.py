"""`persia.data.datasets.prepare_globo` on made-up clicks in the format of the published files."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import persia
from persia.data.datasets.prepare_globo import BEGIN, CONTEXTS, DAY, main, prepare
from persia.errors import DataError

NEAR = 20
TYPES = {
    "label": pa.int8(),
    "timestamp_ms": pa.int64(),
    "user_id": pa.int32(),
    "article_id": pa.int32(),
    "history": pa.list_(pa.int32()),
    **dict.fromkeys(CONTEXTS, pa.int16()),
}


@pytest.fixture
def published(tmp_path):
    """Three days of 600 clicks each, in four files, with the columns of the published ones."""
    random = np.random.default_rng(0)
    times = BEGIN + np.sort(random.integers(0, 3 * DAY, 1800))
    columns = {
        "user_id": random.integers(0, 30, 1800),
        "session_id": times,
        "session_start": times,
        "session_size": random.integers(2, 9, 1800),
        "click_article_id": random.zipf(1.3, 1800) % 200,
        "click_timestamp": times,
        **{name: random.integers(1, 5, 1800) for name in CONTEXTS.values()},
    }
    folder = tmp_path / "clicks"
    folder.mkdir()
    for part in range(4):  # Rows of a file are in no order.
        mine = random.permutation(np.arange(part * 450, (part + 1) * 450))
        table = pa.table({name: column[mine] for name, column in columns.items()})
        pa.csv.write_csv(table, folder / f"clicks_hour_{part:03}.csv")
    return folder, columns


def test_pairs_have_a_new_article_and_one_that_is_unknown(published, tmp_path):
    folder, columns = published
    files = prepare(folder, tmp_path / "globo_ctr", near=NEAR, least_rows=100)
    assert [file.name for file in files] == [f"day={day:02}.parquet" for day in range(3)]
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    assert len(rows) > 500
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    expected = possible(columns)
    taken = []
    for pair in pairs:
        positive, negative = sorted(pair, key=lambda row: -row["label"])
        assert (positive["label"], negative["label"]) == (1, 0)
        number, history, unknown, contexts = expected[
            positive["timestamp_ms"], positive["user_id"], positive["article_id"]
        ]
        assert negative["article_id"] in unknown
        for row in pair:
            assert (row["timestamp_ms"], row["user_id"]) == (positive["timestamp_ms"], positive["user_id"])
            assert row["history"] == history
            assert [row[name] for name in CONTEXTS] == contexts
        taken.append(number)
    assert taken == sorted(set(taken))
    assert len(taken) > 0.9 * len(expected)  # The 8 candidates of a few clicks are all known.
    assert 0.4 < np.mean([first["label"] for first, _ in pairs]) < 0.6


def possible(columns):
    """By time, user and article of a positive: its number, its history, the possible negatives, and its contexts."""
    order = np.lexsort([columns[name] for name in ("click_article_id", "user_id", "click_timestamp")])
    clicks = {name: column[order].tolist() for name, column in columns.items()}
    users, articles, times = clicks["user_id"], clicks["click_article_id"], clicks["click_timestamp"]
    known, found = {}, {}
    for number, (user, article, time) in enumerate(zip(users, articles, times, strict=True)):
        seen = known.setdefault(user, [])
        if article in seen:
            continue
        unknown = {*articles[max(0, number - NEAR + 1) : number + NEAR]} - {article, *seen}
        if unknown and NEAR <= number < len(users) - NEAR:
            contexts = [clicks[name][number] for name in CONTEXTS.values()]
            found[time, user, article] = number, seen[::-1][:10], unknown, contexts
        seen.append(article)
    return found


def test_the_files_are_those_that_the_reader_takes(published, tmp_path):
    files = prepare(published[0], tmp_path / "globo_ctr", near=NEAR, least_rows=100)
    schema = pq.read_schema(files[0])
    assert dict(zip(schema.names, schema.types, strict=True)) == TYPES
    batches = list(persia.data.globo(tmp_path / "globo_ctr", batch_size=64))
    assert sum(len(batch.labels) for batch in batches) == sum(pq.read_metadata(file).num_rows for file in files)
    assert {int(day) for batch in batches for day in np.unique(batch.day)} == {0, 1, 2}


def test_the_same_seed_makes_the_same_files_and_small_days_are_left_out(published, tmp_path):
    def made(name, **options):
        return [pq.read_table(file) for file in prepare(published[0], tmp_path / name, near=NEAR, **options)]

    first = made("a", least_rows=100)
    assert made("b", least_rows=100) == first
    assert made("c", least_rows=100, seed=1) != first
    sizes = [table.num_rows for table in first]
    assert [table.num_rows for table in made("d", least_rows=max(sizes))] == [max(sizes)]


def test_the_command_line(published, tmp_path, capsys):
    folder, _ = published
    assert main([str(folder.parent), str(tmp_path / "out")]) == 0  # Files are also found in directories within.
    assert capsys.readouterr().out == f"0 days in {tmp_path / 'out'}\n"  # They need 50,000 rows.
    assert main([str(tmp_path / "out"), str(tmp_path / "again")]) == 1
    assert "There are no files clicks_hour_*.csv" in capsys.readouterr().err


def test_files_of_version_1_are_refused(published, tmp_path):
    folder, _ = published
    path = folder / "clicks_hour_000.csv"
    pa.csv.write_csv(pa.csv.read_csv(path).drop_columns(["click_os"]), path)
    with pytest.raises(DataError, match=r"clicks_hour_000\.csv has other columns than version 2.*click_os"):
        prepare(folder, tmp_path / "out")
