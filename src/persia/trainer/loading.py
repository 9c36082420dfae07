"""Loads checkpoints, or rows of them, into the network, the state and the embedding PSs of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from persia.checkpoint import (
    AdmissionSketches,
    CheckpointReader,
    StepChoice,
    check_values,
    clock_gaps,
    same_rule,
    server_pieces,
)
from persia.checkpoint.compatibility import id_difference
from persia.checkpoint.row_reading import ServerReading
from persia.config import convert, dump
from persia.errors import CheckpointError, PersiaError
from persia.modes import ModeSetting
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.rpc.fan_out import call_all
from persia.schema import SGD, Adagrad, EmbeddingOptimizer, RowwiseAdagrad, Schema, Table
from persia.schema.optimizers import INITIAL_ACCUMULATOR
from persia.services import EmbeddingPS, StatePiece
from persia.telemetry.logs import get_logger
from persia.trainer.hyperparameters import adopt_hyperparameters, changes, check_optimizer
from persia.trainer.options import Declared, TrainerOptions
from persia.trainer.state import TrainingState
from persia.types import TableToRead
from persia.types.half_floats import LARGEST

__all__ = [
    "LoadOptions",
    "LoadedTable",
    "check_resumable",
    "load",
    "load_partitions",
    "load_rows",
    "recorded",
    "resolved",
]

LOG = get_logger("persia.checkpoint")


class LoadOptions(NamedTuple):
    """How a checkpoint is loaded.

    Attributes:
        step: which one, by its step, or "best" or "latest"; None for the latest.
        new_optimizer: let the optimizers of the network and of tables differ from the checkpoint's. The state of
            those that do is reset, and a warning says so.
        trains_in_other_processes: whether other processes train; see `TrainingState.load_state_dict`.
        refit: let fitted values of features differ from the checkpoint's.
    """

    step: StepChoice = None
    new_optimizer: bool = False
    trains_in_other_processes: bool = False
    refit: bool = False


class LoadedTable(NamedTuple):
    """Number of rows that were loaded into a table.

    Attributes:
        rows: number of rows.
        state: whether the optimizer's state was loaded; otherwise it was reset.
    """

    rows: int
    state: bool


def recorded(directory: str, step: StepChoice = None) -> Declared:
    """Returns the declarations in a checkpoint of a directory, by default the latest."""
    config = CheckpointReader(directory, step).config
    origin = f"the checkpoint in {directory}"
    return Declared(
        convert(config.get("schema"), Schema, origin),
        convert(config.get("embedding_optimizer"), EmbeddingOptimizer, origin),  # type: ignore[arg-type]
        convert(config.get("mode"), ModeSetting, origin),  # type: ignore[arg-type]
        convert(config.get("options"), TrainerOptions, origin),
    )


def load(
    directory: str,
    options: LoadOptions,
    declared: Declared,
    network: DenseStep,
    state: TrainingState,
    embeddings: EmbeddingCollection,
) -> None:
    """Loads a checkpoint into a run that has not trained yet; everything is checked before anything changes.

    Each NN worker calls it. The first one calls it before the others, as it loads the rows, too.

    Args:
        directory: where the checkpoint is.
        options: which one, and how.
        declared: the declarations of the run, which the declarations of the checkpoint have to match, except for the
            dtypes of
            tables: values are rounded to the nearest, and a warning says so.
        network: gets the tensors of the model.
        state: gets the state of training.
        embeddings: their PSs get rows.
    """
    connection = embeddings.connection
    first = connection.rank == 0
    if state.global_step or (first and any(t["rows"] for t in embeddings.statistics().values())):
        raise PersiaError("load() needs a fresh Trainer; this one has trained. Make a new one.")
    reader = CheckpointReader(directory, options.step)
    schema = resolved(declared.schema, connection.servers)
    reader.check_schema(schema, new_optimizer=options.new_optimizer, refit=options.refit)
    reading = ServerReading(reader, connection.servers, range(len(connection.servers)))
    if first:
        reading.verify()
    training = reader.state("training")
    tensors = reader.tensors("model")
    _check_model(network.model, tensors, directory)
    reset = check_optimizer(network.optimizer, training, directory, new=options.new_optimizer)
    if reset:
        training["optimizer"] = network.optimizer.state_dict()
        training["hyperparameters"] = network.hyperparameters
    _check_seed(declared.options.seed, training["seed"], directory)
    changed = [*adopt_hyperparameters(network, training), *_declared_changes(reader, declared)]
    if first:
        _import_rows(connection.servers, reader, reading, _same(connection.servers[0].tables()), state=True)
    network.model.load_state_dict(tensors)
    state.load_state_dict(training, trains_in_other_processes=options.trains_in_other_processes)
    state.loaded = True
    if reset:
        LOG.warning("The optimizer's state is reset: %s.", reset)
    if first and changed:
        LOG.warning("Changed since the checkpoint: %s", "; ".join(changed))
    scheduled = declared.auto is not None or declared.options.mode_schedule
    if first and not scheduled and state.mode != declared.first_mode:
        LOG.warning(
            "Training goes on in the mode of the checkpoint, %s; declared is %s. `Trainer.switch` changes it, or "
            "`mode_schedule`, which may begin at step 0.",
            state.mode, declared.first_mode,
        )  # fmt: skip


def check_resumable(
    reader: CheckpointReader,
    declared: Declared,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    new_optimizer: bool = False,
) -> None:
    """Checks that a run can continue from a checkpoint, as `load` does, without a cluster and without reading rows.

    Args:
        reader: of the checkpoint.
        declared: see `load`.
        model: the network.
        optimizer: of the network.
        new_optimizer: see `LoadOptions`.

    Raises:
        CheckpointError: it cannot; the message says why.
    """
    reader.check_schema(declared.schema, declared.embedding_optimizer, new_optimizer=new_optimizer)
    training = reader.state("training")
    _check_model(model, reader.tensors("model"), reader.path)
    check_optimizer(optimizer, training, reader.path, new=new_optimizer)
    _check_seed(declared.options.seed, training["seed"], reader.path)


def load_rows(
    servers: Sequence[EmbeddingPS],
    schema: Schema,
    directory: str,
    tables: Iterable[str] | Mapping[str, str] | None,
    step: StepChoice,
    state: bool,
) -> dict[str, LoadedTable]:
    """Loads rows of some tables into PSs; see `Trainer.load_rows`."""
    reader = CheckpointReader(directory, step)
    declared, recorded = servers[0].tables(), reader.manifest.tables
    if tables is None:
        tables = [name for name in declared if name in recorded]
    sources = dict(tables) if isinstance(tables, Mapping) else {name: name for name in tables}
    for name, source in sources.items():
        for table, place, known in ((name, "the model", declared), (source, reader.path, recorded)):
            if table not in known:
                raise CheckpointError(
                    f"There is no table {table!r} in {place}; it has {', '.join(known)}.", path=reader.path, table=table
                )
        if declared[name].dim != recorded[source].dim:
            there = "" if source == name else f" table {source!r} has"
            raise CheckpointError(
                f"{reader.path}: table {name!r} has dim {declared[name].dim}, in the checkpoint{there} "
                f"{recorded[source].dim}.",
                path=reader.path,
                table=name,
            )
        if problem := id_difference(reader.schema, schema, name, source):
            raise CheckpointError(f"{reader.path}: {problem}", path=reader.path, table=name)
    reading = ServerReading(reader, servers, range(len(servers)))
    reading.verify()
    return _import_rows(servers, reader, reading, sources, state=state, shards=False)


def resolved(schema: Schema, servers: Sequence[EmbeddingPS]) -> Schema:
    """Returns the schema with every table declared and its optimizer filled in, as the rows were written with."""
    whole: Schema = msgspec.structs.replace(schema, tables=list(servers[0].tables().values()))
    return whole


def load_partitions(
    servers: Sequence[EmbeddingPS], schema: Schema, directory: str, ranks: Collection[int], step: int | None = None
) -> str:
    """Loads the rows of a checkpoint, by default the latest, into the PSs of these ranks; the others keep theirs.

    The PSs are empty, else rows that the checkpoint lacks stay.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another schema.
    """
    reader = CheckpointReader(directory, step)
    reader.check_schema(resolved(schema, servers))
    reading = ServerReading(reader, servers, ranks)
    reading.verify()
    _import_rows(servers, reader, reading, _same(reader.manifest.tables), state=True, ranks=ranks)
    return reader.path


def _same(tables: Iterable[str]) -> dict[str, str]:
    """Returns tables that have the same names in a checkpoint."""
    return {name: name for name in tables}


def _import_rows(
    servers: Sequence[EmbeddingPS],
    reader: CheckpointReader,
    reading: ServerReading,
    tables: Mapping[str, str],
    *,
    state: bool,
    shards: bool = True,
    ranks: Collection[int] | None = None,
) -> dict[str, LoadedTable]:
    """Imports the rows of tables.

    Args:
        servers: all PSs.
        reader: of the checkpoint.
        reading: of the same, into these PSs.
        tables: names in the checkpoint by name.
        state: also take the optimizer's state, where the table has the same optimizer in the checkpoint.
        shards: also import the PSs' state besides rows, if they have the shape of those that wrote it.
        ranks: only import into these PSs.

    Raises:
        CheckpointError: values of a table do not fit its dtype; nothing has been imported.
    """
    if ranks is None:
        ranks = range(len(servers))
    _check_dtypes(reader, [(table, tables[name]) for name, table in servers[0].tables().items() if name in tables])
    changed = [servers[rank] for rank in ranks]
    shapes = _shapes(_exported(servers)) if shards else {}
    written_by = reader.manifest.buckets
    same_owners = written_by is not None and written_by.same_owners(servers[0].buckets())
    same = shards and same_owners and _shapes(server_pieces(reader)) == shapes
    # Stamps of rows, by which the oldest are evicted, count the clock of their shard. Rows that change shards need a
    # common clock.
    gaps = {} if same else clock_gaps(reader)
    own_tables = {name: table for name, table in servers[0].tables().items() if name in tables}
    to_read = [
        _to_read(reader, declared, tables[name], gaps.get(tables[name], {}), state=state)
        for name, declared in own_tables.items()
    ]
    before = {name: (_count(changed, name, "rows"), _count(changed, name, "evicted")) for name in own_tables}
    read = reading.read(to_read)
    loaded: dict[str, LoadedTable] = {}
    other_accumulators: dict[float, list[str]] = {}
    for table, declared in zip(to_read, own_tables.values(), strict=True):
        name, with_state, rows = table.name, table.state, read[table.name]
        loaded[name] = LoadedTable(rows, with_state)
        had_rows, evicted = before[name]
        if more := _count(changed, name, "evicted") - evicted:
            _warn_of_capacity(reader, declared, more, None if had_rows else rows, len(servers))
        recorded = reader.manifest.tables[table.source].optimizer
        if state and rows and not with_state and declared.trainable and recorded is not None:
            LOG.warning("Table %r: the optimizer's state is reset; %s has none of its kind.", name, reader.path)
        initial = _other_accumulator(declared.optimizer, recorded)
        if rows and with_state and initial is not None:
            other_accumulators.setdefault(initial, []).append(name)
    for initial, names in other_accumulators.items():
        LOG.warning(
            "Rows in %s began with initial_accumulator %g (tables %s). New rows begin with the default, %g, and make "
            "longer steps. To continue as before, set initial_accumulator=%g; a learning rate that suits the one does "
            "not suit the other.",
            reader.path, initial, ", ".join(names), INITIAL_ACCUMULATOR, initial,
        )  # fmt: skip
    if same:
        reading.read([], state=True)  # After evictions have been counted, as the state has counters.
    else:
        _merge_counts(servers, reader, {key: length for key, length in shapes.items() if key[0] in ranks})
    call_all([server.end_import for server in changed])
    return loaded


def _to_read(
    reader: CheckpointReader, declared: Table, source: str, gaps: Mapping[int, int], *, state: bool
) -> TableToRead:
    """Returns how a PS reads a table, from `source`; its state if that is asked for and is of the same optimizer."""
    same_optimizer = same_rule(declared.optimizer, reader.manifest.tables[source].optimizer)
    raised = sorted(gaps.items())
    return TableToRead(
        declared.name,
        source,
        state and same_optimizer and _has_state(reader, source),
        np.array([shard for shard, _ in raised], np.uint64),
        np.array([gap for _, gap in raised], np.uint32),
    )


def _merge_counts(
    servers: Sequence[EmbeddingPS], reader: CheckpointReader, shapes: Mapping[tuple[int, str, int, str], int]
) -> None:
    """Continues with the counts of ids that are not admitted, of a checkpoint of other PSs; see `AdmissionSketches`.

    Args:
        servers: all PSs.
        reader: of the checkpoint.
        shapes: lengths of the arrays of the PSs to change.
    """
    lengths = {(number, table, shard): n for (number, table, shard, array), n in shapes.items() if array == "sketch"}
    if not lengths:
        return
    sketches = AdmissionSketches(reader)
    counts = Counter((number, table) for number, table, _ in lengths)
    for (number, table, shard), length in lengths.items():
        if table in sketches:
            values = sketches.of_shard(table, shard, counts[number, table], length)
            servers[number].import_state([StatePiece(table, shard, "sketch", 0, values)])
    tables = [
        f"table {table!r} uses {sketches.used(table):.1%} of its counters"
        if table in sketches
        else f"table {table!r} has no counts in the checkpoint and begins without"
        for table in dict.fromkeys(table for _, table, _ in lengths)
    ]
    LOG.warning(
        "%s was written by PSs of another number, bucket map, capacity or admission. Counts of ids that are not "
        "admitted are merged, so ids may be admitted early: %s.",
        reader.path, "; ".join(tables),
    )  # fmt: skip


def _check_dtypes(reader: CheckpointReader, tables: Iterable[tuple[Table, str]]) -> None:
    """Checks that the values of a checkpoint fit the dtypes of tables, and warns of those that get rounded.

    Reads the rows of tables whose dtype in the checkpoint has larger numbers.

    Args:
        reader: of the checkpoint.
        tables: tables, with their names in the checkpoint.
    """
    for table, source in tables:
        written = {link.manifest.tables[source].dtype for link in reader.links} - {table.dtype}
        if table.dtype == "float32" or not written:
            continue
        if any(LARGEST[dtype] > LARGEST[table.dtype] for dtype in written):
            for _, arrays in reader.rows(source):
                check_values(reader.path, source, arrays, table.dtype)
        LOG.warning(
            "Table %r: values are rounded to the nearest %s; in %s they are %s.",
            table.name, table.dtype, reader.path, " and ".join(sorted(written)),
        )  # fmt: skip


def _count(servers: Sequence[EmbeddingPS], table: str, figure: str) -> int:
    return sum(server.statistics()[table][figure] for server in servers)


def _warn_of_capacity(reader: CheckpointReader, table: Table, evicted: int, rows: int | None, servers: int) -> None:
    """Warns that a full table has not kept all rows: of `rows` in a checkpoint, or, if None, of any it had before."""
    LOG.warning(
        "Table %r: %s its capacity, %s in %d PSs, so the least recently used ones were evicted. "
        "Load %s with a larger capacity to keep them.",
        table.name,
        f"{evicted} of {rows} rows do not fit" if rows is not None else f"{evicted} rows, old or loaded, exceeded",
        table.capacity, servers, reader.path,
    )  # fmt: skip


def _other_accumulator(declared: EmbeddingOptimizer | None, recorded: EmbeddingOptimizer | None) -> float | None:
    """Returns the checkpoint's initial accumulator if it is another one and the table has the default."""
    if not isinstance(declared, Adagrad | RowwiseAdagrad) or not isinstance(recorded, Adagrad | RowwiseAdagrad):
        return None
    initial = recorded.initial_accumulator
    return initial if initial != declared.initial_accumulator == INITIAL_ACCUMULATOR else None


def _exported(servers: Sequence[EmbeddingPS]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for number, server in enumerate(servers):
        for pieces in server.export_state():
            yield number, [piece._asdict() for piece in pieces]


def _shapes(states: Iterable[tuple[int, list[dict[str, Any]]]]) -> dict[tuple[int, str, int, str], int]:
    """Returns the length of each array of state that may differ in it, by PS, table, shard and name."""
    lengths: Counter[tuple[int, str, int, str]] = Counter()
    for number, pieces in states:
        for piece in (piece for piece in pieces if piece["array"] != "ages"):  # Their number does not differ.
            lengths[number, piece["table"], piece["shard"], piece["array"]] += len(piece["values"])
    return lengths


def _has_state(reader: CheckpointReader, table: str) -> bool:
    widths = {link.manifest.tables[table].state_width for link in reader.links if link.manifest.tables[table].rows}
    optimizer = reader.manifest.tables[table].optimizer
    stateless = isinstance(optimizer, SGD) and not optimizer.momentum
    return stateless or widths != {0}


def _declared_changes(reader: CheckpointReader, declared: Declared) -> list[str]:
    """Describes changes of the embedding optimizer and of the dense schedule."""
    config = reader.config
    schedule = {"schedule": (config.get("options") or {}).get("schedule")}
    of_schedule = changes("trainer", schedule, dump(declared.options))
    before, now = config.get("embedding_optimizer") or {}, dump(declared.embedding_optimizer)
    of_tables = changes("embedding_optimizer", before, now)
    if "kind" in of_tables:  # Fields of the same name mean something else.
        of_tables = {"kind": of_tables["kind"]}
    return [*of_schedule.values(), *of_tables.values()]


def _check_model(model: torch.nn.Module, tensors: dict[str, torch.Tensor], directory: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    recorded = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() | recorded.keys()):
        if shapes.get(name) != recorded.get(name):
            raise CheckpointError(
                f"{directory}: the model's tensor {name!r} is {recorded.get(name, 'missing')} in the checkpoint and "
                f"{shapes.get(name, 'missing')} here. Build the model as it was when the checkpoint was written.",
                path=directory,
                tensor=name,
            )


def _check_seed(seed: int, recorded: int, directory: str) -> None:
    if recorded != seed:
        raise CheckpointError(
            f"{directory}: rows were initialised with seed {recorded}, and new ones would be with {seed}. "
            "Set the same seed.",
            path=directory,
        )
