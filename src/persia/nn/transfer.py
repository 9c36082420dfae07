"""Transfers rows of a batch to the device, and gradients back, in their wire form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from persia import batching
from persia.batching.batch import Batch
from persia.dense.torch_threads import shorten_spinning
from persia.nn.clipping import clipped, clipped_tensors
from persia.nn.joined_tensors import JoinedTensors, joined, of_one_width, together
from persia.nn.owned_tables import OwnedTablesPlan
from persia.nn.pooled_together import FeatureGroup, PooledTogether
from persia.nn.pooling import Expander, PooledAhead
from persia.nn.pooling_plan import FeatureIndex, plan_group
from persia.nn.prepared import PreparedBatch
from persia.nn.row_cache import CachePlan
from persia.nn.row_groups import RowGroup, group_layouts
from persia.nn.staging import Ready, Staging, nothing_to_do
from persia.schema import Table
from persia.schema.pooled_features import pooled_feature
from persia.types import Floats, FreshRows, Int64Array, Inverse, LookedUp, Packed, RegisteredBatch, WireRows

__all__ = [
    "Encoded",
    "Transfer",
    "decode",
    "decode_tensors",
    "encode",
    "encode_tensors",
    "encoded",
]

Encoded = tuple[Packed[np.float32 | np.float16], Packed[np.float32] | None]
"""Gradients by table as they travel, and their scales if they are compressed."""

LARGEST = 2.0**15
SMALLEST_SCALE = 2.0**-126


def decode(
    rows: Mapping[str, WireRows],
    scales: Mapping[str, Floats] | None,
    scratch: batching.Scratch | None = None,
    tables: Mapping[str, Table] | None = None,
) -> Packed[np.float32]:
    """Returns float32 rows `[n, dim]` by table; 16-bit rows of `tables` are given as stored."""
    dtype: Any = np.float32 if scales is None else np.float16
    packed = rows if isinstance(rows, Packed) else Packed.of(rows, dtype)
    factors = None if scales is None else Packed.of(scales, np.float32)
    return batching.plain_packed(packed, factors, tables or {}, scratch or batching.Scratch())


def encode(rows: Mapping[str, Floats]) -> tuple[Packed[np.float16], Packed[np.float32]]:
    """Returns float16 rows and their scales by table. A row that is not finite stays so; see `batching.encode_rows`."""
    return batching.encode_packed(Packed.of(rows, np.float32))


def encoded(rows: Packed[np.float32], compressed: bool) -> Encoded:
    """Returns gradients as they travel."""
    return cast("Encoded", encode(rows) if compressed else (rows, None))


def decode_tensors(
    rows: Mapping[str, torch.Tensor],
    scales: Mapping[str, torch.Tensor] | None,
    tables: Mapping[str, Table] | None = None,
) -> dict[str, torch.Tensor]:
    """Like `decode`, on the device of the tensors: tables of one width together, as each operation is a kernel."""
    decoded, scales, tables = dict(rows), scales or {}, tables or {}
    for names in of_one_width({name: rows[name] for name in scales}):
        scale = joined([scales[name] for name in names])
        values = together([rows[name] for name in names]).to(torch.float32) * scale.unsqueeze(1)
        decoded.update(zip(names, values.split([len(rows[name]) for name in names]), strict=True))
    for dtype in ("bfloat16", "float16"):
        for names in of_one_width({n: rows[n] for n in rows if n in tables and tables[n].dtype == dtype}):
            values = together([rows[name] for name in names]).view(getattr(torch, dtype)).to(torch.float32)
            parts = values.split([len(rows[name]) for name in names])
            decoded.update({n: part[:, : tables[n].dim].contiguous() for n, part in zip(names, parts, strict=True)})
    return decoded


def encode_tensors(rows: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Like `encode`, on the device of the tensors; the order of the tables stays."""
    halves: dict[str, torch.Tensor] = dict(rows)
    scales: dict[str, torch.Tensor] = dict(rows)
    for names in of_one_width(rows):
        values = together([rows[name] for name in names])
        magnitudes = torch.where(values.isnan(), 0.0, values.abs())
        largest = magnitudes.amax(dim=1)
        scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))
        counts = [len(rows[name]) for name in names]
        halves.update(zip(names, (values / scale.unsqueeze(1)).to(torch.float16).split(counts), strict=True))
        scales.update(zip(names, scale.split(counts), strict=True))
    return halves, scales


class Transfer:
    """Converts between the wire form of a batch and the tensors of the network.

    Compressed rows and 16-bit values are decoded on the device of the network, so that half the bytes go to a GPU and
    back; on the host the native core decodes them, with the same bits. All arrays of a kind cross as one.

    Args:
        staging: of the device.
        on_host: whether the native core works on the rows.
        tables: the tables of the schema, and those of values that embedding workers may pool, by name.
        clip_norm: largest norm of the gradients of a batch; None for no clipping.
        expander: has the features to pool on a device; without it `PreparedBatch.pooled` is None there.
    """

    def __init__(
        self,
        staging: Staging,
        on_host: bool,
        tables: Mapping[str, Table],
        clip_norm: float | None = None,
        expander: Expander | None = None,
    ) -> None:
        self._staging = staging
        self._tables = tables
        self._frozen = frozenset(name for name, table in tables.items() if not table.trainable)
        self._halves = frozenset(name for name, table in tables.items() if table.dtype != "float32")
        self._on_host = on_host
        self._clip_norm = clip_norm
        self._expander = expander
        self._scratch = batching.Scratch()

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped, which needs those of all rows."""
        return self._clip_norm is not None

    def rows(
        self, batch: Batch | RegisteredBatch, lookup: LookedUp, cached: CachePlan | OwnedTablesPlan | None = None
    ) -> tuple[PreparedBatch, Ready]:
        """Returns the batch on the device; call the second result in the using thread first.

        Args:
            batch: the samples.
            lookup: their rows, without those that `cached` has.
            cached: the plan of a `RowCache`, which gets copies of the rows that were found, or of `OwnedTables`.

        Raises:
            DataError: the rows do not have the form that their tables declare.
        """
        batching.check_rows(lookup.rows, lookup.scales, self._tables)
        included = None if lookup.left_out is None else batching.places_included(lookup.left_out, lookup.rows)
        arrays: dict[str, NDArray[Any]] = {"dense": batch.dense, "labels": batch.labels}
        if batch.weights is not None:
            arrays["weights"] = batch.weights
        if batch.groups is not None:
            arrays["groups"] = batch.groups.view(np.int64)  # Torch has no operations of uint64.
        if cached is not None:
            arrays["places"] = cached.places.buffer
        rows: dict[str, torch.Tensor] | Packed[np.float32] | list[RowGroup]
        pooled: PooledTogether | None = None
        inverse, weights = lookup.inverse, {} if lookup.weights is None else dict(lookup.weights.items())
        if lookup.pooled:
            inverse.update(dict.fromkeys(_pooled_features(lookup), _places(len(batch.labels))))
        index = FeatureIndex(inverse, dict(lookup.offsets.items()), weights)
        if self._on_host:
            plain = decode(lookup.rows, lookup.scales, self._scratch, self._tables)
            if lookup.left_out is not None and included is not None:
                plain = self._with_zeros(plain, included, lookup.left_out.counts)
            elif lookup.seen is not None and not plain.buffer.flags.writeable:
                # In a message, and `fresh_rows` writes them.
                own = self._scratch.floats(plain.buffer.size)
                own[:] = plain.buffer
                plain = Packed(plain.names, plain.counts, own, plain.widths)
            rows = plain
            if cached is None:
                tensors, ready = self._staging.to_device(arrays)
            else:
                tensors, ready = self._staging.to_device({**arrays, "rows": plain.buffer})
                looked_up = unpacked(tensors["rows"], plain)
                rows = cached.assemble(looked_up, unpacked(tensors["places"].long(), cached.places))
        else:
            on_device = _DeviceRows(lookup, self._tables, self._halves, self._frozen, included, cached)
            features = {} if self._expander is None else self._expander.of_pooled(lookup.pooled or ()).features
            plans = [plan_group(layout, features, index) for layout in on_device.layouts]
            arrays.update(on_device.arrays)
            for number, plan in enumerate(plans):
                if plan is not None:
                    arrays.update({f"{kind}/{number}": array for kind, array in plan.arrays.items()})
            # Made on the device, in the stream that has copied the rest.
            kept = {"dense", "labels", "weights", "groups"} & arrays.keys()
            groups: list[FeatureGroup] = []

            def unpack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
                on_device.unpack(tensors)
                for number, (plan, of_group) in enumerate(zip(plans, on_device.groups, strict=True)):
                    if plan is not None:
                        of_plan = {kind: tensors[f"{kind}/{number}"] for kind in plan.arrays}
                        groups.append(FeatureGroup.of(plan, of_group, of_plan))
                made = {f"rows/{number}": of_group.values for number, of_group in enumerate(on_device.groups)}
                bags = {f"bags/{number}": group.bags for number, group in enumerate(groups) if group.bags is not None}
                # A loop that keeps the labels of a batch must not keep its whole block.
                own = {name: tensors[name].clone() for name in kept}
                return {**tensors, **own, **made, **bags}

            tensors, ready = self._staging.to_device(arrays, unpack)
            rows = on_device.groups
            if features:
                tables = {name: table for name, (table, _, _) in features.items()}
                pooled = PooledTogether(groups, tables, self._staging.device)
        offsets: dict[str, Int64Array | None] = dict.fromkeys(inverse)
        offsets.update(index.offsets)
        prepared = PreparedBatch(tensors["dense"], tensors["labels"], batch.day, rows, inverse, offsets)
        prepared.frozen, prepared.pooled = self._frozen, pooled
        prepared.weights, prepared.groups = tensors.get("weights"), tensors.get("groups")
        prepared.id_weights, prepared.pooled_ids = weights, lookup.pooled or {}
        prepared.seen, prepared.left_out = lookup.seen, lookup.left_out
        return prepared, ready

    def _with_zeros(
        self, rows: Packed[np.float32], included: Packed[np.uint32], counts: Sequence[int]
    ) -> Packed[np.float32]:
        """Returns rows in their places among all rows of a batch; the others are zeros."""
        widths = rows.widths or []
        buffer = self._scratch.floats(sum(map(operator.mul, counts, widths)))
        buffer[:] = 0.0
        whole = Packed(rows.names, counts, buffer, widths)
        batching.put_places(whole, included, rows)
        return whole

    def fresh_rows(self, batch: PreparedBatch, fresh: FreshRows) -> Callable[[], None]:
        """Returns a function that overwrites rows of a batch that is not used yet with their current values.

        Args:
            batch: a batch whose rows have `seen`.
            fresh: the rows that have changed.

        Raises:
            DataError: the rows do not have the form that their tables declare.
        """
        batching.check_rows(fresh.rows, fresh.scales, self._tables)
        places, packed = fresh.places, fresh.rows
        if not places.buffer.size:
            return nothing_to_do
        if self._on_host:
            plain = decode(packed, fresh.scales, self._scratch, self._tables)
            return lambda: batching.put_places(batch.packed_rows(), places, plain)
        counts = batch.row_counts()
        batching.check_places({name: counts.get(name, 0) for name in places}, places)  # A device would only stop.
        groups = batch.row_groups()
        arrays: dict[str, NDArray[Any]] = {"rows": packed.buffer}
        for number, group in enumerate(groups):
            arrays[f"places/{number}"] = group.layout.places(places)
        if fresh.scales is not None:
            arrays["scales"] = fresh.scales.buffer

        def put(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            scales = unpacked(tensors["scales"], fresh.scales) if fresh.scales is not None else None
            rows = decode_tensors(unpacked(tensors["rows"], packed), scales, self._tables)
            with torch.no_grad():
                for number, (layout, values) in enumerate(groups):
                    changed = tensors[f"places/{number}"]
                    if len(changed):
                        own = [rows[name] for name in layout.tables if name in rows]
                        values.index_copy_(0, changed, together(own))
            return tensors

        return lambda: batch.refreshed(self._staging.to_device(arrays, put)[1])

    def begin_beside_network(self) -> None:
        """Prepares the calling thread, a new one, for work next to the network. On a CPU both need the cores."""
        if self._on_host:
            shorten_spinning()

    def gradients_of(
        self, batch: PreparedBatch, scale: torch.Tensor | None, compressed: bool, *, sum_now: bool = False
    ) -> Callable[[], Encoded]:
        """Takes the gradients off a batch; the result returns the gradients of its rows. For the training thread.

        Args:
            batch: after its backward pass.
            scale: what gradients are divided by; see `loss_scale`.
            compressed: whether they travel as float16.
            sum_now: sums the gradients of each row here, where the features are pooled ahead. Else the thread that
                calls the result does.
        """
        if not isinstance(batch.pooled, PooledAhead):
            factor = None if scale is None else scale.double().reciprocal().float()
            with torch.no_grad():
                if batch.pooled is None:
                    return self.gradients(batch.take_gradients(factor), compressed, batch.owned)
                used_directly = batch.take_gradients(None)
                return self.gradients(batch.pooled.take_gradients(used_directly, factor), compressed, batch.owned)
        of_rows = {table: gradient.detach().numpy() for table, gradient in batch.take_gradients(None).items()}
        summed = batch.pooled.gradients(of_rows, 1.0 if scale is None else 1.0 / float(scale))
        if batch.owned is not None:
            sums = clipped(summed(), self._clip_norm)
            rest = batch.owned.update({name: torch.from_numpy(part) for name, part in sums.items()})
            pushed = Packed.of({name: part.numpy() for name, part in rest.items()}, np.float32)
            return lambda: encoded(pushed, compressed)
        if sum_now:
            sums = summed()
            return lambda: encoded(clipped(sums, self._clip_norm), compressed)
        return lambda: encoded(clipped(summed(), self._clip_norm), compressed)

    def gradients(
        self, gradients: Mapping[str, torch.Tensor], compressed: bool, owned: OwnedTablesPlan | None = None
    ) -> Callable[[], Encoded]:
        """Starts copying gradients to the host; the result blocks until they are there. For the training thread.

        Args:
            gradients: of the rows of a batch.
            compressed: whether they travel as float16.
            owned: rows of the batch that the device owns, whose gradients stay; None if there are none.
        """
        if not gradients:  # Nothing is on the device.
            nothing: Packed[np.float32] = Packed([], [], np.empty(0, np.float32), [])
            return lambda: encoded(nothing, compressed)
        if self._clip_norm is not None:
            gradients = clipped_tensors(gradients, self._clip_norm)
        if owned is not None:
            gradients = owned.update(gradients)
        if isinstance(gradients, JoinedTensors):
            names, counts, widths = list(gradients.names), list(gradients.counts), list(gradients.widths)
        else:
            names, counts = list(gradients), [len(rows) for rows in gradients.values()]
            widths = [rows.shape[1] for rows in gradients.values()]
        if not compressed or self._on_host:
            whole = gradients.flat if isinstance(gradients, JoinedTensors) else joined(list(gradients.values()))
            plain = self._staging.to_host({"rows": whole})

            def arrived() -> Encoded:
                rows = Packed(names, counts, cast("NDArray[np.float32]", plain()["rows"]), widths)
                return encoded(rows, compressed)

            return arrived
        halves, scales = encode_tensors(gradients)
        copied = self._staging.to_host({"rows": joined(list(halves.values())), "scales": joined(list(scales.values()))})

        def wait() -> Encoded:
            arrays = copied()
            return Packed(names, counts, arrays["rows"], widths), Packed(names, counts, arrays["scales"])

        return wait


class _DeviceRows:
    """The rows of a batch that was looked up, on their way to a device.

    Args:
        lookup: what was found.
        tables: by name.
        halves: tables with 16-bit rows.
        frozen: tables that get no gradient.
        included: places of the rows that were not left out; None if all are there.
        cached: has the other rows; None without.

    Attributes:
        layouts: of the groups of tables.
        arrays: what has to be on the device.
        groups: all rows, after `unpack`.
    """

    def __init__(
        self,
        lookup: LookedUp,
        tables: Mapping[str, Table],
        halves: Set[str],
        frozen: Set[str],
        included: Packed[np.uint32] | None,
        cached: CachePlan | OwnedTablesPlan | None,
    ) -> None:
        self._lookup = lookup
        self._tables = tables
        self._halves = halves
        self._included = included
        self._cached = cached
        counts = lookup.rows.counts
        if lookup.left_out is not None:
            counts = lookup.left_out.counts
        if cached is not None:
            wanted = dict(zip(cached.wanted.names, cached.wanted.counts, strict=True))
            counts = [wanted[name] for name in lookup.rows.names]
        self.layouts = group_layouts(lookup.rows.names, counts, tables, frozen)
        self.arrays: dict[str, NDArray[Any]] = {"rows": lookup.rows.buffer}
        if lookup.scales is not None:
            self.arrays["scales"] = lookup.scales.buffer
        if included is not None:
            self.arrays |= {f"included/{n}": layout.places(included) for n, layout in enumerate(self.layouts)}
        self.groups: list[RowGroup] = []

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes the groups from the arrays on the device, in its current stream."""
        for number, (layout, values) in enumerate(zip(self.layouts, self._values(tensors), strict=True)):
            if self._included is not None:
                values = values.new_zeros(layout.rows, layout.dim).index_copy_(0, tensors[f"included/{number}"], values)
            self.groups.append(RowGroup(layout, values))

    def _values(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Returns the rows of each group, `[rows, dim]`."""
        packed, scales = self._lookup.rows, self._lookup.scales
        plain = scales is None and self._cached is None
        if plain and len(self.layouts) == 1 and self._halves.isdisjoint(packed.names):
            return [tensors["rows"].view(-1, self.layouts[0].dim)]  # Not cut by table.
        factors = None if scales is None else unpacked(tensors["scales"], scales)
        rows = decode_tensors(unpacked(tensors["rows"], packed), factors, self._tables)
        if self._cached is not None:
            rows = self._cached.assemble(rows, unpacked(tensors["places"].long(), self._cached.places))
        return [together([rows[name] for name in layout.tables]) for layout in self.layouts]


def _pooled_features(lookup: LookedUp) -> list[str]:
    """Returns the features that were pooled elsewhere: each sample has a row of its own."""
    return [feature for name in lookup.rows.names if (feature := pooled_feature(name)) is not None]


def _places(samples: int) -> Inverse:
    return np.arange(samples, dtype=np.uint16 if samples <= 1 << 16 else np.uint32)


def unpacked(buffer: torch.Tensor, packed: Packed[Any]) -> dict[str, torch.Tensor]:
    """Returns views into a buffer that is laid out like `packed`."""
    if packed.widths is None:
        return dict(zip(packed.names, buffer.split(list(packed.counts)), strict=True))
    sizes = [count * width for count, width in zip(packed.counts, packed.widths, strict=True)]
    parts = zip(packed.names, buffer.split(sizes), packed.counts, packed.widths, strict=True)
    return {name: part.view(count, width) for name, part, count, width in parts}
