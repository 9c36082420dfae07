"""The public formats, on tiny files of each; and on the real data where they are."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from persia import data
from persia.batching.batch import Batch
from persia.errors import DataError


def text_id(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


def only(reader: Iterator[Batch]) -> Batch:
    (batch,) = list(reader)
    return batch


def test_criteo(tmp_path: Path) -> None:
    counts = ["", "-2", *map(str, range(11))]
    categories = ["68fd1e64", "", *(f"{i:08x}" for i in range(24))]
    path = tmp_path / "train.txt"
    path.write_text("\t".join(["1", *counts, *categories]) + "\n" + "\t".join(["0", *["3"] * 13, *["a"] * 26]) + "\n")
    reader = data.criteo(tmp_path, dim=8, batch_size=4)
    batch = only(iter(reader))
    batch.validate(reader.schema)
    assert batch.labels[:, 0].tolist() == [1, 0]
    assert batch.dense[0, :2].tolist() == [0, 0]
    assert np.allclose(batch.dense[0, 2:], [math.log1p(i) for i in range(11)])
    assert batch.id_features["C1"].values.tolist() == [text_id("68fd1e64"), text_id("a")]
    assert batch.id_features["C2"].values.tolist() == [text_id("a")]
    assert {f.dim for f in reader.schema.id_features} == {8}


AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
    "1000009418151094273,1,14102107,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,"
    "44956a24,1,2,15706,320,50,1722,0,35,-1,79\n"
)


def test_avazu(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(AVAZU)
    reader = data.avazu(tmp_path / "train.csv")
    batch = only(iter(reader))
    batch.validate(reader.schema)
    assert batch.labels.tolist() == [[1]]
    assert batch.id_features["hour_of_day"].values.tolist() == [7]
    assert batch.id_features["C20"].values.tolist() == [text_id("-1")]
    assert len(batch.id_features) == 22
    assert batch.day is not None
    assert batch.day.tolist() == [(datetime.date(2014, 10, 21) - datetime.date(1970, 1, 1)).days]
    (tmp_path / "train.csv").write_text(AVAZU.replace("14102107", "14992107"))
    with pytest.raises(DataError, match=r"train\.csv.*YYMMDDHH"):
        list(reader)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n7,1029,4.0,1260759179\n"),
        ("ratings.dat", "1::31::2::1260759144\n7::1029::4::1260759179\n"),
        ("u.data", "1\t31\t2\t1260759144\n7\t1029\t4\t1260759179\n"),
    ],
)
def test_movielens(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    for path in (tmp_path, tmp_path / name):
        reader = data.movielens(path)
        batch = only(iter(reader))
        batch.validate(reader.schema)
        assert batch.id_features["user"].values.tolist() == [1, 7]
        assert batch.id_features["movie"].values.tolist() == [31, 1029]
        assert batch.labels[:, 0].tolist() == [0, 1]
        assert batch.day is not None
        assert batch.day.tolist() == [1260759144 // 86400] * 2


def test_movielens_absent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds none of ratings\.csv"):
        data.movielens(tmp_path)


ADULT = "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K"


def test_adult(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text(f"{ADULT}\n{ADULT.replace('<=', '>')}\n\n")
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{ADULT}.\n{ADULT.replace('<=', '>')}.\n")
    for split in ("train", "test"):
        reader = data.adult(tmp_path, split=split)  # type: ignore[arg-type]
        batch = only(iter(reader))
        batch.validate(reader.schema)
        assert len(batch.id_features) == 8
        assert batch.labels[:, 0].tolist() == [0, 1]
        assert batch.id_features["workclass"].values[0] == text_id("State-gov")
        assert batch.id_features["occupation"].values[0] == text_id("?")
        scaled = [(39 - 38.6) / 13.6, (13 - 10.1) / 2.6, (math.log1p(2174) - 0.73) / 2.5, -0.36 / 1.6, -0.4 / 12.3]
        assert np.allclose(batch.dense[0], scaled, atol=1e-6)
    (tmp_path / "adult.data").write_text(ADULT.replace("<=50K", "much"))
    with pytest.raises(DataError, match=r"adult\.data.*'much'"):
        list(data.adult(tmp_path / "adult.data"))
    (tmp_path / "adult.data").write_text(ADULT + "\ncomment\n")
    with pytest.raises(DataError, match=r"adult\.data: the line 'comment' at row 1 has 1 fields instead of 15"):
        list(data.adult(tmp_path / "adult.data"))


def test_globo(tmp_path: Path) -> None:
    contexts = {
        n: pa.array([1, 2], pa.int16()) for n in ["environment", "device_group", "os", "country", "region", "referrer"]
    }
    table = pa.table(
        {
            "label": pa.array([1, 0], pa.int8()),
            "timestamp_ms": [1, 2],
            "user_id": [5, 5],
            "article_id": [7, 8],
            "history": pa.array([[], [7, 9]], pa.list_(pa.int32())),
            **contexts,
        }
    )
    pq.write_table(table, tmp_path / "day=04.parquet")
    reader = data.globo(tmp_path)
    batch = only(iter(reader))
    batch.validate(reader.schema)
    assert batch.id_features["history"].values.tolist() == [7, 9]
    assert batch.day is not None
    assert batch.day.tolist() == [4, 4]
    assert set(reader.schema.resolved_tables()) == {"user_id", "article_id", *contexts}
    assert reader.schema.feature("history").max_length == 10


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adult").mkdir()
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    assert data.find("adult") == tmp_path / "adult"
    assert data.find("globo_ctr") is None
    with pytest.raises(DataError, match="PERSIA_DATA"):
        data.globo()
    monkeypatch.delenv("PERSIA_DATA")
    (tmp_path / "data" / "adult").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert data.find("adult") is None


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(data.find(name) is None, reason=f"no {name} data here (PERSIA_DATA)")


@_needs("adult")
def test_the_real_adult_data() -> None:
    train, test = list(data.adult()), list(data.adult(split="test"))
    assert (sum(map(len, train)), sum(map(len, test))) == (32561, 16281)
    dense = np.concatenate([b.dense for b in train])
    assert np.allclose(dense.mean(0), 0, atol=0.02)
    assert np.allclose(dense.std(0), 1, atol=0.03)


@_needs("globo_ctr")
def test_the_real_globo_data() -> None:
    reader = data.globo()
    batches = list(reader.batches(start=5700))
    assert (len(batches), len(batches[-1])) == (54, 5892006 % 1024)
    for batch in batches:
        batch.validate(reader.schema)
