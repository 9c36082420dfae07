"""The configuration of a run, as `persia train CONFIG` reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import torch

from persia import data
from persia.checks import check_choice, check_integer, did_you_mean
from persia.cli.imports import import_modules
from persia.cluster import Embedded, Placement, RayOptions
from persia.cluster.ray.placement import PlacedRole
from persia.config import call, convert, dump
from persia.errors import ConfigError
from persia.metrics import check_metric_name
from persia.modes import Hybrid, Mode, ModeSetting
from persia.nn.dense_step import OptimizerFactory
from persia.nn.models.registry import MODELS, build
from persia.optim import APMSqueeze, APMSqueezeOptions
from persia.schema import Adagrad, EmbeddingOptimizer, Schema, with_values_of
from persia.services import Cluster
from persia.telemetry.process import check_port
from persia.trainer import Trainer
from persia.trainer.options import TrainerOptions
from persia.types import ModelDescription

__all__ = [
    "ClusterConfig",
    "ContinualConfig",
    "DataConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "Range",
    "RunConfig",
    "SweepConfig",
    "TrainConfig",
]

ReaderKind: TypeAlias = Literal[
    "parquet",
    "csv",
    "jsonl",
    "event_log",
    "criteo",
    "avazu",
    "movielens",
    "adult",
    "globo",
    "amazon",
    "diginetica",
    "kuairand",
    "mind",
    "taobao",
    "synthetic",
    "kafka",
]
READERS: dict[str, Callable[..., Any]] = {kind: getattr(data, kind) for kind in get_args(ReaderKind)}
FILES = ("parquet", "csv", "jsonl")
"""Readers of a file format. The schema names the columns."""
WITH_SCHEMA = (*FILES, "event_log", "kafka")
WITH_DEFAULT_PATH = tuple(
    kind for kind, make in READERS.items() if next(iter(inspect.signature(make).parameters.values())).default is None
)
"""Readers that default to files in PERSIA_DATA."""
TRAINING_ONLY = (
    *("split", "shuffle_rows", "drop_last", "shard", "group_rows", "similar_lengths"),
    *("leave_one_out", "newest_only"),
    *("start", "until", "group", "dead_letters"),
)
"""Options that select or order the training rows."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}


def _apmsqueeze(params: Iterable[torch.nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    """Makes an APMSqueeze optimizer from plain values: its arguments, and the fields of its options."""
    options = {name: arguments.pop(name) for name in PLAIN_OPTIONS if name in arguments}
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    return APMSqueeze(params, **arguments, options=convert(options, APMSqueezeOptions, "optimizer.options"))


PLAIN_OPTIONS = tuple(name for name in APMSqueezeOptions.__struct_fields__ if name != "process_group")
_apmsqueeze.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(each for each in inspect.signature(APMSqueeze).parameters.values() if each.name != "options"),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in PLAIN_OPTIONS),
    ]
)
OPTIMIZERS["apmsqueeze"] = _apmsqueeze


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Source of samples.

    Attributes:
        kind: a reader of `persia.data`.
        path: file, directory, glob or fsspec URL. "adult", "globo", "amazon", "diginetica", "kuairand", "mind" and
            "taobao" default to PERSIA_DATA; "synthetic" needs none. For "kafka" it is a topic, or several separated by
            commas.
        batch_size: samples per batch.
        options: further arguments of the reader, by name: fields of `persia.data.RowOptions` and
            `persia.data.ColumnOptions`, and the reader's own. "kafka" needs `bootstrap`.
    """

    kind: ReaderKind
    path: str | None = None
    batch_size: int = 1024
    options: dict[str, Any] = {}

    def reader(self, schema: Schema | None, where: str) -> Any:
        """Opens the reader.

        Args:
            schema: required by `WITH_SCHEMA`; other readers define their own.
            where: section of the configuration, for error messages.
        """
        make = READERS[self.kind]
        arguments = {"batch_size": self.batch_size, **self.options}
        if self.kind == "synthetic":
            return call(make, arguments, f"{where}.options")
        if self.path is None and self.kind not in WITH_DEFAULT_PATH:
            raise ConfigError(
                f"Missing {where}.path; give a file, directory, glob or URL, or a topic.", field=f"{where}.path"
            )
        if self.kind in WITH_SCHEMA:
            if schema is None:
                raise ConfigError(f"Missing [schema] section; {where}.kind = {self.kind!r} needs one.", field="schema")
            arguments["schema"] = schema
        if self.kind == "kafka" and "bootstrap" not in arguments:
            raise ConfigError(
                f"Missing {where}.options.bootstrap; give the addresses of some brokers, host:port,host:port.",
                field=f"{where}.options.bootstrap",
            )
        place = self.path.split(",") if self.kind == "kafka" and self.path is not None else self.path
        return call(make, arguments, f"{where}.options", place)

    def inheriting(self, data: DataConfig) -> DataConfig:
        """Returns a copy that inherits the options of the training data that it does not set itself.

        Options that select or order rows are not inherited. A reader of another kind inherits nothing.

        Raises:
            ConfigError: `data` leaves events out, and this does not say which of the same events it takes.
        """
        if self.kind != data.kind:
            return self
        part = data.options.get("leave_one_out")
        if part is not None and self.path == data.path and "leave_one_out" not in self.options:
            raise ConfigError(
                f"data.options.leave_one_out is {part!r}, and eval_data reads the same events. Set "
                "eval_data.options.leave_one_out to 'validation' or 'test'.",
                field="eval_data.options.leave_one_out",
            )
        inherited = {name: value for name, value in data.options.items() if name not in TRAINING_ONLY}
        return msgspec.structs.replace(self, options=inherited | self.options)

    def in_order(self) -> DataConfig:
        """Returns a copy that reads all samples in the order of the source, for output aligned with its rows."""
        fixed: data.RowOptions = {"shuffle_rows": 0, "similar_lengths": False, "drop_last": False, "group_rows": 0}
        return msgspec.structs.replace(self, options={k: fixed.get(k, v) for k, v in self.options.items()})

    def of_file(self, path: str) -> DataConfig:
        """Returns a copy that reads another file, whose rows are not split.

        Args:
            path: file, directory, glob or fsspec URL.

        Raises:
            ConfigError: the reader is not "parquet", "csv" or "jsonl".
        """
        if self.kind not in FILES:
            raise ConfigError(
                f"--data reads files as {', '.join(FILES)} do, and the configuration has kind = {self.kind!r}; set "
                "path and options of that reader with --set.",
                field="data",
            )
        options = {key: value for key, value in self.options.items() if key != "split"}
        return msgspec.structs.replace(self, path=path, options=options)

    def unlabelled(self, labels: Iterable[str]) -> DataConfig:
        """Returns a copy that takes every row as a sample, including rows without these labels."""
        options = {key: value for key, value in self.options.items() if key != "where"}
        options["fill"] = dict(options.get("fill", {})) | dict.fromkeys(labels, 0.0)
        return msgspec.structs.replace(self, options={**options, "require_labels": False})


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network.

    Attributes:
        kind: a model of `persia.nn.models`, or one of your own as "module:Class", such as "model:Model" for the class
            `Model` in `model.py` next to the configuration. The class takes the schema, then the options.
        options: arguments of the model, by name (`hidden`, `dropout`, ...).
    """

    kind: str = "ffnn"
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.kind not in MODELS and not all(self.kind.partition(":")):
            raise ConfigError(
                f"Invalid model.kind = {self.kind!r}; expected one of: {', '.join(MODELS)}; or a class of your own as "
                f"module:Class.{did_you_mean(self.kind, MODELS)}",
                field="model.kind",
            )

    def build(self, schema: Schema) -> torch.nn.Module:
        """Builds the network for a schema.

        Raises:
            ConfigError: the module or its class is not found, or an option is unknown or invalid.
        """
        if self.kind not in MODELS:
            import_modules([self.kind.partition(":")[0]], "model.kind")
        return build(ModelDescription(self.kind, self.options), schema)


class OptimizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimizer of the network.

    Attributes:
        kind: an optimizer of `torch.optim`, or "apmsqueeze": Adam with 1-bit communication.
        lr: learning rate.
        options: further arguments of the optimizer, by name; for "apmsqueeze" also the fields of `APMSqueezeOptions`.
    """

    kind: str = "adam"
    lr: float = 1e-3
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        check_choice("optimizer.kind", self.kind, list(OPTIMIZERS))

    def factory(self) -> OptimizerFactory:
        """Returns a function that makes the optimizer from parameters."""
        return lambda parameters: call(
            OPTIMIZERS[self.kind], {"lr": self.lr, **self.options}, "optimizer.options", parameters
        )


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Placement and number of the roles.

    The fields from `ps` on apply to "ray" only.

    Attributes:
        kind: "embedded": all roles in one process; "ray": one process per role instance.
        threads: threads of each process's store, and with "ray" of torch; null for one per core.
        ps: number of embedding PSs.
        embedding_workers: number of embedding workers.
        data_loaders: number of data loaders.
        nn_workers: number of NN workers.
        overcommit: accept tables whose declared capacity exceeds the memory of the hosts, with a warning.
        place: placements by role, such as `[cluster.place.ps]` with `memory = "100GB"`.
        ray: address, resources, compression, ...
    """

    kind: Literal["embedded", "ray"] = "embedded"
    threads: int | None = None
    ps: int = 1
    embedding_workers: int = 1
    data_loaders: int = 1
    nn_workers: int = 1
    overcommit: bool = False
    place: dict[PlacedRole, Placement] = {}
    ray: RayOptions = RayOptions()

    @property
    def goes_on(self) -> bool:
        """Whether the driver of this run has died, so that its output is no other run's."""
        from persia.cluster.ray.driver_folder import has_recovery_point

        return self.kind == "ray" and self.ray.run is not None and has_recovery_point(self.ray.run)

    def build(self, prometheus_port: int | None = None) -> Cluster:
        """Builds the cluster without starting a process."""
        if self.kind == "embedded":
            return Embedded(self.threads, prometheus_port, self.overcommit)
        from persia.cluster import Ray

        port = self.ray.prometheus_port if prometheus_port is None else prometheus_port
        options = msgspec.structs.replace(
            self.ray,
            threads=self.ray.threads or self.threads,
            overcommit=self.ray.overcommit or self.overcommit,
            prometheus_port=port,
        )
        return Ray(self.ps, self.embedding_workers, self.data_loaders, self.nn_workers, options, self.place)


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Export of metrics, in addition to `trainer.log_dir` and `trainer.progress`.

    Attributes:
        prometheus_port: port on which each process exports its metrics, or the next free one; null for no export.
        ui_port: port at 127.0.0.1 of the page of `persia train --ui`, or the next free one; 0 for any.
    """

    prometheus_port: int | None = None
    ui_port: int = 8060

    def __post_init__(self) -> None:
        check_port(self.prometheus_port, "observe.prometheus_port")
        check_port(self.ui_port, "observe.ui_port")


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Length of the training.

    Attributes:
        epochs: passes over the data in total, including passes before a resume.
        max_steps: maximum number of global steps; null for no limit.
        fit_rows: rows that rules of features are fitted to, from the beginning of `data`; null for all, of a topic
            those that exist when fitting begins.
    """

    epochs: int = 1
    max_steps: int | None = None
    fit_rows: int | None = None

    def __post_init__(self) -> None:
        if self.fit_rows is not None:
            check_integer("train.fit_rows", self.fit_rows, 1)


class ContinualConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Further configuration of `persia continual`.

    Attributes:
        modes: mode from a given day on, by day: `[continual.modes.8]` with `kind = "gba"`. Earlier days use `mode`.
    """

    modes: dict[str, Mode] = {}

    def __post_init__(self) -> None:
        for day in self.modes:
            if not day.isdecimal():
                raise ConfigError(
                    f"Invalid day in continual.modes.{day}; expected a whole number.", field=f"continual.modes.{day}"
                )

    def mode(self, day: int) -> Mode | None:
        """Returns the mode of a day; None before the first entry."""
        started = [int(first) for first in self.modes if int(first) <= day]
        return {int(first): mode for first, mode in self.modes.items()}[max(started)] if started else None


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of numbers of a sweep; whole numbers if both ends are whole.

    Attributes:
        low: least number.
        high: greatest number.
        log: draw from the logarithms, as for learning rates.
    """

    low: int | float
    high: int | float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ConfigError(
                f"Invalid range from {self.low} to {self.high}; expected low < high, and low > 0 with log.",
                field="sweep.values",
            )


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trials of `persia train --sweep`.

    Attributes:
        values: by path, as in `--set`: a list of values, or a range `{ low = 1e-4, high = 1e-2, log = true }`.
        trials: number of trials, which Optuna's TPE sampler draws. By default all combinations if all values are
            lists, else 20.
        metric: metric to optimise, named as in `trainer.keep_best`; null for the default of the first label. It is of
            `eval_data`, or progressive if there is none. Where `trainer.keep_best` or `trainer.patience` watches this
            metric, that of the best checkpoint of a trial.
        prune_every_steps: interval in steps at which a trial stops if its progressive metric is worse than the median
            of earlier trials at that step. Not set: no trial stops early.
        seed: seed of the sampler.
    """

    values: dict[str, Range | list[Any]] = {}
    trials: int | None = None
    metric: str | None = None
    prune_every_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("trials", "prune_every_steps"):
            if (value := getattr(self, name)) is not None:
                check_integer(f"sweep.{name}", value, 1)
        if self.metric is not None:
            check_metric_name("sweep.metric", self.metric)
        for path, values in self.values.items():
            if isinstance(values, list) and not values:
                raise ConfigError(f"sweep.values.{path!r} is an empty list; give values.", field="sweep.values")


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        data: training samples.
        eval_data: samples to evaluate on at the end; null for none. If it has the kind of `data`, it inherits the
            options of `data` that it does not set, except options that select or order rows.
        schema: required by "parquet", "csv", "jsonl" and "kafka"; other readers define their own.
        model: the network.
        optimizer: optimizer of the network.
        embedding_optimizer: optimizer of tables that declare none.
        mode: training mode: `kind = "sync"`, "hybrid", "gba", ...; or "auto", with a section `mode.asynchronous`.
        cluster: placement and number of the roles.
        train: length of the training.
        trainer: precision, checkpoints, seed, ...
        observe: export of metrics.
        continual: options of `persia continual`.
        sweep: options of `persia train --sweep`.
        imports: modules that define modes, which are imported first.
    """

    data: DataConfig
    eval_data: DataConfig | None = None
    schema: Schema | None = None
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    embedding_optimizer: EmbeddingOptimizer = Adagrad(lr=0.05)
    mode: ModeSetting = Hybrid()
    cluster: ClusterConfig = ClusterConfig()
    train: TrainConfig = TrainConfig()
    trainer: TrainerOptions = TrainerOptions()
    observe: ObserveConfig = ObserveConfig()
    continual: ContinualConfig = ContinualConfig()
    sweep: SweepConfig | None = None
    imports: list[str] = []

    def __post_init__(self) -> None:
        if self.eval_data is not None:
            msgspec.structs.force_setattr(self, "eval_data", self.eval_data.inheriting(self.data))

    def saving_to(self, directory: str) -> RunConfig:
        """Returns a copy that saves checkpoints to a directory."""
        trainer = msgspec.structs.replace(self.trainer, checkpoint_dir=directory)
        return msgspec.structs.replace(self, trainer=trainer)

    def fitted_as(self, saved: Schema) -> RunConfig:
        """Returns a copy with the fitted values of a saved schema, for features that both declare in the same way."""
        return self if self.schema is None else self.of_schema(with_values_of(self.schema, saved))

    def of_schema(self, schema: Schema) -> RunConfig:
        """Returns a copy with another schema."""
        return msgspec.structs.replace(self, schema=schema)

    def reader(self) -> Any:
        """Opens the training reader; its `schema` is the run's."""
        return self.data.reader(self.schema, "data")

    def build_trainer(self, schema: Schema) -> Trainer:
        """Builds a new trainer; initialises the network from `trainer.seed`."""
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
        """Returns the configuration as plain data, including defaults."""
        return dump(self)
