"""The rows that a device owns during a training pass, of all tables with `owned_rows`.

Whoever reads rows in this process does so through :class:`CurrentService`, which has them written back first, as the
end of a pass does (docs/decisions/0041-owned-rows-in-training.md).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from persia.errors import ConfigError, PersiaError
from persia.modes import Mode, Sync
from persia.nn.gate import LookupTime
from persia.nn.options import CollectionOptions
from persia.nn.owned_rows import HotRows, OwnedBatch, OwnedPlan, OwnershipRule, Unwritten
from persia.nn.row_access import RowAccess
from persia.schema import EmbeddingOptimizer, Schema, Table
from persia.services import Connection, EmbeddingPS, ProcessCluster
from persia.types import Packed, UpdateCounts

__all__ = ["CurrentService", "OwnedCounts", "OwnedTables", "OwnedTablesPlan", "check_outputs_of_run", "check_ownership"]

S = TypeVar("S")

IDLE_BATCHES = 32
"""Number of batches for which a row was not used before another may take its slot: rare rows displace no hot ones."""

READS = frozenset({"begin_snapshot", "evaluate", "export_rows", "lookup", "lookup_ahead", "read_rows", "refresh"})
"""Calls of PSs and embedding workers that return values of rows."""

CHANGES = frozenset({"begin_move", "import_rows", "import_state", "publish", "push", "read_own_rows", "set_rows"})
"""Calls that change rows, move them, or go on to read them later."""

NEAR = (
    "all rows in memory of this process, as other processes would read rows that are not written back. Use "
    "persia.cluster.Embedded(), and tables without `spill`"
)
"""What owned rows need of a cluster, for errors."""

RECORDING = "no record_dir: owned rows are not looked up, and a schedule has the versions of all lookups"


class OwnedCounts(NamedTuple):
    """Rows that a device owns, and what it saves.

    Attributes:
        hits: distinct rows of batches that were on the device so far.
        misses: distinct rows of batches of these tables that were looked up so far.
        rows: rows on the device now.
        unwritten: updates that only the device has.
        lost: updates that could not be written back at the end of a pass so far.
    """

    hits: int = 0
    misses: int = 0
    rows: int = 0
    unwritten: Unwritten = Unwritten()
    lost: Unwritten = Unwritten()


def check_ownership(tables: Mapping[str, Table], mode: Mode, cluster: object = None) -> None:
    """Checks that a mode, and a cluster, can train tables whose rows a device owns.

    Raises:
        ConfigError: they cannot; the error names the table.
    """
    owned = [table for table in tables.values() if table.owned_rows]
    if owned and isinstance(cluster, ProcessCluster):
        raise _refused(owned[0], NEAR)
    if owned and not isinstance(mode, Sync):
        raise _refused(
            owned[0],
            f"the mode Sync, not {type(mode).__name__}, in which a gradient is applied after later lookups. Train in "
            "persia.modes.Sync()",
        )


def check_outputs_of_run(schema: Schema, *, publishes: bool, records: bool) -> None:
    """Checks that a run with owned rows has no outputs that need the rows of parameter servers in each step.

    Args:
        schema: of the run.
        publishes: whether changes of rows are published during training.
        records: whether the schedule of lookups is recorded.

    Raises:
        ConfigError: it has; the error names the table.
    """
    owned = [table for table in schema.resolved_tables().values() if table.owned_rows]
    if owned and publishes:
        raise _refused(
            owned[0], "no TrainerOptions.publish: parameter servers publish rows while some are newer on the device"
        )
    if owned and records:
        raise _refused(owned[0], RECORDING)


class OwnedTablesPlan:
    """Which rows of a batch the device has, and its gradients' way. For the training thread.

    Attributes:
        wanted: whether to look each row up, by table, bool `[unique ids]`.
        pushed: whether the gradient of each row goes to the parameter servers, in the same form.
        places: empty; see `CachePlan.places`.
        oldest: 0, as no row lacks an update.
        step: global step of the batch, counted from 0; to be set before `update`.
    """

    oldest = 0

    def __init__(
        self, owner: OwnedTables, ids: Packed[np.uint64], plans: Mapping[str, OwnedPlan], wanted: Packed[np.bool_]
    ) -> None:
        self.wanted = wanted
        self.places: Packed[np.int32] = Packed([], [], np.empty(0, np.int32))
        self.step = 0
        self._owner = owner
        self._plans = plans
        self._batches: dict[str, OwnedBatch] = {}
        self.pushed = Packed(ids.names, ids.counts, np.ones(len(ids.buffer), np.bool_))
        self._refused: dict[str, torch.Tensor] = {}

    def assemble(
        self, looked_up: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns all rows, by table `[unique ids, dim]`. Reads those that have got a slot, with their state.

        Args:
            looked_up: rows that were looked up, by table.
            places: not used.
        """
        rows = dict(looked_up)
        with self._owner.lock:
            self._owner.await_training_stream()
            for name, plan in self._plans.items():
                self._batches[name] = batch = self._owner.hot[name].assemble(plan, looked_up[name])
                rows[name] = batch.values
                self.pushed[name][:] = batch.pushed
        return rows

    def update(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Updates the owned rows of the batch, once. Returns the gradients of the others, `[pushed rows, dim]`.

        Args:
            gradients: of all rows, by table, float32 `[unique ids, dim]`; tables that have none are left out.
        """
        rest = dict(gradients)
        with self._owner.lock:
            for name, batch in self._batches.items():
                if name in gradients:
                    hot = self._owner.hot[name]
                    before = hot.refused
                    rest[name] = hot.update(batch, gradients[name], self.step)
                    self._refused[name] = hot.refused - before
                    self._owner.updated = True
        return rest

    def with_owned(self, counts: Mapping[str, UpdateCounts]) -> dict[str, UpdateCounts]:
        """Returns the outcome of a push by table, with the gradients of owned rows. Waits for the device."""
        total = dict(counts)
        for name, refused in self._refused.items():
            other, rows = total.get(name, UpdateCounts()), len(self._batches[name].places)
            non_finite = int(refused)
            total[name] = other._replace(
                applied=other.applied + rows - non_finite, non_finite=other.non_finite + non_finite
            )
        return total


class OwnedTables:
    """The rows that the device of the only NN worker owns, of all tables with `owned_rows`. Thread-safe.

    Args:
        schema: features and tables.
        optimizer: for tables that declare none.
        connection: of the NN worker, to the roles themselves.
        options: of the collection.
        device: of the network.

    Attributes:
        hot: the rows by table; empty before the first training pass, and after rows were changed elsewhere.
        lock: guards them.
        updated: whether a row was updated since all were written back.

    Raises:
        ConfigError: rows cannot be owned there; the error names the table.
    """

    def __init__(
        self,
        schema: Schema,
        optimizer: EmbeddingOptimizer,
        connection: Connection,
        options: CollectionOptions,
        device: torch.device,
    ) -> None:
        self._tables = {name: table for name, table in schema.resolved_tables().items() if table.owned_rows}
        self._optimizer = optimizer
        self._device = device
        self.hot: dict[str, HotRows] = {}
        self.lock = threading.RLock()
        self.updated = False
        self._training = False
        self._hits = self._misses = 0
        self._lost = Unwritten()
        self._stream: torch.cuda.Stream | None = None
        if self._tables:
            _check_place(next(iter(self._tables.values())), connection, options)
            self._access = RowAccess(schema, connection.servers)

    def __bool__(self) -> bool:
        """Returns whether a table has `owned_rows`."""
        return bool(self._tables)

    def watched(self, connection: Connection) -> Connection:
        """Returns a connection through which rows are read with the updates of owned rows."""
        if not self:
            return connection
        servers: Sequence[EmbeddingPS] = [_current(server, self) for server in connection.servers]
        return connection._replace(worker=_current(connection.worker, self), servers=servers)

    # --- a pass -----------------------------------------------------------------------------------------------------

    def open(self, mode: Mode, free: Callable[[], int], *, recording: bool = False) -> bool:
        """Begins a pass, with the rows of the pass before. Returns whether there may be owned rows.

        Args:
            mode: of the pass.
            free: returns the free bytes of the device.
            recording: whether a schedule is recorded.

        Raises:
            ConfigError: the mode cannot train such tables, a schedule is recorded, or the device lacks the memory.
        """
        if not self:
            return False
        check_ownership(self._tables, mode)
        if recording:
            raise _refused(next(iter(self._tables.values())), RECORDING)
        with self.lock:
            self.hot = self.hot or self._allocated(free())
        return True

    def _allocated(self, left: int) -> dict[str, HotRows]:
        """Returns empty slots of all tables. Raises ConfigError, before any is made, unless they fit into memory."""
        optimizers: dict[str, EmbeddingOptimizer] = {}
        for name, table in self._tables.items():
            optimizer = table.optimizer_or(self._optimizer)
            assert optimizer is not None  # Such a table is trainable.
            optimizers[name] = optimizer
            size = table.owned_rows * HotRows.slot_bytes(table, optimizer)
            if size > left:
                raise ConfigError(
                    f"Table({name!r}).owned_rows = {table.owned_rows} needs {size:,} bytes on the device, which has "
                    f"{left:,} left for it. Set it to fewer rows, or to 0.",
                    field=f"Table({name!r}).owned_rows",
                )
            left -= size
        rule = OwnershipRule(idle_batches=IDLE_BATCHES)
        return {
            name: HotRows(table, optimizers[name], self._access, table.owned_rows, self._device, rule)
            for name, table in self._tables.items()
        }

    def close(self, failure: BaseException | None = None) -> None:
        """Ends the pass: writes all rows back; they stay for the next one. Blocks.

        Args:
            failure: the error that ended the pass, which gets a note if rows cannot be written back; None without.

        Raises:
            PersiaError: they cannot be written back, and are lost; a note counts them. Not raised next to `failure`.
        """
        with self.lock:
            self._training = False
            try:
                self.write_back()
            except PersiaError as error:
                lost = self._unwritten()
                self._lost = _total([self._lost, lost])
                note = (
                    f"{lost.updates:,} updates of {lost.rows:,} rows that the device owned are lost. Continue from the "
                    "last checkpoint."
                )
                self.hot, self.updated = {}, False
                if failure is None or isinstance(failure, GeneratorExit):
                    error.add_note(note)
                    raise
                failure.add_note(f"{note} They could not be written back ({type(error).__name__}: {error}).")

    def plan(self, ids: Packed[np.uint64], at: LookupTime) -> OwnedTablesPlan:
        """Decides which rows of a batch to look up, and takes slots for them, whose rows are written back.

        Args:
            ids: distinct ids of the batch, by table.
            at: not used.

        Raises:
            PersiaError: rows cannot be written back; see `RowAccess.set`.
        """
        wanted = Packed(ids.names, ids.counts, np.ones(len(ids.buffer), np.bool_))
        plans: dict[str, OwnedPlan] = {}
        with self.lock:
            self._training = True
            self._note_stream()
            for name, hot in self.hot.items():
                if name in ids:
                    plans[name] = plan = hot.plan(ids[name])
                    wanted[name][:] = plan.missing
                    missing = int(plan.missing.sum())
                    self._hits += len(plan.ids) - missing
                    self._misses += missing
        return OwnedTablesPlan(self, ids, plans, wanted)

    def clear(self) -> None:
        """No-op: a batch that was lost after its plan leaves slots empty, and changes no row."""

    def _note_stream(self) -> None:
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    def await_training_stream(self) -> None:
        """Makes the current stream wait for what the training thread has queued: index and rows are used in both."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # --- readers ----------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Writes all rows that were updated on the device to the parameter servers; they stay on the device. Blocks.

        Raises:
            PersiaError: some could not be written; repeat the call.
        """
        with self.lock:
            if not self.updated:
                return
            self.await_training_stream()
            for hot in self.hot.values():
                hot.write_back()
            self.updated = False

    def before_change(self, call: str) -> None:
        """Discards the rows on the device before a call that changes them elsewhere.

        What an interrupted end of a pass has not written back is written first.

        Raises:
            PersiaError: a training pass, which may change them on the device, is under way; or rows cannot be written.
        """
        with self.lock:
            if not self._training:
                self.write_back()
                self.hot = {}
            elif call != "push":
                raise PersiaError(
                    f"{call} changes, moves or publishes rows while a device owns some of them (Table.owned_rows). "
                    "Leave the `prefetch` loop, or wait for the end of `fit`, first."
                )

    @property
    def counts(self) -> OwnedCounts:
        """Number of owned rows, and outcome of their lookups so far. Waits for the device."""
        with self.lock:
            self.await_training_stream()
            rows = sum(map(len, self.hot.values()))
            return OwnedCounts(self._hits, self._misses, rows, self._unwritten(), self._lost)

    def _unwritten(self) -> Unwritten:
        return _total([hot.unwritten() for hot in self.hot.values()])


class CurrentService:
    """A PS or an embedding worker, which has the updates of owned rows before a call reads rows. Thread-safe.

    Args:
        service: it.
        owned: the rows that the device of this process owns.
    """

    def __init__(self, service: object, owned: OwnedTables) -> None:
        self._service = service
        self._owned = owned

    def __getattr__(self, name: str) -> Any:
        """Returns a method of the service."""
        method = getattr(self._service, name)
        if name in READS:
            before = self._owned.write_back
        elif name in CHANGES:
            before = functools.partial(self._owned.before_change, name)
        else:
            return method

        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            before()
            return method(*arguments, **named)

        return call


def _total(parts: Sequence[Unwritten]) -> Unwritten:
    return Unwritten(sum(part.rows for part in parts), sum(part.updates for part in parts))


def _current(service: S, owned: OwnedTables) -> S:
    return cast("S", CurrentService(service, owned))


def _check_place(table: Table, connection: Connection, options: CollectionOptions) -> None:
    """Raises ConfigError unless a device of this process may own rows."""
    if connection.nn_workers > 1:
        raise _refused(table, f"one NN worker, and there are {connection.nn_workers}, which need each other's rows")
    if not connection.near:
        raise _refused(table, NEAR)
    if options.accumulation_steps > 1:
        raise _refused(
            table, f"accumulation_steps = 1, not {options.accumulation_steps}: gradients are applied batch by batch"
        )
    if options.one_thread is not None:
        raise _refused(table, f"one_thread to be left out, which is {options.one_thread}")


def _refused(table: Table, needs: str) -> ConfigError:
    field = f"Table({table.name!r}).owned_rows"
    return ConfigError(f"{field} = {table.owned_rows} needs {needs}. Or set owned_rows to 0.", field=field)
