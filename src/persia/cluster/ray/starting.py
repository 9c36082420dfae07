"""What comes before the first process of a cluster: Ray itself, and what all processes are told."""

from __future__ import annotations

import os
import sys
import uuid

import ray

from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.plan import Plan
from persia.cluster.ray.processes import NAMESPACE
from persia.errors import ConfigError
from persia.rpc.keys import KEYS_VARIABLE

__all__ = ["connect", "make_plan"]


def connect(address: str | None) -> bool:
    """Connects this program to Ray, or starts one, unless that has been done; whether it was done here."""
    if ray.is_initialized():
        return False
    # Without an address Ray would join whatever it finds on this machine.
    address = address or (None if "RAY_ADDRESS" in os.environ else "local")
    ray.init(address=address, namespace=NAMESPACE, include_dashboard=False if address == "local" else None)
    return True


def make_plan(servers: int, nn_workers: int, options: RayOptions) -> Plan:
    """A plan without a coordinator, for a new cluster on the hosts of Ray.

    Raises:
        ConfigError: there are several hosts, and no keys.
    """
    loopback = sum(node["Alive"] for node in ray.nodes()) == 1
    keys = os.environ.get(KEYS_VARIABLE)
    if not loopback and not keys:
        raise ConfigError(
            "This Ray cluster has several hosts, and there are no keys: anybody who reaches them could read and change "
            f"the embeddings. Make keys with persia.rpc.make_keys, put them on every host, and set {KEYS_VARIABLE}.",
            field="cluster",
        )
    return Plan(f"persia-{uuid.uuid4().hex[:8]}", servers, nn_workers, options, loopback, keys, list(sys.path))
