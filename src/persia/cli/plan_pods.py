"""Writes the files of a planned deployment on Kubernetes: `persia plan CONFIG --kubernetes DIR`."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from persia.cli import ui
from persia.cli.config_paths import directory_of
from persia.cluster.ray.placement import read_place
from persia.errors import ConfigError
from persia.plan import place_of
from persia.plan.kubernetes import STORAGE_DIRECTORY, PodPlan, kubernetes_files
from persia.plan.ray_launcher import PLACE_ROLES
from persia.printable import say

if TYPE_CHECKING:
    from persia.cli.run_config import RunConfig
    from persia.plan import DeploymentPlan, PlanRequest

__all__ = ["write_pods"]

SERVED_ROW_BYTES = 35
"""Id and index of a row in a prediction server, beyond its values; see `docs/decisions/0017-serving-rows.md`."""
LEAST_STORAGE = 10 << 30


def write_pods(
    directory: str, run: RunConfig, config: str, deployment: DeploymentPlan, request: PlanRequest, command: str
) -> None:
    """Writes manifests, and the configuration as pods read it.

    Args:
        directory: directory of the files, which are replaced.
        run: the configuration.
        config: path of its file.
        deployment: the plan.
        request: input of the plan.
        command: command that made the plan.

    Raises:
        ConfigError: the plan is of a single process, tables lack `spill`, or a directory or file cannot be written.
    """
    if not request.topology.apart:
        raise ConfigError(
            "Manifests are of a cluster: set cluster.kind = 'ray'. `embedded` runs all roles in one process, which "
            "needs a single container; see the Dockerfile.",
            field="cluster.kind",
        )
    if deployment.added:
        raise ConfigError(
            f"Rows do not fit into memory. Set `spill` and `capacity` of {', '.join(deployment.added)} in {config} "
            "before manifests are written.",
            field="spill",
        )
    in_pods = _in_pods(run, deployment)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        ui.print_toml(in_pods.dump())
    publish = in_pods.trainer.publish
    assert in_pods.trainer.checkpoint_dir is not None
    places = [in_pods.trainer.checkpoint_dir, *([] if publish is None else [publish.url])]
    checkpoint = sum(table.checkpoint for table in deployment.tables)
    copies = in_pods.trainer.keep_last + 1 + (0 if publish is None else publish.keep + 1)
    served = sum(table.rows * (4 * table.config.dim + SERVED_ROW_BYTES) for table in request.tables)
    module = in_pods.model.kind.partition(":")[0] if ":" in in_pods.model.kind else None
    files = kubernetes_files(
        PodPlan(
            deployment,
            command,
            text.getvalue(),
            _modules(config, [*run.imports, *([module] if module else [])]),
            in_pods.trainer.checkpoint_dir,
            None if publish is None else publish.url,
            any(place.startswith(STORAGE_DIRECTORY) for place in places),
            module,
            run.cluster.ray.regions,
            tuple(sorted({table.table.spill for table in request.tables if table.table.spill is not None})),
            served,
            max(LEAST_STORAGE, copies * checkpoint),
        )
    )
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (Path(directory) / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"Cannot write to {directory}: {error.strerror}. Give another directory.", path=directory
        ) from error
    say(f"Wrote {', '.join(files)} to {directory}. The guide `Deploy on Kubernetes` says what to fill in.")
    if publish is None:
        say("The run publishes nowhere (trainer.publish), so there are no prediction servers.")
    if in_pods.data.path is not None and "://" not in in_pods.data.path and in_pods.data.kind != "kafka":
        say(f"Pods read {in_pods.data.path}: it must be in the image, or below {STORAGE_DIRECTORY} on their volume.")


def _in_pods(run: RunConfig, deployment: DeploymentPlan) -> RunConfig:
    """Returns the configuration with the processes of the plan, and with local directories on the shared volume."""
    counts = {PLACE_ROLES[role.role]: role.processes for role in deployment.roles}
    cluster = msgspec.structs.replace(
        run.cluster,
        place=read_place(place_of(deployment)),
        ray=msgspec.structs.replace(run.cluster.ray, address="auto"),
        **counts,
    )
    trainer = run.trainer
    changes: dict[str, Any] = {
        "checkpoint_dir": _shared(trainer.checkpoint_dir or "", "checkpoints"),
        "log_dir": trainer.log_dir and _shared(trainer.log_dir, "tensorboard"),
        "record_dir": trainer.record_dir and _shared(trainer.record_dir, "schedule"),
    }
    if trainer.publish is not None:
        changes["publish"] = msgspec.structs.replace(trainer.publish, url=_shared(trainer.publish.url, "changes"))
    return msgspec.structs.replace(run, cluster=cluster, trainer=msgspec.structs.replace(trainer, **changes))


def _shared(place: str, name: str) -> str:
    """Returns a URL as it is, and a directory of the shared volume in place of a local one."""
    return place if "://" in place else f"{STORAGE_DIRECTORY}/{name}"


def _modules(config: str, names: list[str]) -> dict[str, str]:
    """Returns the user's modules next to the configuration; others must be in the image."""
    paths = [Path(directory_of(config)) / f"{name}.py" for name in names]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
