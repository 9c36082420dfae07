"""Manifests for Kubernetes of a planned deployment: the training, its hosts, and prediction servers.

They need no operator and no template engine: `kubectl apply -k DIR`. See `docs/decisions/0030-manifests.md`.
"""

from persia.plan.kubernetes.files import kubernetes_files
from persia.plan.kubernetes.pods import RUN_DIRECTORY, STORAGE_DIRECTORY, PodPlan

__all__ = ["RUN_DIRECTORY", "STORAGE_DIRECTORY", "PodPlan", "kubernetes_files"]
