"""Data on a real S3 server on loopback: moto's."""

from __future__ import annotations

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persia
from persia import data
from persia.errors import DataError
from support import s3

bucket, endpoint = s3.bucket, s3.endpoint  # fixtures
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

SCHEMA = persia.Schema([persia.IdFeature("item", dim=4)], labels=["label"])


def write(url, first):
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.table({"item": range(first, first + 4), "label": [0, 1, 0, 1]}), file)


def items(batches):
    return [batch.id_features["item"].values.tolist() for batch in batches]


def test_files_directories_globs_and_growing_directories(bucket):
    write(f"{bucket}/hour=00/a.parquet", 0)
    write(f"{bucket}/hour=01/a.parquet", 10)
    assert items(data.parquet(bucket, SCHEMA, 6)) == [[0, 1, 2, 3, 10, 11], [12, 13]]
    assert items(data.parquet(f"{bucket}/hour=01/*.parquet", SCHEMA)) == [[10, 11, 12, 13]]
    reader = data.growing(bucket, SCHEMA, 4, success="_SUCCESS", until="now")
    reader.begin(0, {}, lambda: False)
    assert items(reader.batches()) == []
    with fsspec.open(f"{bucket}/hour=00/_SUCCESS", "wb"):
        pass
    assert items(reader.batches()) == [[0, 1, 2, 3]]
    assert reader.offsets(1) == {f"{bucket}/hour=00/a.parquet": {0: 4}}
    with fsspec.open(f"{bucket}/hour=01/_SUCCESS", "wb"):
        pass
    assert items(reader.batches(0, 1)) == [[10, 11, 12, 13]]
    with pytest.raises(DataError, match="There is no file or directory"):
        data.parquet(f"{bucket}/none", SCHEMA)
