from __future__ import annotations

import pytest

from persia.serve import Predictor, ServeOptions
from support.trained_logs import SCHEMAS, train
from support.written_log import Steps, WrittenLog


@pytest.fixture
def log(tmp_path):
    found = WrittenLog(tmp_path / "log", servers=2)
    found.begin(3)
    return found


@pytest.fixture
def serve(request):
    """Starts predictors, whose threads do nothing: tests refresh them."""

    def start(log, model=Steps, **options):
        predictor = Predictor(log.url, model, ServeOptions(poll_seconds=3600.0, **options))
        request.addfinalizer(predictor.close)
        predictor.start(timeout=0.0)
        return predictor

    return start


@pytest.fixture(scope="session")
def trained_logs(tmp_path_factory):
    """URLs of the logs of small runs, by the name of their schema in `SCHEMAS`."""
    urls = {name: str(tmp_path_factory.mktemp(name) / "log") for name in SCHEMAS}
    for name, url in urls.items():
        train(SCHEMAS[name], url)
    return urls
