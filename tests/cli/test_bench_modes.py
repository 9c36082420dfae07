"""`persia bench modes` and `persia control`."""

import json
import threading

import pytest
from typer.testing import CliRunner

from persia import rpc, services
from persia.cli import ui
from persia.cli.app import app
from persia.coordinator import TokenScheduler
from persia.errors import ConfigError, DataError
from persia.modes import Auto, AutoEvidence, Gba, HopBw, Hybrid, StepTime, Sync, load_evidence
from persia.testing import emulation as bench


def test_all_modes_side_by_side(tmp_path):
    out = tmp_path / "modes.json"
    arguments = ["bench", "modes", "--workers", "3", "--slow", "1:3x", "--compute", "1ms", "--steps", "4"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert done.exit_code == 0, done.output
    lines = json.loads(out.read_text())
    assert [line["mode"].split("(")[0] for line in lines] == ["Sync", "Hybrid", "Async", "HopBs", "Bsp", "HopBw", "Gba"]
    assert all(line["rows_per_second"] > 0 for line in lines)
    assert all(line["mode"] in done.output for line in lines)


def test_the_modes_are_compared_as_they_are_after_a_warm_up():
    """A comparison has fewer steps than the default warm-up, in which Hybrid is Sync at first."""
    emulation = bench.Emulation.parse(2, "0:1x", "5ms")
    (hybrid,) = (mode for mode in bench.all_modes(emulation.workers) if isinstance(mode, Hybrid))
    line = bench.run(hybrid, emulation, 24)
    assert bench.record(line)["row_staleness_max"] > 0


def test_columns_of_the_table_are_aligned():
    lines = [bench.run(mode, bench.Emulation.parse(1, "0:1x", "1ms"), 2) for mode in (Hybrid(4), Sync())]
    title, *rows = bench.table(lines).splitlines()
    assert [len(row) for row in rows] == [len(title)] * 2


class Late:
    """A trace in which NN worker 0 computes its first batch until all but `left` batches have begun.

    No batch takes time, so the order does not depend on how busy the machine is.
    """

    def __init__(self, workers, batches, left):
        self.workers, self.until = range(workers), batches - left
        self.begun, self.changed = 0, threading.Condition()

    def finish(self, rank, began, compute):
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
            assert rank != 0 or self.changed.wait_for(lambda: self.begun >= self.until, 60.0)
        return began


def test_a_fast_nn_worker_takes_more_batches():
    trained = bench.train(Gba(2 * bench.ROWS), bench.Emulation(Late(2, 36, left=6), 0.01), 36)
    workers = trained.result.asynchronous.workers
    assert workers[1].batches > 2 * workers[0].batches > 0


def test_rates_of_a_run_and_of_its_simulation():
    emulation = bench.Emulation.parse(2, "1:8x", "10ms")
    line = bench.run(Gba(2 * bench.ROWS), emulation, 36)
    result = line.trained.result
    assert bench.ROWS * sum(len(times) for times in line.trained.finished) == result.rows
    assert 0 < line.of_bound < 1.1
    assert line.trained.applied_rows == result.rows - result.asynchronous.dropped_rows


def test_hop_bw_drops_the_slow_one():
    report = bench.train(HopBw(1), bench.Emulation(Late(3, 30, left=3), 0.01), 30).result.asynchronous
    assert report.workers[0].dropped > 0
    assert report.workers[1].dropped + report.workers[2].dropped <= 2


@pytest.mark.parametrize(("slow", "compute"), [("2", "20ms"), ("9:4x", "20ms"), ("1:4x", "20")])
def test_bad_arguments(slow, compute):
    with pytest.raises(ConfigError, match="expected"):
        bench.Emulation.parse(8, slow, compute)


def test_a_cluster_day_is_replayed(tmp_path):
    day = tmp_path / "day.json"
    day.write_text('{"period": 0.4, "workers": [[[0.0, 1.0], [0.2, 9.0]], [[0.0, 1.0]]]}')
    emulation = bench.Emulation.parse(8, "2:4x", "5ms", str(day))
    assert emulation.workers == 2
    assert emulation.trace.factor(0, 0.3) == 9.0
    with pytest.raises(ConfigError, match="cannot be read"):
        bench.Emulation.parse(8, "2:4x", "5ms", str(tmp_path / "night.json"))


def test_control_asks_for_a_switch():
    tokens = TokenScheduler(5.0)
    with rpc.serve(tokens, protocol=services.TokenService) as server:
        done = CliRunner().invoke(app, ["control", "switch", server.address, "gba", "--set", "global_batch_size=64"])
        assert done.exit_code == 0, done.output
        assert tokens.requested() == Gba(64)
        again = CliRunner().invoke(app, ["control", "switch", server.address, "async"])
        assert "in progress" in str(again.exception)
        assert "Invalid mode" in str(CliRunner().invoke(app, ["control", "switch", server.address, "waltz"]).exception)
        assert "NAME=VALUE" in str(
            CliRunner().invoke(app, ["control", "switch", server.address, "gba", "--set", "x"]).exception
        )


def test_the_report_of_an_asynchronous_run_is_json_and_a_table(tmp_path, capsys):
    auto = Auto(Gba(2 * bench.ROWS), windows=1, seconds=0.05)
    result = bench.train(auto, bench.Emulation.parse(2, "1:9x", "5ms"), 60).result
    assert result.asynchronous is not None
    ui.write_json(str(tmp_path / "result.json"), ui.fit_record(result))
    record = json.loads((tmp_path / "result.json").read_text())
    report = record["asynchronous"]
    assert set(report["rows_per_second_by_worker"]) == {"0", "1"}
    assert report["rows"] + report["dropped_rows"] <= record["rows"]
    assert report["staleness_max"] >= report["staleness_mean"] >= 0
    assert [v["switch"] for v in record["mode_choices"]].count(True) >= 1
    ui.print_fit(result, "out")
    assert "dropped batches" in capsys.readouterr().out


def test_rehearse_repeats_decisions_with_other_thresholds(tmp_path):
    steps = [StepTime(rank, float(n), 1.0 + 3.0 * rank) for rank in (0, 1) for n in range(40)]
    AutoEvidence(steps).save(tmp_path / "auto.json")
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\nkind = "synthetic"\n[mode]\nkind = "auto"\nseconds = 5.0\n'
        '[mode.asynchronous]\nkind = "gba"\nglobal_batch_size = 64\n'
    )
    arguments = ["bench", "rehearse", str(tmp_path / "auto.json"), str(config)]
    assert "switch to asynchronous" in CliRunner().invoke(app, arguments).output
    calm = CliRunner().invoke(app, [*arguments, "--set", "mode.gain=9.0"])
    assert calm.exit_code == 0
    assert "stay sync" in calm.output
    assert "switch" not in calm.output
    other = CliRunner().invoke(app, [*arguments, "--set", 'mode={kind="sync"}'])
    assert isinstance(other.exception, ConfigError)
    with pytest.raises(DataError, match="cannot be read"):
        load_evidence(tmp_path / "none.json")
