"""Turns a plan into the `place` argument of `persia.cluster.Ray`, and into a cluster file for `ray up`."""

from __future__ import annotations

import json
from typing import Any

from persia.plan.deployment import DeploymentPlan, HostPlan
from persia.ps.regions import DEFAULT_ROOT

__all__ = ["ENLARGE_REGIONS", "PLACE_ROLES", "cluster_file", "in_shared_memory", "place_of"]

ENLARGE_REGIONS = "sudo mount -o remount,size=95% /dev/shm"
"""Command for a host of PSs: leaves room in /dev/shm for regions, 90 % of memory in a plan, and for files of Ray."""

PLACE_ROLES = {
    "embedding_ps": "ps", "embedding_worker": "embedding_workers", "data_loader": "data_loaders",
    "nn_worker": "nn_workers",
}  # fmt: skip
"""Names of the arguments of `persia.cluster.Ray` by role; `place` has the role `embedding_ps` as "ps"."""

LITTLE = 0.001
"""Amount of a host's own resource, of which it has 1: any number of processes fit, but only on this kind of host."""

PREPARE = """\
file_mounts: { ~/persia.keys: ./persia.keys }
setup_commands: ['pip install "persia-recsys[ray]"']
head_start_ray_commands:
  - ray stop
  - export PERSIA_CURVE_KEYS=~/persia.keys; ulimit -n 65536;
    ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml
worker_start_ray_commands:
  - ray stop
"""
"""Part of a cluster file: keys, which roles need to listen on an address that other hosts can reach."""

ENLARGE = f"  - {ENLARGE_REGIONS}  # For rows; it is often half of the memory.\n"
JOIN = "  - export PERSIA_CURVE_KEYS=~/persia.keys; ulimit -n 65536; ray start --address=$RAY_HEAD_IP:6379\n"


def place_of(plan: DeploymentPlan) -> dict[str, dict[str, Any]]:
    """Returns the `Placement` of a process by role, as plain data: its kind of host, memory of a PS, a GPU.

    With this memory PSs keep the same rows in memory as the plan.
    """
    places: dict[str, dict[str, Any]] = {}
    for host in plan.hosts:
        for role in host.roles:
            placement: dict[str, Any] = {"resources": {host.kind.name: LITTLE}}
            if role == "embedding_ps":
                placement["memory"] = host.reserved
            if role == "nn_worker" and host.kind.gpus:
                placement["GPU"] = 1
            places["ps" if role == "embedding_ps" else role] = placement
    return places


def in_shared_memory(regions: str) -> bool:
    """Returns whether rows are in /dev/shm, given `RayOptions.regions`."""
    return regions == DEFAULT_ROOT or regions.startswith(f"{DEFAULT_ROOT}/")


def cluster_file(plan: DeploymentPlan, command: str, regions: str = DEFAULT_ROOT) -> str:
    """Returns a cluster file for `ray up`, in YAML. The provider and the types of machines are left to fill in.

    Args:
        plan: the plan.
        command: command that made the plan, for the first line.
        regions: `RayOptions.regions` of the plan.
    """
    options = 'address="auto"' if regions == DEFAULT_ROOT else f'address="auto", regions={json.dumps(regions)}'
    counts = {PLACE_ROLES[role.role]: role.processes for role in plan.roles}
    arguments = ", ".join(f"{name}={count}" for name, count in counts.items())
    lines = [
        f"# {command}",
        f"# persia.cluster.Ray({arguments}, place={json.dumps(place_of(plan))}, "
        f"options=persia.cluster.RayOptions({options}))",
        "# Keys, made here once: python -c 'import persia.rpc; persia.rpc.make_keys(\"persia.keys\")'",
        "# On the head, the program needs PERSIA_CURVE_KEYS=~/persia.keys",
        *_tables(plan),
        "cluster_name: persia",
        f"max_workers: {sum(host.number for host in plan.hosts)}",
        "provider: { type: gcp, region: FILL-IN, availability_zone: FILL-IN, project_id: FILL-IN }",
        "auth: { ssh_user: ubuntu }",
        "available_node_types:",
        "  head:",
        "    resources: { CPU: 0 }",
        "    node_config: { machineType: FILL-IN }",
    ]
    for host in plan.hosts:
        lines += _node_type(host)
    lines.append("head_node_type: head")
    return "\n".join(lines) + "\n" + PREPARE + (ENLARGE if in_shared_memory(regions) else "") + JOIN


def _tables(plan: DeploymentPlan) -> list[str]:
    """Returns comments: rows in memory of tables with rows on SSD, and options that tables must set."""
    comments = []
    for table in plan.tables:
        if table.disk or table.name in plan.added:
            line = f"# table {table.name!r}: {table.memory_rows:,} of {table.rows:,} rows in memory"
            if table.name in plan.added:
                line += f"; set spill to a directory on the SSD, and capacity = {plan.added[table.name]}"
            comments.append(line)
    return comments


def _node_type(host: HostPlan) -> list[str]:
    kind = host.kind
    resources = {"CPU": kind.cores, "memory": kind.memory, kind.name: 1}
    if kind.gpus:
        resources["GPU"] = kind.gpus
    roles = ", ".join(f"{count} x {role}" for role, count in host.roles.items())
    return [
        f"  {json.dumps(kind.name)}:  # {roles}; number determined by: {host.needed_for}",
        f"    min_workers: {host.number}",
        f"    max_workers: {host.number}",
        f"    resources: {json.dumps(resources)}",
        "    node_config: { machineType: FILL-IN }",
    ]
