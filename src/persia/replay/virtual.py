"""Training of a torch model and the native store along timelines of any mode and any cluster.

It computes on a laptop the parameters that a hundred NN workers would produce: the order of events comes from
:mod:`persia.replay`, the gradients from the model. Speed is simulated, not measured.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from persia import batching
from persia.batching import RoutedBatch
from persia.batching.batch import Batch
from persia.checks import check_number
from persia.dense import partition, spec_of
from persia.errors import DataError
from persia.modes import Hybrid
from persia.nn.clipping import clipped_tensors
from persia.nn.objective import Objective
from persia.nn.pooling import UNWEIGHTED, Expander
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.replay import (
    ReplayDense,
    ReplayRows,
    ReplayServer,
    ScheduleEvent,
    Timeline,
    check_replayable,
    replay,
)
from persia.replay.local_all_reduce import LocalAllReduce
from persia.replay.local_networks import LocalNetworks
from persia.replay.replay_servers import Numbers, RowGradients
from persia.replay.schedule import DENSE
from persia.schema import EmbeddingOptimizer, Schema, Table
from persia.types import BucketMap, Floats, Gradients, Ids, Int64Array, PushHeader
from persia.worker.routing import Router

__all__ = ["VirtualTraining"]


class _StoredRows:
    """Tables of an embedding PS, which applies each update immediately."""

    def __init__(self, server: EmbeddingServer, tables: Mapping[str, Table]) -> None:
        self._server = server
        self._tables = tables
        self._scratch = batching.Scratch()
        self._map_version = server.buckets().version
        self._pushes = 0

    def lookup(self, ids: Mapping[str, Ids]) -> dict[str, Floats]:
        rows = self._server.lookup(ids, True, self._map_version)
        return dict(batching.plain_packed(rows, None, self._tables, self._scratch))

    def update(self, gradients: RowGradients, step: int) -> None:
        self._pushes += 1
        header = PushHeader(generation=1, rank=0, sequence=self._pushes, step=step, rows=1)
        packed = {table: Gradients(*part) for table, part in gradients.items()}
        self._server.push(header, packed, self._map_version)


class VirtualTraining:
    """A model, its tables and their optimizers, trained along one timeline after another.

    The first timeline decides how many PSs there are, and which ids each owns.

    Not thread-safe. Networks whose buffers change in training (BatchNorm) are trained as if by one NN worker.

    Args:
        model: `model(dense, embeddings)` returns logits `[batch, Schema.outputs]`, or a `ModelOutput`. The loss is the
            model's own method `loss`, or else that of the schema's labels.
        schema: the input of the model.
        batches: returns a batch by its number.
        optimizer: makes the optimizer of the dense parameters from a list of them.
        embedding_optimizer: optimizer of tables that declare none.
        seed: seed of row initialization and admission.
        clip_embedding_norm: see `TrainerOptions`.

    Raises:
        ConfigError: rows of a table expire after `Days`, or `clip_embedding_norm` is invalid.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        schema: Schema,
        batches: Callable[[int], Batch],
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        embedding_optimizer: EmbeddingOptimizer,
        seed: int = 0,
        clip_embedding_norm: float | None = None,
    ) -> None:
        check_replayable(schema)
        if clip_embedding_norm is not None:
            check_number("clip_embedding_norm", clip_embedding_norm, 0, open_low=True)
        self._clip_embedding_norm = clip_embedding_norm
        self.model = model
        self._objective = Objective(model, schema)
        self._batches = batches
        self._schema, self._embedding_optimizer, self._seed = schema, embedding_optimizer, seed
        self._expander = Expander(schema, torch.device("cpu"))
        self._used = [p for p in model.parameters() if p.requires_grad]
        self._trained = [torch.nn.Parameter(p.detach().clone()) for p in self._used]
        self._optimizers = optimizer
        self._optimizer = optimizer(self._trained)
        self._routed: dict[int, tuple[Batch, RoutedBatch]] = {}
        self.logits: dict[int, Floats] = {}
        """Logits `[batch, labels]` of the training forward pass by batch, for progressive validation."""
        self._tables = schema.resolved_tables()
        self._scratch = batching.Scratch()
        self.stores: list[EmbeddingServer] = []
        """The embedding PSs."""
        self._buckets = BucketMap.even(1)
        self._owned: list[list[int]] = []
        self._servers: dict[str, ReplayServer] = {}

    def _begin(self, buckets: BucketMap, dense: int) -> None:
        """Makes the servers."""
        self._buckets = buckets
        threads = torch.get_num_threads()
        tables, optimizer = self._schema.resolved_tables(), self._embedding_optimizer
        mode = Hybrid(None, combine=False)
        self.stores = [
            EmbeddingServer(
                tables, optimizer, mode, self._seed, threads, ServerOptions(**shares._asdict(), buckets=buckets)
            )
            for shares in divide_here(tables, optimizer, buckets.servers)
        ]
        self._router = Router(self._schema, buckets, threads)
        self._owned = partition([spec_of(str(n), p) for n, p in enumerate(self._used)], dense)
        for rank, store in enumerate(self.stores):
            self._servers[f"ps-{rank}"] = ReplayRows(
                _StoredRows(store, self._tables), functools.partial(self._ids, rank)
            )
        for rank in range(dense):
            read, update = functools.partial(self._pull, rank), functools.partial(self._update, rank)
            self._servers[f"dense-{rank}"] = ReplayDense(read, update)

    def run(self, schedule: Timeline, on_event: Callable[[ScheduleEvent, Any], None] | None = None) -> None:
        """Trains along a timeline; see :func:`persia.replay.replay`.

        In `LocalAllReduce`, `evaluate` does not see the networks of a run before its end, when they are averaged.

        Raises:
            DataError: the timeline before had another bucket map.
        """
        names = schedule.servers
        dense = sum(name.startswith(DENSE) for name in names)
        buckets = schedule.buckets or (BucketMap.even(len(names) - dense) if len(names) > dense else self._buckets)
        if not self._servers:
            self._begin(buckets, dense)
        elif not buckets.same_owners(self._buckets):
            raise DataError(
                f"The timeline has {buckets.servers} embedding PSs, or other ids at each of them than the "
                f"{self._buckets.servers} of the timeline before; create a new VirtualTraining for it."
            )
        self.model.train()
        if isinstance(schedule.mode, LocalAllReduce):
            self._run_local(schedule, on_event)
        else:
            replay(schedule, self._servers, self._compute, on_event)

    def _run_local(self, schedule: Timeline, on_event: Callable[[ScheduleEvent, Any], None] | None) -> None:
        networks = LocalNetworks(schedule, self._trained, self._optimizer, self._optimizers)

        def trained(event: ScheduleEvent, gradient: Any) -> None:
            networks.trained(event, gradient)
            if on_event is not None:
                on_event(event, gradient)

        replay(schedule, self._servers | {f"{DENSE}-0": networks}, self._compute, trained)
        networks.into(self._trained, self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the parameters, rows and optimizer states, from which other trainings can continue.

        Rows of tables with a `ttl` count as seen at that moment.
        """
        return {
            "parameters": [parameter.detach().clone() for parameter in self._trained],
            "buffers": [buffer.detach().clone() for buffer in self.model.buffers()],
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "rows": [list(store.export_rows()) for store in self.stores],
            "buckets": self._buckets,
            "dense": len(self._owned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, which does not change. Start the next timeline at the step where it ended.

        Raises:
            DataError: this training has started.
        """
        if self._servers:
            raise DataError("A VirtualTraining that has started cannot load a state; create a new one.")
        with torch.no_grad():
            for parameter, value in zip(self._trained, state["parameters"], strict=True):
                parameter.copy_(value)
            for buffer, value in zip(self.model.buffers(), state["buffers"], strict=True):
                buffer.copy_(value)
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._begin(state["buckets"], state["dense"])
        for store, chunks in zip(self.stores, state["rows"], strict=True):
            for chunk in chunks:
                store.import_rows(chunk, self._buckets.version)

    def evaluate(self, batches: Iterable[Batch]) -> Floats:
        """Returns logits `[rows, labels]` with the current parameters. Changes nothing."""
        if not self._servers:
            self._begin(BucketMap.even(1), 1)
        self._show(dict(enumerate(map(self._pull, range(len(self._owned))))))
        self.model.eval()
        logits = []
        with torch.no_grad():
            for batch in batches:
                routed = self._router.route(batch.id_features)
                answers = [
                    store.lookup(self._router.ids_of(routed, number), False, self._buckets.version)
                    for number, store in enumerate(self.stores)
                ]
                stored = self._router.join(routed, answers)
                rows = batching.plain_packed(stored, None, self._tables, self._scratch)
                embeddings = self._expander(
                    _tensors(rows), routed.inverse, _offsets(routed), routed.weights or UNWEIGHTED
                )
                output = self.model(torch.from_numpy(batch.dense), embeddings)
                logits.append(self._objective.logits(output, torch.from_numpy(batch.labels)).numpy())
        return np.concatenate(logits)

    # --- for the servers ----------------------------------------------------------------------------------------

    def _ids(self, rank: int, number: int) -> Mapping[str, Ids]:
        if number not in self._routed:
            batch = self._batches(number)
            self._routed[number] = (batch, self._router.route(batch.id_features))
        return self._router.ids_of(self._routed[number][1], rank)

    def _pull(self, rank: int) -> Numbers:
        return _joined([self._trained[number].detach() for number in self._owned[rank]])

    def _update(self, rank: int, gradient: Numbers, step: int) -> None:
        owned = [self._trained[number] for number in self._owned[rank]]
        for parameter, part in zip(owned, torch.from_numpy(gradient).split([p.numel() for p in owned]), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()  # Parameters without a gradient do not change.
        for parameter in owned:
            parameter.grad = None

    # --- an NN worker -------------------------------------------------------------------------------------------

    def _compute(self, number: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        batch, routed = self._routed.pop(number)
        self._show({rank: inputs[f"dense-{rank}"] for rank in range(len(self._owned))})
        parts = [inputs[f"ps-{rank}"] for rank in range(len(self.stores))]  # Ids are sorted by the PS that owns them.
        leaves = _tensors({table: np.concatenate([part[table][1] for part in parts]) for table in parts[0]})
        for leaf in leaves.values():
            leaf.requires_grad_()
        embeddings = self._expander(leaves, routed.inverse, _offsets(routed), routed.weights or UNWEIGHTED)
        output = self.model(torch.from_numpy(batch.dense), embeddings)
        weights = None if batch.weights is None else torch.from_numpy(batch.weights)
        groups = None if batch.groups is None else torch.from_numpy(batch.groups.view(np.int64))
        logits, loss = self._objective(output, torch.from_numpy(batch.labels), weights, groups)
        loss.backward()
        self.logits[number] = logits.detach().numpy()
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._used]
        gradients: dict[str, Any] = {
            f"dense-{rank}": _joined([flat[number] for number in owned]) for rank, owned in enumerate(self._owned)
        }
        for parameter in self._used:
            parameter.grad = None
        row_gradients = {table: leaf.grad for table, leaf in leaves.items() if leaf.grad is not None}
        if self._clip_embedding_norm is not None and row_gradients:
            row_gradients = clipped_tensors(row_gradients, self._clip_embedding_norm)
        positions = dict.fromkeys(leaves, 0)
        for rank, part in enumerate(parts):
            server_gradients = gradients[f"ps-{rank}"] = {}
            for table, (ids, _) in part.items():
                start, positions[table] = positions[table], positions[table] + len(ids)
                if table in row_gradients:
                    server_gradients[table] = (ids, row_gradients[table].numpy()[start : start + len(ids)])
        return gradients

    def _show(self, flat: Mapping[int, Numbers]) -> None:
        """Copies parameters into the model."""
        for rank, values in flat.items():
            owned = [self._used[number] for number in self._owned[rank]]
            for parameter, part in zip(owned, torch.from_numpy(values).split([p.numel() for p in owned]), strict=True):
                parameter.data = part.view_as(parameter)


def _joined(tensors: list[torch.Tensor]) -> Numbers:
    return torch.cat([t.reshape(-1) for t in tensors]).numpy() if tensors else np.zeros(0, np.float32)


def _offsets(batch: RoutedBatch) -> dict[str, Int64Array | None]:
    return {name: batch.offsets.get(name) for name in batch.inverse}


def _tensors(rows: Mapping[str, Numbers]) -> dict[str, torch.Tensor]:
    return {table: torch.from_numpy(values) for table, values in rows.items()}
