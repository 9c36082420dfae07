"""A plugin of pytest that says where the time goes: `python -m pytest -p support.timings [--times FILE]`.

Prints a table by folder: tests, seconds, seconds of the processor (of this process with all its threads, and of child
processes that have ended), and seconds in which the test waited. With --times, also writes a line of JSON a test.

    python -m support.timings FILE    the tests in such a file that are not quick, as tests/not_quick.txt lists them
"""

import json
import os
import sys
import time
from collections import defaultdict

import pytest

QUICK_SECONDS = 0.07
FOLDERS = "tests", "seconds", "own CPU", "children", "waiting"


class Timings:
    """Collects the seconds of each test: setup, call and teardown together."""

    def __init__(self):
        self.tests = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        before, start = os.times(), time.monotonic()
        try:
            return (yield)
        finally:
            after = os.times()
            self.tests[item.nodeid] = {
                "test": item.nodeid,
                "seconds": time.monotonic() - start,
                "own": after.user + after.system - before.user - before.system,
                "children": after.children_user + after.children_system - before.children_user - before.children_system,
            }

    def pytest_terminal_summary(self, terminalreporter):
        folders = defaultdict(lambda: [0, 0.0, 0.0, 0.0, 0.0])
        for test in self.tests.values():
            parts = test["test"].split("::")[0].split("/")
            for name in (parts[1] if len(parts) > 2 else ".", "all"):
                sums = folders[name]
                waiting = max(0.0, test["seconds"] - test["own"] - test["children"])
                for index, value in enumerate((1, test["seconds"], test["own"], test["children"], waiting)):
                    sums[index] += value
        terminalreporter.section("where the time goes")
        terminalreporter.write_line(f"{'folder':14}" + "".join(f"{name:>10}" for name in FOLDERS))
        for name, sums in sorted(folders.items(), key=lambda each: -each[1][1]):
            terminalreporter.write_line(f"{name:14}{sums[0]:10}" + "".join(f"{value:10.1f}" for value in sums[1:]))


class Gathered:
    """Takes over what the processes of `pytest -n` have collected."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        timings = node.config.pluginmanager.get_plugin("timings")
        timings.tests.update(getattr(node, "workeroutput", {}).get("timings", {}))


def pytest_addoption(parser):
    parser.addoption("--times", help="write the seconds of each test to this file, a line of JSON each")


def pytest_configure(config):
    config.pluginmanager.register(Timings(), "timings")
    config.pluginmanager.register(Gathered())


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["timings"] = session.config.pluginmanager.get_plugin("timings").tests


def pytest_unconfigure(config):
    file = config.getoption("--times")
    if file and not hasattr(config, "workerinput"):
        with open(file, "w", encoding="utf-8") as stream:
            for test in config.pluginmanager.get_plugin("timings").tests.values():
                stream.write(json.dumps(test) + "\n")


def not_quick(lines):
    """Names of the test functions one of whose tests takes longer than a quick one."""
    tests = map(json.loads, lines)
    return sorted({test["test"].partition("[")[0] for test in tests if test["seconds"] > QUICK_SECONDS})


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as stream:
        print("\n".join(not_quick(stream)))
