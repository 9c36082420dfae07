"""The configuration of a run: what `persia train CONFIG` reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import torch

from persia import data
from persia.cluster import Embedded, RayOptions
from persia.config import convert, dump
from persia.errors import ConfigError
from persia.modes import AnyMode, Auto, Hybrid
from persia.nn import models
from persia.nn.dense_step import OptimizerFactory
from persia.optim import APMSqueeze, APMSqueezeOptions
from persia.schema import Adagrad, EmbeddingOptimizer, Schema
from persia.services import Cluster
from persia.trainer import Trainer
from persia.trainer.options import TrainerOptions

__all__ = [
    "ClusterConfig",
    "ContinualConfig",
    "DataConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
]

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "ffnn": models.FFNN,
    "ffnn_paper": models.FFNN.paper,
    "deepfm": models.DeepFM,
    "dlrm": models.DLRM,
    "dcn_v2": models.DCNv2,
}
READERS: dict[str, Callable[..., Any]] = {
    "parquet": data.parquet,
    "csv": data.csv,
    "criteo": data.criteo,
    "avazu": data.avazu,
    "movielens": data.movielens,
    "adult": data.adult,
    "globo": data.globo,
    "synthetic": data.synthetic,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}


def _apmsqueeze(
    params: Iterable[torch.nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup: int | str = "auto",
    compressor: dict[str, Any] | None = None,
    communicate: str = "momentum",
    clip_norm: float | None = None,
    bucket_bytes: int = 25 << 20,
    variance_floor: float = 1e-3,
    timeout: float = 600.0,
    debug: bool = False,
) -> torch.optim.Optimizer:
    """APMSqueeze and its options by plain values."""
    options = {
        "warmup": warmup,
        "compressor": compressor or {"kind": "one_bit"},
        "communicate": communicate,
        "clip_norm": clip_norm,
        "bucket_bytes": bucket_bytes,
        "variance_floor": variance_floor,
        "timeout": timeout,
        "debug": debug,
    }
    converted = convert(options, APMSqueezeOptions, "optimizer.options")
    return APMSqueeze(params, lr, (betas[0], betas[1]), eps, weight_decay, options=converted)


OPTIMIZERS["apmsqueeze"] = _apmsqueeze


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where samples come from.

    Attributes:
        kind: a reader of `persia.data`.
        path: file, directory, glob or fsspec URL; "globo" and "adult" look in PERSIA_DATA when it is left out,
            "synthetic" needs none.
        batch_size: samples per batch.
        options: further arguments of the reader, by name.
    """

    kind: Literal["parquet", "csv", "criteo", "avazu", "movielens", "adult", "globo", "synthetic"]
    path: str | None = None
    batch_size: int = 1024
    options: dict[str, Any] = {}

    def reader(self, schema: Schema | None, where: str) -> Any:
        """Opens the reader.

        Args:
            schema: needed by "parquet" and "csv"; the others know theirs.
            where: section of the configuration, named in errors.
        """
        make = READERS[self.kind]
        arguments = {"batch_size": self.batch_size, **self.options}
        if self.kind == "synthetic":
            return _call(make, arguments, f"{where}.options")
        if self.path is None and self.kind not in ("globo", "adult"):
            raise ConfigError(f"{where}.path is missing; give a file, directory, glob or URL.", field=f"{where}.path")
        if self.kind in ("parquet", "csv"):
            if schema is None:
                raise ConfigError(f"{where}.kind = {self.kind!r} needs a [schema] section.", field="schema")
            arguments["schema"] = schema
        return _call(make, arguments, f"{where}.options", self.path)

    def in_order(self) -> DataConfig:
        """The same samples in the order of the source, all of them: what belongs beside its rows."""
        settled = {"shuffle_rows": 0, "drop_last": False}
        return msgspec.structs.replace(self, options={k: settled.get(k, v) for k, v in self.options.items()})


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network.

    Attributes:
        kind: a model of `persia.nn.models`.
        options: its arguments, by name (`hidden`, `dropout`, ...).
    """

    kind: Literal["ffnn", "ffnn_paper", "deepfm", "dlrm", "dcn_v2"] = "ffnn"
    options: dict[str, Any] = {}

    def build(self, schema: Schema) -> torch.nn.Module:
        """Makes the network for a schema."""
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in self.options.items()}
        network: torch.nn.Module = _call(MODELS[self.kind], options, "model.options", schema)
        return network


class OptimizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimizer of the network.

    Attributes:
        kind: of `torch.optim`, or "apmsqueeze": Adam that sends one bit per parameter.
        lr: learning rate.
        options: its further arguments, by name; for "apmsqueeze" also those of `APMSqueezeOptions`.
    """

    kind: Literal["adam", "adamw", "adagrad", "sgd", "rmsprop", "apmsqueeze"] = "adam"
    lr: float = 1e-3
    options: dict[str, Any] = {}

    def factory(self) -> OptimizerFactory:
        """What makes the optimizer from parameters."""
        return lambda parameters: _call(
            OPTIMIZERS[self.kind], {"lr": self.lr, **self.options}, "optimizer.options", parameters
        )


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the roles run.

    Attributes:
        kind: "embedded": all in one process; "ray": as processes.
        threads: of each process's store, and with "ray" of torch; null for one per core.
        ps: embedding PSs; for "ray", like all that follows.
        embedding_workers: how many.
        data_loaders: how many.
        nn_workers: how many.
        ray: address, resources, compression, ...
    """

    kind: Literal["embedded", "ray"] = "embedded"
    threads: int | None = None
    ps: int = 1
    embedding_workers: int = 1
    data_loaders: int = 1
    nn_workers: int = 1
    ray: RayOptions = RayOptions()

    def build(self, prometheus_port: int | None = None) -> Cluster:
        """The cluster; no process is started yet."""
        if self.kind == "embedded":
            return Embedded(self.threads, prometheus_port)
        from persia.cluster import Ray

        port = self.ray.prometheus_port if prometheus_port is None else prometheus_port
        options = msgspec.structs.replace(self.ray, threads=self.ray.threads or self.threads, prometheus_port=port)
        return Ray(self.ps, self.embedding_workers, self.data_loaders, self.nn_workers, options)


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the run can be watched, beside `trainer.log_dir` and `trainer.progress`.

    Attributes:
        prometheus_port: where each process exports its figures, the next free port being taken if need be; null for
            nowhere.
    """

    prometheus_port: int | None = None


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to train.

    Attributes:
        epochs: passes over the data.
        max_steps: most global steps; null for no bound.
    """

    epochs: int = 1
    max_steps: int | None = None


class ContinualConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `persia continual` needs beside.

    Attributes:
        modes: by day, the mode from this day on, such as `[continual.modes.8]` with `kind = "gba"`; `mode` before it.
    """

    modes: dict[str, AnyMode] = {}

    def __post_init__(self) -> None:
        for day in self.modes:
            if not day.isdecimal():
                raise ConfigError(f"continual.modes.{day}: a day is a whole number.", field=f"continual.modes.{day}")

    def mode(self, day: int) -> AnyMode | None:
        """That of a day; None before the first entry."""
        begun = [int(first) for first in self.modes if int(first) <= day]
        return {int(first): mode for first, mode in self.modes.items()}[max(begun)] if begun else None


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        data: training samples.
        eval_data: evaluated at the end; null for none.
        schema: needed by "parquet" and "csv"; other readers know theirs.
        model: the network.
        optimizer: of the network.
        embedding_optimizer: of tables that declare none.
        mode: of training: `kind = "sync"`, "hybrid", "gba", ...; or "auto", with a section `mode.asynchronous`.
        cluster: where the roles run.
        train: how long.
        trainer: precision, checkpoints, seed, ...
        observe: metrics for Prometheus.
        continual: for `persia continual`.
    """

    data: DataConfig
    eval_data: DataConfig | None = None
    schema: Schema | None = None
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    embedding_optimizer: EmbeddingOptimizer = Adagrad(lr=0.05)
    mode: AnyMode | Auto = Hybrid()
    cluster: ClusterConfig = ClusterConfig()
    train: TrainConfig = TrainConfig()
    trainer: TrainerOptions = TrainerOptions()
    observe: ObserveConfig = ObserveConfig()
    continual: ContinualConfig = ContinualConfig()

    def reader(self) -> Any:
        """The training reader; its `schema` is the run's."""
        return self.data.reader(self.schema, "data")

    def build_trainer(self, schema: Schema) -> Trainer:
        """A new trainer; the network's initialisation follows `trainer.seed`."""
        torch.manual_seed(self.trainer.seed)
        return Trainer(
            self.model.build(schema),
            schema,
            optimizer=self.optimizer.factory(),
            embedding_optimizer=self.embedding_optimizer,
            mode=self.mode,
            cluster=self.cluster.build(self.observe.prometheus_port),
            options=self.trainer,
        )

    def dump(self) -> dict[str, Any]:
        """The configuration as plain data, defaults included."""
        return dump(self)


def _call(make: Callable[..., Any], options: dict[str, Any], where: str, *positional: Any) -> Any:
    """Calls with options from a configuration; a wrong name becomes an error that lists the right ones."""
    known = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}.{name} is unknown; there are {', '.join(known)}.", field=f"{where}.{name}")
    try:
        return make(*positional, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}.", field=where) from error
