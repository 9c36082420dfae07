"""The parts that all pods share: user, keys, volumes and labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from persia.plan.deployment import DeploymentPlan

__all__ = [
    "ACCOUNT",
    "IMAGE",
    "KEYS_FILE",
    "RUN_DIRECTORY",
    "STORAGE_DIRECTORY",
    "PodPlan",
    "container",
    "labels",
    "mebibytes",
    "metadata",
    "part_labels",
    "pod",
    "secret_volume",
    "spread",
]

IMAGE = "registry.example.com/persia"
"""Name that `images` of a kustomization replaces by the registry's."""
USER = 1000
"""The user of the image; see the `Dockerfile`."""
ACCOUNT = "persia"
RUN_DIRECTORY = "/etc/persia/run"
"""The configuration and the user's modules, in all pods."""
STORAGE_DIRECTORY = "/srv/persia"
"""The volume that all pods share."""
KEYS_FILE = "/etc/persia/keys/keys"
SERVING = ("server", "rows")
"""Components of serving; all others are of the training."""
OWNER_READS = 0o400
"""Mode of a secret. Kubernetes makes it 0440, for `fsGroup`: the file belongs to root, and persia is not root."""


class PodPlan(NamedTuple):
    """The input of the manifests of a run.

    Attributes:
        plan: the plan.
        command: command that made the plan, for the first line of each file.
        config: configuration of the run as pods read it, in TOML.
        modules: further files next to the configuration, by name.
        checkpoints: directory or URL of the checkpoints.
        changes: log of changes that prediction servers follow; None for no servers.
        shared: whether pods share a volume at `STORAGE_DIRECTORY`.
        model_module: module of the user's network; None for a network of persia.
        regions: `RayOptions.regions`.
        disks: directories of rows on SSD.
        served_bytes: bytes of all rows in a prediction server.
        stored_bytes: bytes of the shared volume.
    """

    plan: DeploymentPlan
    command: str
    config: str
    modules: Mapping[str, str]
    checkpoints: str
    changes: str | None
    shared: bool
    model_module: str | None
    regions: str
    disks: tuple[str, ...]
    served_bytes: int
    stored_bytes: int

    @property
    def stop_seconds(self) -> int:
        """Seconds that the training may take to stop: its last checkpoint, in twice the planned time, and a minute."""
        return 60 + math.ceil(2 * self.plan.checkpoint_seconds)


def part_labels(part: str) -> dict[str, str]:
    """Returns the labels by which all pods of a part are selected: "training" or "serving"."""
    return {"app.kubernetes.io/name": "persia", "app.kubernetes.io/part-of": f"persia-{part}"}


def labels(component: str) -> dict[str, str]:
    """Returns the labels by which a component's pods are selected."""
    part = "serving" if component in SERVING else "training"
    return {**part_labels(part), "app.kubernetes.io/component": component}


def metadata(name: str, component: str) -> dict[str, Any]:
    """Returns the name and the labels of an object."""
    return {"name": name, "labels": labels(component)}


def mebibytes(count: float) -> str:
    """Returns bytes as a quantity of Kubernetes, rounded down."""
    return f"{math.floor(count / (1 << 20))}Mi"


def container(name: str, command: list[str], resources: Mapping[str, str], mounts: Mapping[str, str]) -> dict[str, Any]:
    """Returns a container that has no more rights than its user, and the resources that it uses reserved.

    Args:
        name: name of the container.
        command: the command line. `tini` passes signals on to it, which the first process of a container lacks.
        resources: quantities by resource.
        mounts: directories by volume.
    """
    return {
        "name": name,
        "image": IMAGE,
        "command": ["tini", "--", *command],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }


def pod(
    request: PodPlan, component: str, containers: list[dict[str, Any]], volumes: list[dict[str, Any]], seconds: int
) -> dict[str, Any]:
    """Returns the template of a pod, with the volumes of the configuration and of the shared storage.

    Args:
        request: input of the manifests.
        component: component of the pod.
        containers: its containers, which also get the mounts of these volumes.
        volumes: further volumes.
        seconds: time to stop.
    """
    shared = [{"name": "run", "configMap": {"name": "persia-run"}}]
    mounts = [{"name": "run", "mountPath": RUN_DIRECTORY, "readOnly": True}]
    if request.shared:
        shared.append({"name": "storage", "persistentVolumeClaim": {"claimName": "persia-storage"}})
        mounts.append({"name": "storage", "mountPath": STORAGE_DIRECTORY})
    for each in containers:
        each["volumeMounts"] += mounts
    return {
        "metadata": {"labels": labels(component)},
        "spec": {
            "serviceAccountName": ACCOUNT,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": seconds,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": containers,
            "volumes": [*volumes, *shared],
        },
    }


def secret_volume(name: str, secret: str) -> dict[str, Any]:
    """Returns a volume with the file `keys` of a secret."""
    return {
        "name": name,
        "secret": {"secretName": secret, "defaultMode": OWNER_READS, "items": [{"key": "keys", "path": "keys"}]},
    }


def spread(component: str, required: bool) -> dict[str, Any]:
    """Returns the affinity that puts each pod of a component on a node of its own, or does so if it can."""
    term = {"labelSelector": {"matchLabels": labels(component)}, "topologyKey": "kubernetes.io/hostname"}
    if required:
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
