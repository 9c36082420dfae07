"""What tests of several folders share."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

if "CI" not in os.environ:  # There hypothesis has a profile of its own, without a deadline either.
    settings.register_profile("persia", deadline=None)  # Examples are as slow as the machine is busy.
    settings.load_profile("persia")


_statuses: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    _statuses.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process with the status of the tests, and without the end of Python.

    What tests leave behind is ended there with a wait for each, and Ray and librdkafka have threads of their own: both
    have kept processes. That programs end is tested with programs.
    """
    if _statuses:
        config.get_terminal_writer().flush()
        os._exit(_statuses[-1])


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


@pytest.fixture(scope="session", autouse=True)
def _no_files_left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Removes the temporary files of tests that have all passed, which pytest would do at the end of Python."""
    yield
    if not request.session.testsfailed:
        shutil.rmtree(tmp_path_factory.getbasetemp(), ignore_errors=True)


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
