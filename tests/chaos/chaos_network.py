"""Training over three hosts whose network and processes fail: `make chaos-hosts`, or with `PYTHONPATH=tests` this file.

Prints a JSON line for each seed: the share of the time in which samples were trained, and every invariant that does not
hold. With `--shrink`, a schedule that fails is run again without some of its faults, until each that is left is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from chaos_shrinking import shrink

from persia import rpc
from support.clocks import make_clock
from support.hosts import Treatment, UnavailableError
from support.hosts_driver import HostsDriver
from support.ray_hosts import LATE_NOTICE, RayHosts

HOSTS = 3
GBITS = 1.0
NARROW_GBITS = 0.001
CLOCK_SECONDS = -3600
"""By which the clock of the last host is wrong."""
REGION_MEBIBYTES = 64
PAUSE_SECONDS = 2.0
RECOVERY_SECONDS = 240.0
"""Within which training continues after a fault, or has failed with the reason."""
ROLES = ("embedding_ps", "embedding_worker", "data_loader", "coordinator", "nn_worker")
TESTS = Path(__file__).parents[1]


class NetworkFault(NamedTuple):
    """One fault, after which training must continue.

    Attributes:
        kind: one of `INJECTORS`.
        host: number of the host whose link or disk it is.
        seconds: that it lasts.
        amount: share of packets that are lost, for the kind `loss`.
        role: of the process that is stopped, for the kind `stop`.
    """

    kind: str
    host: int = 0
    seconds: float = 0.0
    amount: float = 0.0
    role: str = ""


class Run(HostsDriver):
    """A training over hosts, to which faults are done.

    Args:
        hosts: hosts that run Ray.
        folder: empty folder of the run.
        mode: one of `chaos_training.MODES`.
    """

    def __init__(self, hosts: RayHosts, folder: Path, mode: str) -> None:
        regions = folder / "regions"
        regions.mkdir()
        for number in range(HOSTS):
            size = f"size={REGION_MEBIBYTES}m"
            done = hosts.hosts.run(number, "mount", "-t", "tmpfs", "-o", size, "tmpfs", str(regions))
            assert done.returncode == 0, done.stderr
        self.ballast = regions / "ballast"
        self.processes: list[dict[str, Any]] = []
        """Role, rank, process id and address of the host of each process."""
        self.reports = self.productive = 0
        """Messages so far, and how many of them came after training."""
        self._looked_up: dict[str, float] = {}
        super().__init__(hosts, folder / "driver.log", "-m", "chaos_network_training", str(folder), mode)

    def train(self, seconds: float) -> None:
        """Returns after some seconds, and once samples were trained after them.

        Raises:
            AssertionError: the training has failed or does not continue.
        """
        self._follow(seconds, until_trained=True)

    def wait(self, seconds: float) -> None:
        """Returns after some seconds, whether samples were trained or not.

        Raises:
            AssertionError: the training has failed.
        """
        self._follow(seconds, until_trained=False)

    def stop(self) -> dict[str, Any]:
        """Ends the training and returns its outcome."""
        self.send("stop")
        outcome: dict[str, Any] = self.await_message("outcome", RECOVERY_SECONDS)
        return outcome

    def _follow(self, seconds: float, until_trained: bool) -> None:
        end = time.monotonic() + seconds
        for message in self.messages(seconds + RECOVERY_SECONDS):
            self.processes = message["processes"]
            counts: dict[str, float] = message["looked_up"]
            trained = any(count > self._looked_up.get(name, 0.0) for name, count in counts.items())
            self._looked_up = counts
            self.reports += 1
            self.productive += trained
            if time.monotonic() >= end and (trained or not until_trained):
                return


# --- faults -----------------------------------------------------------------------------------------------------------


def delay(run: Run, fault: NetworkFault) -> None:
    """Packets are late, by different times, some reordered, some twice."""
    hosts = run.hosts.hosts
    hosts.treat(fault.host, Treatment(delay=0.01, jitter=0.02, reordered=0.02, duplicated=0.02))
    run.wait(fault.seconds)
    hosts.treat(fault.host, Treatment())


def loss(run: Run, fault: NetworkFault) -> None:
    """Packets are lost."""
    run.hosts.hosts.lose(fault.host, fault.amount)
    run.wait(fault.seconds)
    run.hosts.hosts.lose(fault.host, 0.0)


def mute(run: Run, fault: NetworkFault) -> None:
    """Others do not hear the host."""
    run.hosts.hosts.mute(fault.host)
    _pause(run, fault)
    run.hosts.hosts.lose(fault.host, 0.0)


def deaf(run: Run, fault: NetworkFault) -> None:
    """The host does not hear others."""
    run.hosts.hosts.deafen(fault.host)
    _pause(run, fault)
    run.hosts.hosts.lose(fault.host, 0.0)


def partition(run: Run, fault: NetworkFault) -> None:
    """The host reaches no other."""
    run.hosts.hosts.cut(fault.host)
    _pause(run, fault)
    run.hosts.hosts.join(fault.host)


def narrow(run: Run, fault: NetworkFault) -> None:
    """The link has 1 Mbit/s."""
    run.hosts.hosts.shape(fault.host, NARROW_GBITS)
    run.wait(fault.seconds)
    run.hosts.hosts.shape(fault.host, GBITS)


def reset(run: Run, fault: NetworkFault) -> None:
    """All connections of the host are reset."""
    run.hosts.hosts.reset(fault.host)


def stop(run: Run, fault: NetworkFault) -> None:
    """A process hangs, its connections open, and continues."""
    victims = [process for process in run.processes if process["role"] == fault.role]
    assert victims, f"there is no {fault.role}"
    victim = victims[fault.host % len(victims)]
    number = run.hosts.hosts.addresses.index(victim["host"])
    run.hosts.hosts.run(number, "kill", "-STOP", str(victim["pid"]))
    _pause(run, fault)
    run.hosts.hosts.run(number, "kill", "-CONT", str(victim["pid"]))


def full(run: Run, fault: NetworkFault) -> None:
    """The file system of rows and of the coordinator's state is full."""
    hosts = run.hosts.hosts
    filled = hosts.run(fault.host, "dd", "if=/dev/zero", f"of={run.ballast}", "bs=4096", f"count={1 << 20}")
    assert "No space left" in filled.stderr
    _pause(run, fault)
    hosts.run(fault.host, "rm", str(run.ballast))


def _pause(run: Run, fault: NetworkFault) -> None:
    """Without reading messages, which may not come meanwhile."""
    del run
    time.sleep(fault.seconds)


INJECTORS: Mapping[str, Callable[[Run, NetworkFault], None]] = {
    "delay": delay,
    "loss": loss,
    "mute": mute,
    "deaf": deaf,
    "partition": partition,
    "narrow": narrow,
    "reset": reset,
    "stop": stop,
    "full": full,
}


# --- schedules --------------------------------------------------------------------------------------------------------


def draw(seed: int, count: int) -> list[NetworkFault]:
    """Returns `count` faults, in rounds in which each kind comes once. The seed decides all."""
    rng = random.Random(seed)
    faults: list[NetworkFault] = []
    kinds: list[str] = []
    for _ in range(count):
        if not kinds:
            kinds = rng.sample(list(INJECTORS), len(INJECTORS))
        kind = kinds.pop()
        role = rng.choice(ROLES)
        faults.append(
            NetworkFault(
                kind,
                rng.randrange(HOSTS),
                round(rng.uniform(1.0, 10.0), 1) if kind != "reset" else 0.0,
                round(rng.uniform(0.01, 0.1), 3) if kind == "loss" else 0.0,
                role if kind == "stop" else "",
            )
        )
    return faults


# --- runs -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lying_hosts(folder: Path, notice: Mapping[str, str] = LATE_NOTICE) -> Iterator[RayHosts]:
    """Hosts with keys, of which the last one has a wrong clock.

    Raises:
        UnavailableError: this machine does not permit them.
    """
    keys = folder / "keys"
    rpc.make_keys(keys)
    clock = make_clock(folder, CLOCK_SECONDS)
    clocks = {} if clock is None else {HOSTS - 1: clock}
    with RayHosts(HOSTS, GBITS, keys, notice=notice, clocks=clocks) as hosts:
        yield hosts


def train_through(
    faults: Sequence[NetworkFault], mode: str, folder: Path, log: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Trains through faults; returns the outcome of `chaos_network_training`, and the share of the time with training.

    Raises:
        AssertionError: the training has failed, or did not continue after a fault.
        UnavailableError: this machine does not permit hosts.
    """
    folder.mkdir(exist_ok=True)
    with lying_hosts(folder) as hosts, contextlib.closing(Run(hosts, folder, mode)) as run:
        run.train(PAUSE_SECONDS)
        log(" ".join(f"{p['role']}-{p['rank']}@{p['host']}" for p in run.processes))
        run.reports = run.productive = 0
        for fault in faults:
            began = time.monotonic()
            INJECTORS[fault.kind](run, fault)
            run.train(PAUSE_SECONDS)
            log(f"{fault}: trains {time.monotonic() - began - fault.seconds:.1f} s after its end")
        return {**run.stop(), "training": run.productive / max(1, run.reports)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--mode", choices=("sync", "hybrid", "gba"), default="hybrid")
    parser.add_argument("--shrink", action="store_true", help="run a schedule that fails again without some faults")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="persia-chaos-") as place:
        numbers = iter(range(sys.maxsize))

        def outcome_of(faults: Sequence[NetworkFault]) -> dict[str, Any]:
            try:
                folder = Path(place) / str(next(numbers))
                return train_through(faults, arguments.mode, folder, partial(print, file=sys.stderr, flush=True))
            except AssertionError as error:
                return {"wrong": [str(error)]}

        for seed in arguments.seeds:
            schedule = draw(seed, arguments.faults)
            try:
                outcome = outcome_of(schedule)
            except UnavailableError as reason:
                sys.exit(f"This needs hosts in namespaces: {reason}")
            if outcome["wrong"]:
                failed = True
                if arguments.shrink:
                    schedule = shrink(schedule, lambda faults: bool(outcome_of(faults)["wrong"]))
            line = {"name": "chaos.hosts", "mode": arguments.mode, "seed": seed, "schedule": schedule, **outcome}
            print(json.dumps(line), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
