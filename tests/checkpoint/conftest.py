from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from support.checkpoint_samples import write


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run" / "ck pt")
        return
    root = f"memory://{uuid4().hex}/run"
    yield root
    fs = fsspec.filesystem("memory")
    if fs.exists(root):
        fs.rm(root, recursive=True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(tmp_path, 12)
    return tmp_path
