from __future__ import annotations

import pytest

from support.change_log import begun


@pytest.fixture
def kafka():
    pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia[kafka]"')
    from support.kafka import Kafka

    return Kafka()


@pytest.fixture
def topic(kafka):
    """The URL of a topic."""
    return f"kafka://{kafka.bootstrap}/{kafka.topic}"


@pytest.fixture(params=["directory", "topic"])
def url(request, tmp_path):
    """The URL of a place for a log."""
    return str(tmp_path / "log") if request.param == "directory" else request.getfixturevalue("topic")


@pytest.fixture
def log(url):
    return begun(url)
