"""The rates from which a plan is computed, measured by `persia bench rates` and stored as JSON."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from persia.errors import ConfigError
from persia.store import TableConfig

__all__ = [
    "BatchShape",
    "CheckpointRate",
    "DiskRate",
    "RateSource",
    "Rates",
    "RowRate",
    "StepRate",
    "WireRate",
    "WorkloadRate",
    "load_rates",
    "merge_rates",
    "row_key",
    "save_rates",
    "workload_key",
]

VERSION = 1


class RateSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Origin of the rates of a file.

    Attributes:
        machine: processor, cores and system.
        cores: number of cores of that machine.
        persia: version of persia.
        measured: RFC 3339 time of the last measurement.
        command: the last command.
        file: path that the rates were read from; empty in the file itself.
    """

    machine: str
    cores: int
    persia: str
    measured: str
    command: str
    file: str = ""


class RowRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Core seconds of an embedding PS for a row, in a table of `rows` rows and with distinct, uniform ids.

    Attributes:
        lookup: seconds to look up a row.
        update: seconds to apply a gradient.
        rows: number of rows of the table in which they were measured.
    """

    lookup: float
    update: float
    rows: int


class WireRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a call between two processes, over loopback.

    Attributes:
        call: core seconds of caller and callee together for a call without data.
        byte: core seconds of sender and receiver together for a byte.
        bandwidth: bytes/s of one stream of calls.
    """

    call: float
    byte: float
    bandwidth: float


class CheckpointRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes/s that one PS writes to or reads from a checkpoint, and seconds until a restarted PS answers.

    Attributes:
        write: bytes/s of a checkpoint, synced to disk.
        read: bytes/s of a checkpoint, from the file cache.
        restart: seconds from the start of a PS process to its first answer, without rows.
        attach: seconds that each row in its shared memory adds to `restart`.
    """

    write: float
    read: float
    restart: float
    attach: float = 0.0


class DiskRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of an SSD, without the cache of the operating system.

    Attributes:
        directory: directory in which they were measured.
        reads: random reads/s of 4 KiB, with as many in flight as an embedding PS has.
        write: bytes/s in blocks of 64 KiB.
        row: core seconds of an embedding PS to move a row back from disk, and to move another one out for it.
    """

    directory: str
    reads: float
    write: float
    row: float = 0.0


class StepRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of an NN worker for a batch whose rows have arrived.

    Attributes:
        device: device of the network.
        seconds: duration of a step.
        core_seconds: processor time of a step.
    """

    device: str
    seconds: float
    core_seconds: float


class BatchShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a batch, as the mean over the batches that were read.

    Attributes:
        samples: number of samples.
        ids: number of ids by table, repetitions included.
        unique: number of distinct ids by table.
        offsets: bytes of the offsets and weights of ids by table, for features whose samples have any number of ids.
        dense_bytes: bytes of non-ID-type features and labels.
        parameters: number of parameters of the network.
    """

    samples: int
    ids: dict[str, float]
    unique: dict[str, float]
    offsets: dict[str, float]
    dense_bytes: float
    parameters: int


class WorkloadRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of a configuration: its data, network and batch size.

    Attributes:
        name: name of the configuration's file.
        batch: shape of a batch.
        reader: core seconds of a data loader for a batch.
        worker: core seconds of an embedding worker for a batch, without its calls.
        server: core seconds of a PS for the two requests of a batch, independent of the number of rows.
        step: rate of an NN worker.
    """

    name: str
    batch: BatchShape
    reader: float
    worker: float
    server: float
    step: StepRate


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured rates. A plan fails if a rate that it needs is missing.

    Attributes:
        version: version of this format.
        sources: origin of the rates, one for each file.
        rows: rates of rows by `row_key`.
        workloads: rates of configurations by `workload_key`.
        wire: costs of calls.
        checkpoint: rates of checkpoints and restarts.
        disk: rates of an SSD.
        sharing: core seconds that roles spend as processes of one machine, divided by the sum of the core seconds that
            each spends alone: they wake one another, and evict one another's data from the caches. None: not measured.
    """

    version: int
    sources: list[RateSource]
    rows: dict[str, RowRate] = {}
    workloads: dict[str, WorkloadRate] = {}
    wire: WireRate | None = None
    checkpoint: CheckpointRate | None = None
    disk: DiskRate | None = None
    sharing: float | None = None

    @property
    def shared(self) -> float:
        """Factor for the costs of a role measured alone if roles are processes of one machine: `sharing`, or 1."""
        return self.sharing or 1.0

    def row(self, table: TableConfig) -> RowRate:
        """Returns the rate of a table's rows.

        Raises:
            ConfigError: the rate was not measured.
        """
        key = row_key(table)
        if key not in self.rows:
            raise self.missing(f"the rate of rows {key!r} of table {table.name!r}")
        return self.rows[key]

    def workload(self, key: str) -> WorkloadRate:
        """Returns the rates of a configuration.

        Raises:
            ConfigError: the rates were not measured.
        """
        if key not in self.workloads:
            raise self.missing("the rates of this configuration's data, network and batch size")
        return self.workloads[key]

    def missing(self, what: str, option: str = "") -> ConfigError:
        """Returns the error for a rate that was not measured."""
        files = [source.file for source in self.sources]
        return ConfigError(
            f"Missing rate in {', '.join(files) or 'the rates'}: {what}. Measure it on a machine like the hosts of the "
            f"plan: persia bench rates CONFIG{option} --save {files[0] if files else 'rates.json'}",
            field="rates",
        )


def row_key(table: TableConfig) -> str:
    """Returns the key of the rate of a table's rows: dim, dtype and optimizer."""
    momentum = "+momentum" if table.optimizer == "sgd" and table.state_width else ""
    return f"{table.dim}/{table.dtype}/{table.optimizer}{momentum}"


def workload_key(*parts: Any) -> str:
    """Returns the key of a configuration's rates: a digest of everything that they depend on."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


def load_rates(paths: Sequence[str]) -> Rates:
    """Reads files of rates. If two files have the same rate, the later one takes precedence.

    Raises:
        ConfigError: a file cannot be read, or has another version.
    """
    merged = Rates(VERSION, [])
    for path in paths:
        try:
            rates = msgspec.json.decode(Path(path).read_bytes(), type=Rates)
        except OSError as error:
            raise ConfigError(
                f"The rates {path} cannot be read: {error.strerror}. Measure them: persia bench rates CONFIG --save "
                f"{path}",
                path=path,
            ) from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not a file of rates: {error}.", path=path) from error
        if rates.version != VERSION:
            raise ConfigError(
                f"{path} has rates of version {rates.version}; expected {VERSION}. Measure them again: persia bench "
                f"rates CONFIG --save {path}",
                path=path,
            )
        merged = merge_rates(merged, rates, path)
    return merged


def merge_rates(first: Rates, second: Rates, file: str) -> Rates:
    """Merges rates; the second ones take precedence."""
    named = [msgspec.structs.replace(source, file=file) for source in second.sources]
    return Rates(
        VERSION,
        [*first.sources, *named],
        {**first.rows, **second.rows},
        {**first.workloads, **second.workloads},
        second.wire or first.wire,
        second.checkpoint or first.checkpoint,
        second.disk or first.disk,
        second.sharing or first.sharing,
    )


def save_rates(path: str, rates: Rates) -> None:
    """Adds rates to a file, which is created if needed. Replaces the file atomically.

    Raises:
        ConfigError: the file has rates of another machine.
    """
    source = rates.sources[-1]
    if os.path.exists(path):
        before = load_rates([path])
        if before.sources and before.sources[0].machine != source.machine:
            raise ConfigError(
                f"{path} has rates of another machine ({before.sources[0].machine}); save the rates of this machine to "
                "another file, and pass both to `persia plan`: --rates FILE --rates FILE.",
                path=path,
            )
        rates = merge_rates(before, rates, "")
    rates = msgspec.structs.replace(rates, sources=[source])
    partial = f"{path}.tmp"
    Path(partial).write_bytes(msgspec.json.format(msgspec.json.encode(rates), indent=2) + b"\n")
    os.replace(partial, path)
