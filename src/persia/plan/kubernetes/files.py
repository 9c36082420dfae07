"""The files of a deployment on Kubernetes, for `kubectl apply -k`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from persia.plan.kubernetes.pods import ACCOUNT, IMAGE, PodPlan, metadata
from persia.plan.kubernetes.serving import NAME, SERVERS, serving_manifests
from persia.plan.kubernetes.training import training_manifests
from persia.plan.kubernetes.yaml_text import yaml_text

__all__ = ["kubernetes_files"]


def kubernetes_files(request: PodPlan) -> dict[str, str]:
    """Returns the texts of the files of a deployment, by name.

    `kustomization.yaml` has the values: name and tag of the image, namespace, number of servers. They are changed
    there, or in a kustomization of the user's own that has this directory among its resources.

    Raises:
        ConfigError: the name of a kind of hosts does not fit Kubernetes.
    """
    manifests = {
        "common.yaml": [_account()],
        "training.yaml": training_manifests(request),
        "serving.yaml": serving_manifests(request),
    }
    files = {name: _text(request, documents) for name, documents in manifests.items() if documents}
    files["kustomization.yaml"] = _text(request, [_kustomization(request, list(files))])
    if request.shared:  # Not a resource: `kubectl delete -k` must not delete the checkpoints.
        files["storage.yaml"] = _text(request, [_storage(request)])
    return {**files, "config.toml": f"# {request.command}\n{request.config}", **request.modules}


def _kustomization(request: PodPlan, manifests: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "persia",
        "images": [{"name": IMAGE, "newName": IMAGE, "newTag": "latest"}],
    }
    if "serving.yaml" in manifests:
        values["replicas"] = [{"name": NAME, "count": SERVERS}]
    values["resources"] = manifests
    values["configMapGenerator"] = [{"name": "persia-run", "files": ["config.toml", *request.modules]}]
    # The Job cannot be changed: a new name of the ConfigMap would be rejected.
    values["generatorOptions"] = {"disableNameSuffixHash": True}
    return values


def _account() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": ACCOUNT, "labels": {"app.kubernetes.io/name": "persia"}},
        "automountServiceAccountToken": False,
    }


def _storage(request: PodPlan) -> dict[str, Any]:
    size = f"{math.ceil(request.stored_bytes / (1 << 30))}Gi"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata("persia-storage", "storage"),
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
    }


def _text(request: PodPlan, documents: Sequence[dict[str, Any]]) -> str:
    return f"# {request.command}\n" + "---\n".join(yaml_text(document) for document in documents)
