"""Training over three hosts whose network and processes fail: `make chaos-hosts`, or with `PYTHONPATH=tests` this file.

Prints a JSON line for each seed: the share of the time in which samples were trained, and every invariant that does not
hold. With `--scale`, embedding PSs and NN workers join and leave while the faults are made. With `--shrink`, a schedule
that fails is run again without some of its faults, until each that is left is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
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
REGION_MEBIBYTES = 128
PAUSE_SECONDS = 2.0
RECOVERY_SECONDS = 240.0
"""Within which training continues after a fault, or has failed with the reason."""
END_SECONDS = 480.0
"""Within which changes of the numbers of processes have ended, and all rows are checked."""
ROLES = ("embedding_ps", "embedding_worker", "data_loader", "coordinator", "nn_worker")
NUMBERS: Mapping[str, Sequence[int]] = {"embedding_ps": (3, 4, 2, 5), "nn_worker": (2, 3, 1)}
"""Numbers of processes of the roles that join and leave; a training begins with the first."""
MOST_SECONDS = {"partition": 30.0, "stop": 20.0}
"""That a fault may last, where it is not 10."""
SCALES = 2
"""Changes of the numbers of processes in each round of faults, for `draw`."""
TARGET = 0.85
"""Share of the time in which samples must be trained."""
LONGEST_REPORT = 2.0
"""Seconds of training that one report may stand for; they come each second."""
TESTS = Path(__file__).parents[1]


class NetworkFault(NamedTuple):
    """One fault, after which training must continue.

    Attributes:
        kind: one of `INJECTORS`.
        host: number of the host whose link or disk it is; chooses among the processes of `role`.
        seconds: that it lasts.
        amount: share of packets that are lost, for the kind `loss`.
        role: of the process that is stopped or killed, or of those that join and leave.
        count: number of processes that there are to be, for the kind `scale`.
    """

    kind: str
    host: int = 0
    seconds: float = 0.0
    amount: float = 0.0
    role: str = ""
    count: int = 0


class Shares:
    """Measures the share of the time in which samples are trained, from reports that come about each second.

    Attributes:
        seconds: between the first report and the last.
        trained: seconds of them in which samples were trained; of a report that is late, 2 at most.
    """

    def __init__(self) -> None:
        self.seconds = self.trained = 0.0
        self._at: float | None = None
        self._looked_up: Mapping[str, float] = {}

    def add(self, at: float, looked_up: Mapping[str, float]) -> bool:
        """Adds a report; returns whether samples were trained since the one before.

        Args:
            at: when it was made, in seconds of a monotonic clock.
            looked_up: batches that each embedding worker has looked up since its start.
        """
        trained = any(count > self._looked_up.get(name, 0.0) for name, count in looked_up.items())
        if self._at is not None:
            self.seconds += at - self._at
            self.trained += min(at - self._at, LONGEST_REPORT) if trained else 0.0
        self._at, self._looked_up = at, looked_up
        return trained

    def restart(self) -> None:
        """Forgets the time so far."""
        self.seconds = self.trained = 0.0


class Run(HostsDriver):
    """A training over hosts, to which faults are done.

    Args:
        hosts: hosts that run Ray.
        folder: empty folder of the run.
        mode: one of `chaos_training.MODES`.
        scales: whether numbers of processes change, so that no table may have a declared capacity.

    Attributes:
        killed: number of processes that were killed, by role.
    """

    def __init__(self, hosts: RayHosts, folder: Path, mode: str, scales: bool = False) -> None:
        regions = folder / "regions"
        regions.mkdir()
        for number in range(HOSTS):
            size = f"size={REGION_MEBIBYTES}m"
            done = hosts.hosts.run(number, "mount", "-t", "tmpfs", "-o", size, "tmpfs", str(regions))
            assert done.returncode == 0, done.stderr
        self.ballast = regions / "ballast"
        self.processes: list[dict[str, Any]] = []
        """Role, rank, process id and address of the host of each process."""
        self.shares = Shares()
        self.killed: Counter[str] = Counter()
        program = ("-m", "chaos_network_training", str(folder), mode, *(("scale",) if scales else ()))
        super().__init__(hosts, folder / "driver.log", *program)

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
        self.send(f"stop {self.killed['embedding_ps']}")
        outcome: dict[str, Any] = self.await_message("outcome", END_SECONDS)
        return outcome

    def victim(self, fault: NetworkFault) -> dict[str, Any]:
        """Returns a process of the role of a fault; waits for one.

        Raises:
            AssertionError: the training has failed, or there is none in time.
        """
        end = time.monotonic() + RECOVERY_SECONDS
        while not (there := [process for process in self.processes if process["role"] == fault.role]):
            assert time.monotonic() < end, f"there is no {fault.role}"
            self.wait(0.0)
        return there[fault.host % len(there)]

    def signal(self, process: Mapping[str, Any], name: str) -> bool:
        """Signals a process; returns whether it was still there."""
        number = self.hosts.hosts.addresses.index(process["host"])
        return self.hosts.hosts.run(number, "kill", f"-{name}", str(process["pid"])).returncode == 0

    def _follow(self, seconds: float, until_trained: bool) -> None:
        end = time.monotonic() + seconds
        for message in self.messages(seconds + RECOVERY_SECONDS):
            self.processes = message["processes"]
            trained = self.shares.add(message["at"], message["looked_up"])
            # By the time of the report, as others may have waited here since before. All hosts have one such clock.
            if message["at"] >= end and (trained or not until_trained):
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
    victim = run.victim(fault)
    if run.signal(victim, "STOP"):
        _pause(run, fault)
        run.signal(victim, "CONT")


def kill(run: Run, fault: NetworkFault) -> None:
    """A process is gone at once, as the OOM killer does it."""
    run.killed[fault.role] += run.signal(run.victim(fault), "KILL")


def scale(run: Run, fault: NetworkFault) -> None:
    """Processes begin to join or leave. Other faults are made meanwhile."""
    run.send(f"scale {fault.role} {fault.count}")


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
    "kill": kill,
    "full": full,
    "scale": scale,
}
AT_ONCE = ("reset", "kill", "scale")
"""Kinds that do not last."""


# --- schedules --------------------------------------------------------------------------------------------------------


def draw(seed: int, count: int, scales: bool = False) -> list[NetworkFault]:
    """Returns `count` faults, in rounds in which each kind comes once. The seed decides all.

    Args:
        seed: of the schedule.
        count: how many.
        scales: whether numbers of processes change too, `SCALES` times in each round.
    """
    rng = random.Random(seed)
    faults: list[NetworkFault] = []
    kinds: list[str] = []
    numbers = {role: counts[0] for role, counts in NUMBERS.items()}
    for _ in range(count):
        if not kinds:
            kinds = [kind for kind in INJECTORS if kind != "scale"] + ["scale"] * (SCALES if scales else 0)
            rng.shuffle(kinds)
        kind = kinds.pop()
        host, lasts = rng.randrange(HOSTS), rng.uniform(1.0, MOST_SECONDS.get(kind, 10.0))
        fault = NetworkFault(kind, host, 0.0 if kind in AT_ONCE else round(lasts, 1))
        if kind == "loss":
            fault = fault._replace(amount=round(rng.uniform(0.01, 0.1), 3))
        elif kind in ("stop", "kill"):
            fault = fault._replace(role=rng.choice(ROLES))
        elif kind == "scale":
            role = rng.choice(list(NUMBERS))
            numbers[role] = rng.choice([number for number in NUMBERS[role] if number != numbers[role]])
            fault = fault._replace(role=role, count=numbers[role])
        faults.append(fault)
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
    faults: Sequence[NetworkFault],
    mode: str,
    folder: Path,
    log: Callable[[str], None] = lambda _: None,
    pause: float = PAUSE_SECONDS,
    made: Counter[str] | None = None,
) -> dict[str, Any]:
    """Trains through faults; returns the outcome of `chaos_network_training`, and the share of the time with training.

    Args:
        faults: made one after another; those of the kind `scale` in the background.
        mode: one of `chaos_training.MODES`.
        folder: of the run; made here.
        log: gets a line for each fault.
        pause: seconds after each fault; longer, if no samples are trained until then.
        made: counts the faults that were made, by kind.

    Raises:
        AssertionError: the training has failed, or did not continue after a fault.
        UnavailableError: this machine does not permit hosts.
    """
    folder.mkdir(exist_ok=True)
    scales = any(fault.kind == "scale" for fault in faults)
    with lying_hosts(folder) as hosts, contextlib.closing(Run(hosts, folder, mode, scales)) as run:
        run.train(PAUSE_SECONDS)
        log(" ".join(f"{p['role']}-{p['rank']}@{p['host']}" for p in run.processes))
        run.shares.restart()
        for fault in faults:
            began = time.monotonic()
            INJECTORS[fault.kind](run, fault)
            if made is not None:
                made[fault.kind] += 1
            run.train(0.0)
            log(f"{fault}: trains {time.monotonic() - began - fault.seconds:.1f} s after its end")
            run.train(pause)
        seconds, trained = run.shares.seconds, run.shares.trained
        return {**run.stop(), "training": trained / max(seconds, 1e-9), "seconds": round(seconds, 1)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the schedules; default: 1 2 3")
    parser.add_argument("--faults", type=int, default=20, help="number of faults of a schedule; default: 20")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds after each fault; default: 2")
    parser.add_argument("--mode", choices=("sync", "hybrid", "gba"), default="hybrid", help="default: hybrid")
    parser.add_argument(
        "--scale", action="store_true", help="let embedding PSs and NN workers join and leave meanwhile"
    )
    parser.add_argument("--shrink", action="store_true", help="run a schedule that fails again without some faults")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="persia-chaos-") as place:
        numbers = iter(range(sys.maxsize))

        def outcome_of(faults: Sequence[NetworkFault], made: Counter[str] | None = None) -> dict[str, Any]:
            try:
                folder, log = Path(place) / str(next(numbers)), partial(print, file=sys.stderr, flush=True)
                return train_through(faults, arguments.mode, folder, log, arguments.pause, made)
            except AssertionError as error:
                return {"wrong": [str(error)], "training": 0.0}

        for seed in arguments.seeds:
            schedule = draw(seed, arguments.faults, arguments.scale)
            made: Counter[str] = Counter()
            try:
                outcome = outcome_of(schedule, made)
            except UnavailableError as reason:
                sys.exit(f"This needs hosts in namespaces: {reason}")
            if outcome["wrong"]:
                failed = True
                if arguments.shrink:
                    schedule = shrink(schedule, lambda faults: bool(outcome_of(faults)["wrong"]))
            share = round(outcome.pop("training"), 3)
            line = {
                "name": "chaos.hosts",
                "value": share,
                "unit": "of the time spent training",
                "target": TARGET,
                "holds": not outcome["wrong"] and share >= TARGET,
                "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
                "mode": arguments.mode,
                "seed": seed,
                "faults": made.total(),
                "made": made,
                **outcome,
                "schedule": schedule,
            }
            print(json.dumps(line), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
