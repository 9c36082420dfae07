"""The scripts of the manifests for Kubernetes, run over hosts in namespaces in place of pods."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from persia import rpc
from persia.checkpoint import list_checkpoints
from support.hosts import Hosts, UnavailableError

pytest.importorskip("yaml")
pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.planned_pods import Manifests, plan_pods, save_rates

pytestmark = [pytest.mark.hosts, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = Path(sys.executable).parent
SECONDS = 240.0
RUN = """
[data]
kind = "synthetic"
batch_size = 256
options = { rows = 1_000_000_000_000, id_features = 2, ids_per_feature = 1000, dim = 4 }
[mode]
kind = "hybrid"
staleness = 2
[cluster]
kind = "ray"
[trainer]
progress = false
checkpoint_every_steps = 200
"""
HOSTS = """
[[hosts]]
name = "rows"
roles = ["embedding_ps"]
cores = 2
memory = "256MB"
network = "1Gbit/s"
[[hosts]]
name = "rest"
cores = 2
memory = "512MB"
network = "1Gbit/s"
"""
DRIVER = "persia-train"
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TMPDIR": "/dev/shm",  # Of each host; pods have their own /tmp.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000",
}


class Pods:
    """Hosts in place of pods, in the order of their manifests; a container that ends is started again by `repeat`."""

    def __init__(self, hosts: Hosts, manifests: Manifests, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.scripts = {}
        self.processes: list[subprocess.Popen[str]] = []
        for number, (name, script) in enumerate(manifests.scripts()):
            for place in ("/etc/persia/run", "/etc/persia/keys", "/srv/persia"):
                script = script.replace(place, str(folder / place[1:]))
            self.scripts[name] = (number, script)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts.addresses[0]} {DRIVER}\n")
        paths = os.pathsep.join(path for path in sys.path if path)
        self.environment = RAY | {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "PYTHONPATH": paths,
            "PERSIA_CURVE_KEYS": str(folder / "etc/persia/keys/keys"),
        }

    def start(self, name: str, script: str | None = None) -> subprocess.Popen[str]:
        """Starts the script of a container; its process id is in a file of its name."""
        number, own = self.scripts[name]
        first = f"mount --bind {self.folder}/hosts /etc/hosts; echo $$ > {self.folder}/{name}.pid\n"
        first += "ip route replace default dev eth0\n"  # Ray asks the kernel for its address by it.
        with (self.folder / f"{name}.log").open("a") as log:
            process = self.hosts.start(
                number, "sh", "-ec", first + (script or own), env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def repeat(self, name: str) -> None:
        """Starts the script of a container, and again whenever it ends."""
        (self.folder / name).write_text(self.scripts[name][1])
        self.start(name, f"while true; do sh -e {self.folder / name} || true; sleep 1; done")

    def terminate(self, name: str) -> None:
        """Sends SIGTERM to the process that the script has become."""
        pid = (self.folder / f"{name}.pid").read_text().strip()
        assert self.hosts.run(self.scripts[name][0], "kill", "-TERM", pid).returncode == 0

    def logs(self) -> str:
        """Returns the ends of all logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


@pytest.fixture
def pods(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "hosts.toml").write_text(HOSTS)
    save_rates(tmp_path / "rates.json", tmp_path / "run.toml")
    run, keys = tmp_path / "etc/persia/run", tmp_path / "etc/persia/keys"
    rows = ["--rows", "id_0=1000", "--rows", "id_1=1000"]
    plan_pods(tmp_path / "run.toml", tmp_path / "hosts.toml", tmp_path / "rates.json", tmp_path / "k8s", *rows)
    run.mkdir(parents=True)
    keys.mkdir()
    (tmp_path / "srv/persia").mkdir(parents=True)
    config = (tmp_path / "k8s/config.toml").read_text().replace("/srv/persia", str(tmp_path / "srv/persia"))
    (run / "config.toml").write_text(config)
    rpc.make_keys(keys / "keys")
    manifests = Manifests(tmp_path / "k8s")
    try:
        hosts = Hosts(len(list(manifests.scripts())), 1.0)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    pods = Pods(hosts, manifests, tmp_path)
    with hosts:
        yield pods
    for process in pods.processes:
        process.wait(SECONDS)


def wait_until(condition, pods, process):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, pods.logs()
        assert time.monotonic() < deadline, pods.logs()
        time.sleep(0.2)


def last_step(pods):
    checkpoints = list_checkpoints(str(pods.folder / "srv/persia/checkpoints"))
    return checkpoints[-1].step if checkpoints else 0


@pytest.mark.skipif(not (PROGRAMS / "ray").exists(), reason=f"There is no command `ray` in {PROGRAMS}.")
def test_the_driver_stops_with_a_checkpoint_and_the_next_one_continues(pods):
    """Hosts wait for the end of the run; they join the head of the next driver, whose pod has the same name."""
    hosts = [name for name in pods.scripts if name != DRIVER]
    assert len(hosts) == 2
    for name in hosts:
        pods.repeat(name)
    for _ in range(2):
        trained = last_step(pods)
        driver = pods.start(DRIVER)
        wait_until(lambda earlier=trained: last_step(pods) > earlier, pods, driver)
        waiting = pods.hosts.start(
            pods.scripts[hosts[0]][0], "persia", "cluster", "wait-end", "--timeout", str(SECONDS), env=pods.environment
        )
        time.sleep(1)
        assert waiting.poll() is None, pods.logs()
        before = last_step(pods)
        pods.terminate(DRIVER)
        assert driver.wait(SECONDS) == 128 + 15, pods.logs()
        assert waiting.wait(SECONDS) == 0
        assert last_step(pods) > before
        trained = last_step(pods)
        assert f"Stopped by SIGTERM after step {trained}. Step {trained} is saved in" in pods.logs()
        pods.hosts.kill(0)  # As a pod ends, with the processes of Ray in it.
        pods.hosts.boot(0)
