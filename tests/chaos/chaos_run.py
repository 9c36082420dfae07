"""Training while things go wrong: `make chaos`, or with `PYTHONPATH=tests` this file.

Prints a JSON line for each seed: the share of the time that was spent training, and every invariant that does not hold.
With `--shrink`, a schedule that fails is run again without some of its faults, until each that is left is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from chaos_checks import Course, check_rows
from chaos_hosts import proxied
from chaos_injectors import Chaos, Site
from chaos_invariants import Before, checkpoints, connected, quality, rows_of
from chaos_schedule import KINDS, MOVES, ON_MEMORY, Fault, draw
from chaos_shrinking import shrink
from chaos_training import MODES, make_data, make_test_data, make_trainer

import persia
from persia.cluster.ray import roles as on_ray
from persia.errors import ClosedError
from persia.testing import Threads
from support.cluster_samples import eventually, pids

REGION_MEBIBYTES = 128
NN_WORKERS = 2


class Plan(NamedTuple):
    """One run.

    Attributes:
        seed: of the faults.
        seconds: that the faults are spread over.
        faults: how many.
        mode: one of `MODES`.
        steps: global steps that are trained at least; more, if the faults take longer.
        chunk: steps of one call of `fit`.
        every: only every so many-th id is watched; of the table `many` all are.
        moves: whether PSs join and leave meanwhile, so that rows move. Tables have no declared capacity then.
        kinds: of faults that may come.
    """

    seed: int
    seconds: float
    faults: int
    mode: str = "hybrid"
    steps: int = 0
    chunk: int = 500
    every: int = 1
    moves: bool = False
    kinds: Sequence[str] = KINDS


class Outcome(NamedTuple):
    """What came of a run.

    Attributes:
        wrong: invariants that do not hold.
        made: faults, by kind.
        deaths: of NN workers, that training went on after.
        steps: that were trained.
        training: seconds of steps that counted.
        wall: seconds in all.
        auc: at the end, with faults and without.
        compared: rows whose values were compared, by table.
        counted: rows whose update counts were compared.
        stale: rows of gradients that Gba dropped as too old.
        differ: rows of gradients that do not count as others do in Gba: these, those that a dead PS held, and those
            of steps that were cut short.
        schedule: the faults that were to be made.
    """

    wrong: list[str]
    made: dict[str, int]
    deaths: int
    steps: int
    training: float
    wall: float
    auc: tuple[float, float]
    compared: dict[str, int]
    counted: int
    stale: int
    differ: int
    schedule: list[Fault]


def run(
    plan: Plan, folder: Path, told: Callable[[str], None] = lambda _: None, faults: Sequence[Fault] | None = None
) -> Outcome:
    """Trains through the faults of a plan, or through given ones, and as long without them."""
    before = Before()
    with _small_memory(folder / "regions") as mounted:
        kinds = [kind for kind in (*plan.kinds, *(MOVES if plan.moves else ())) if mounted or kind not in ON_MEMORY]
        site = Site(None, folder / "checkpoints", folder / "regions", set(), set(), [], [])
        (folder / "pushes").mkdir()
        with (
            mock.patch.multiple(on_ray, **_hosts(str(folder / "pushes"), plan.every)),
            _cluster(site) as cluster,
        ):
            site = site._replace(cluster=cluster)
            trainer = make_trainer(cluster, plan.mode, f"chaos://{site.checkpoints}", bounded=not plan.moves)
            trainer.fit(make_data(not plan.moves), max_steps=10)  # Until all roles are there.
            if faults is None:
                faults = draw(plan.seed, plan.seconds, plan.faults, kinds, plan.faults // 4)
            chaos = Chaos(site, list(faults), lambda fault: told(f"{fault.kind} {fault.role}"))
            began = time.monotonic()
            chaos.start()
            training, deaths, dropped = 0.0, 0, Dropped()
            try:
                while (
                    chaos.is_alive()
                    or trainer.global_step < plan.steps
                    or any(thread.is_alive() for thread in site.moves)
                ):
                    left = plan.steps - trainer.global_step
                    steps = min(plan.chunk, left) if left > 0 else plan.chunk
                    result = trainer.fit(make_data(not plan.moves), max_steps=steps)
                    training += result.seconds
                    deaths += result.failures
                    dropped.add(trainer.embeddings.connection.servers)
            finally:
                chaos.give_up()
                chaos.join()
            wall = time.monotonic() - began
            wrong = [f"chaos failed: {chaos.failure}"] if chaos.failure else []
            wrong += site.unmoved
            auc = trainer.evaluate(make_test_data()).auc
            rows = rows_of(trainer.embeddings.connection.servers)
            site.seen.update(pids(cluster))
            ports = _ports(cluster)
            wrong += [] if ports & set(connected()) else ["the connections of this process are not found"]
        with contextlib.suppress(AssertionError):  # It is said below.
            eventually(lambda: not before.left(site.seen, ports, site.regions), "nothing is left", 30.0)
        wrong += before.left(site.seen, ports, site.regions)
    restarts = deaths + sum(fault[1:3] == ("kill", "embedding_ps") for fault in chaos.made)
    course = Course(plan.mode, NN_WORKERS, restarts, len(site.moves), dropped.rows)
    checked = check_rows(rows, folder / "pushes", course)
    wrong += checked.wrong
    wrong += checkpoints(site.checkpoints, site.spoiled)
    undisturbed = _undisturbed(plan, trainer.global_step)
    wrong += quality(auc, undisturbed)
    made = dict(Counter(fault.kind for fault in chaos.made))
    return Outcome(
        wrong,
        made,
        deaths,
        trainer.global_step,
        training,
        wall,
        (auc, undisturbed),
        checked.compared,
        checked.counted,
        dropped.rows,
        checked.differ,
        list(faults),
    )


class Dropped:
    """Counts the rows of gradients that PSs have dropped, also those of PSs that have been killed since."""

    def __init__(self) -> None:
        self.rows = 0
        self._seen: dict[int, int] = {}

    def add(self, servers: Any) -> None:
        """Asks the PSs. One that leaves meanwhile, as rows move, is left out."""
        for number, server in enumerate(servers):
            try:
                dropped, before = server.row_staleness().stale, self._seen.get(number, 0)
            except ClosedError:
                continue
            self.rows += dropped - before if dropped >= before else dropped  # A new process begins with 0.
            self._seen[number] = dropped


def _undisturbed(plan: Plan, steps: int) -> float:
    """The AUC of as many steps in which nothing goes wrong, with all roles in this process."""

    def trained(member: Any) -> float:
        trainer = make_trainer(member, plan.mode, None, bounded=not plan.moves)
        trainer.fit(make_data(not plan.moves), max_steps=steps)
        return float(trainer.evaluate(make_test_data()).auc)

    return Threads(NN_WORKERS, ps=2).run(trained)[0]


def _ports(cluster: Any) -> set[int]:
    """Where its processes listen."""
    _, plan, coordinator = cluster._roles.started()
    addresses = [plan.coordinator, *(member.address for member in coordinator.membership().members)]
    return {int(address.rpartition(":")[2]) for address in addresses if address}


def _hosts(pushes: str, every: int) -> dict[str, type]:
    """The hosts of all roles, such that they can be spoiled."""
    names = ("CoordinatorHost", "EmbeddingWorkerHost", "DataLoaderHost")
    found = {name: proxied(getattr(on_ray, name)) for name in names}
    return {**found, "EmbeddingServerHost": proxied(on_ray.EmbeddingServerHost, pushes, every)}


def _cluster(site: Site) -> Any:
    options = persia.cluster.RayOptions(threads=1, timeout=240.0, restarts=1000, regions=str(site.regions))
    return persia.cluster.Ray(2, 2, 1, NN_WORKERS, options)


@contextlib.contextmanager
def _small_memory(place: Path) -> Iterator[bool]:
    """A memory file system of its own for regions, where that is allowed, so that it can be filled."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={REGION_MEBIBYTES}m", "tmpfs", str(place)]
    mounted = (
        shutil.which("mount") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fails(plan: Plan, faults: Sequence[Fault]) -> bool:
    """Returns whether a run through some faults violates an invariant."""
    with tempfile.TemporaryDirectory(prefix="persia-chaos-") as folder:
        return bool(run(plan, Path(folder), lambda line: print(line, file=sys.stderr, flush=True), faults).wrong)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="that the faults are spread over")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000, help="at least; the AUC still rises until step 600 or so")
    parser.add_argument("--mode", choices=sorted(MODES), default="hybrid")
    parser.add_argument("--every", type=int, default=4, help="watch only every so many-th id, of the table `many` all")
    parser.add_argument("--moves", action="store_true", help="let embedding PSs join and leave meanwhile")
    parser.add_argument(
        "--only", choices=KINDS, nargs="+", default=KINDS, metavar="KIND", help="make only these faults"
    )
    parser.add_argument("--shrink", action="store_true", help="run a schedule that fails again without some faults")
    of = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    failed = False
    for seed in of.seeds:
        with tempfile.TemporaryDirectory(prefix="persia-chaos-") as folder:
            plan = Plan(seed, of.seconds, of.faults, of.mode, of.steps, every=of.every, moves=of.moves, kinds=of.only)
            found = run(plan, Path(folder), lambda line: print(line, file=sys.stderr, flush=True))
        failed |= bool(found.wrong)
        if found.wrong and of.shrink:
            found = found._replace(schedule=shrink(found.schedule, functools.partial(_fails, plan)))
        share = found.training / found.wall
        line = {
            "name": "chaos",
            "value": round(share, 3),
            "unit": "of the time spent training",
            "target": 0.5,
            "holds": not found.wrong and share >= 0.5,
            "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
            "seed": seed,
            "faults": sum(found.made.values()),
            **found._asdict(),
        }
        print(json.dumps(line), flush=True)
    ray.shutdown()
    sys.exit(failed)


if __name__ == "__main__":
    main()
