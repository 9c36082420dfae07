"""Hot rows of a table on a device, with their optimizer state: they are updated there, and written back by a rule.

For one NN worker, whose batches are computed one after another, as in `Sync`: a row that is owned has its newest values
here and nowhere else. `owned_tables.py` uses it in training; see docs/decisions/0040-owned-rows.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from persia.nn.row_access import CHUNK_BYTES, RowAccess
from persia.nn.row_updates import RowUpdates
from persia.schema import EmbeddingOptimizer, Table
from persia.types import BoolArray, Ids, Int64Array, RowState

__all__ = ["HotRows", "OwnedBatch", "OwnedPlan", "OwnershipRule", "Unwritten"]

FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads ids over slots (Fibonacci hashing), as the core does for copies of rows."""

SLOT_BYTES = 48
"""Memory of a slot in addition to values and optimizer state."""

NEVER = -1
"""Last use of a slot that is empty."""

COUNT, LAST_STEP, UNWRITTEN, USED = range(4)
"""Columns of what is known of a slot: updates of its row, the step of the last one, updates since it was written back,
and the batch that has used it last."""


class OwnershipRule(NamedTuple):
    """When rows come to the device, and when they are written back.

    Attributes:
        idle_batches: number of batches for which a row was not used before another may take its slot.
        write_back_steps: number of global steps after which all rows are written back; 0: only when `write_back` is
            called, and when a row loses its slot.
    """

    idle_batches: int = 0
    write_back_steps: int = 0


class Unwritten(NamedTuple):
    """Updates that only the device has. They are lost if its process dies.

    Attributes:
        rows: number of rows.
        updates: number of updates of these rows.
    """

    rows: int = 0
    updates: int = 0


class OwnedPlan(NamedTuple):
    """Which rows of a batch are on the device.

    Attributes:
        ids: distinct ids of the batch, uint64 `[n]`.
        missing: whether each row has to be looked up, bool `[n]`.
        taken: places of the missing rows that get a slot, int64 `[t]`.
        slots: slot of each id on the device, int64 `[n]`; it has the row of another id unless the row is owned.
    """

    ids: Ids
    missing: BoolArray
    taken: Int64Array
    slots: Tensor


@dataclass(frozen=True)
class OwnedBatch:
    """The rows of a batch.

    Attributes:
        values: all rows, float32 `[n, dim]`, on the device.
        pushed: whether the gradient of each row goes to the parameter servers, bool `[n]`: the device does not own it.
        places: places of the owned rows, int64 `[k]`, on the device.
        slots: their slots, int64 `[k]`, on the device.
        rest: places of the others, int64 `[n - k]`, on the device.
    """

    values: Tensor
    pushed: BoolArray
    places: Tensor
    slots: Tensor
    rest: Tensor


class HotRows:
    """Rows of a table that a device owns. For one thread, and one batch at a time. Calls block.

    For each batch call `plan`, look up the rows that it lacks in training, then `assemble`, and `update` after the
    backward pass. Results are those of a parameter server that updates all rows: the numbers on tensors of a CPU are
    the same, however many rows are owned. Rows lose their slot to others of the same slot only (direct-mapped).

    A parameter server has earlier values of owned rows. Call `write_back` before anything reads them there: a
    checkpoint, publishing, evaluation, `EmbeddingCollection.rows`. What was not written back is lost with the process;
    `unwritten` counts it.

    Args:
        table: the table.
        optimizer: of its rows.
        access: reads and sets rows at the parameter servers.
        capacity: number of slots.
        device: of the rows; see `slot_bytes`.
        rule: when rows come and go.

    Raises:
        ConfigError: rows of this table cannot be owned.
    """

    def __init__(
        self,
        table: Table,
        optimizer: EmbeddingOptimizer,
        access: RowAccess,
        capacity: int,
        device: torch.device,
        rule: OwnershipRule = OwnershipRule(),  # noqa: B008 - immutable
    ) -> None:
        table.check_ownable()
        self._table = table.name
        self._access = access
        self._rule = rule
        self._updates = RowUpdates(optimizer, table.value_bound)
        width = self._updates.state_width(table.dim)
        self._values = torch.empty(capacity, table.dim, device=device)
        self._state = torch.empty(capacity, width, device=device)
        self._known = torch.zeros(capacity, 4, dtype=torch.int64, device=device)
        self._known[:, USED] = NEVER
        self._ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._claims = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        """While slots are taken: the place of the row that gets each one, else -1."""
        self._chunk = max(1, CHUNK_BYTES // self.slot_bytes(table, optimizer))
        self._batch = 0
        self._non_finite = torch.zeros((), dtype=torch.int64, device=device)

    @staticmethod
    def slot_bytes(table: Table, optimizer: EmbeddingOptimizer) -> int:
        """Returns the memory of a row on the device."""
        return 4 * (table.dim + RowUpdates(optimizer).state_width(table.dim)) + SLOT_BYTES

    # --- a batch ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def plan(self, ids: Ids) -> OwnedPlan:
        """Decides which rows of a batch get a slot, after the rows that lose it were written back.

        Args:
            ids: distinct ids, uint64 `[n]`.

        Raises:
            PersiaError: rows cannot be written back, see `RowAccess.set`; call again.
        """
        keys = torch.from_numpy(ids.view(np.int64).copy()).to(self._ids.device)
        slots = ((keys * FACTOR >> 32) & 0xFFFFFFFF) % len(self._ids)
        used = self._known[:, USED].index_select(0, slots)
        hits = (self._ids.index_select(0, slots) == keys) & (used != NEVER)
        self._batch += 1
        # Before slots are taken: a row of this batch does not lose its slot to another of this batch.
        self._known[slots[hits], USED] = self._batch
        used = self._known[:, USED].index_select(0, slots)
        free = ~hits & ((used == NEVER) | (used < self._batch - self._rule.idle_batches))
        places = free.nonzero().squeeze(1)
        wanted = slots.index_select(0, places)
        # Of several rows for one slot the last gets it, as any order of writes would do on a CPU only.
        self._claims.scatter_reduce_(0, wanted, places, "amax")
        places = places[self._claims.index_select(0, wanted) == places]
        self._claims.index_fill_(0, wanted, -1)
        taken = slots.index_select(0, places)
        self._write(taken[self._known[:, UNWRITTEN].index_select(0, taken) > 0])
        self._known.index_fill_(0, taken, 0)
        self._known[taken, USED] = NEVER
        return OwnedPlan(ids, ~hits.cpu().numpy(), places.cpu().numpy(), slots)

    @torch.no_grad()
    def assemble(self, plan: OwnedPlan, looked_up: Tensor) -> OwnedBatch:
        """Returns the rows of a batch. Reads those that have got a slot, with their state.

        Args:
            plan: the last one.
            looked_up: the missing rows as a training lookup has returned them, float32 `[missing, dim]`, on the device.
        """
        device = self._ids.device
        self._load(plan)
        own = self._ids.index_select(0, plan.slots) == torch.from_numpy(plan.ids.view(np.int64).copy()).to(device)
        own &= self._known[:, USED].index_select(0, plan.slots) == self._batch
        places, rest = own.nonzero().squeeze(1), (~own).nonzero().squeeze(1)
        slots = plan.slots.index_select(0, places)
        values = looked_up.new_empty(len(plan.ids), self._values.shape[1])
        values.index_copy_(0, torch.from_numpy(np.flatnonzero(plan.missing)).to(device), looked_up)
        values.index_copy_(0, places, self._values.index_select(0, slots))
        return OwnedBatch(values, ~own.cpu().numpy(), places, slots, rest)

    def _load(self, plan: OwnedPlan) -> None:
        """Reads the rows that have got a slot. Those that do not exist (not admitted, or evicted) lose it."""
        if not len(plan.taken):
            return
        read = self._access.read(self._table, plan.ids[plan.taken], True)
        assert read.state is not None
        found, device = read.found, self._ids.device
        slots = plan.slots.index_select(0, torch.from_numpy(plan.taken[found]).to(device))
        state, counts = read.state.values[found], read.state.update_count[found].astype(np.int64)
        self._updates.note_counts(int(counts.max(initial=0)))
        self._values.index_copy_(0, slots, torch.from_numpy(read.values[found]).to(device))
        self._state.index_copy_(0, slots, torch.from_numpy(state).to(device))
        zeros = np.zeros_like(counts)
        known = np.stack([counts, read.state.last_step[found].astype(np.int64), zeros, zeros + self._batch], 1)
        self._known.index_copy_(0, slots, torch.from_numpy(known).to(device))
        self._ids.index_copy_(0, slots, torch.from_numpy(read.ids[found].view(np.int64)).to(device))

    @torch.no_grad()
    def update(self, batch: OwnedBatch, gradients: Tensor, step: int) -> Tensor:
        """Updates the owned rows of a batch, and returns the gradients of the others, float32 `[rest, dim]`.

        Args:
            batch: the last one.
            gradients: of all its rows, float32 `[n, dim]`.
            step: global step, counted from 0.

        Raises:
            PersiaError: the rows are updated, and cannot be written back, which was due; see `RowAccess.set`.
        """
        slots = batch.slots
        known = self._known.index_select(0, slots)
        found = self._updates.update(
            gradients.index_select(0, batch.places),
            self._values.index_select(0, slots),
            self._state.index_select(0, slots),
            known[:, COUNT],
            step,
        )
        self._values.index_copy_(0, slots, found.values)
        self._state.index_copy_(0, slots, found.state)
        known[:, COUNT] = found.counts
        known[:, LAST_STEP] = torch.where(found.applied, step, known[:, LAST_STEP])
        known[:, UNWRITTEN] += found.applied
        self._known.index_copy_(0, slots, known)
        self._non_finite = self._non_finite + (~found.applied).sum()
        if self._rule.write_back_steps and (step + 1) % self._rule.write_back_steps == 0:
            self.write_back()
        return gradients.index_select(0, batch.rest)

    # --- writing back -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self) -> int:
        """Writes all rows that were updated here to the parameter servers. Returns their number.

        They stay on the device. A call may be repeated after an error: rows that were written are not written again.

        Raises:
            StoreFullError: a parameter server has no space.
            DeadlineError: a parameter server was late.
        """
        slots = (self._known[:, UNWRITTEN] > 0).nonzero().squeeze(1)
        self._write(slots)
        return len(slots)

    def _write(self, slots: Tensor) -> None:
        for some in slots.split(self._chunk) if len(slots) else ():
            known = self._known.index_select(0, some).cpu().numpy()
            state = RowState(
                self._state.index_select(0, some).cpu().numpy(),
                known[:, COUNT].astype(np.uint32),
                known[:, LAST_STEP].astype(np.uint32),
            )
            ids = self._ids.index_select(0, some).cpu().numpy().view(np.uint64)
            self._access.set(self._table, ids, self._values.index_select(0, some).cpu().numpy(), state)
            self._known[some, UNWRITTEN] = 0

    def unwritten(self) -> Unwritten:
        """Returns the updates that only the device has."""
        updates = self._known[:, UNWRITTEN]
        return Unwritten(int((updates > 0).sum()), int(updates.sum()))

    def discard(self) -> Unwritten:
        """Empties all slots without writing back, as rows were set elsewhere, or training state goes back.

        Returns:
            The updates that are lost.
        """
        lost = self.unwritten()
        self._known.zero_()
        self._known[:, USED] = NEVER
        return lost

    @property
    def refused(self) -> Tensor:
        """The same as `non_finite`, int64 `[]`, on the device. Later updates do not change it."""
        return self._non_finite

    @property
    def non_finite(self) -> int:
        """Number of gradients that were not applied here, as they, or a value after them, are not finite."""
        return int(self._non_finite)

    def __len__(self) -> int:
        """Returns the number of owned rows."""
        return int((self._known[:, USED] != NEVER).sum())
