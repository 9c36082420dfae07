"""`RecommenderModule`: a network of persia and its embeddings as a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule

from persia.batching.batch import Batch
from persia.errors import CheckpointError, ConfigError
from persia.interop.lightning.row_checkpoints import KEY, RowsCheckpointIO
from persia.metrics import Metrics, answers_of
from persia.metrics.result import headlines
from persia.nn import EmbeddingCollection, PreparedBatch
from persia.nn.arguments import DENSE_OPTIMIZER, MODEL, Expected, check_arguments
from persia.nn.objective import Objective
from persia.nn.output import are_log_odds

__all__ = ["RecommenderModule"]

COLLECTION = Expected(
    lambda value: isinstance(value, EmbeddingCollection), "a persia.nn.EmbeddingCollection for the schema of the data"
)


class RecommenderModule(LightningModule):  # type: ignore[misc]
    """Trains a network and embeddings with a Lightning `Trainer`, in one process, by automatic optimization.

    The loss is the same as in `persia.Trainer`: the model's own method `loss`, or else that of the schema's labels.
    `backward` pushes the gradients of rows; Lightning's optimizer gets the network's parameters. Batches come from
    `PrefetchLoader`. Logs `train_loss`, in validation `val_auc` and `val_log_loss`, and in tests `test_auc` and
    `test_log_loss`; for labels that are not binary `val_LABEL_rmse` or `val_LABEL_accuracy`. `trainer.predict` returns
    probabilities `[batch, labels]`, or logits that are not log-odds; of other labels the answers of `persia.Trainer`.

    Your own LightningModule needs no base class: hold the collection as a submodule, call it with the batch, and pass
    `PrefetchLoader` and `PersiaCallback` to its Trainer.

    Args:
        model: `forward(dense, embeddings)` returns logits `[batch, Schema.outputs]` or a `ModelOutput`, as for a
            `persia.Trainer`.
        embeddings: tables of the model. Rows are not parameters, so Lightning does not clip their gradients.
        optimizer: makes the optimizer of the network from its parameters.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        embeddings: EmbeddingCollection,
        *,
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        super().__init__()
        check_arguments(
            model=(model, MODEL), embeddings=(embeddings, COLLECTION), optimizer=(optimizer, DENSE_OPTIMIZER)
        )
        self.model = model
        self.embeddings = embeddings
        self._objective = Objective(model, embeddings.schema)
        self._make_optimizer = optimizer
        self._metrics = Metrics(embeddings.schema.labels)

    def forward(self, batch: PreparedBatch) -> Any:
        """Returns what the model returns."""
        return self.model(batch.dense, self.embeddings(batch))

    def training_step(self, batch: PreparedBatch, batch_idx: int) -> torch.Tensor:
        """Returns the loss, and logs it."""
        _, loss = self._objective(self(batch), batch.labels, batch.weights, batch.groups)
        self.log("train_loss", loss, batch_size=len(batch), prog_bar=True)
        return loss

    def validation_step(self, batch: PreparedBatch, batch_idx: int) -> None:
        """Adds a batch to the metrics."""
        self._metrics.update(self._objective.logits(self(batch), batch.labels), batch.labels, None, batch.weights)

    def test_step(self, batch: PreparedBatch, batch_idx: int) -> None:
        """Adds a batch to the metrics."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: PreparedBatch, batch_idx: int) -> torch.Tensor:
        """Returns answers `[batch, columns]`: probabilities, or logits that are not log-odds; see `persia.Trainer`."""
        logits = self._objective.logits(self(batch), batch.labels)
        answers = answers_of(self.embeddings.schema, log_odds=are_log_odds(self.model))
        if answers.name == "predictions":
            return torch.from_numpy(answers.answers(logits.cpu().numpy()))
        return torch.sigmoid(logits) if answers.name == "probabilities" else logits

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics of the pass."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Logs the metrics of the pass."""
        self._log_metrics("test")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch.

        Raises:
            ConfigError: the batch comes from a reader and has no rows.
        """
        if isinstance(batch, Batch):
            raise ConfigError(
                "The data of the Trainer are batches without rows; pass PrefetchLoader(module.embeddings, data).",
                field="dataloaders",
            )
        return batch

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Checks that the Trainer also reads rows if the checkpoint has any.

        Raises:
            CheckpointError: the Trainer has no `PersiaCallback`.
        """
        trainer = self._trainer  # None in `load_from_checkpoint`.
        if KEY in checkpoint and trainer and not isinstance(trainer.strategy.checkpoint_io, RowsCheckpointIO):
            raise CheckpointError(
                "The checkpoint has rows, which only PersiaCallback reads; add it to the callbacks of the Trainer, or "
                "load only the network with `load_from_checkpoint`."
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes the optimizer of the network."""
        return self._make_optimizer(self.model.parameters())

    def _log_metrics(self, prefix: str) -> None:
        result = self._metrics.result()
        labels = result.labels.values()
        names = [name for name in ("auc", "log_loss") if any(hasattr(each, name) for each in labels)]
        others = {name.replace(":", "_"): value for name, value in headlines(result.labels).items()}
        means = {name: getattr(result, name) for name in names}
        self.log_dict({f"{prefix}_{name}": value for name, value in (means | others).items()}, batch_size=1)
        self._metrics = Metrics(self.embeddings.schema.labels)
