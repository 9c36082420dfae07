"""The configuration of a training run: `TrainerOptions`, and `Declared`, which checkpoints record."""

from __future__ import annotations

import itertools
from types import NoneType
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from persia.checks import (
    MAX_SEED,
    MAX_STEPS,
    check_choice,
    check_flag,
    check_integer,
    check_kind,
    check_number,
    check_seconds,
    plain,
    plain_fields,
    plain_paths,
)
from persia.errors import ConfigError
from persia.metrics import WatchedMetric, check_metric_name, watched_metric
from persia.modes import Auto, Mode
from persia.nn.arguments import NEW_MODE, check_arguments
from persia.nn.compiled_training import COMPILE_MODES, CompileMode
from persia.nn.dense_step import Precision
from persia.nn.options import check_device
from persia.schema import EmbeddingOptimizer, Schedule, Schema
from persia.telemetry.tracking import BackgroundTracker, MLflow, TensorBoardTracker, Tracker, Wandb
from persia.types import PublishOptions

__all__ = ["Declared", "TrainerOptions", "check_dense_servers"]


DEFAULT_SECONDS = 600.0
"""Seconds between two checkpoints of a cluster of processes that nothing else says how often to write."""


class TrainerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a training run that have defaults.

    Args:
        seed: of row initialisation and admission. For the dense model, seed torch before you make it.
        device: where the network runs: "cpu", "cuda", "cuda:1", or "auto" for CUDA where an NN worker has a device,
            else the CPU. Each NN worker resolves it in its own process. The driver of a cluster of processes keeps its
            copy of the network on the CPU.
        precision: "float32", or autocast to "bf16" or "fp16" (with loss scaling).
        compile: compile forward and backward of the network in training, by `torch.compile` in its mode "default", or
            "reduce-overhead", which also replays its kernels as CUDA graphs on a GPU; None leaves it as it is. The
            first batch takes seconds to minutes. See the guide on the trainer.
        accumulation_steps: batches per update, of the network and of the embeddings.
        clip_norm: largest global norm of the dense gradient; None for no clipping.
        clip_embedding_norm: largest L2 norm of the gradients of all rows of a batch together; None for no clipping.
            See `CollectionOptions`; `clip_row_norm` of an embedding optimizer bounds each row.
        one_thread: whether the thread that trains also looks rows up and pushes gradients, while a GPU computes: see
            `CollectionOptions`. Not for asynchronous modes, nor for several NN workers.
        schedule: learning-rate factor of the dense optimizer by global step; steps that overflow in fp16 do not count.
        checkpoint_dir: where checkpoints go; None for none.
        checkpoint_every_steps: global steps between two checkpoints during `fit`; None for no such interval. They are
            written in the background; one that is due while another is being written is left out. There is always one
            at the end.
        checkpoint_every_seconds: seconds between two checkpoints; None for no such interval. "auto": on a cluster of
            processes, unless `checkpoint_every_steps` is set, 600, and more where it takes more than a minute to write
            one, so that at most a tenth of the time is spent on it; elsewhere as None.
        checkpoint_consistent: whether all rows of such a checkpoint are of one step. Otherwise a row is as it was when
            it was written, and PSs keep no old rows aside. `Sync` is always consistent.
        checkpoint_share: maximum share of the processors of each host that a checkpoint takes while it is written in
            the background. A smaller share slows training less, and the checkpoint takes longer.
        checkpoint_increments: checkpoints between two full ones that hold only the rows that have changed.
        keep_last: checkpoints kept, with those that they add to; older ones are removed.
        keep_best: keep the best checkpoint too, by this metric of `eval_data`: "auc", "log_loss", "normalized_entropy",
            "calibration" (closest to 1), "rmse", "mae", "accuracy", ...; with `Schema(group=...)` also "gauc", "ndcg@k"
            and "recall@k"; or "LABEL:METRIC" for one label. Of models with two towers whose items have only an id, such
            as `NextItem`, also "retrieval_hr@k", "retrieval_ndcg@k" and "retrieval_mrr", as of
            `Trainer.evaluate_retrieval`: `eval_data` are then read as there, and not scored otherwise. The file `BEST`
            names it. Without `eval_every_steps` and `eval_every_epochs`, checkpoints of an interval that is set are
            evaluated, and the one at the end; those of "auto" are not.
        eval_every_steps: evaluate `eval_data` at every global step that is a multiple of this. Training does not
            change by it: in `Sync` it gives the same bits.
        eval_every_epochs: evaluate `eval_data` after every n-th pass over the data.
        patience: end `fit` when the metric of `keep_best` has not improved for this many of those evaluations in a
            row; without `keep_best`, AUC for a binary first label, RMSE for a value, log-loss for classes. With a
            `checkpoint_dir`, each evaluation that improves writes a checkpoint, and the best one is kept. Ignored on
            streams, which have no end to come before.
        log_dir: TensorBoard directory (needs the extra `tensorboard`).
        trackers: `persia.MLflow` and `persia.Wandb`, which receive the metrics of the run.
        progress: whether to show a live line.
        timeout: seconds that any wait for data, embeddings or other NN workers may take.
        record_dir: directory for the schedule of each phase, `phase-1.jsonl`, ...: `persia.replay` follows it, and
            arrives at the same parameters. Lookups and updates of a PS exclude each other meanwhile.
        recovery_point_every_seconds: seconds between two recovery points, on clusters of processes: copies of the
            network, its optimizer and the data position in this process. NN workers restart from the last one when one
            of them has died.
        max_failures: maximum number of NN-worker restarts per `fit` call, after an NN worker, a dense PS or a host has
            died; the next such death ends the call. Other roles restart by themselves: see `RayOptions.restarts`.
        allow_empty: let `fit` on data without a single batch warn, instead of raising DataError.
        nonfinite: what `fit` does about gradients of rows that are not finite while the logits are. In either case the
            rows stay as they were, and log, result and report name table and feature. "warn" trains on without these
            gradients; "raise" ends `fit` after the step with a `DivergedError`. In fp16 they are usual while the loss
            scale is found, so there is only "warn".
        retrieval_leave_out: `leave_out` of metrics of retrieval in `keep_best`: features whose ids do not compete.
        publish: where `fit` publishes changes of rows, and the network, for those who serve them; None for nowhere.
        mode_schedule: `[(global step, mode), ...]`: from this step on this mode. `Trainer.switch` holds until the next
            entry.
    """

    seed: int = 0
    device: str = "auto"
    precision: Precision = "float32"
    accumulation_steps: int = 1
    clip_norm: float | None = None
    schedule: Schedule | None = None
    checkpoint_dir: str | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_every_seconds: float | Literal["auto"] | None = "auto"
    checkpoint_consistent: bool = True
    checkpoint_share: float = 0.1
    checkpoint_increments: int = 0
    keep_last: int = 2
    keep_best: str | None = None
    eval_every_steps: int | None = None
    eval_every_epochs: int | None = None
    patience: int | None = None
    log_dir: str | None = None
    trackers: list[MLflow | Wandb] = msgspec.field(default_factory=list)
    progress: bool = True
    timeout: float = 600.0
    record_dir: str | None = None
    recovery_point_every_seconds: float = 30.0
    max_failures: int = 5
    allow_empty: bool = False
    nonfinite: Literal["warn", "raise"] = "warn"
    publish: PublishOptions | None = None
    mode_schedule: list[tuple[int, Mode]] = msgspec.field(default_factory=list)
    clip_embedding_norm: float | None = None
    compile: CompileMode | None = None
    retrieval_leave_out: list[str] = msgspec.field(default_factory=list)
    one_thread: bool | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        paths = ("checkpoint_dir", "log_dir", "record_dir")
        plain_paths(self, *paths)
        for name in paths:
            check_kind(name, getattr(self, name), (str, NoneType), "a path, or None")
        check_device(self.device)
        check_choice("precision", self.precision, ("float32", "bf16", "fp16"))
        check_choice("nonfinite", self.nonfinite, ("warn", "raise"))
        if self.compile is not None:
            check_choice("compile", self.compile, COMPILE_MODES)
        if self.compile == "reduce-overhead" and self.accumulation_steps != 1:
            raise ConfigError(
                f'compile = "reduce-overhead" does not go with accumulation_steps = {self.accumulation_steps}: a CUDA '
                'graph overwrites the gradients of the batch before. Use compile = "default", or larger batches.',
                field="compile",
            )
        if self.nonfinite == "raise" and self.precision == "fp16":
            raise ConfigError(
                'nonfinite = "raise" does not go with precision = "fp16", whose gradients overflow now and then while '
                'the loss scale is found. Use "bf16" or "float32", or leave nonfinite at "warn".',
                field="nonfinite",
            )
        check_kind("schedule", self.schedule, (Schedule, NoneType), "a Schedule, or None")
        for name in ("checkpoint_consistent", "progress", "allow_empty"):
            check_flag(name, getattr(self, name))
        check_integer("accumulation_steps", self.accumulation_steps, 1)
        check_integer("keep_last", self.keep_last, 1)
        check_integer("checkpoint_increments", self.checkpoint_increments, 0)
        check_integer("max_failures", self.max_failures, 0)
        check_integer("seed", self.seed, 0, MAX_SEED)
        if self.checkpoint_every_steps is not None:
            check_integer("checkpoint_every_steps", self.checkpoint_every_steps, 1, MAX_STEPS)
        if self.checkpoint_every_seconds not in (None, "auto"):
            check_seconds("checkpoint_every_seconds", self.checkpoint_every_seconds)
        check_seconds("timeout", self.timeout)
        check_seconds("recovery_point_every_seconds", self.recovery_point_every_seconds)
        check_number("checkpoint_share", self.checkpoint_share, 0, 1, open_low=True)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, 0, open_low=True)
        if self.one_thread is not None:
            check_flag("one_thread", self.one_thread)
        if self.clip_embedding_norm is not None:
            check_number("clip_embedding_norm", self.clip_embedding_norm, 0, open_low=True)
        if self.record_dir is not None and self.accumulation_steps > 1:
            raise ConfigError(
                "A schedule is recorded batch by batch: leave accumulation_steps at 1.", field="record_dir"
            )
        check_kind("trackers", self.trackers, (list, tuple), "a list of MLflow and Wandb")
        for tracker in self.trackers:
            check_kind("trackers", tracker, (MLflow, Wandb), "a list of MLflow and Wandb")
        check_kind("publish", self.publish, (PublishOptions, NoneType), "PublishOptions, or None")
        check_kind("mode_schedule", self.mode_schedule, (list, tuple), "a list of (global step, mode)")
        for entry in self.mode_schedule:
            if not isinstance(entry, (list, tuple)) or len(entry) != 2:
                raise ConfigError(
                    f"Invalid mode_schedule with the entry {entry!r}; expected (global step, mode).",
                    field="mode_schedule",
                )
            check_integer("mode_schedule", plain(entry[0]), 0, MAX_STEPS)
            check_arguments(mode_schedule=(entry[1], NEW_MODE))
        steps = [plain(step) for step, _ in self.mode_schedule]
        if any(isinstance(step, np.generic) for step, _ in self.mode_schedule):
            modes = [mode for _, mode in self.mode_schedule]
            msgspec.structs.force_setattr(self, "mode_schedule", list(zip(steps, modes, strict=True)))
        if any(b <= a for a, b in itertools.pairwise(steps)):
            raise ConfigError(
                f"Invalid mode_schedule with the steps {steps}; expected rising numbers.", field="mode_schedule"
            )
        if self.keep_best is not None:
            check_metric_name("keep_best", self.keep_best)
        check_kind("retrieval_leave_out", self.retrieval_leave_out, (list, tuple), "a list of features")
        for name in ("eval_every_steps", "eval_every_epochs", "patience"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, MAX_STEPS)
        if self.patience is not None and not self.evaluates:
            raise ConfigError(
                "patience counts evaluations: set eval_every_steps or eval_every_epochs too.", field="patience"
            )

    @property
    def checkpoints_by_default(self) -> bool:
        """Whether nothing says how often checkpoints are written, so that a cluster of processes decides it."""
        return self.checkpoint_every_steps is None and self.checkpoint_every_seconds == "auto"

    def checkpoint_seconds(self, *, in_processes: bool) -> float | None:
        """Returns the seconds between two checkpoints; None if they are not written by time.

        Args:
            in_processes: whether this is a cluster of processes.
        """
        if self.checkpoint_every_seconds == "auto":
            return DEFAULT_SECONDS if in_processes and self.checkpoints_by_default and self.checkpoint_dir else None
        return self.checkpoint_every_seconds

    @property
    def evaluates(self) -> bool:
        """Whether `fit` evaluates at intervals of steps or passes."""
        return self.eval_every_steps is not None or self.eval_every_epochs is not None

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint is kept, if there are checkpoints."""
        return self.keep_best is not None or self.patience is not None

    def make_trackers(self) -> list[Tracker]:
        """Makes the trackers; they open nothing before the first `Trainer.fit`."""
        board: list[Tracker] = [TensorBoardTracker(self.log_dir)] if self.log_dir else []
        return [BackgroundTracker(tracker) for tracker in board + [tracker.tracker() for tracker in self.trackers]]


def check_dense_servers(options: TrainerOptions, mode: str) -> None:
    """Raises ConfigError for options that do not go with dense PSs.

    Args:
        options: of the run.
        mode: name of the mode that needs dense PSs.
    """
    if options.accumulation_steps > 1:
        raise ConfigError(
            f"accumulation_steps = {options.accumulation_steps} does not go with the mode {mode}. Leave it at 1: "
            "how many gradients make a step is the mode's, Gba's `global_batch_size` for example.",
            field="accumulation_steps",
        )
    if options.precision == "fp16":
        raise ConfigError(
            f'precision = "fp16" does not go with the mode {mode}: the loss scale would follow a step that is made '
            'elsewhere. Use "bf16" or "float32".',
            field="precision",
        )
    if options.one_thread:
        raise ConfigError(
            f"one_thread = true does not go with the mode {mode}, whose lookups wait for tokens in threads of their "
            "own. Leave it out, or use a synchronous mode.",
            field="one_thread",
        )
    if options.compile == "reduce-overhead":
        raise ConfigError(
            f'compile = "reduce-overhead" does not go with the mode {mode}: a CUDA graph overwrites gradients that are '
            'not pushed yet. Use compile = "default", or a synchronous mode.',
            field="compile",
        )


class Declared(NamedTuple):
    """The declarations of a run, as its user made them; each checkpoint records them.

    Attributes:
        schema: input of the model.
        embedding_optimizer: for tables that declare none.
        mode: the mode to begin with, or the rule that changes it.
        options: the rest.
    """

    schema: Schema
    embedding_optimizer: EmbeddingOptimizer
    mode: Mode | Auto
    options: TrainerOptions

    @property
    def auto(self) -> Auto | None:
        """The rule that changes the mode; None without one."""
        return self.mode if isinstance(self.mode, Auto) else None

    @property
    def watched(self) -> WatchedMetric:
        """The held-out metric that decides which state is the best.

        Raises:
            ConfigError: no label has it.
        """
        return watched_metric(self.schema, self.options.keep_best)

    @property
    def first_mode(self) -> Mode:
        """The mode to begin with."""
        return self.mode.sync if isinstance(self.mode, Auto) else self.mode
