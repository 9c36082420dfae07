"""What tests of the commands share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.forked import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs commands to their end as processes of their own, without importing torch for each."""
    with Forks() as started:
        yield started
