"""Tests of shards that use all their row numbers, 2^32 - 2, in a core whose numbers have 16 bits.

No table of a schema fills the numbers of a shard with rows in memory: a schema cannot set the number of shards, and a
PS chooses it so that each shard uses half of its numbers at most. It refuses a capacity that exceeds 1,024 such shards.
Scenarios with a `Trainer` therefore fill shards to that half, or with rows on disk to a capacity for which a shard
reserves all its numbers. Only `NativeStore` with `shards=1` reaches the last one.

`make row-bits-16` builds that core; `make test-all` does so first.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = Path(__file__).with_name("row_numbers.py")

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def core():
    """Path of a core that is built with 16 bits."""
    modules = list((ROOT / "build" / "row-bits-16").glob("_core*.so"))
    if not modules:
        pytest.skip("the core with 16 bits is not built: make row-bits-16")
    (module,) = modules
    newest = max(path.stat().st_mtime for folder in ("cpp", "bindings") for path in (ROOT / folder).rglob("*.?pp"))
    assert module.stat().st_mtime > newest, "the core with 16 bits is older than its sources: make row-bits-16"
    return str(module)


OTHER_CORE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("persia._core", sys.argv[1])
sys.modules["persia._core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["persia._core"])
"""
PROGRAM = """
import runpy, sys
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0])
"""


@pytest.fixture
def run(forks, tmp_path):
    """Runs a scenario in a process of its own, with the installed core for None, and returns what it prints."""

    def run(core, scenario):
        code = (OTHER_CORE if core else "") + PROGRAM
        done = forks.run(["-c", code, core, SCENARIOS, scenario], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.parametrize(
    "scenario",
    [
        "a_full_table_on_disk_keeps_its_rows_apart",
        "a_full_shard_outlives_its_process",
        "more_rows_than_numbers_are_refused",
        "shards_are_chosen_so_that_half_of_the_numbers_stay_free",
    ],
)
def test_a_shard_with_16_bits(core, run, scenario):
    run(core, scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        "a_full_shard_evicts_what_is_oldest",
        "a_full_table_of_a_trainer_evicts_what_is_oldest",
        "a_table_has_more_rows_than_a_shard_has_numbers",
    ],
)
def test_results_are_those_of_32_bits(core, run, scenario):
    assert run(core, scenario) == run(None, scenario) != ""
