"""`persia bench rates` and `persia plan`, as a user types them."""

import json
import os

import pytest
from typer.testing import CliRunner

from persia.cli.app import app

RUN = """
[data]
kind = "synthetic"
batch_size = 256
options = { rows = 20_000, id_features = 2, ids_per_feature = 1000, dim = 4 }
[model]
kind = "ffnn"
options = { hidden = [8] }
[mode]
kind = "hybrid"
staleness = 2
"""


@pytest.fixture
def persia(forks):
    def run(*arguments, cwd, status=0):
        done = forks.run(["-m", "persia", *arguments], cwd)
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.mark.processes
def test_a_plan_needs_rates(run, persia):
    error = persia("plan", "run.toml", cwd=run, status=1)
    assert error.startswith("persia: The rates rates.json cannot be read")
    assert "persia bench rates CONFIG --save rates.json" in error
    assert "Invalid --rows id_0" in persia("plan", "run.toml", "--rows", "id_0", cwd=run, status=1)


@pytest.mark.processes
def test_modules_are_found_beside_the_configuration(run, persia):
    (run / "configs").mkdir()
    (run / "configs" / "beside.py").write_text("")
    (run / "configs" / "run.toml").write_text(f'imports = ["beside"]\n{RUN}')
    assert "rates.json cannot be read" in persia("plan", "configs/run.toml", cwd=run, status=1)


def test_a_plan_of_saved_rates(run, monkeypatch):
    from persia.cli.plan import run_key
    from persia.cli.run_config import RunConfig
    from persia.config import convert, load
    from persia.plan import Rates, RateSource, save_rates
    from persia.plan.rates import BatchShape, CheckpointRate, RowRate, StepRate, WireRate, WorkloadRate
    from persia.units import format_bytes

    monkeypatch.chdir(run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # The cores of this host limit the plan.
    names = ("id_0", "id_1")
    shape = BatchShape(256, dict.fromkeys(names, 256.0), dict.fromkeys(names, 200.0), {}, 1024.0, 5000)
    work = WorkloadRate("run.toml", shape, 1e-4, 1e-4, 1e-5, StepRate("cpu", 0.002, 0.002))
    key = run_key(convert(load("run.toml", []), RunConfig, "run.toml"))
    save_rates("rates.json", Rates(
        1, [RateSource("here", 2, "0", "today", "")], {"4/float32/adagrad": RowRate(1e-7, 1e-7, 1000)}, {key: work},
        checkpoint=CheckpointRate(1e8, 1e8, 0.5),
    ))  # fmt: skip
    shown = CliRunner().invoke(
        app, ["plan", "run.toml", "--rows", "id_0=1000", "--rows", "id_1=1e6", "--json", "plan.json"]
    )
    assert shown.exit_code == 0, shown.output
    assert "Rates: rates.json, measured today on here" in shown.output
    assert "Bottleneck: steps of NN workers" in shown.output
    plan = json.loads((run / "plan.json").read_text())
    assert plan["samples_per_second"] == pytest.approx(128_000)
    assert [table["rows"] for table in plan["tables"]] == [1000, 1_000_000]
    # Processes need the costs of calls, which nobody has measured.
    on_ray = ["plan", "run.toml", "--rows", "id_0=1000", "--rows", "id_1=1e6", "--set", "cluster.kind=ray"]
    assert "cost of calls between processes" in str(CliRunner().invoke(app, on_ray).exception)
    # With processes, the plan says what regions must hold.
    save_rates("rates.json", Rates(1, [RateSource("here", 2, "0", "today", "")], wire=WireRate(1e-5, 1e-9, 1e9)))
    assert "/dev/shm" not in shown.output
    shown = CliRunner().invoke(app, [*on_ray, "--json", "plan.json"])
    plan = json.loads((run / "plan.json").read_text())
    reserved = format_bytes(plan["place"]["ps"]["memory"])
    assert f"Embedding PSs need {reserved} of RayOptions.regions on each host of kind 'this-host'." in shown.output
    assert "sudo mount -o remount,size=95% /dev/shm" in shown.output
    text = " ".join(shown.output.split())
    assert "NN workers share a host: rows and gradients travel without compression" in text
    assert "features are pooled by NN workers (RayOptions.pool_at='auto')" in text
    assert plan["compression"] == "none"
    (run / "hosts.toml").write_text('[[hosts]]\nname = "host"\ncores = 8\nmemory = "10GB"\nnetwork = "10Gbit/s"\n')
    apart = CliRunner().invoke(app, [*on_ray, "--hosts", "hosts.toml", "--json", "apart.json"])
    assert apart.exit_code == 0, apart.exception
    text = " ".join(apart.output.split())
    assert (
        "NN workers are on different hosts: rows and gradients travel as fp16 (RayOptions.compression='auto')" in text
    )
    assert "features are pooled where that sends fewer bytes (RayOptions.pool_at='auto')" in text
    written = json.loads((run / "apart.json").read_text())
    assert (written["compression"], written["pool_at"]) == ("fp16", "auto")
    assert received(written) == 1024 + 2 * (200 * 12 + 256 * 2)
    pooled = ["--set", "cluster.ray.pool_at=embedding_worker", "--json", "pooled.json"]
    shown = CliRunner().invoke(app, [*on_ray, "--hosts", "hosts.toml", *pooled])
    assert "are pooled by embedding workers (RayOptions.pool_at='embedding_worker')" in " ".join(shown.output.split())
    assert received(json.loads((run / "pooled.json").read_text())) == 1024 + 2 * 256 * 12
    shown = CliRunner().invoke(
        app, [*on_ray, "--hosts", "hosts.toml", *pooled, "--set", "trainer.clip_embedding_norm=1.0"]
    )
    assert "features are pooled by NN workers" in " ".join(shown.output.split())
    chosen = CliRunner().invoke(app, [*on_ray, "--hosts", "hosts.toml", "--set", "cluster.ray.compression=none"])
    assert "travel without compression (RayOptions.compression='none')" in " ".join(chosen.output.split())
    system = os.statvfs("/dev/shm")
    assert plan["hosts"][0]["kind"]["memory"] <= system.f_blocks * system.f_frsize


def received(plan):
    """Returns the bytes that NN workers receive for a batch."""
    return next(role["load"]["received"] for role in plan["roles"] if role["role"] == "nn_worker")


@pytest.mark.slow
def test_measures_and_plans(run, persia):
    assert "Saved the rates to rates.json" in persia("bench", "rates", "run.toml", "--save", "rates.json", cwd=run)
    rows = ["--rows", "id_0=1000", "--rows", "id_1=1e6"]
    text = persia("plan", "run.toml", *rows, "--json", "plan.json", "--ray-file", "ray.yaml", cwd=run)
    assert "Rates: rates.json, measured" in text
    assert "Bottleneck: " in text
    plan = json.loads((run / "plan.json").read_text())
    assert [table["rows"] for table in plan["tables"]] == [1000, 1_000_000]
    assert plan["samples_per_second"] > 0
    assert plan["rates"][0]["file"] == "rates.json"
    assert plan["place"].keys() == {"ps", "embedding_worker", "data_loader", "nn_worker"}
    assert "persia.cluster.Ray(ps=1," in (run / "ray.yaml").read_text()
    # Another network has other rates.
    error = persia("plan", "run.toml", *rows, "--set", "model.options.hidden=[16]", cwd=run, status=1)
    assert "Missing rate in rates.json: the rates of this configuration's data" in error
    # The mode is no part of them.
    sync = persia("plan", "run.toml", *rows, "--set", 'mode={kind="sync"}', cwd=run)
    assert "Bottleneck: " in sync
    faster = persia("plan", "run.toml", *rows, "--samples-per-second", "100M", cwd=run, status=1)
    assert "hosts of kind 'this-host' for their cores, and there are 1" in faster
