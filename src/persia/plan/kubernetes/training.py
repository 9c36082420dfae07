"""Manifests of a training: a Job with the driver, and a StatefulSet for each kind of host.

The pod of the Job is the head of Ray and runs `persia train`; all roles but the coordinator run in the other pods. So
the end of either ends the run, and SIGTERM reaches the program that saves the checkpoint.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
from typing import Any

from persia.errors import ConfigError
from persia.plan.deployment import HostPlan
from persia.plan.kubernetes.pods import (
    KEYS_FILE,
    RUN_DIRECTORY,
    PodPlan,
    container,
    labels,
    mebibytes,
    metadata,
    part_labels,
    pod,
    secret_volume,
    spread,
)
from persia.plan.ray_launcher import in_shared_memory
from persia.ps.regions import DEFAULT_ROOT

__all__ = ["training_manifests"]

DRIVER = "driver"
TRAIN = "persia-train"
RAY_PORT = 6379
RAYLET_PORT = 52365
"""Port of Ray's agent on each host, which tells whether its raylet is healthy."""
DRIVER_RESOURCES = {"cpu": "2", "memory": "8Gi"}
"""Of the driver, which has a copy of the network and starts the roles."""
DRIVER_REGIONS = "1Gi"
"""Shared memory of the driver: for Ray's objects, and the state of the coordinator."""
RETRIES = 20
ENLARGED, USUAL = 0.95, 0.5
"""Share of a host's memory that /dev/shm may have, for regions of PSs and files of Ray; without PSs, for the latter."""
JOIN_SECONDS = 600
LONGEST_NAME = 40
"""Kubernetes derives labels from the name of a StatefulSet, which have at most 63 characters."""
OPEN_FILES = 'ulimit -Sn "$(ulimit -Hn)"'


def training_manifests(request: PodPlan) -> list[dict[str, Any]]:
    """Returns the objects of a training.

    Raises:
        ConfigError: the name of a kind of hosts does not fit Kubernetes.
    """
    names = [_component(host) for host in request.plan.hosts]
    valid = all(len(name) <= LONGEST_NAME and name[-1].isalnum() for name in names)
    if len(set(names)) < len(names) or not valid:
        raise ConfigError(
            f"Kubernetes needs distinct names of kinds of hosts, of at most {LONGEST_NAME - len('hosts-')} characters, "
            "the last a letter or digit, where '_' is the same as '-': "
            f"{', '.join(host.kind.name for host in request.plan.hosts)}. Rename them in the file of --hosts.",
            field="hosts",
        )
    manifests = [_service(TRAIN, DRIVER, "gcs", RAY_PORT), _job(request)]
    for host in request.plan.hosts:
        component = _component(host)
        manifests += [
            _service(f"persia-{component}", component, "raylet", RAYLET_PORT),
            _stateful_set(request, host),
            _budget(host),
        ]
    return [*manifests, _policy()]


def _component(host: HostPlan) -> str:
    return f"hosts-{host.kind.name.replace('_', '-')}"


def _service(name: str, component: str, port: str, number: int) -> dict[str, Any]:
    """Returns a service without an address, for the name of a pod."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, component),
        "spec": {"clusterIP": "None", "selector": labels(component), "ports": [{"name": port, "port": number}]},
    }


def _job(request: PodPlan) -> dict[str, Any]:
    hosts = 1 + sum(host.number for host in request.plan.hosts)
    train = ["persia", "train", f"{RUN_DIRECTORY}/config.toml", "--output", request.checkpoints, "--continue"]
    script = [
        OPEN_FILES,
        f"ray start --head --port={RAY_PORT} --num-cpus=0 --dashboard-host=127.0.0.1 --disable-usage-stats",
        f"persia cluster wait-hosts {hosts} --timeout {JOIN_SECONDS}",
        f"exec {shlex.join(train)}",
    ]
    driver = container(DRIVER, _script(script), DRIVER_RESOURCES, {"keys": "/etc/persia/keys", "shm": DEFAULT_ROOT})
    listens = {"tcpSocket": {"port": "gcs"}}
    driver |= {
        "env": [{"name": "PERSIA_CURVE_KEYS", "value": KEYS_FILE}],
        "ports": [{"name": "gcs", "containerPort": RAY_PORT}],
        "startupProbe": {**listens, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**listens, "periodSeconds": 5},
        "livenessProbe": {**listens, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 60},
    }
    volumes = [secret_volume("keys", "persia-keys"), _memory("shm", DRIVER_REGIONS)]
    template = pod(request, DRIVER, [driver], volumes, request.stop_seconds)
    template["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(TRAIN, DRIVER),
        "spec": {
            "backoffLimit": RETRIES,
            "podFailurePolicy": {"rules": _not_counted()},
            "podReplacementPolicy": "Failed",  # Else a second driver starts while the first one saves.
            "template": template,
        },
    }


def _not_counted() -> list[dict[str, Any]]:
    """Returns the ends of a driver that are no failures: by SIGTERM, after a checkpoint, and with its node."""
    stopped = {"containerName": DRIVER, "operator": "In", "values": [128 + signal.SIGTERM]}
    return [
        {"action": "Ignore", "onExitCodes": stopped},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _stateful_set(request: PodPlan, host: HostPlan) -> dict[str, Any]:
    kind, component = host.kind, _component(host)
    memory = kind.memory >> 20 << 20  # What its limit has, in whole MiB.
    resources = {"cpu": str(kind.cores), "memory": mebibytes(memory)}
    start = [
        "--block", f"--num-cpus={kind.cores}",
        f"--memory={memory}", f"--resources={json.dumps({kind.name: 1})}",
        f"--dashboard-agent-listen-port={RAYLET_PORT}", "--disable-usage-stats",
    ]  # fmt: skip
    if kind.gpus:
        resources["nvidia.com/gpu"] = str(kind.gpus)
        start.append(f"--num-gpus={kind.gpus}")
    script = [OPEN_FILES]
    if request.regions:  # Of a driver that was killed: no role runs in a pod before its first line.
        script.append(f"persia cluster regions --clean --directory {shlex.quote(request.regions)}")
    # By address: the name may belong to another pod later, and Ray does not resolve names as the system does.
    head = f'--address="${{head%% *}}:{RAY_PORT}"'
    script += [
        f"until head=$(getent hosts {TRAIN}) && ray health-check {head}; do sleep 2; done",
        f"exec ray start {head} {shlex.join(start)}",
    ]
    seconds = request.stop_seconds + 60
    mounts = {"keys": "/etc/persia/keys", "shm": DEFAULT_ROOT}
    roles = container("roles", _script(script), resources, mounts)
    disks = _disks(request) if "embedding_ps" in host.roles else ()
    roles["volumeMounts"] += [
        {"name": "disk", "mountPath": path, "subPath": f"rows-{number}"} for number, path in enumerate(disks)
    ]
    healthy = {"httpGet": {"path": "/api/local_raylet_healthz", "port": "raylet"}, "timeoutSeconds": 5}
    roles |= {
        "ports": [{"name": "raylet", "containerPort": RAYLET_PORT}],
        "startupProbe": {**healthy, "periodSeconds": 5, "failureThreshold": JOIN_SECONDS // 5},
        "readinessProbe": {**healthy, "periodSeconds": 5},
        # Long: the rows of a host are lost with its pod, so a busy host must not be restarted.
        "livenessProbe": {**healthy, "periodSeconds": 10, "failureThreshold": 60},
        "lifecycle": {"preStop": {"exec": {"command": ["persia", "cluster", "wait-end", "--timeout", str(seconds)]}}},
    }
    share = ENLARGED if "embedding_ps" in host.roles and in_shared_memory(request.regions) else USUAL
    volumes = [secret_volume("keys", "persia-keys"), _memory("shm", mebibytes(memory * share))]
    template = pod(request, component, [roles], volumes, seconds)
    template["spec"]["affinity"] = spread(component, "embedding_ps" in host.roles)
    spec: dict[str, Any] = {
        "serviceName": f"persia-{component}",
        "replicas": host.number,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},  # Else a new image would replace hosts with rows while they are used.
        "selector": {"matchLabels": labels(component)},
        "template": template,
    }
    if disks:
        spec["volumeClaimTemplates"] = [_claim(request, host)]
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Delete"}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(f"persia-{component}", component),
        "spec": spec,
    }


def _disks(request: PodPlan) -> tuple[str, ...]:
    """Returns the directories of a PS's host that are on an SSD."""
    elsewhere = request.regions and not in_shared_memory(request.regions)
    return (*request.disks, request.regions) if elsewhere else request.disks


def _claim(request: PodPlan, host: HostPlan) -> dict[str, Any]:
    rows = host.disk + (0 if in_shared_memory(request.regions) else host.memory)
    size = f"{math.ceil(1.25 * rows / (1 << 30))}Gi"  # File systems and compaction need some more.
    return {
        "metadata": {"name": "disk"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }


def _budget(host: HostPlan) -> dict[str, Any]:
    """Returns how many pods of a kind may be evicted at the same time: none with PSs, whose rows would be lost."""
    component = _component(host)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(f"persia-{component}", component),
        "spec": {
            "maxUnavailable": 0 if "embedding_ps" in host.roles else 1,
            "selector": {"matchLabels": labels(component)},
        },
    }


def _policy() -> dict[str, Any]:
    """Returns the rule that only pods of the training reach it: Ray and the group of NN workers have no keys."""
    selector = {"matchLabels": part_labels("training")}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("persia-training", DRIVER),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selector}]}],
        },
    }


def _memory(name: str, size: str) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _script(lines: list[str]) -> list[str]:
    return ["sh", "-ec", "\n".join(lines) + "\n"]
