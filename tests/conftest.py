"""What tests of several folders share."""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import multiprocessing.util
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is loaded: several processes share the cores here, and a thread that spins takes one from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy.testing  # noqa: F401 - Some versions start a process at its import.
import pytest
import typer.main
from hypothesis import settings

from support.examples import examples
from support.forked import Forks

# Without a deadline, as examples are as slow as the machine is busy. In CI the same ones each time.
settings.register_profile(
    "persia", settings.get_profile("ci" if "CI" in os.environ else "default"), deadline=None, max_examples=examples(100)
)
settings.load_profile("persia")

# Typer makes all commands of `persia` each time one is run, which takes longer than most of them. Replaced before
# `typer.testing` imports it.
typer.main.get_command = functools.cache(typer.main.get_command)

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"})
"""Audit events of the interpreter that begin a process."""

_starts_none: str | None = None
"""The running test, if it is not marked `processes`."""


def _refuse(event: str) -> None:
    if _starts_none is not None:
        raise AssertionError(
            f"{_starts_none} starts a process ({event}), so `make quick` and `make test` would be slow. Mark it with "
            "pytest.mark.processes."
        )


RAY_ADDRESS = "PERSIA_TESTS_RAY"
"""Environment variable: address of the Ray that tests use, in place of their own."""

NOT_QUICK = Path(__file__).with_name("not_quick.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make quick` says."""
    parser.addoption("--quick", action="store_true", help="leave out the tests that tests/not_quick.txt lists")


def pytest_configure() -> None:
    """Watches for tests that start processes without being marked."""
    # Of a terminal that is not there: rich would keep it for as long as the process lives.
    os.environ.pop("COLUMNS", None)
    os.environ.pop("LINES", None)

    def audit(event: str, _: tuple[Any, ...]) -> None:
        if event in STARTS:
            _refuse(event)

    sys.addaudithook(audit)
    start = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(*arguments: Any) -> int:  # Of multiprocessing, which raises no event.
        _refuse("multiprocessing")
        return start(*arguments)

    multiprocessing.util.spawnv_passfds = spawnv_passfds


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tells the watch which test runs, with its fixtures."""
    global _starts_none
    _starts_none = None if item.get_closest_marker("processes") else item.nodeid
    try:
        return (yield)
    finally:
        _starts_none = None


def pytest_unconfigure() -> None:
    """What keeps the process after the last test is named, and ends it."""
    faulthandler.dump_traceback_later(120.0, exit=True, file=sys.__stderr__)


def _files_on_ray(processes: int) -> dict[str, int]:
    """Returns the files with tests on Ray, and which Ray has the tests of each."""
    root = Path(__file__).parents[1]
    files = [file for file in (root / "tests").rglob("test_*.py") if "ray_here" in file.read_text(encoding="utf-8")]
    names = sorted(file.relative_to(root).as_posix() for file in files)
    # On two cores the processes of two Rays compete, and take longer than those of one.
    several = processes > 2 and len(os.sched_getaffinity(0)) > 2
    return {name: number % (2 if several else 1) for number, name in enumerate(names)}


STARTS_PROCESSES = re.compile(r'^pytestmark = (\[[^\]=]*?|[^=\n]*?)(mark\.processes|"ray_here")', re.MULTILINE)
"""In a file all of whose tests start processes."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files whose tests `-m "not processes"` would all deselect: imports take as long as many tests."""
    if collection_path.suffix == ".py" and "not processes" in config.option.markexpr:
        return STARTS_PROCESSES.search(collection_path.read_text(encoding="utf-8")) is not None or None
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process of `pytest -n` whole files, which share fixtures, and to one or two all with tests on Ray.

    Two of three or more where there are cores for them, each with a Ray of its own: the tests of one would last longer
    than all others.
    Not `--dist loadgroup`: xdist 3.8 tells groups by names of tests, which pytest 9 does not let it change.
    """
    from xdist.scheduler import LoadScopeScheduling

    on_ray = _files_on_ray(len(config.getoption("tx")))

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return f"Ray {on_ray[file]}" if file in on_ray else file

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)  # Before marks select tests.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests on Ray together: its threads stay in the process until the end, and slow all others down.

    In one process they come last. Of several (`pytest -n`) one begins with them, or two with a half each; the others
    share the remaining files, those that start processes first, as these take longest.
    """

    def on_ray(item: pytest.Item) -> bool:
        return "ray_here" in getattr(item, "fixturenames", ())

    for item in items:
        if on_ray(item):
            item.add_marker(pytest.mark.processes)
    if hasattr(config, "workerinput"):
        first = _files_on_ray(config.workerinput["workercount"])
        early = {item.path for item in items if item.get_closest_marker("processes")}
        last = len(first)
        items.sort(key=lambda item: (first.get(item.nodeid.partition("::")[0], last), item.path not in early))
    else:
        items.sort(key=on_ray)
    if config.getoption("--quick"):
        slower = set(NOT_QUICK.read_text(encoding="utf-8").split())
        left_out = [item for item in items if item.nodeid.partition("[")[0] in slower]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid.partition("[")[0] not in slower]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Imports tests without Python's garbage collector, which would go through all modules again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Lets Python's garbage collector leave out what exists by now, a million objects of modules and tests.

    Also lets loggers of torch propagate: pytest adds two handlers to each that does not, three times in each test.
    """
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


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
def forks() -> Iterator[Forks]:
    """Runs programs and commands as processes of their own, without importing torch for each."""
    with Forks() as started:
        yield started


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """One Ray for all tests: clusters come and go in it, as in an existing Ray job.

    That of several hosts, where `tests/hosts/test_cluster_on_hosts.py` runs tests on one of them; else of this process.
    """
    import ray

    if RAY_ADDRESS in os.environ:
        ray.init(address=os.environ[RAY_ADDRESS], log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()
        return

    from persia.cluster.ray.processes import of_this_host_only
    from support.ray_forks import forking

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: they would wait for all other tests.
    with forking():
        # Ray believes in the GPU, whether there is one or not.
        with of_this_host_only():
            ray.init(
                address="local",
                num_cpus=4,
                num_gpus=1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
        yield
        ray.shutdown()
