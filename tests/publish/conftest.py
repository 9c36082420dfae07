from __future__ import annotations

import pytest

from support.change_log import ChangeLog
from support.kafka import Kafka


@pytest.fixture(params=["directory", "topic"])
def url(request, tmp_path):
    """The place of a log."""
    if request.param == "directory":
        yield str(tmp_path / "log")
        return
    kafka = Kafka()
    yield f"kafka://{kafka.bootstrap}/{kafka.topic}"


@pytest.fixture
def log(url):
    found = ChangeLog(url)
    found.train(3)
    found.begin()
    return found
