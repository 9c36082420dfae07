"""Training over three hosts in namespaces, with links between them: Hybrid against Sync, and several NN workers.

    python -m benchmarks 'hosts.*' [--preset laptop|full] [--json FILE]

Three namespaces of this machine run Ray. Links carry 1 Gbit/s and take 1 ms from one host to another; all calls have
keys. A step waits 40 ms in place of computing a network, so that all NN workers fit on few processors. Lookups and
pushes are real, and take processors of this machine: the details have the CPU seconds of each role, which say what
bounds a rate. It needs root, and is skipped in smoke runs.

hosts.hybrid_vs_sync  Samples/s of `Hybrid` over those of `Sync`, whose lookups wait for the step before.
hosts.scaling         Samples/s of 4 NN workers over those of 1, in `Hybrid`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.cluster import DIM, WARM_STEPS, cpu_seconds, emulated
from benchmarks.elsewhere import tests_support
from persia import rpc
from persia.cluster import Ray, RayOptions
from persia.modes import Hybrid, Mode, Sync

HOSTS, GBITS = 3, 1.0
LINK_SECONDS = 0.0005
"""Delay of each link; two of them are between two hosts."""
FEATURES, ROWS = 26, 512
STEPS = {"laptop": 40, "full": 200}
ROUNDS = {"laptop": 5, "full": 9}
COUNTS = (1, 2, 4)
SECONDS = 900.0
"""Of each program; then it has failed."""
MODES: dict[str, Mode] = {"sync": Sync(), "hybrid": Hybrid(4, warmup=0)}


# --- the program on the first host ------------------------------------------------------------------------------------


def main(rounds: int, steps: int, *kinds: str) -> None:
    """Trains with clusters of these kinds by turns; prints the seconds of all loops, and what they took.

    Args:
        rounds: how often each cluster trains.
        steps: of each time.
        kinds: such as "sync-1": mode and number of NN workers.
    """
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="error")
    found: dict[str, Any] = {}
    clusters = {}
    try:
        for kind in kinds:
            clusters[kind] = Ray(2, 1, 1, int(kind.partition("-")[2]), RayOptions(threads=1, timeout=SECONDS))
            found[kind] = {"seconds": []}
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                seconds, cpu = _train(clusters[kind], kind, steps)
                if number:  # The first one starts the roles and fills the tables.
                    found[kind]["seconds"].append(seconds)
                    found[kind]["cpu"] = cpu
        for kind, cluster in clusters.items():
            found[kind]["hosts"] = tests_support("hosts_training").roles_by_host(cluster)
    finally:
        for cluster in clusters.values():
            cluster.close()
        ray.shutdown()
    print(json.dumps(found), flush=True)


def _train(cluster: Ray, kind: str, steps: int) -> tuple[float, dict[str, float]]:
    """Returns the seconds of a loop on all NN workers, and CPU seconds of a batch by role."""
    mode = MODES[kind.partition("-")[0]]
    before = cluster.statistics() if cluster._roles.service is not None else {}
    loops = cluster.run(lambda: emulated(cluster, mode, steps, FEATURES, real_rows=ROWS))
    spent = cpu_seconds(before, cluster.statistics(), len(loops) * (WARM_STEPS + steps))
    return max(loop.seconds for loop in loops), {
        **spent,
        "nn_worker": sum(each.cpu for each in loops) / len(loops) / steps,
    }


# --- measures ---------------------------------------------------------------------------------------------------------


@contextmanager
def ray_hosts(names: str) -> Iterator[Any]:
    """Yields hosts that run Ray, with late links; None where this machine does not permit them."""
    support = tests_support("ray_hosts")
    hosts_support = tests_support("hosts")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        rpc.make_keys(str(keys))
        try:
            hosts = support.RayHosts(HOSTS, GBITS, keys, cpus=4)
        except hosts_support.UnavailableError as reason:
            print(f"{names} is skipped: {reason}", file=sys.stderr)
            yield None
            return
        with hosts:
            for number in range(HOSTS):
                hosts.hosts.treat(number, hosts_support.Treatment(delay=LINK_SECONDS))
            yield hosts


def trained(hosts: Any, rounds: int, steps: int, *kinds: str) -> dict[str, Any]:
    """Runs `main` on the first host, and returns what it has printed."""
    arguments = ("-m", "benchmarks.hosts", str(rounds), str(steps), *kinds)
    done: subprocess.CompletedProcess[str] = hosts.run(0, *arguments, seconds=SECONDS)
    if done.returncode:
        raise RuntimeError(f"the training over hosts failed:\n{done.stderr[-6000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def details_of(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns what each kind took, and what it is about."""
    return {
        "workload": f"{FEATURES} ID-type features of dim {DIM}, batch {ROWS}, {GBITS:g} Gbit/s, 1 ms, keys",
        **{
            kind: {
                "s/step": round(statistics.median(of["seconds"]) / steps, 4),
                "CPU s/batch": {role: round(seconds, 4) for role, seconds in of["cpu"].items()},
                "hosts": of["hosts"],
            }
            for kind, of in found.items()
        },
    }


@runner.measures("hosts.hybrid_vs_sync")
def hybrid_vs_sync(preset: str) -> runner.Measure | None:
    """Hybrid against Sync with one NN worker."""
    if preset not in STEPS:
        print("hosts.hybrid_vs_sync is skipped: it takes minutes", file=sys.stderr)
        return None
    with ray_hosts("hosts.hybrid_vs_sync") as hosts:
        if hosts is None:
            return None
        found = trained(hosts, ROUNDS[preset], STEPS[preset], "sync-1", "hybrid-1")
    pairs = zip(found["sync-1"]["seconds"], found["hybrid-1"]["seconds"], strict=True)
    details = {"of": "rows/s", **details_of(found, STEPS[preset])}
    ratios = [theirs / ours for theirs, ours in pairs]
    return runner.quantity("hosts.hybrid_vs_sync", ratios, "ratio", at_least=1.6, details=details)


@runner.measures("hosts.scaling")
def scaling(preset: str) -> runner.Measure | None:
    """Samples/s of the most NN workers over those of one."""
    if preset not in STEPS:
        print("hosts.scaling is skipped: it takes minutes", file=sys.stderr)
        return None
    kinds = [f"hybrid-{count}" for count in COUNTS]
    with ray_hosts("hosts.scaling") as hosts:
        if hosts is None:
            return None
        found = trained(hosts, ROUNDS[preset], STEPS[preset], *kinds)
    alone = found[kinds[0]]["seconds"]
    ratios = {
        count: [count * one / all_ for one, all_ in zip(alone, found[kind]["seconds"], strict=True)]
        for count, kind in zip(COUNTS, kinds, strict=True)
    }
    details = {"of": f"rows/s, {COUNTS[-1]} NN workers over 1", **details_of(found, STEPS[preset])}
    details["by_number"] = {str(count): round(statistics.median(of), 3) for count, of in ratios.items()}
    return runner.quantity("hosts.scaling", ratios[COUNTS[-1]], "ratio", details=details)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
