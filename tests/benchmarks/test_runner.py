"""The benchmark runner: selection, declared names, signs, units, spreads and aggregates."""

import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import runner


@pytest.fixture
def registered(monkeypatch):
    """Three benchmarks in place of the real ones; `ran` lists which of them ran."""
    ran = []

    def pair(preset):
        ran.append(("pair", preset))
        yield runner.Measure("fake.one", -0.25, "AUC", **runner.within(0.5))
        yield runner.Measure("fake.two", 3.0, "rows/s", at_least=4.0, spread=0.1)

    def single(preset):
        ran.append(("single", preset))
        return runner.Measure("other.single", 1.0, "s")

    def undeclared(preset):
        return runner.Measure("liar.undeclared", 1.0, "s")

    found = (
        runner.Benchmark(("fake.one", "fake.two"), pair),
        runner.Benchmark(("other.single",), single),
        runner.Benchmark(("liar.declared",), undeclared),
    )
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    return ran


def selected(*patterns):
    return [measure.name for measure in runner.run(patterns, "smoke")]


def test_a_name_selects_itself_only(registered):
    assert selected("fake.two") == ["fake.two"]
    assert registered == [("pair", "smoke")]


def test_patterns_select_and_a_function_runs_once(registered):
    assert selected("fake.*", "*.one", "other.single") == ["fake.one", "fake.two", "other.single"]
    assert registered == [("pair", "smoke"), ("single", "smoke")]


def test_a_function_may_ask_which_names_are_selected(monkeypatch):
    asked = []

    def each(preset, selected):
        asked.append((preset, selected))
        yield from (runner.Measure(name, 1.0, "s") for name in sorted(selected))

    found = (runner.Benchmark(("fake.one", "fake.two", "fake.three"), each),)
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    assert selected("fake.t*") == ["fake.three", "fake.two"]
    assert asked == [("smoke", {"fake.two", "fake.three"})]


def test_other_parameters_keep_their_defaults(monkeypatch):
    def one(preset, name="fake.one", *, unit="s"):
        return runner.Measure(name, 1.0, unit)

    found = (runner.Benchmark(("fake.one",), functools.partial(one, unit="rows")),)
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    assert selected("fake.one") == ["fake.one"]


@pytest.mark.processes
def test_beside_other_processes_lines_say_so(monkeypatch, tmp_path):
    asked = []

    def one(preset, beside=0):
        asked.append(beside)
        return runner.Measure("fake.one", 1.0, "s")

    def other(preset):
        return runner.Measure("fake.other", 1.0, "s")

    found = (runner.Benchmark(("fake.one",), one), runner.Benchmark(("fake.other",), other))
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    file = tmp_path / "lines.jsonl"
    assert command.main(["fake.*", "--json", str(file)]) == 0
    assert command.main(["fake.*", "--beside", "1", "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["fake.one", "fake.other", "beside_1.fake.one", "beside_1.fake.other"]
    assert [line["command"].endswith(" --beside 1") for line in lines] == [False, False, True, True]
    assert asked == [0, 1]


def test_a_name_that_selects_nothing_is_an_error(registered):
    with pytest.raises(KeyError, match=r"No benchmark is named 'fake'; did you mean 'fake\.\*'"):
        selected("fake")
    with pytest.raises(KeyError, match=r"'nothing\.\*'"):
        selected("fake.*", "nothing.*")
    assert registered == []


def test_a_printed_name_that_is_not_registered_is_an_error(registered):
    with pytest.raises(RuntimeError, match=r"liar\.undeclared is printed but not registered"):
        selected("liar.declared")


def test_benchmarks_run_in_the_order_of_their_patterns(registered):
    assert selected("other.*", "*.two", "fake.*") == ["other.single", "fake.one", "fake.two"]
    assert registered == [("single", "smoke"), ("pair", "smoke")]


def test_an_error_ends_the_run_or_is_collected(monkeypatch, capsys):
    def failing(preset):
        yield runner.Measure("fake.one", 1.0, "s")
        raise OSError("no space left")

    def other(preset):
        return runner.Measure("fake.two", 1.0, "s")

    found = (runner.Benchmark(("fake.one",), failing), runner.Benchmark(("fake.two",), other))
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    monkeypatch.setattr(command, "_commit", lambda: "a commit")
    monkeypatch.setattr(command, "machine", lambda: "2 cores")
    failed = []
    kept = [measure.name for measure in runner.run(["fake.*", "missing.*"], "laptop", failed=failed)]
    assert (kept, failed) == (["fake.one", "fake.two"], ["missing.*", "fake.one"])
    said = capsys.readouterr().err
    assert "No benchmark is named 'missing.*'" in said
    assert "OSError: no space left" in said
    assert command.main(["fake.*", "--keep-going"]) == 1
    assert command.main(["fake.two", "--keep-going"]) == 0
    assert "Failed: fake.one" in capsys.readouterr().err


def test_no_benchmark_begins_after_the_time_of_a_run(registered, monkeypatch, capsys):
    monkeypatch.setattr(command, "_commit", lambda: "a commit")
    monkeypatch.setattr(command, "machine", lambda: "2 cores")
    assert [measure.name for measure in runner.run(["fake.*", "other.*"], "smoke", seconds=-1.0)] == []
    assert registered == []
    assert "fake.one, fake.two: left out" in capsys.readouterr().err
    assert command.main(["fake.*", "--seconds", "3600"]) == 0
    assert len(registered) == 1


def test_a_line_of_a_gpu_names_it_first(monkeypatch, capsys):
    def one(preset):
        return runner.Measure("gpu.one", 1.0, "s", details={"gpu": "NVIDIA H100 80GB HBM3"})

    def other(preset):
        return runner.Measure("gpu.two", 1.0, "s", details={"gpu": None})

    found = (runner.Benchmark(("gpu.one",), one), runner.Benchmark(("gpu.two",), other))
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    monkeypatch.setattr(command, "_commit", lambda: "a commit")
    monkeypatch.setattr(command, "machine", lambda: "2 cores")
    assert command.main(["gpu.*"]) == 0
    first, second = (json.loads(line)["machine"] for line in capsys.readouterr().out.splitlines())
    assert (first, second) == ("NVIDIA H100 80GB HBM3, 2 cores", "2 cores")


@pytest.mark.parametrize("late", [False, True])
def test_an_error_names_the_benchmark_that_failed(monkeypatch, capsys, late):
    def failing(preset):
        if late:
            yield runner.Measure("fake.one", 1.0, "s")
        raise OSError("no space left")

    found = (runner.Benchmark(("fake.zero",), lambda preset: None), runner.Benchmark(("fake.one", "fake.two"), failing))
    monkeypatch.setattr(runner, "benchmarks", lambda: found)
    with pytest.raises(OSError, match="no space left") as raised:
        selected("fake.*")
    assert raised.value.__notes__ == ["The benchmark that failed: python -m benchmarks fake.one --preset smoke"]
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("---")]
    assert printed == ["--- fake.zero", "--- fake.one"]  # If it had crashed instead.


@pytest.mark.processes
def test_the_command_prints_signed_values_and_bounds(registered, capsys, tmp_path):
    file = tmp_path / "lines.jsonl"
    assert command.main(["fake.*", "--preset", "smoke", "--json", str(file)]) == 0
    assert command.main(["other.single", "--json", str(file)]) == 0
    one, two, single = map(json.loads, file.read_text().splitlines())
    assert (one["value"], one["at_least"], one["at_most"], one["holds"]) == (-0.25, -0.5, 0.5, True)
    assert (two["holds"], two["spread"], two["command"]) == (False, 0.1, "python -m benchmarks fake.two --preset smoke")
    assert (single["holds"], single["spread"]) == (None, None)
    assert capsys.readouterr().out == file.read_text()


@pytest.mark.parametrize(("arguments", "message"), [([], "no NAME given"), (["nothing"], "No benchmark is named")])
def test_the_command_refuses(registered, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_has_every_name(registered, capsys):
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == ["fake.one", "fake.two", "other.single", "liar.declared"]


def test_a_failure_of_a_benchmark_is_no_wrong_argument(monkeypatch):
    def failing(preset):
        raise KeyError("lr")

    monkeypatch.setattr(runner, "benchmarks", lambda: (runner.Benchmark(("fake.one",), failing),))
    with pytest.raises(KeyError, match="lr"):
        command.main(["fake.*", "--preset", "smoke"])


WITHOUT_RAY = """
import runpy, sys
sys.modules["ray"] = None
sys.argv = ["benchmarks", "--list"]
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
def test_without_ray_the_list_names_skipped_benchmarks():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split()
    assert "gpu.step_vs_torch" in listed
    skipped = re.findall(r"^benchmarks/(\w+)\.py is skipped: .*persia-recsys\[ray\]", done.stderr, re.MULTILINE)
    assert "cluster" in skipped
    missing = {name.split(".")[0] for name in runner.names()} - {name.split(".")[0] for name in listed}
    assert missing <= set(skipped)


def test_a_spread_needs_five_rounds():
    with pytest.raises(ValueError, match="measured 4 times"):
        runner.quantity("x", [1.0] * 4, "s")
    assert runner.quantity("x", [1.0], "s").spread is None  # Of a smoke run.
    measure = runner.quantity("x", [1.0, 2.0, 3.0, 4.0, 5.0], "s", at_most=3.0)
    assert (measure.value, measure.spread, measure.holds) == (3.0, pytest.approx(0.5), True)


def test_a_ratio_alternates():
    order = []

    def rate(name, value):
        order.append(name)
        return value

    measure = runner.ratio("x", ours=lambda: rate("ours", 6.0), theirs=lambda: rate("theirs", 2.0), of="rows/s")
    assert (measure.value, measure.spread, measure.details["of"]) == (3.0, 0.0, "rows/s")
    assert order == ["ours", "theirs", "theirs", "ours"] * 2 + ["ours", "theirs"]


def test_units_are_base_units():
    with pytest.raises(ValueError, match="Invalid unit 'ms' of x"):
        runner.Measure("x", 1.0, "ms")


def test_an_aggregate_is_the_worst():
    found = [
        runner.Measure("x.a", -0.002, "AUC", **runner.within(0.001)),
        runner.Measure("x.b", 0.0, "AUC", **runner.within(0.001)),
    ]
    whole = runner.worst("x", found)
    assert (whole.name, whole.value, whole.holds, whole.details["worst"]) == ("x", -0.002, False, "x.a")
    assert runner.worst("x", [runner.Measure("x.a", 0.2, "AUC"), runner.Measure("x.b", -0.1, "AUC")]).value == -0.1


def test_make_bench_reaches_every_name():
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    areas = re.search(r"^BENCHMARKS = (.*)$", makefile, re.MULTILINE)
    assert set(areas.group(1).split()) == {name.split(".")[0] for name in runner.names()}
    beside_ray = re.search(r"^BESIDE_RAY = (.*)$", makefile, re.MULTILINE)  # The other process has those left.
    assert set(beside_ray.group(1).split()) < set(areas.group(1).split())


def test_performance_page_names_what_can_be_selected():
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    page = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| ([a-z]+\.[a-z0-9_]+(?:\.[a-z0-9_]+)*)", page, re.MULTILINE)
    assert len(rows) > 60
    known = runner.names()
    assert [row for row in rows if row not in known and not any(name.startswith(f"{row}.") for name in known)] == []


def test_the_end_of_an_interval_has_to_meet_the_target():
    ours, theirs = [0.71, 0.72, 0.73], [0.70, 0.72, 0.72]
    measure = runner.paired("fake.two", ours, theirs, "AUC", at_least=-0.01)
    half = 4.303 * 0.0057735 / 3**0.5  # t with two degrees of freedom, standard deviation of 0.01, 0, 0.01
    assert measure.value == pytest.approx(0.02 / 3)
    assert measure.interval == pytest.approx((0.02 / 3 - half, 0.02 / 3 + half), rel=1e-4)
    assert measure.holds is True
    assert runner.paired("fake.two", ours, theirs, "AUC", at_least=-0.007).holds is False
    assert runner.paired("fake.two", ours, theirs, "AUC", at_most=0.02).holds is False
    assert runner.paired("fake.two", ours, theirs, "AUC", at_least=-0.007, target_on_mean=True).holds is True


def test_quantiles_leave_out_a_fortieth_at_each_end():
    """By the density of Student's t, integrated."""
    for degrees, quantile in enumerate(runner.T_975, 1):
        scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        t = np.linspace(0.0, quantile, 10_001)
        density = scale * (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
        inside = np.sum((density[1:] + density[:-1]) / 2 * np.diff(t))
        assert inside == pytest.approx(0.475, abs=1e-4)


def test_twenty_pairs_have_an_interval_and_more_are_refused():
    ours = [0.7 + 0.001 * (n % 2) for n in range(20)]
    assert runner.paired("fake.two", ours, [0.7] * 20, "AUC").interval is not None
    with pytest.raises(ValueError, match="21 pairs"):
        runner.paired("fake.two", [0.7] * 21, [0.7] * 21, "AUC")


def test_a_single_pair_has_no_interval():
    measure = runner.paired("fake.two", [0.7], [0.6], "AUC", at_least=0.0)
    assert (measure.interval, measure.holds) == (None, True)


@pytest.mark.parametrize("bound", ["at_least", "at_most"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [([], []), ([1.0, math.nan], [1.0, 1.0]), ([math.inf, 1.0], [math.inf, 1.0])]
)
def test_without_a_number_every_target_is_missed(ours, theirs, bound):
    measure = runner.paired("fake.two", ours, theirs, "loss", **{bound: 0.0})
    assert (measure.interval, measure.holds) == (None, False)


def test_a_run_that_diverged_has_no_interval():
    measure = runner.paired("fake.two", [1.0, math.inf], [1.0, 1.1], "loss", at_most=1.0)
    assert (measure.value, measure.interval, measure.holds) == (math.inf, None, False)


def test_the_interval_of_a_ratio_is_that_of_its_logarithm():
    measure = runner.paired_ratio("fake.two", [2.0, 8.0], [1.0, 1.0], at_least=1.0)
    assert measure.value == pytest.approx(4.0)
    assert measure.interval == pytest.approx((4.0 / 2**12.706, 4.0 * 2**12.706))
    assert measure.holds is False
    assert runner.paired_ratio("fake.two", [2.0, 2.0], [1.0, math.inf], at_least=1.0).value == 0.0
