"""Readers of public logs of events: which columns become which features, on files as their publishers write them."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from persia import data
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.cli.run_config import DataConfig
from persia.data import from_csv, histories, json_lines
from persia.errors import ConfigError, DataError
from persia.nn.models import DIEN


def only(reader: data.StreamReader) -> Batch:
    (batch,) = reader
    batch.validate(reader.schema, require_labels=False)
    return batch


def ids(batch: Batch) -> dict[str, list[int]]:
    return {name: column.values.tolist() for name, column in batch.id_features.items()}


def lists(column: IdColumn) -> list[list[int]]:
    assert column.offsets is not None
    return [column.values[low:high].tolist() for low, high in itertools.pairwise(column.offsets)]


def text_ids(*texts: str) -> list[int]:
    return [xxhash.xxh64_intdigest(text.encode()) for text in texts]


def days(*dates: str) -> list[int]:
    return np.array(dates, "datetime64[D]").astype(int).tolist()  # type: ignore[no-any-return]


# --- Taobao -----------------------------------------------------------------------------------------------------

BEHAVIORS = """\
1,2268318,2520377,pv,1511544070
1,2333346,2520771,buy,1511561733
1000011,4719814,1320293,cart,1512257127
1000011,4719814,1320293,fav,1512257128
"""


def test_taobao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taobao").mkdir()
    file = tmp_path / "taobao" / "UserBehavior.csv"
    file.write_text(BEHAVIORS)
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    batch = only(data.taobao())
    assert ids(batch) == {
        "user_id": [1, 1, 1000011, 1000011],
        "item_id": [2268318, 2333346, 4719814, 4719814],
        "category_id": [2520377, 2520771, 1320293, 1320293],
    }
    assert batch.labels[:, 0].tolist() == [0, 1, 0, 0]
    assert batch.day is not None
    assert batch.day.tolist() == days("2017-11-24", "2017-11-24", "2017-12-02", "2017-12-02")
    batch = only(data.taobao(file, positive=["cart", "fav"], where="behavior != 'pv'"))
    assert batch.labels[:, 0].tolist() == [0, 1, 1]
    late = only(data.taobao(file, split={"part": "test", "by": "time", "column": "timestamp", "at": 1512000000}))
    assert ids(late)["user_id"] == [1000011, 1000011]
    for positive in ([], "buy", ["view"]):
        with pytest.raises(ConfigError, match="positive"):
            data.taobao(file, positive=positive)


EVENTS = """\
1,10,100,pv,1511544070
1,11,100,buy,1511544060
2,12,101,pv,-2134949234
1,13,101,cart,1511544080
2,10,100,fav,1511544065
"""


def test_taobao_with_histories(tmp_path: Path) -> None:
    """In the order of time, which is before 1970 for some lines of the published file."""
    file = tmp_path / "UserBehavior.csv"
    file.write_text(EVENTS)
    reader = data.taobao(file, max_length=5)
    batch = only(reader)
    assert ids(batch)["user_id"] == [2, 1, 2, 1, 1]
    assert ids(batch)["item_id"] == [12, 11, 10, 10, 13]
    assert ids(batch)["category_id"] == [101, 100, 100, 100, 101]
    assert lists(batch.id_features["history"]) == [[], [], [12], [11], [11, 10]]
    assert lists(batch.id_features["category_history"]) == [[], [], [101], [100], [100, 100]]
    assert batch.labels[:, 0].tolist() == [0, 1, 0, 0, 0]
    assert batch.day is not None
    assert batch.day.tolist() == [-24711, 17494, 17494, 17494, 17494]
    # What is left out of the samples is still in histories.
    late = only(data.taobao(file, max_length=1, min_history=1, where="behavior == 'cart'", positive=["cart"]))
    assert ids(late) == {
        "user_id": [1],
        "item_id": [13],
        "category_id": [101],
        "history": [10],
        "category_history": [100],
    }
    assert late.labels.tolist() == [[1]]
    configured = DataConfig(kind="taobao", path=str(file), options={"max_length": 5, "pooling": "none"})
    sequences = configured.reader(None, "data").schema
    assert sequences.aligned() == {"history", "category_history"}
    assert DIEN(sequences).input.pairs == (("history", "item_id"), ("category_history", "category_id"))
    with pytest.raises(ConfigError, match="min_history = 1 needs histories; give their max_length"):
        data.taobao(file, min_history=1)
    file.write_text(EVENTS.replace("1511544080", "24 November"))
    with pytest.raises(DataError, match=r"UserBehavior\.csv: column 'timestamp' has '24 November' at row 3; histories"):
        list(data.taobao(file, max_length=5))
    file.write_text(EVENTS.replace("1511544080", ""))
    with pytest.raises(DataError, match="at row 3"):
        list(data.taobao(file, max_length=5))
    file.write_text("user_id,item_id,category_id,timestamp\n1,10,100,5\n1,11,100,6\n")
    assert only(data.taobao(file, max_length=5, require_labels=False)).labels.shape == (2, 0)


def test_other_formats_of_taobao_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n")
    with pytest.raises(DataError, match="first line has 3 fields, the format 5"):
        list(data.taobao(tmp_path / "a.csv"))


# --- KuaiRand ---------------------------------------------------------------------------------------------------

VIDEOS = """\
user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,play_time_ms,\
duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab
17387,1123453,20220421,400,1650485801301,1,0,0,0,0,0,1,151024,104400,0,0,0,0,1
17388,1123454,20220422,1000,1650592800000,0,1,0,0,0,0,0,500,104400,0,0,0,1,4
"""


def test_kuairand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kuairand" / "KuaiRand-Pure" / "data"
    folder.mkdir(parents=True)
    (folder / "log_standard_4_08_to_4_21_pure.csv").write_text(VIDEOS)
    (folder / "log_random_4_22_to_5_08_pure.csv").write_text(VIDEOS)
    (folder / "user_features_pure.csv").write_text("user_id,user_active_degree\n17387,full_active\n")
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    batch = only(data.kuairand())
    assert ids(batch) == {"user_id": [17387, 17388], "video_id": [1123453, 1123454], "tab": [1, 4]}
    assert batch.labels.tolist() == [[1], [0]]
    assert batch.day is not None
    assert batch.day.tolist() == days("2022-04-20", "2022-04-22")
    several = only(data.kuairand(folder, signals=["is_like", "long_view"], where="is_rand == 1"))
    assert several.labels.tolist() == [[1, 0]]
    one = data.kuairand(folder / "log_random_4_22_to_5_08_pure.csv")
    assert len(only(one)) == 2
    for signals in ([], "is_click", ["is_shared"]):
        with pytest.raises(ConfigError, match="signals"):
            data.kuairand(folder, signals=signals)


# --- MIND -------------------------------------------------------------------------------------------------------

IMPRESSIONS = (
    "1\tU13740\t11/11/2019 9:05:58 AM\tN55189 N42782 N34694\tN55689-1 N35729-0\n"
    "2\tU91836\t11/12/2019 6:11:30 PM\t\tN20678-0\n"
    "3\tU73700\t11/14/2019 7:01:48 AM\tN10732\tN50014-0 N23877-0 N35389-1\n"
)
USERS = ["U13740", "U13740", "U91836", "U73700", "U73700", "U73700"]
NEWS = ["N55689", "N35729", "N20678", "N50014", "N23877", "N35389"]


def test_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("MINDsmall_train", "MINDsmall_dev"):
        (tmp_path / "mind" / part).mkdir(parents=True)
        (tmp_path / "mind" / part / "behaviors.tsv").write_text(IMPRESSIONS)
        (tmp_path / "mind" / part / "news.tsv").write_text(
            "N55528\tlifestyle\tlifestyleroyals\tThe Brands\t\t\t[]\t[]\n"
        )
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    assert sum(map(len, data.mind())) == 12
    reader = data.mind(tmp_path / "mind" / "MINDsmall_train", max_length=2)
    batch = only(reader)
    found = ids(batch)
    assert found["user_id"] == text_ids(*USERS)
    assert found["news_id"] == text_ids(*NEWS)
    past = text_ids("N55189", "N42782", "N34694")
    assert lists(batch.id_features["history"]) == [past, past, [], *[text_ids("N10732")] * 3]
    assert batch.labels[:, 0].tolist() == [1, 0, 0, 0, 0, 1]
    assert batch.day is not None
    assert batch.day.tolist() == days(*["2019-11-11"] * 2, "2019-11-12", *["2019-11-14"] * 3)
    history = reader.schema.feature("history")
    assert (history.keep, history.max_length, history.table_name, history.pooling) == ("last", 2, "news_id", "mean")
    configured = DataConfig(kind="mind", options={"pooling": "none"}).reader(None, "data")
    assert configured.schema.feature("history").pooling is None


def test_samples_of_mind_match_the_file_wherever_reading_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        f"{i}\tU{i}\t11/{i % 28 + 1}/2019 9:05:58 AM\tN1 N{i}\t{' '.join(f'N{j}-{j % 2}' for j in range(i % 4 + 1))}\n"
        for i in range(40)
    ]
    for name, part in (("a", lines[:25]), ("b", lines[25:])):
        (tmp_path / f"{name}.tsv").write_text("".join(part))
    whole = only(data.mind(tmp_path / "*.tsv"))
    assert len(whole) == 100
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 100)
    reader = data.mind(tmp_path / "*.tsv", 7)
    batches = list(reader)
    assert ids(Batch.concat(batches)) == ids(whole)
    assert [ids(batch) for batch in reader.batches(start=9)] == [ids(batch) for batch in batches[9:]]
    (tmp_path / "c.txt").write_text("".join(lines).replace("N2-0 N3-1\n", "N2-0 N3\n"))
    with pytest.raises(DataError, match=r"has 'N3' at row 9"):
        list(data.mind(tmp_path / "c.txt", 3))
    kept = data.mind(tmp_path / "*.tsv", split={"part": "test", "by": "hash", "column": "impression_id"})
    rest = data.mind(tmp_path / "*.tsv", split={"part": "train", "by": "hash", "column": "impression_id"})
    users = [set(ids(only(reader))["user_id"]) for reader in (kept, rest)]
    assert not users[0] & users[1]
    assert len(users[0]) + len(users[1]) == 40


def test_impressions_without_clicks(tmp_path: Path) -> None:
    file = tmp_path / "behaviors.tsv"
    file.write_text(IMPRESSIONS.replace("-0", "").replace("-1", ""))
    assert only(data.mind(file, require_labels=False)).labels.shape == (6, 0)
    with pytest.raises(DataError, match="Column 'click'"):
        list(data.mind(file))
    file.write_text(IMPRESSIONS.replace("N23877-0", "N23877"))
    with pytest.raises(DataError, match=r"behaviors\.tsv: column 'impressions' has 'N23877' at row 4"):
        list(data.mind(file))
    file.write_text(IMPRESSIONS.replace("11/12/2019", "2019-11-12"))
    with pytest.raises(DataError, match=r"column 'time' has '2019-11-12 6:11:30 PM' at row 2; it takes times such as"):
        list(data.mind(file))


# --- Amazon -----------------------------------------------------------------------------------------------------

REVIEWS = [  # User, item, rating, seconds since 1970: not in the order of time, nor of users.
    ("A2", "0005019281", 5.0, 1_300_000_000),
    ("A1", "B000002", 4.0, 1_200_000_100),
    ("A1", "B000003", 1.0, 1_200_000_000),
    ("A1", "B000004", 3.0, 1_400_000_000),
    ("A1", "B000001", 5.0, 1_200_000_100),
]


def old_reviews(path: Path, reviews: list[tuple[str, str, float, int]] = REVIEWS) -> Path:
    lines = [
        json.dumps(
            {"reviewerID": u, "asin": i, "vote": "1,000", "overall": r, "style": {"a:": " b"}, "unixReviewTime": t}
        )
        for u, i, r, t in reviews
    ]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    return path


def new_reviews(path: Path, reviews: list[tuple[str, str, float, int]] = REVIEWS) -> Path:
    lines = [
        json.dumps(
            {"rating": r, "images": [], "asin": "variant", "parent_asin": i, "user_id": u, "timestamp": t * 1_000}
        )
        for u, i, r, t in reviews
    ]
    path.write_text("\n".join(lines))  # No newline at the end.
    return path


@pytest.mark.parametrize("form", [old_reviews, new_reviews])
def test_amazon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[[Path], Path]) -> None:
    (tmp_path / "amazon").mkdir()
    file = form(tmp_path / "amazon" / ("Books_5.json.gz" if form is old_reviews else "Books.jsonl"))
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    batch = only(data.amazon())
    assert ids(batch)["user_id"] == text_ids("A1", "A1", "A1", "A2", "A1")
    items = ["B000003", "B000002", "B000001", "0005019281", "B000004"]
    assert ids(batch)["item_id"] == text_ids(*items)
    past = [text_ids(*of) for of in ([], items[:1], items[:2], [], items[:3])]
    assert lists(batch.id_features["history"]) == past
    assert batch.labels[:, 0].tolist() == [0, 1, 1, 1, 0]
    assert batch.day is not None
    assert batch.day.tolist() == days("2008-01-10", "2008-01-10", "2008-01-10", "2011-03-13", "2014-05-13")
    reader = data.amazon(file, max_length=2, positive=0, min_history=1, pooling=None)
    late = only(reader)
    assert late.labels[:, 0].tolist() == [1, 1, 1]
    assert lists(late.id_features["history"]) == [past[1], past[2], past[4][1:]]
    history = reader.schema.feature("history")
    assert (history.keep, history.max_length, history.table_name, history.pooling) == ("last", 2, "item_id", None)
    # What is left out of the samples is still in histories.
    split = {"part": "test", "by": "time", "column": "timestamp", "at": 1_300_000_000_000}
    assert lists(only(data.amazon(file, split=split)).id_features["history"]) == [[], past[4]]
    assert ids(only(data.amazon(file, where="user_id == 'A2' and rating > 4")))["item_id"] == text_ids("0005019281")


def test_samples_of_amazon_are_the_same_wherever_reading_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    reviews = [(f"U{u}", f"B{i}", 4.0, int(t)) for u, i, t in rng.integers(1, (9, 40, 50), (200, 3))]
    old_reviews(tmp_path / "a.json.gz", reviews[:90])
    new_reviews(tmp_path / "b.jsonl", reviews[90:])
    whole = only(data.amazon(tmp_path, max_length=5))
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 150)
    monkeypatch.setattr(histories, "PIECE_IDS", 100)
    reader = data.amazon(tmp_path, 7, max_length=5)
    batches = list(reader)
    assert ids(Batch.concat(batches)) == ids(whole)
    assert [ids(batch) for batch in reader.batches(start=20)] == [ids(batch) for batch in batches[20:]]
    seen: dict[str, list[str]] = {}
    expected = []
    for user, item, _, _ in sorted(reviews, key=lambda review: review[3]):
        expected.append(text_ids(*seen.setdefault(user, [])[-5:]))
        seen[user].append(item)
    assert lists(whole.id_features["history"]) == expected
    assert only(data.amazon(tmp_path, max_length=5, shard=(1, 2), batch_size=150)).day is not None


def test_other_files_than_reviews_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "meta.json"
    good = json.dumps({"reviewerID": "A", "asin": "B", "overall": 1.0, "unixReviewTime": 1})
    for line, refusal in (
        ('{"asin": "B", "title": "Lamp"}', "object at row 1 has no 'reviewerID'. Reviews have the keys"),
        ("{'asin': 'B'}", "cannot be read as JSON lines at row 1"),
        ('{"reviewerID": 5, "asin": "B"}', "cannot be read as JSON lines at row 1"),
        ('{"reviewerID": "A", "asin": "B", "unixReviewTime": 5}', "'positive' .*at row 1"),
        ('{"reviewerID": "A", "asin": "B", "overall": 5.0, "unixReviewTime": -5}', "'timestamp' .*at row 1"),
    ):
        file.write_text(f"{good}\n{line}\n")
        with pytest.raises(DataError, match=refusal):
            list(data.amazon(file))
    file.write_text("")
    with pytest.raises(DataError, match="no samples"):
        list(data.amazon(file))
    file.write_text(good.replace('"overall": 1.0, ', ""))
    assert only(data.amazon(file, require_labels=False)).labels.shape == (1, 0)
    with pytest.raises(DataError, match="'positive'"):
        list(data.amazon(file))
    with pytest.raises(ConfigError, match="positive"):
        data.amazon(file, positive=-1)


# --- Diginetica -------------------------------------------------------------------------------------------------

VIEWS = """\
sessionId;userId;itemId;timeframe;eventdate
2;NA;9;1000;2016-05-10
1;NA;9654;20000;2016-05-09
1;NA;33043;10000;2016-05-09
1;81766;9654;30000;2016-05-09
2;81766;33043;500;2016-05-10
3;81766;33043;500;2016-05-10
"""
PURCHASES = (
    "sessionId;userId;timeframe;eventdate;ordernumber;itemId\n1;NA;40000;2016-05-09;16421;9654\n3;1;1;2016-05-10;2;9\n"
)


def test_diginetica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "diginetica"
    folder.mkdir()
    file = folder / "train-item-views.csv"
    file.write_text(VIEWS)
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    batch = only(data.diginetica())
    assert ids(batch)["item_id"] == [9654, 9654, 9]
    assert lists(batch.id_features["history"]) == [[33043], [33043, 9654], [33043]]
    assert batch.labels[:, 0].tolist() == [1, 1, 1]
    assert batch.day is not None
    assert batch.day.tolist() == days("2016-05-09", "2016-05-09", "2016-05-10")
    configured = DataConfig(kind="diginetica", options={"pooling": "none"}).reader(None, "data")
    assert ids(only(configured)) == ids(batch)
    assert configured.schema.feature("history").pooling is None
    with pytest.raises(DataError, match=r"train-purchases\.csv"):
        data.diginetica(folder, label="purchase")
    assert only(data.diginetica(folder, label="purchase", require_labels=False)).labels.shape == (3, 0)
    (folder / "train-purchases.csv").write_text(PURCHASES)
    every = only(data.diginetica(file, label="purchase", min_history=0))
    assert ids(every)["item_id"] == [33043, 9654, 9654, 33043, 33043, 9]
    assert every.labels[:, 0].tolist() == [0, 1, 1, 0, 0, 0]
    assert ids(only(data.diginetica(file, where="eventdate >= '2016-05-10'"))) == {"item_id": [9], "history": [33043]}
    for name, text in (("train-item-views.csv", VIEWS), ("train-purchases.csv", PURCHASES)):  # As in most copies.
        header, rows = text.split("\n", 1)
        for one, other in (("sessionId", "session_id"), ("userId", "user_id"), ("itemId", "item_id")):
            header = header.replace(one, other)
        assert header.startswith("session_id;")
        (folder / name).write_text(f"{header}\n{rows}")
    copied = only(data.diginetica(file, label="purchase", min_history=0, where="sessionId > 0"))
    assert ids(copied) == ids(every)
    assert copied.labels.tolist() == every.labels.tolist()
    with pytest.raises(ConfigError, match="label"):
        data.diginetica(file, label="click")  # type: ignore[arg-type]
    file.write_text(VIEWS.replace("2;NA;9;", "NA;NA;9;"))
    with pytest.raises(DataError, match=r"train-item-views\.csv: column 'sessionId' has no value at row 0"):
        list(data.diginetica(file))
