"""Plans with made-up rates, whose manifests for Kubernetes are tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from persia import plan
from persia.cli.app import app
from persia.cli.plan import run_key
from persia.cli.run_config import RunConfig
from persia.config import convert, load
from persia.plan.rates import BatchShape, CheckpointRate, DiskRate, RowRate, StepRate, WireRate, WorkloadRate

__all__ = ["Manifests", "container_of", "plan_pods", "save_rates"]


def save_rates(path: Path, config: Path, *overrides: Sequence[str]) -> None:
    """Writes rates of a configuration with two features of dim 4, also with each of these overrides of it."""
    names = ("id_0", "id_1")
    shape = BatchShape(256, dict.fromkeys(names, 256.0), dict.fromkeys(names, 200.0), {}, 1024.0, 5000)
    workloads = {}
    for each in ((), *overrides):
        key = run_key(convert(load(str(config), list(each)), RunConfig, "run.toml"))
        workloads[key] = WorkloadRate("run.toml", shape, 1e-4, 1e-4, 1e-5, StepRate("cpu", 0.002, 0.002))
    rates = plan.Rates(
        1,
        [plan.RateSource("here", 2, "0", "today", "")],
        {"4/float32/adagrad": RowRate(1e-7, 1e-7, 1000)},
        workloads,
        checkpoint=CheckpointRate(1e7, 1e7, 0.5),
        disk=DiskRate("/ssd", 1e5, 1e9),
        wire=WireRate(1e-5, 1e-9, 1e9),
    )
    plan.save_rates(str(path), rates)


def plan_pods(config: Path, hosts: Path, rates: Path, target: Path, *options: str) -> str:
    """Runs `persia plan CONFIG --kubernetes TARGET`, and returns what it prints, on one line."""
    words = ["plan", config, "--hosts", hosts, "--rates", rates, "--kubernetes", target, *options]
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None:
        raise result.exception
    return " ".join(result.output.split())


class Manifests:
    """The files in a directory.

    Attributes:
        folder: the directory.
        files: texts by name.
        kustomization: the kustomization.
        objects: its objects, in order, and the claim of the volume.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
        self.kustomization = yaml.safe_load(self.files["kustomization.yaml"])
        resources = self.kustomization["resources"]
        names = [*resources, *({"storage.yaml"} & self.files.keys())]
        self.objects = [each for name in names for each in yaml.safe_load_all(self.files[name])]

    def of(self, kind: str) -> dict[str, Any]:
        """Returns the objects of a kind by name."""
        return {each["metadata"]["name"]: each for each in self.objects if each["kind"] == kind}

    def pods(self) -> dict[str, Any]:
        """Returns the templates of pods, by the name of their owner."""
        kinds = ("Job", "StatefulSet", "Deployment")
        return {name: each["spec"]["template"] for kind in kinds for name, each in self.of(kind).items()}

    def scripts(self) -> Iterator[tuple[str, str]]:
        """Yields the scripts of containers, by the name of their owner."""
        for name, template in self.pods().items():
            command = container_of(template)["command"]
            if command[2:4] == ["sh", "-ec"]:
                yield name, command[4]


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    """Returns the only container of a pod."""
    (container,) = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container
