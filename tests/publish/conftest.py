from __future__ import annotations

import pytest

from support import s3
from support.change_log import begun
from support.webhdfs import webhdfs

bucket, endpoint = s3.bucket, s3.endpoint  # fixtures


@pytest.fixture
def kafka():
    pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia-recsys[kafka]"')
    from support.kafka import Kafka

    return Kafka()


@pytest.fixture
def topic(kafka):
    """The URL of a topic."""
    return f"kafka://{kafka.bootstrap}/{kafka.topic}"


@pytest.fixture
def hdfs(tmp_path):
    """The URL of a directory of a server of WebHDFS."""
    with webhdfs(tmp_path) as root:
        yield f"{root}/log"


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path / "log")


@pytest.fixture(params=["directory", "topic"])
def url(request):
    """The URL of a place for a log; see `support.change_log.everywhere`."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def log(url):
    return begun(url)
