"""`PersiaCallback`: rows in Lightning's checkpoints, and persia's metrics in its logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from persia.errors import ConfigError
from persia.interop.lightning.prefetch_loader import PrefetchLoader, check_one_process
from persia.interop.lightning.row_checkpoints import RowsCheckpointIO
from persia.nn import EmbeddingCollection

__all__ = ["PersiaCallback"]


class PersiaCallback(Callback):  # type: ignore[misc]
    """Saves and loads rows with Lightning's checkpoints, and logs persia's metrics.

    The rows of `last.ckpt` are in the directory `last.rows` next to it: written before the file, read with
    `trainer.fit(..., ckpt_path=...)`, removed when Lightning removes the file. They contain all gradients so far. Each
    logged step has `persia/staleness` (mean so far), `persia/rows_applied`, `persia/rows_absent`,
    `persia/rows_non_finite` and `persia/batches_released`, counted from the start; see
    `EmbeddingCollection.staleness` and `pushed`.

    The callback also passes the `GradScaler` of `precision="16-mixed"` to the collection.

    Args:
        embeddings: the collection; None for the only one among the submodules of the LightningModule.

    Raises:
        ConfigError: at the start of a run, if Lightning runs several processes, accumulates a different number of
            batches than the collection, or the module does not have exactly one collection.
    """

    def __init__(self, embeddings: EmbeddingCollection | None = None) -> None:
        self._explicit = embeddings
        self.embeddings = embeddings

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run, and adds rows to its checkpoints."""
        check_one_process(trainer.world_size)
        embeddings = self._explicit or _only_collection(pl_module)
        steps = embeddings.options.accumulation_steps
        if stage == "fit" and trainer.accumulate_grad_batches != steps:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), but the collection accumulates "
                f"{steps}; make it with CollectionOptions(accumulation_steps={trainer.accumulate_grad_batches}).",
                field="accumulation_steps",
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            embeddings.grad_scaler = scaler
        strategy = trainer.strategy
        base = strategy.checkpoint_io
        strategy.checkpoint_io = RowsCheckpointIO(base.base if isinstance(base, RowsCheckpointIO) else base, embeddings)
        self.embeddings = embeddings

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs every `Trainer.log_every_n_steps`."""
        embeddings = self.embeddings
        if embeddings is None or trainer.global_step % trainer.log_every_n_steps:
            return
        pushed = embeddings.pushed
        metrics = {
            "persia/staleness": embeddings.staleness.mean,
            "persia/rows_applied": pushed.applied,
            "persia/rows_absent": pushed.absent,
            "persia/rows_non_finite": pushed.non_finite,
            "persia/batches_released": pushed.released,
        }
        pl_module.log_dict({name: float(value) for name, value in metrics.items()}, batch_size=1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until all gradients so far are applied, so that rows are as new as the network."""
        if self.embeddings is not None:
            self.embeddings.await_pushes()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the pass over the training data."""
        _close_loaders(trainer.train_dataloader)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the pass over the training data."""
        _close_loaders(trainer.train_dataloader)


def _close_loaders(loaders: Any) -> None:
    """Closes a loader, or each loader of a list or dict, if it prefetches."""
    if isinstance(loaders, PrefetchLoader):
        loaders.close()
    elif isinstance(loaders, Mapping | list | tuple):
        for each in loaders.values() if isinstance(loaders, Mapping) else loaders:
            _close_loaders(each)


def _only_collection(module: LightningModule) -> EmbeddingCollection:
    collections = [each for each in module.modules() if isinstance(each, EmbeddingCollection)]
    if len(collections) != 1:
        raise ConfigError(
            f"{type(module).__name__} has {len(collections)} embedding collections among its submodules; pass the one "
            "whose rows to save: PersiaCallback(embeddings).",
            field="embeddings",
        )
    return collections[0]
