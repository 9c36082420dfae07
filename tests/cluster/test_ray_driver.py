"""The driver of a run on Ray is killed, and the same command goes on: with the rows that were left, each trained once.

The drivers are programs of their own in the Ray of the tests, which ends their processes when they die.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import persia
from persia.errors import ConfigError
from persia.modes import encode
from persia.ps.regions import leftovers
from persia.telemetry.process import LOOPBACK

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import ray
from ray._private import ray_constants

from support.cluster_samples import eventually, make_trainer, options, reader
from support.killed_driver import ROWS, rows_of
from support.signalled import Command

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.processes]

IN_FLIGHT = 12
"""More batches than are in flight in any mode of these tests."""
FOREIGN = "persia-0123abcd/ps-0"


class Runs:
    """Drivers of one run, one after the other.

    Args:
        forks: see `support.signalled.Command`.
        folder: of the run, its regions and its results.
        **settings: see `killed_driver`.
    """

    def __init__(self, forks: Any, folder: Path, **settings: Any) -> None:
        self.forks = forks
        self.folder = folder
        port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
        self.settings = {
            **{"folder": str(folder), "address": f"{LOOPBACK}:{port}", "ps": 2, "nn_workers": 1},
            **{
                "values": False,
                "waits": False,
                "calls": [],
                "scale": 0,
                "stop": 0,
                "mark": 0,
                "seconds": 60.0,
                **settings,
            },
        }
        foreign = folder / "regions" / FOREIGN
        foreign.mkdir(parents=True)
        for name in ("regions.json", "000-id.0"):
            (foreign / name).touch()

    def driver(self) -> Command:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        program = ["-m", "support.killed_driver", json.dumps(self.settings)]
        # The Ray of the tests listens only there; otherwise Ray replaces the address by that of the host.
        environment = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", "RAY_AUTH_MODE": "disabled"}
        return Command(self.forks, program, self.folder, PYTHONPATH=paths, **environment)

    def kill(self, command: Command, once: str) -> None:
        """Kills a driver, once it has made a file."""
        command.until((self.folder / once).exists, once)
        command.signal(signal.SIGKILL)
        assert command.end() == -signal.SIGKILL
        regions = str(self.folder / "regions")  # Its roles train on until Ray ends them.
        eventually(lambda: not any(one.in_use for one in leftovers(regions)), "the roles of the dead driver end")
        (self.folder / "gate").touch()

    def left(self) -> list[str]:
        """What is left of the run in the directory of regions."""
        regions = self.folder / "regions"
        found = [str(Path(one.path).relative_to(regions)) for one in leftovers(str(regions))]
        assert FOREIGN in found
        return [name for name in found if name != FOREIGN]

    def result(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What the last driver found, once nothing is left of the run."""
        assert not self.left()
        assert not (self.folder / "run").exists()
        found = json.loads((self.folder / "out").read_text())
        return found, dict(np.load(self.folder / "rows.npz"))


@pytest.mark.parametrize(
    ("mode", "nn_workers"),
    [
        pytest.param(persia.modes.Sync(), 2, id="sync"),
        pytest.param(persia.modes.Hybrid(2, warmup=0), 1, id="hybrid"),
        pytest.param(persia.modes.Gba(2 * ROWS), 2, id="gba", marks=pytest.mark.slow),
    ],
)
def test_a_killed_driver_loses_no_row_and_doubles_none(mode, nn_workers, tmp_path, forks):
    """The first call ends at batch 40, where there is a recovery point; the driver dies in the second one."""
    batches, ended, stop = 160, 40, 80
    runs = Runs(
        forks,
        tmp_path,
        mode=json.loads(encode(mode)),
        nn_workers=nn_workers,
        batches=batches,
        stop=stop,
        mark=stop,
        calls=[ended // nn_workers],
    )
    with runs.driver() as first:
        runs.kill(first, "trained")
    with runs.driver() as second:
        assert second.end() == 0, second.text
    found, rows = runs.result()
    assert found["finished"]
    assert sum(found["steps"]) == found["global_step"] == batches // nn_workers
    assert found["history"] == batches * ROWS
    assert np.array_equal(rows["id.ids"], np.arange(batches * ROWS))
    times = rows["id.update_count"].reshape(batches, ROWS)
    # From the recovery point on they are trained again, up to the death; each PS may have had its part of a step.
    assert set(times[:ended].flat) == set(times[stop:].flat) == {1}
    assert set(times[ended:stop].flat) <= {1, 2}
    again = np.flatnonzero(times.max(axis=1) == 2)
    assert len(again) >= (stop - ended) // 2
    assert (times[ended : again[-1] - IN_FLIGHT] == 2).all()


def test_network_and_rows_are_those_of_a_run_that_nobody_killed(tmp_path, forks):
    """Killed between two calls, so that nothing is trained twice, and after a PS has joined. With Adam and Adagrad."""
    batches, first_steps = 40, 25
    mode = persia.modes.Sync()
    runs = Runs(
        forks,
        tmp_path,
        mode=json.loads(encode(mode)),
        batches=batches,
        calls=[first_steps],
        scale=3,
        values=True,
        waits=True,
    )
    with runs.driver() as first:
        runs.kill(first, "waiting")
    assert sorted(name.rpartition("/")[2] for name in runs.left()) == ["coordinator", "ps-0", "ps-1", "ps-2"]
    # Another program takes nothing away.
    directories = {"regions": str(tmp_path / "regions"), "run": str(tmp_path / "run")}
    with (
        persia.cluster.Ray(2, 1, 1, 1, options(**directories)) as cluster,
        pytest.raises(ConfigError, match="rows of another schema than this program"),
    ):
        make_trainer(cluster, mode, table={"trainable": False})
    with (
        persia.cluster.Ray(3, 1, 1, 1, options(**directories)) as cluster,
        pytest.raises(ConfigError, match="ps = 3 instead of 2"),
    ):
        make_trainer(cluster, mode)
    with runs.driver() as second:
        assert second.end() == 0, second.text
    found, rows = runs.result()
    assert found["steps"] == [first_steps, batches - first_steps]
    with persia.cluster.Ray(2, 1, 1, 1, options()) as cluster:
        trainer = make_trainer(cluster, mode)
        trainer.fit(reader(batches), max_steps=first_steps)
        trainer.fit(reader(batches))
        expected = rows_of(trainer)
    assert expected.keys() == rows.keys()
    for name, values in expected.items():
        assert np.array_equal(rows[name], values), name
