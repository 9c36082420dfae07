from __future__ import annotations

import pytest

from support.change_log import ChangeLog


@pytest.fixture
def log(tmp_path):
    found = ChangeLog(tmp_path / "log")
    found.train(3)
    found.begin()
    return found
