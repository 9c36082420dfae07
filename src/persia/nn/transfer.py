"""Transfers rows of a batch to the device, and gradients back, in their wire form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from persia import batching
from persia.batching.batch import Batch
from persia.dense.torch_threads import shorten_spinning
from persia.errors import ConfigError
from persia.memory import host_memory
from persia.nn.clipping import clipped, clipped_tensors
from persia.nn.joined_tensors import joined, of_one_width, together
from persia.nn.options import check_device
from persia.nn.pooling import UNWEIGHTED, Weights
from persia.nn.prepared import PreparedBatch
from persia.nn.row_cache import CachePlan
from persia.schema import Table
from persia.schema.pooled_features import pooled_feature
from persia.types import Floats, FreshRows, Int64Array, Inverse, LookedUp, Packed, RegisteredBatch, WireRows

__all__ = [
    "CpuStaging",
    "CudaStaging",
    "Encoded",
    "Ready",
    "Staging",
    "Transfer",
    "copied_array",
    "decode",
    "decode_tensors",
    "encode",
    "encode_tensors",
    "encoded",
    "nothing_to_do",
    "staging_for",
]

Ready = Callable[[], None]
"""To be called by the thread that uses the tensors, before it does."""

Then = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Staging(Protocol):
    """Moves arrays of the host to tensors of a device, and back."""

    device: torch.device

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Returns tensors on the device; call the second result in the using thread first.

        Args:
            arrays: on the host.
            then: maps the tensors on the device to those that are returned.
        """

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Starts copying; the result blocks until the copies are there. Called by the training thread."""

    def free_bytes(self) -> int:
        """Returns the memory of the device that new tensors can take."""


class CpuStaging:
    """Staging without a device: tensors and arrays share memory."""

    device = torch.device("cpu")

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Wraps the arrays."""
        # torch has no read-only tensors: it warns, and a write would crash.
        tensors = {
            name: torch.from_numpy(array) if array.flags.writeable else copied_array(array)
            for name, array in arrays.items()
        }
        return tensors if then is None else then(tensors), nothing_to_do

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Wraps the tensors."""
        arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
        return lambda: arrays

    def free_bytes(self) -> int:
        """Returns the free memory of the host."""
        return host_memory().free


class CudaStaging:
    """Pinned memory and one side stream per direction, so that copies overlap with computing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        # The network is on the device, so these threads need not leave processors to it.
        self._pool = batching.ThreadPool(batching.default_threads())

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Copies on the side stream; the using stream waits for an event, the thread does not."""
        tensors: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._up):
            for name, array in arrays.items():
                tensors[name] = copied_array(array, self._pool, pin_memory=True).to(self.device, non_blocking=True)
            if then is not None:
                tensors = then(tensors)
            copied = torch.cuda.Event()
            copied.record(self._up)

        def ready() -> None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in tensors.values():
                # The caching allocator must not reuse the memory before this stream has used it.
                tensor.record_stream(stream)

        return tensors, ready

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Copies on the side stream, after the work that the training stream has queued."""
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        pinned: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._down):
            for name, tensor in tensors.items():
                tensor.record_stream(self._down)
                pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                pinned[name].copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._down)

        def wait() -> dict[str, Any]:
            copied.synchronize()
            return {name: tensor.numpy() for name, tensor in pinned.items()}

        return wait

    def free_bytes(self) -> int:
        """Returns the free memory of the device, with what torch has reserved and does not use."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)


def staging_for(name: str) -> Staging:
    """Returns the staging of a device of this process.

    Args:
        name: see `CollectionOptions.device`.

    Raises:
        ConfigError: the device is unknown, or not there.
    """
    check_device(name)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not available):
        return CpuStaging()
    index = int(name[len("cuda:") :]) if name.startswith("cuda:") else None
    if not available or (index is not None and index >= available):
        raise ConfigError(
            f"Device {name!r} is not available in this process: torch {torch.__version__} sees {available} CUDA "
            "devices. Use cpu or auto, a torch with CUDA, or on a cluster RayOptions(gpus=1), which gives each NN "
            "worker a GPU.",
            field="device",
        )
    # By number: other threads may have another current device.
    return CudaStaging(torch.device("cuda", torch.cuda.current_device() if index is None else index))


LARGE = 1 << 20
"""Bytes of an array that several threads copy."""


def copied_array(
    array: NDArray[np.generic], pool: batching.ThreadPool | None = None, *, pin_memory: bool = False
) -> torch.Tensor:
    """Returns a tensor with a copy of an array, which may be read-only and of any layout. Copies once.

    `torch.from_numpy(array).pin_memory()` warns of read-only arrays, and copies on one thread.

    Args:
        array: of any dtype that torch has.
        pool: threads for a large array that is contiguous; None for the calling one.
        pin_memory: whether a CUDA device can copy from the tensor by itself.
    """
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    copy = torch.empty(array.shape, dtype=dtype, pin_memory=pin_memory)
    if pool is not None and array.nbytes >= LARGE and array.flags.c_contiguous:
        batching.copy_array(copy.numpy(), array, pool)
    else:
        np.copyto(copy.numpy(), array)
    return copy


def nothing_to_do() -> None:
    """No-op: the tensors are ready."""


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
    """

    def __init__(
        self, staging: Staging, on_host: bool, tables: Mapping[str, Table], clip_norm: float | None = None
    ) -> None:
        self._staging = staging
        self._tables = tables
        self._frozen = frozenset(name for name, table in tables.items() if not table.trainable)
        self._on_host = on_host
        self._clip_norm = clip_norm
        self._scratch = batching.Scratch()

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped, which needs those of all rows."""
        return self._clip_norm is not None

    def rows(
        self, batch: Batch | RegisteredBatch, lookup: LookedUp, cached: CachePlan | None = None
    ) -> tuple[PreparedBatch, Ready]:
        """Returns the batch on the device; call the second result in the using thread first.

        Args:
            batch: the samples.
            lookup: their rows, without those that `cached` has.
            cached: the plan of a `RowCache`, which gets copies of the rows that were found.

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
        rows: dict[str, torch.Tensor] | Packed[np.float32]
        inverse: dict[str, Inverse] | dict[str, torch.Tensor]
        offsets: dict[str, Int64Array | None] | dict[str, torch.Tensor | None]
        if self._on_host:
            plain = decode(lookup.rows, lookup.scales, self._scratch, self._tables)
            if lookup.left_out is not None and included is not None:
                plain = self._with_zeros(plain, included, lookup.left_out.counts)
            elif lookup.seen is not None and not plain.buffer.flags.writeable:
                # In a message, and `fresh_rows` writes them.
                own = self._scratch.floats(plain.buffer.size)
                own[:] = plain.buffer
                plain = Packed(plain.names, plain.counts, own, plain.widths)
            rows, inverse = plain, lookup.inverse
            if cached is None:
                tensors, ready = self._staging.to_device(arrays)
            else:
                tensors, ready = self._staging.to_device({**arrays, "rows": plain.buffer})
                looked_up = unpacked(tensors["rows"], plain)
                rows = cached.assemble(looked_up, unpacked(tensors["places"].long(), cached.places))
            ends = cast("Mapping[str, Int64Array]", lookup.offsets)
            if lookup.pooled:
                inverse.update(dict.fromkeys(_pooled_features(lookup), _places(len(batch.labels))))
            offsets = {name: ends.get(name) for name in inverse}
            id_weights: Weights = UNWEIGHTED if lookup.weights is None else dict(lookup.weights.items())
        else:
            packs = {"rows": lookup.rows, "narrow": lookup.narrow, "wide": lookup.wide, "offsets": lookup.offsets}
            optional = {"scales": lookup.scales, "id_weights": lookup.weights}
            packed: dict[str, Packed[Any]] = {**packs, **{k: pack for k, pack in optional.items() if pack is not None}}
            arrays.update({kind: pack.buffer for kind, pack in packed.items()})
            if included is not None:
                arrays["included"] = included.buffer.astype(np.int64)
            # Made on the device, in the stream that has copied the rest.
            made: dict[str, dict[str, torch.Tensor]] = {}

            def unpack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
                made.update({kind: unpacked(tensors[kind], pack) for kind, pack in packed.items()})
                made["rows"] = decode_tensors(made["rows"], made.get("scales"), self._tables)
                if cached is not None:
                    made["rows"] = cached.assemble(made["rows"], unpacked(tensors["places"].long(), cached.places))
                if lookup.left_out is not None and included is not None:
                    index, whole = unpacked(tensors["included"], included), dict[str, torch.Tensor]()
                    for (name, rows), count in zip(made["rows"].items(), lookup.left_out.counts, strict=True):
                        whole[name] = rows.new_zeros(count, rows.shape[1]).index_copy_(0, index[name], rows)
                    made["rows"] = whole
                return {**tensors, **{f"rows/{name}": rows for name, rows in made["rows"].items()}}

            tensors, ready = self._staging.to_device(arrays, unpack)
            rows, inverse = made["rows"], {**made["narrow"], **made["wide"]}
            if lookup.pooled:
                places = torch.arange(len(batch.labels), device=self._staging.device)
                inverse.update(dict.fromkeys(_pooled_features(lookup), places))
            offsets = {name: made["offsets"].get(name) for name in inverse}
            id_weights = made.get("id_weights", UNWEIGHTED)
        prepared = PreparedBatch(tensors["dense"], tensors["labels"], batch.day, rows, inverse, offsets)
        prepared.frozen = self._frozen
        prepared.weights, prepared.groups = tensors.get("weights"), tensors.get("groups")
        prepared.id_weights, prepared.pooled_ids = id_weights, lookup.pooled or {}
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
        arrays: dict[str, NDArray[Any]] = {"rows": packed.buffer, "places": places.buffer.astype(np.int64)}
        if fresh.scales is not None:
            arrays["scales"] = fresh.scales.buffer

        def put(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            scales = unpacked(tensors["scales"], fresh.scales) if fresh.scales is not None else None
            rows = decode_tensors(unpacked(tensors["rows"], packed), scales, self._tables)
            with torch.no_grad():
                for name, index in unpacked(tensors["places"], places).items():
                    if len(index):
                        batch.rows[name].index_copy_(0, index, rows[name])
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
        if batch.pooled is None:
            with torch.no_grad():
                return self.gradients(batch.take_gradients(scale), compressed)
        of_rows = {table: gradient.detach().numpy() for table, gradient in batch.take_gradients(None).items()}
        summed = batch.pooled.gradients(of_rows, 1.0 if scale is None else 1.0 / float(scale))
        if sum_now:
            sums = summed()
            return lambda: encoded(clipped(sums, self._clip_norm), compressed)
        return lambda: encoded(clipped(summed(), self._clip_norm), compressed)

    def gradients(self, gradients: Mapping[str, torch.Tensor], compressed: bool) -> Callable[[], Encoded]:
        """Starts copying gradients to the host; the result blocks until they are there. For the training thread."""
        if self._clip_norm is not None and gradients:
            gradients = clipped_tensors(gradients, self._clip_norm)
        names, counts = list(gradients), [len(rows) for rows in gradients.values()]
        widths = [rows.shape[1] for rows in gradients.values()]

        if not compressed or self._on_host or not gradients:
            plain = self._staging.to_host({"rows": joined(list(gradients.values()))})

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
