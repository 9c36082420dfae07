"""What tests of several folders share."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

if "CI" not in os.environ:  # There hypothesis has a profile of its own, without a deadline either.
    settings.register_profile("persia", deadline=None)  # Examples are as slow as the machine is busy.
    settings.load_profile("persia")


def pytest_unconfigure() -> None:
    """What keeps the process after the last test is named, and ends it."""
    faulthandler.dump_traceback_later(120.0, exit=True, file=sys.__stderr__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray come last: its threads stay in this process until the end, and would slow all others down."""
    items.sort(key=lambda item: "ray_here" in getattr(item, "fixturenames", ()))


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """Fails a test that leaves a thread which the end of Python would wait for."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while left := [t.name for t in threading.enumerate() if t not in before and not t.daemon]:
        assert time.monotonic() < deadline, f"threads that do not end: {left}"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """One Ray for all tests: clusters come and go in it, as in an existing Ray job."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray believes in the GPU, whether there is one or not.
    ray.init(
        address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    yield
    ray.shutdown()
