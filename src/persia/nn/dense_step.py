"""`DenseStep`: forward, loss, backward and optimizer of the dense network; precision and accumulation included."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch

from persia.dense.torch_threads import TorchThreads
from persia.errors import ConfigError
from persia.nn.compiled_training import CompiledTraining, CompileMode
from persia.nn.objective import Objective
from persia.nn.pooling import Embeddings
from persia.nn.prepared import PreparedBatch, loss_scale
from persia.nn.replicas import Replicas, SingleReplica
from persia.schema import Schedule, Schema
from persia.telemetry.metrics import Histogram
from persia.telemetry.tracing import Tracer

__all__ = ["DenseStep", "OptimizerFactory", "Precision", "StepOptions", "autocast_for"]

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Precision = Literal["float32", "bf16", "fp16"]


def autocast_for(precision: Precision, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Returns a function that makes the context of a forward pass in a precision.

    Args:
        precision: see `StepOptions`.
        device: where the network runs.
    """
    dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return contextlib.nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype)


class StepOptions(NamedTuple):
    """Options of the update of the dense network.

    Attributes:
        schedule: factor of all learning rates by the number of updates; those that overflow in fp16 do not count.
        precision: "bf16" and "fp16" run the forward pass under autocast; "fp16" also scales the loss.
        accumulation_steps: backward passes per optimizer step; the loss is divided by it.
        clip_norm: largest global norm of the dense gradient; None for no clipping.
        compile: mode of `torch.compile` for the network in training; None leaves it as it is.
    """

    schedule: Schedule | None = None
    precision: Precision = "float32"
    accumulation_steps: int = 1
    clip_norm: float | None = None
    compile: CompileMode | None = None


class DenseStep:
    """The dense network with its optimizer: computes gradients batch by batch, and applies them.

    Args:
        model: `model(dense, embeddings)` gives logits `[batch, Schema.outputs]`, or a `ModelOutput`; `Objective` says
            which loss trains it.
        optimizer: makes the optimizer from the model's parameters.
        device: where the network runs.
        options: the rest.
        schema: the labels, and their losses.

    Attributes:
        replicas: the replicas of this network on all NN workers; set it before the first batch.
        tracer: records forward, backward and update.
        threads: of torch; None if the network is not on a CPU.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerFactory,
        device: torch.device,
        options: StepOptions,
        schema: Schema,
    ) -> None:
        self._device = device
        self.model = model.to(device)
        self._objective = Objective(model, schema)
        self.make_optimizer = optimizer
        self._compiled = None if options.compile is None else CompiledTraining(self.model, options.compile, device)
        self.replicas: Replicas = SingleReplica(self.trained)
        self.tracer = Tracer()
        self.threads: TorchThreads | None = None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(parameters)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer(params) returned {type(self.optimizer).__name__}; return a torch.optim.Optimizer.",
                field="optimizer",
            )
        self.hyperparameters = [_hyperparameters(group) for group in self.optimizer.param_groups]
        """Hyperparameters that the optimizer was made with, by parameter group; training may change its own."""
        self.scheduler = (
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, options.schedule.factor) if options.schedule else None
        )
        self.scaler = torch.amp.GradScaler(device.type) if options.precision == "fp16" else None
        # An optimizer that communicates itself has to decide for all NN workers whether a step overflowed.
        if self.scaler is not None and hasattr(self.optimizer, "attach_scaler"):
            self.optimizer.attach_scaler(self.scaler)
        if options.clip_norm is not None and hasattr(self.optimizer, "consolidate"):
            raise ConfigError(
                f"clip_norm of the Trainer does not reach {type(self.optimizer).__name__}, whose gradients are not "
                "averaged before it; give its own options a clip_norm.",
                field="clip_norm",
            )
        self._autocast = autocast_for(options.precision, device)
        self._accumulation = options.accumulation_steps
        self._clip = options.clip_norm
        self._batches = 0
        self._rows = 0
        self._began = 0.0
        self.times = Histogram()
        """Time that batches took; on a GPU, to be launched."""

    @property
    def trained(self) -> torch.nn.Module:
        """The module to call in training: the compiled network, if it is compiled; it has the same parameters."""
        return self.model if self._compiled is None else self._compiled.module

    def forward_backward(
        self, batch: PreparedBatch, embeddings: Embeddings, *, all_reduce: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the gradients of one batch; gradients of its embeddings leave by their own hooks during `backward`.

        Args:
            batch: the batch. Nothing is learned from a dummy one.
            embeddings: of the batch.
            all_reduce: the batch belongs to an update of this network: in the last one of it, gradients are averaged
                over all NN workers. Otherwise they stay here, for dense PSs.

        Returns:
            Logits float32 `[batch, Schema.outputs]` and the loss, both before the update, and detached.
        """
        self._began = time.perf_counter()
        if not all_reduce:
            result = self._forward_backward(batch, embeddings, self.trained)
            self.times.add(time.perf_counter() - self._began)
            return result
        self._batches += 1
        self._rows += batch.samples
        if batch.dummy and self.replicas.nn_workers == 1:  # No other NN worker waits for it in a collective.
            nothing = batch.labels.new_zeros(())
            return nothing, nothing
        with self.replicas.batch(batch.dummy, self._batches == self._accumulation):
            return self._forward_backward(batch, embeddings, self.replicas.model)

    def _forward_backward(
        self, batch: PreparedBatch, embeddings: Embeddings, model: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.tracer.span("forward"):
            with self._autocast():
                if self._compiled is None:
                    output = model(batch.dense, embeddings)
                else:
                    output = self._compiled(model, batch.dense, embeddings, eager=batch.dummy)
            logits, loss = self._objective(output, batch.labels, batch.weights, batch.groups)
        scaled = loss if self._accumulation == 1 else loss / self._accumulation
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        with self.tracer.span("backward"):
            scaled.backward()
        logits, loss = logits.detach(), loss.detach()
        if self._compiled is not None and self._compiled.replays:
            return logits.clone(), loss.clone()
        return logits, loss

    def apply(self) -> bool:
        """Ends a batch of an update. Updates the network if it was the last one, and returns whether it was."""
        last = self._batches == self._accumulation
        if last:
            with self.tracer.span("update"):
                self._update()
        self.times.add(time.perf_counter() - self._began)
        return last

    def finish(self) -> None:
        """Applies the gradients since the last update, if there are any. All NN workers call it, at the same batch."""
        if self._batches:
            self.replicas.reduce_rest(p for p in self.model.parameters() if p.requires_grad)
            self._update()

    def discard(self) -> None:
        """Drops the gradients since the last update, so that the next batch begins one."""
        self._batches = self._rows = 0
        self.replicas.discard()
        self.optimizer.zero_grad()

    def _update(self) -> None:
        trained = self._rows or self.replicas.rows()
        self._batches = self._rows = 0
        if not trained:  # The batches of all were lost.
            self.optimizer.zero_grad()
            return
        if self._clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        skipped: torch.Tensor | bool = False
        if self.scaler is not None:
            before = loss_scale(self.scaler, self._device)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            after = loss_scale(self.scaler, self._device)
            assert before is not None
            assert after is not None
            skipped = after < before  # There is no other sign of an overflow.
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None and not skipped:  # On a GPU `skipped` is read here only, as that waits for it.
            self.scheduler.step()

    def optimizer_state(self) -> dict[str, Any]:
        """The state of the optimizer; the whole of one that is spread over NN workers. All call it. Blocks."""
        consolidate: Callable[[], dict[str, Any]] = getattr(self.optimizer, "consolidate", self.optimizer.state_dict)
        return consolidate()

    @torch.no_grad()
    def logits(self, batch: PreparedBatch, embeddings: Embeddings) -> torch.Tensor:
        """Logits float32 `[batch, Schema.outputs]`, without training."""
        with self._autocast():
            output = self.model(batch.dense, embeddings)
        return self._objective.logits(output, batch.labels)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the hyperparameters of a parameter group, with the learning rate before any scheduler."""
    own = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    return copy.deepcopy(own | {"lr": group["initial_lr"]} if "initial_lr" in group else own)
