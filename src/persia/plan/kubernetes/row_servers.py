"""Manifests of row servers, which hold parts of the rows for prediction servers."""

from __future__ import annotations

import math
import shlex
from typing import Any

from persia.plan.kubernetes.pods import (
    KEYS_FILE,
    PodPlan,
    container,
    labels,
    mebibytes,
    metadata,
    pod,
    secret_volume,
    spread,
)

__all__ = ["PROGRAM_BYTES", "SERVER", "parts_for", "row_server_address", "row_server_manifests"]

SERVER = "server"
"""Component of prediction servers, which may connect."""
ROWS = "rows"
NAME = "persia-rows"
PORT = 7000
CORES = "4"
PROGRAM_BYTES = 4 << 30
"""Memory of a server without its rows."""
EPOCHS = 3
"""Rows that it holds at most: of the served epoch, of the one before for servers that lag, and of a new one."""
STOP_SECONDS = 30


def parts_for(served: int, memory: int) -> int:
    """Returns the number of row servers for bytes of rows, if each may have this much memory."""
    return max(2, math.ceil(EPOCHS * served / max(1 << 30, memory - PROGRAM_BYTES)))


def row_server_address(part: int) -> str:
    """Returns the address of a part."""
    return f"tcp://{NAME}-{part}.{NAME}:{PORT}"


def row_server_manifests(request: PodPlan, changes: str, parts: int) -> list[dict[str, Any]]:
    """Returns the objects of the row servers, of which each has the part of its number.

    Args:
        request: input of the manifests.
        changes: log of changes.
        parts: number of row servers.
    """
    script = (
        f'exec persia serve-rows {shlex.quote(changes)} --part "${{HOSTNAME##*-}}/{parts}" '
        f"--address tcp://0.0.0.0:{PORT} --cache-dir /var/cache/persia\n"
    )
    memory = PROGRAM_BYTES + math.ceil(EPOCHS * request.served_bytes / parts)
    mounts = {"keys": "/etc/persia/keys", "cache": "/var/cache/persia", "tmp": "/tmp"}
    rows = container("rows", ["sh", "-ec", script], {"cpu": CORES, "memory": mebibytes(memory)}, mounts)
    rows["securityContext"]["readOnlyRootFilesystem"] = True
    listens = {"tcpSocket": {"port": "rows"}}
    rows |= {
        "env": [{"name": "PERSIA_CURVE_KEYS", "value": KEYS_FILE}, {"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "rows", "containerPort": PORT}],
        "startupProbe": {**listens, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**listens, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**listens, "periodSeconds": 5},
    }
    volumes = [
        secret_volume("keys", "persia-keys"),
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    template = pod(request, ROWS, [rows], volumes, STOP_SECONDS)
    template["spec"]["affinity"] = spread(ROWS, required=False)
    selector = {"matchLabels": labels(ROWS)}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(NAME, ROWS),
            "spec": {
                "clusterIP": "None",
                "selector": labels(ROWS),
                "ports": [{"name": "rows", "port": PORT}],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": metadata(NAME, ROWS),
            "spec": {
                "serviceName": NAME,
                "replicas": parts,
                "podManagementPolicy": "Parallel",
                # A part that starts again has no rows until it has read its snapshot, which a port does not tell.
                "updateStrategy": {"type": "OnDelete"},
                "selector": selector,
                "template": template,
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(NAME, ROWS),
            "spec": {"maxUnavailable": 1, "selector": selector},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(NAME, ROWS),
            "spec": {
                "podSelector": selector,
                "policyTypes": ["Ingress"],
                "ingress": [
                    {
                        "from": [{"podSelector": {"matchLabels": labels(SERVER)}}],
                        "ports": [{"protocol": "TCP", "port": "rows"}],
                    }
                ],
            },
        },
    ]
