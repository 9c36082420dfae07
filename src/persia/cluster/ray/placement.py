"""`Placement`: the hosts that a role needs, and the resources that each process reserves; importable without ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from persia.checks import MAX_COUNT, check_choice, check_kind, check_number, described, plain, plain_fields
from persia.cluster.ray.options import RayOptions
from persia.errors import ConfigError
from persia.types.explaining import explained
from persia.units import parse_bytes

__all__ = ["RESOURCE_UNIT", "Place", "PlacedRole", "Placement", "nn_worker_gpus", "read_place"]

PlacedRole = Literal["ps", "embedding_worker", "data_loader", "nn_worker", "dense_ps"]
"""Roles that can be placed. The coordinator runs on the host of the driver, without which training ends anyway."""

ROLES: tuple[PlacedRole, ...] = ("ps", "embedding_worker", "data_loader", "nn_worker", "dense_ps")

MAX_BYTES = 1 << 62
RESOURCE_UNIT = 1e-4
"""Ray counts resources in units of this size."""
FIELDS = ("CPU", "GPU", "memory")
"""Resources that are fields of `Placement`, so not among its `resources`."""


class Placement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename={"cpu": "CPU", "gpu": "GPU"}
):
    """Demands of each process of a role on its host. Plain data: `msgspec.json.encode`, or a section of a TOML file.

    Ray counts `memory`, `cpu`, `gpu` and `resources` of its hosts, and does not exceed them. In dicts and files `cpu`
    and `gpu` have Ray's names, `CPU` and `GPU`.

    Args:
        memory: bytes, or a string such as "100GB" or "64GiB". A PS holds rows up to this size, in regions that need as
            much free space on its host (unless `overcommit` is set). For other roles it is only reserved in Ray.
        cpu: number of processors; None for `RayOptions.cpus`.
        gpu: number of GPUs, only for NN workers; None for `RayOptions.gpus`. 0.5 lets two NN workers share a GPU.
        resources: custom Ray resources by name, such as `{"ssd": 1}` for `ray start --resources='{"ssd": 4}'`.
        labels: required labels of the host, such as `{"pool": "memory"}` for `ray start --labels=pool=memory`.
        strategy: "spread" over as many hosts as possible, PSs in proportion to free memory; or "pack" onto as few as
            possible, for fast communication among the processes of the role.
    """

    memory: int | str = 0
    cpu: float | None = None
    gpu: float | None = None
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    strategy: Literal["spread", "pack"] = "spread"

    def __post_init__(self) -> None:
        plain_fields(self)
        _bytes(self.memory)
        for name, amount in (("CPU", self.cpu), ("GPU", self.gpu)):
            if amount is not None:
                _check_amount(f"Placement.{name}", amount)
        if self.gpu is not None and self.gpu > 1 and self.gpu != int(self.gpu):
            raise ConfigError(
                f"Invalid Placement.GPU = {self.gpu!r}; expected a whole number, or a fraction of one GPU.", field="GPU"
            )
        check_kind("Placement.resources", self.resources, dict, "amounts by the name of a resource")
        for resource, amount in self.resources.items():
            _check_resource(resource)
            _check_amount(f"Placement.resources[{resource!r}]", amount)
        check_kind("Placement.labels", self.labels, dict, "values by the name of a label")
        for label, value in self.labels.items():
            check_kind(f"Placement.labels[{label!r}]", value, str, "a string")
        check_choice("Placement.strategy", self.strategy, ("spread", "pack"))

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return _bytes(self.memory)

    def demand(self) -> dict[str, float]:
        """Returns the nonzero amounts of resources that a process takes, by Ray's names."""
        amounts = {"memory": float(self.memory_bytes), "CPU": self.cpu or 0.0, "GPU": self.gpu or 0.0}
        if 0 < amounts["GPU"] < 1:  # Each process is on one GPU: two processes with 0.4 leave too little for a third.
            amounts["GPU"] = 1 / math.floor(1 / amounts["GPU"] + RESOURCE_UNIT)
        return {name: amount for name, amount in {**amounts, **self.resources}.items() if amount}


Place = dict[PlacedRole, Placement]
"""Placements by role."""


def read_place(place: object) -> Place:
    """Checks the argument `place` of a cluster, whose placements may be plain data.

    Raises:
        ConfigError: a role is unknown, or a placement is not valid.
    """
    check_kind("place", place, Mapping, 'a dict by role, such as {"ps": {"memory": "100GB"}}')
    assert isinstance(place, Mapping)
    placements: Place = {}
    for role, placement in place.items():
        check_choice("role in place", role, ROLES, field="place")
        try:
            values = {name: plain(v) for name, v in placement.items()} if isinstance(placement, Mapping) else placement
            placements[role] = msgspec.convert(values, Placement)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"Invalid place[{role!r}] = {placement!r}: {explained(error, values, Placement)}.",
                field=f"place.{role}",
            ) from error
        if placements[role].gpu and role != "nn_worker":
            raise ConfigError(
                f"place[{role!r}] reserves a GPU, which would idle: only NN workers compute on GPUs. To use hosts with "
                "GPUs for their memory or processors, give them a label and require it.",
                field=f"place.{role}",
            )
    return placements


def nn_worker_gpus(placements: Place, options: RayOptions) -> RayOptions:
    """Returns the options with the GPUs of `place["nn_worker"]`, which NN workers must train on.

    Raises:
        ConfigError: `place` and `options` specify different numbers.
    """
    gpus = placements["nn_worker"].gpu if "nn_worker" in placements else None
    if gpus is None or gpus == options.gpus:
        return options
    if options.gpus:
        raise ConfigError(
            f"place['nn_worker'] reserves {gpus:g} GPU for each NN worker, but RayOptions.gpus is {options.gpus:g}. "
            "Set only one of them.",
            field="place.nn_worker",
        )
    return msgspec.structs.replace(options, gpus=gpus)


def _bytes(value: object) -> int:
    """Returns `Placement.memory` in bytes.

    Raises:
        ConfigError: it is not a number of bytes.
    """
    size = parse_bytes(value, "Placement.memory")
    if size > MAX_BYTES:
        raise ConfigError(
            f"Invalid Placement.memory = {described(value)}; expected at most {MAX_BYTES} bytes.",
            field="Placement.memory",
        )
    return size


def _check_resource(name: object) -> None:
    """Raises ConfigError unless this is the name of a custom resource."""
    if not isinstance(name, str) or not name or name in FIELDS:
        raise ConfigError(
            f"Invalid name {name!r} in Placement.resources; expected the name of a custom resource. Memory, CPUs and "
            "GPUs have their own fields.",
            field="resources",
        )


def _check_amount(name: str, amount: Any) -> None:
    check_number(name, amount, 0, MAX_COUNT)
