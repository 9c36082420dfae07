"""Fixtures of a real S3 server on loopback: moto's."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from uuid import uuid4

import pytest

__all__ = ["bucket", "endpoint"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import s3fs

    for name, value in (
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{uuid4().hex[:12]}"
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request).close()
    yield f"s3://{name}/run"
    s3fs.S3FileSystem.clear_instance_cache()
