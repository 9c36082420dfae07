"""The state of a training run as a checkpoint, and back: what `Trainer.save` and `Trainer.load` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from persia import batching
from persia.checkpoint import CheckpointReader, CheckpointWriter
from persia.checkpoint.format import StatePart
from persia.config import convert, dump
from persia.dense import merged_metrics
from persia.errors import CheckpointError, PersiaError
from persia.fit import Totals, totals
from persia.modes import AnyMode, Hybrid, Mode, decode, encode
from persia.options import TrainerOptions
from persia.random_state import random_states, set_random_state
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import ProcessCluster, RowChunk, StatePiece

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["Recorded", "load", "load_training_state", "recorded", "save", "training_state"]


MOST_SHARDS = 1024
"""Of a table in one PS: shard s of PS p is number p * MOST_SHARDS + s in a checkpoint."""


class Recorded(NamedTuple):
    """The declarations that a checkpoint was written with."""

    schema: Schema
    embedding_optimizer: EmbeddingOptimizer
    mode: Mode
    options: TrainerOptions


def save(trainer: Trainer, directory: str, state: dict[str, Any]) -> str:
    """Writes a checkpoint of a trainer at rest; returns its path. One NN worker does it for all.

    Args:
        trainer: of that NN worker.
        directory: where it goes.
        state: of `training_state`, which all NN workers call.
    """
    with CheckpointWriter(directory, trainer.global_step, keep_last=trainer.options.keep_last) as writer:
        for number, server in enumerate(trainer.embeddings.connection.servers):
            for chunk in server.export_rows():
                writer.add_rows(chunk.table, number * MOST_SHARDS + chunk.shard, chunk.arrays)
            for part, pieces in enumerate(server.export_state()):
                writer.add_state(f"server-{number}.{part}", [piece._asdict() for piece in pieces])
        writer.add_tensors("model", trainer.model.state_dict())
        writer.add_state("training", state)
        return writer.commit(
            schema=resolved(trainer),
            config={
                "schema": dump(trainer.schema),
                "embedding_optimizer": dump(trainer.embedding_optimizer),
                "mode": dump(trainer.mode),
                "options": dump(trainer.options),
            },
            global_step=trainer.global_step,
        )


def recorded(directory: str) -> Recorded:
    """The declarations in the latest checkpoint of a directory."""
    config = CheckpointReader(directory).manifest.config
    origin = f"the checkpoint in {directory}"
    return Recorded(
        convert(config.get("schema"), Schema, origin),
        convert(config.get("embedding_optimizer"), EmbeddingOptimizer, origin),  # type: ignore[arg-type]
        convert(config.get("mode"), AnyMode, origin),  # type: ignore[arg-type]
        convert(config.get("options"), TrainerOptions, origin),
    )


def load(trainer: Trainer, directory: str, *, first: bool = True) -> None:
    """Puts the latest checkpoint of a directory into a fresh trainer; everything is checked before anything changes.

    Args:
        trainer: of an NN worker.
        directory: where the checkpoint is.
        first: whether it is NN worker 0, which loads for all what there is but once, before the others.
    """
    if trainer.global_step or (first and any(t["rows"] for t in trainer.embeddings.statistics().values())):
        raise PersiaError("load() needs a fresh Trainer; this one has trained. Make a new one.")
    reader = CheckpointReader(directory)
    reader.check_schema(resolved(trainer))
    reader.verify()
    training = reader.state("training")
    tensors = reader.tensors("model")
    _check_model(trainer.model, tensors, directory)
    _check_optimizer(trainer, training, directory)
    _check_servers(trainer, reader)
    if first:
        _load_rows(trainer, reader)
    trainer.model.load_state_dict(tensors)
    load_training_state(trainer, training)


def resolved(trainer: Trainer) -> Schema:
    """The schema with every table declared and its optimizer filled in, as the rows were written with."""
    server = trainer.embeddings.connection.servers[0]
    schema = trainer.schema
    return Schema(schema.id_features, schema.dense_features, schema.labels, list(server.tables().values()))


def training_state(trainer: Trainer) -> dict[str, Any]:
    """What decides the future of training, beside rows and the network's tensors; and what has been counted so far.

    Of all NN workers together; the same on each. Blocks until all have called it.
    """
    step, gather = trainer.step, trainer.step.replicas.gather
    return {
        "seed": trainer.options.seed,
        "optimizer_class": type(step.optimizer).__qualname__,
        "optimizer": step.optimizer_state(),
        "scheduler": step.scheduler.state_dict() if step.scheduler else None,
        "scaler": step.scaler.state_dict() if step.scaler else None,
        "global_step": trainer.global_step,
        "mode": encode(trainer.mode),
        "depth": trainer.embeddings.gate.depth,
        "epoch": trainer.epoch,
        "position": trainer.position,
        "random": [*random_states(gather), *trainer.elsewhere],
        "metrics": merged_metrics(trainer.metrics, gather).state_dict(),
        "counts": msgspec.to_builtins(totals(trainer)),
    }


def load_training_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Puts `training_state` back: into each NN worker what is its own, into the first one what there is but once."""
    step = trainer.step
    step.optimizer.load_state_dict(state["optimizer"])
    if step.scheduler is not None and state["scheduler"] is not None:
        step.scheduler.load_state_dict(state["scheduler"])
    if step.scaler is not None and state["scaler"] is not None:
        step.scaler.load_state_dict(state["scaler"])
    trainer.embeddings.global_step = state["global_step"]
    if "mode" in state:  # Checkpoints of before modes could be changed lack it.
        trainer.segments.adopt(decode(state["mode"]))
    if trainer.mode == Hybrid("auto") and isinstance(state["depth"], int):
        trainer.embeddings.gate.depth = state["depth"]
    trainer.epoch, trainer.position = state["epoch"], state["position"]
    trainer.earlier = msgspec.convert(state.get("counts", {}), Totals)
    rank = trainer.embeddings.connection.rank
    if rank == 0:
        trainer.metrics.load_state_dict(state["metrics"])
    generators = state["random"] if isinstance(state["random"], list) else [state["random"]]  # Of version 0.1.
    if rank < len(generators):
        set_random_state(generators[rank])
    else:  # Else dropout would be the same as on another one.
        torch.manual_seed(state["seed"] + rank)
    if isinstance(trainer.cluster, ProcessCluster):
        trainer.elsewhere = generators[1:]


def _load_rows(trainer: Trainer, reader: CheckpointReader) -> None:
    servers = trainer.embeddings.connection.servers
    for table in servers[0].tables():
        for shard, arrays in reader.rows(table):
            if len(servers) == 1:
                servers[0].import_rows(RowChunk(table, shard, arrays))
                continue
            owners = batching.owners(table, arrays["ids"], len(servers))
            for owner in np.unique(owners):
                part = {name: array[owners == owner] for name, array in arrays.items()}
                servers[owner].import_rows(RowChunk(table, shard, part))
    for number, place in _server_parts(reader):
        pieces = reader.state(f"server-{number}.{place}")
        servers[number].import_state([StatePiece(**piece) for piece in pieces])


def _check_servers(trainer: Trainer, reader: CheckpointReader) -> None:
    saved = len({number for number, _ in _server_parts(reader)})
    mine = len(trainer.embeddings.connection.servers)
    if saved != mine:
        raise CheckpointError(
            f"{reader.path}: it was written by {saved} embedding PSs, and there are {mine} here. Start as many.",
            path=reader.path,
        )


def _server_parts(reader: CheckpointReader) -> list[tuple[int, int]]:
    """Number of the PS, and of the part of its state, in order."""
    names = (part.name for part in reader.manifest.parts if isinstance(part, StatePart))
    found = [name.removeprefix("server-").split(".") for name in names if name.startswith("server-")]
    return sorted((int(number), int(part)) for number, part in found)


def _check_model(model: torch.nn.Module, tensors: dict[str, torch.Tensor], directory: str) -> None:
    mine = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{directory}: the model's tensor {name!r} is {theirs.get(name, 'missing')} in the checkpoint and "
                f"{mine.get(name, 'missing')} here. Build the model as it was when the checkpoint was written.",
                path=directory,
                tensor=name,
            )


def _check_optimizer(trainer: Trainer, state: dict[str, Any], directory: str) -> None:
    mine = _kind_of_optimizer(trainer.step.optimizer, trainer.step.optimizer.state_dict())
    theirs = _kind_of_optimizer(state["optimizer_class"], state["optimizer"])
    if mine != theirs:
        raise CheckpointError(
            f"{directory}: the optimizer is {theirs} in the checkpoint and {mine} here. Make the optimizer as it was.",
            path=directory,
        )
    seed = state["seed"]
    if seed != trainer.options.seed:
        raise CheckpointError(
            f"{directory}: rows were initialised with seed {seed}, and new ones would be with {trainer.options.seed}. "
            "Set the same seed.",
            path=directory,
        )


def _kind_of_optimizer(optimizer: torch.optim.Optimizer | str, state: dict[str, Any]) -> str:
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__qualname__
    return f"{name} with groups of {[len(group['params']) for group in state['param_groups']]} tensors"
