"""Manifests of prediction servers, which follow the log of changes of a training.

If the rows do not fit into a server, row servers hold parts of them. A server has as much memory as the largest kind of
host in the plan, at most.
"""

from __future__ import annotations

from typing import Any

from persia.plan.kubernetes.pods import (
    RUN_DIRECTORY,
    PodPlan,
    container,
    labels,
    mebibytes,
    metadata,
    pod,
    secret_volume,
    spread,
)
from persia.plan.kubernetes.row_servers import (
    PROGRAM_BYTES,
    SERVER,
    parts_for,
    row_server_address,
    row_server_manifests,
)

__all__ = ["serving_manifests"]

NAME = "persia-serve"
PORT = 8080
SERVERS = 2
CORES = "4"
LEAVE_SECONDS = 10
"""Time between the end of a pod's address and SIGTERM: balancers learn late, and a stopping server refuses them."""
DRAIN_SECONDS = 30
LOAD_SECONDS = 3600
"""Time that a new server may take to read a snapshot."""
EPOCHS = 2
"""Rows that a server holds at most: of the served epoch, and of a new one that it reads."""


def serving_manifests(request: PodPlan) -> list[dict[str, Any]]:
    """Returns the objects of the prediction servers; none if the run publishes nowhere."""
    if request.changes is None:
        return []
    parts = _parts(request)
    selector = {"matchLabels": labels(SERVER)}
    return [
        *(row_server_manifests(request, request.changes, parts) if parts else []),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(NAME, SERVER),
            "spec": {"selector": labels(SERVER), "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(NAME, SERVER),
            "spec": {
                "replicas": SERVERS,
                "minReadySeconds": 10,
                "progressDeadlineSeconds": LOAD_SECONDS,
                # An old server stops once a new one is ready.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "selector": selector,
                "template": _template(request, request.changes, parts),
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(NAME, SERVER),
            "spec": {"maxUnavailable": 1, "selector": selector},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(NAME, SERVER),
            "spec": {
                "podSelector": selector,
                "policyTypes": ["Ingress"],
                "ingress": [{"ports": [{"protocol": "TCP", "port": "http"}]}],
            },
        },
    ]


def _parts(request: PodPlan) -> int:
    """Returns the number of row servers; 0 if each server has all rows."""
    largest = max(host.kind.memory for host in request.plan.hosts)
    return 0 if PROGRAM_BYTES + EPOCHS * request.served_bytes <= largest else parts_for(request.served_bytes, largest)


def _template(request: PodPlan, changes: str, parts: int) -> dict[str, Any]:
    command = [
        "persia", "serve", changes, "--host", "0.0.0.0", "--port", str(PORT), "--key-file", "/etc/persia/keys/keys",
        "--cache-dir", "/var/cache/persia", "--drain-seconds", str(DRAIN_SECONDS),
    ]  # fmt: skip
    if request.model_module is not None:
        command += ["--import", request.model_module]
    for part in range(parts):
        command += ["--rows", row_server_address(part)]
    memory = PROGRAM_BYTES + (0 if parts else EPOCHS * request.served_bytes)
    resources = {"cpu": CORES, "memory": mebibytes(memory)}
    mounts = {"keys": "/etc/persia/keys", "cache": "/var/cache/persia", "tmp": "/tmp"}
    server = container("server", command, resources, mounts)
    server["securityContext"]["readOnlyRootFilesystem"] = True
    live = {"httpGet": {"path": "/live", "port": "http"}}
    server |= {
        "env": [{"name": "PYTHONPATH", "value": RUN_DIRECTORY}, {"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**live, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**live, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2, "timeoutSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}},
    }
    volumes = [
        secret_volume("keys", "persia-serve-keys"),
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if parts:  # Row servers admit the keys of the roles.
        server["env"].append({"name": "PERSIA_CURVE_KEYS", "value": "/etc/persia/row-keys/keys"})
        server["volumeMounts"].append({"name": "row-keys", "mountPath": "/etc/persia/row-keys"})
        volumes.append(secret_volume("row-keys", "persia-keys"))
    template = pod(request, SERVER, [server], volumes, LEAVE_SECONDS + DRAIN_SECONDS + 20)
    template["spec"]["affinity"] = spread(SERVER, required=False)
    return template
