"""Training in virtual time: a torch model and the native store behind a schedule of any mode and any cluster.

What a hundred NN workers would do to the parameters, on a laptop: the order of events comes from
:mod:`persia.modes.replay`, the gradients from the model. Speed is not measured here, it is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from persia.batching.batch import Batch
from persia.modes import Hybrid
from persia.modes.replay import DenseServer, Event, RowServer, Schedule, Server, replay
from persia.modes.replay.servers import Numbers, RowGradients
from persia.nn.pool import Expander
from persia.ps import EmbeddingServer
from persia.schema import EmbeddingOptimizer, Schema
from persia.types import Floats, Gradients, Ids, Int64Array, PushHeader
from persia.worker.routing import Entry, Router

__all__ = ["VirtualTraining"]


class _StoredRows:
    """The rows of an embedding PS, each update applied at once."""

    def __init__(self, server: EmbeddingServer) -> None:
        self._server = server
        self._pushes = 0

    def lookup(self, ids: Mapping[str, Ids]) -> dict[str, Floats]:
        return dict(self._server.lookup(ids, train=True))

    def update(self, gradients: RowGradients, step: int) -> None:
        self._pushes += 1
        header = PushHeader(generation=1, rank=0, sequence=self._pushes, step=step, weight=1)
        self._server.push(header, {table: Gradients(*part) for table, part in gradients.items()})


class VirtualTraining:
    """A model, its tables and their optimizers, trained by schedules, one after another.

    Not thread-safe. Networks whose buffers change in training (BatchNorm) are trained as if by one NN worker.

    Args:
        model: `model(dense, embeddings)` gives logits `[batch, labels]`; the loss is the mean binary cross-entropy.
        schema: the input of the model.
        batches: gives a batch by its number.
        optimizer: of the dense parameters, made from a list of them.
        embedding_optimizer: for tables that declare none.
        seed: of row initialisation and admission.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        schema: Schema,
        batches: Callable[[int], Batch],
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        embedding_optimizer: EmbeddingOptimizer,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._batches = batches
        threads = torch.get_num_threads()
        self._store = EmbeddingServer(schema.resolved_tables(), embedding_optimizer, Hybrid(None), seed, threads)
        self._router = Router(schema, 1, threads)
        self._expander = Expander(schema, torch.device("cpu"))
        self._used = [p for p in model.parameters() if p.requires_grad]
        self._kept = [torch.nn.Parameter(p.detach().clone()) for p in self._used]
        self._optimizer = optimizer(self._kept)
        self._entries: dict[int, tuple[Batch, Entry]] = {}
        self.logits: dict[int, Floats] = {}
        """Of every batch, `[batch, labels]`, as the training forward gave them: for progressive validation."""
        self.servers: dict[str, Server] = {
            "ps-0": RowServer(_StoredRows(self._store), self._ids),
            "dense-0": DenseServer(self._pull, self._update),
        }

    def run(self, schedule: Schedule, watch: Callable[[Event, Any], None] | None = None) -> None:
        """Trains; see :func:`persia.modes.replay.replay`."""
        self.model.train()
        replay(schedule, self.servers, self._compute, watch)

    def evaluate(self, batches: Iterable[Batch]) -> Floats:
        """Logits `[rows, labels]` with the present parameters; nothing changes."""
        self._show(self._pull())
        self.model.eval()
        found = []
        with torch.no_grad():
            for batch in batches:
                entry = self._router.entry(batch.id_features)
                rows = self._store.lookup(entry.ids, train=False)
                embeddings = self._expander(_tensors(rows), entry.inverse, _offsets(entry))
                found.append(self.model(torch.from_numpy(batch.dense), embeddings).numpy())
        return np.concatenate(found)

    # --- what the servers ask for -------------------------------------------------------------------------------

    def _ids(self, number: int) -> dict[str, Ids]:
        batch = self._batches(number)
        entry = self._router.entry(batch.id_features)
        self._entries[number] = (batch, entry)
        return dict(entry.ids)

    def _pull(self) -> Numbers:
        return torch.cat([p.detach().reshape(-1) for p in self._kept]).numpy()

    def _update(self, gradient: Numbers, step: int) -> None:
        parts = torch.from_numpy(gradient).split([p.numel() for p in self._kept])
        for parameter, part in zip(self._kept, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()

    # --- an NN worker -------------------------------------------------------------------------------------------

    def _compute(self, number: int, found: Mapping[str, Any]) -> dict[str, Any]:
        batch, entry = self._entries.pop(number)
        self._show(found["dense-0"])
        leaves = _tensors({table: rows for table, (_, rows) in found["ps-0"].items()})
        for leaf in leaves.values():
            leaf.requires_grad_()
        embeddings = self._expander(leaves, entry.inverse, _offsets(entry))
        logits = self.model(torch.from_numpy(batch.dense), embeddings)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        loss.backward()
        self.logits[number] = logits.detach().numpy()
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._used]
        dense = torch.cat([g.reshape(-1) for g in flat]).numpy()
        for parameter in self._used:
            parameter.grad = None
        rows = {table: (entry.ids[table], leaf.grad.numpy()) for table, leaf in leaves.items() if leaf.grad is not None}
        return {"ps-0": rows, "dense-0": dense}

    def _show(self, flat: Numbers) -> None:
        """Lets the model compute with these parameters."""
        parts = torch.from_numpy(flat).split([p.numel() for p in self._used])
        for parameter, part in zip(self._used, parts, strict=True):
            parameter.data = part.view_as(parameter)


def _offsets(entry: Entry) -> dict[str, Int64Array | None]:
    return {name: entry.offsets.get(name) for name in entry.inverse}


def _tensors(rows: Mapping[str, Numbers]) -> dict[str, torch.Tensor]:
    return {table: torch.from_numpy(values) for table, values in rows.items()}
