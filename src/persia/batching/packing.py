"""The batch path on packed arrays: all tables of a batch in one call (docs/decisions/0004-packed-arrays.md)."""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from persia.batching.codec import decode_rows, encode_rows
from persia.batching.native import Scratch, ThreadPool, as_data_error, core
from persia.schema import Table
from persia.types import Floats, Ids, Int64Array, WireRows
from persia.types.packed import Packed

__all__ = ["PackedBatch", "decode_packed", "encode_packed", "pack_batch", "plain_packed", "put_part", "take_part"]

S = TypeVar("S", bound=np.generic)

_core: Any = importlib.import_module("persia._core").packed


class PackedBatch(NamedTuple):
    """The distinct ids of a batch, sorted by the PS that owns them, and where those of each feature are.

    Attributes:
        ids: by table.
        bounds: int64 `[tables, servers + 1]`: PS p owns `ids[table][bounds[t, p]:bounds[t, p + 1]]`.
        narrow: by feature, the place of every id among those of its table; of tables with at most 65,536 ids.
        wide: of the others.
    """

    ids: Packed[np.uint64]
    bounds: Int64Array
    narrow: Packed[np.uint16]
    wide: Packed[np.uint32]


def pack_batch(
    tables: Sequence[tuple[str, Sequence[str]]],
    values: Sequence[Sequence[Ids]],
    servers: int,
    pool: ThreadPool,
    scratch: Scratch,
) -> PackedBatch:
    """`unique` and `group_by_owner` of all tables in one call.

    Args:
        tables: their names, and those of their features.
        values: for each table the ids of its features: contiguous uint64 arrays `[n_i]`.
        servers: how many PSs there are.
        pool: threads to run on, over tables.
        scratch: memory kept from call to call. All that is returned is lent by it.

    Raises:
        DataError: an array has another dtype or shape, or is not contiguous; a table has 2^32 - 1 ids or more.

    Blocks until done, without the GIL. Thread-safe.
    """
    groups = [list(group) for group in values]
    lengths = [[len(ids) for ids in group] for group in groups]
    total = sum(map(sum, lengths))
    block = scratch.floats(3 * total)
    ids, inverse = block[: 2 * total].view(np.uint64), block[2 * total :].view(np.uint32)
    bounds = np.empty((len(tables), servers + 1), np.int64)
    names = [name for name, _ in tables]
    with as_data_error:
        distinct, narrow, wide, are_wide = _core.pack_batch(names, groups, ids, inverse, bounds, pool, scratch)
    features: tuple[list[str], list[str]] = [], []
    counts: tuple[list[int], list[int]] = [], []
    for (_, mine), sizes, is_wide in zip(tables, lengths, are_wide, strict=True):
        features[is_wide].extend(mine)
        counts[is_wide].extend(sizes)
    return PackedBatch(
        Packed(names, bounds[:, -1].tolist(), ids[:distinct]),
        bounds,
        Packed(features[0], counts[0], inverse[wide:].view(np.uint16)[:narrow]),
        Packed(features[1], counts[1], inverse[:wide]),
    )


def take_part(whole: Packed[S], bounds: Int64Array, server: int) -> Packed[S]:
    """The rows of one PS; a copy, unless there is one PS only.

    Args:
        whole: by table.
        bounds: of these tables, as in `PackedBatch`.
        server: number of the PS.

    Raises:
        DataError: the bounds are not those of these arrays.
    """
    if bounds.shape[1] == 2:
        return whole
    counts = (bounds[:, server + 1] - bounds[:, server]).tolist()
    widths = whole.widths or [1] * len(counts)
    mine = np.empty(sum(count * width for count, width in zip(counts, widths, strict=True)), whole.buffer.dtype)
    with as_data_error:
        _core.move_part(whole.buffer, mine, bounds, server, widths, True)
    return Packed(whole.names, counts, mine, whole.widths)


def put_part(whole: Packed[S], bounds: Int64Array, server: int, mine: NDArray[S]) -> None:
    """The opposite: writes the rows of one PS, table after table, to their places. Raises as `take_part` does."""
    with as_data_error:
        _core.move_part(whole.buffer, mine, bounds, server, whole.widths or [1] * len(whole), False)


def encode_packed(
    rows: Packed[np.float32], narrow: Collection[str] = ()
) -> tuple[Packed[np.float16], Packed[np.float32]]:
    """`encode_rows` of all tables: a call for each run of tables of one width.

    Args:
        rows: by table.
        narrow: tables of 16-bit values, whose rows are as stored. They stay as they are, without scales.
    """
    if any(name in narrow for name in rows.names):
        return _encode_mixed(rows, narrow)
    halves = np.empty(rows.buffer.shape, np.float16)
    scales = np.empty(sum(rows.counts), np.float32)
    for row, end, first, last, width in _runs(rows):
        encoded, factors = encode_rows(rows.buffer[first:last].reshape(-1, width))
        halves[first:last], scales[row:end] = encoded.reshape(-1), factors
    return Packed(rows.names, rows.counts, halves, rows.widths), Packed(rows.names, rows.counts, scales)


def decode_packed(halves: Packed[np.float16], scales: Packed[np.float32], scratch: Scratch) -> Packed[np.float32]:
    """`decode_rows` of all tables: undoes `encode_packed`."""
    rows: Floats | None = None
    for row, end, first, last, width in _runs(halves):
        part = decode_rows(halves.buffer[first:last].reshape(-1, width), scales.buffer[row:end], scratch).reshape(-1)
        if last - first == len(halves.buffer):
            rows = part
            break
        rows = scratch.floats(len(halves.buffer)) if rows is None else rows
        rows[first:last] = part
    return Packed(halves.names, halves.counts, np.empty(0, np.float32) if rows is None else rows, halves.widths)


def plain_packed(
    rows: Packed[np.float32 | np.float16],
    scales: Packed[np.float32] | None,
    narrow: Mapping[str, Table],
    scratch: Scratch,
) -> Packed[np.float32]:
    """Rows as float32 `[n, dim]`, from any form in which they travel; as they are if they are float32 already.

    Args:
        rows: by table.
        scales: of the tables that `encode_packed` has encoded; None if there are none.
        narrow: tables of 16-bit values, by name; their rows are as stored.
        scratch: memory kept from call to call.

    Raises:
        DataError: rows do not fit their table.
    """
    if not any(name in narrow for name in rows.names):
        if scales is None:
            return cast("Packed[np.float32]", rows)
        return decode_packed(cast("Packed[np.float16]", rows), scales, scratch)
    dims = [narrow[n].dim if n in narrow else w for n, w in zip(rows.names, rows.widths or [], strict=True)]
    plain = Packed(rows.names, rows.counts, scratch.floats(sum(map(operator.mul, rows.counts, dims))), dims)
    for (name, array), out in zip(rows.items(), plain.arrays(), strict=True):
        if name in narrow:
            with as_data_error:
                core.widen_rows(array, out, narrow[name].dtype)
        elif scales is not None and name in scales:
            out[:] = decode_rows(array, scales[name], scratch)  # type: ignore[arg-type]
        else:
            out[:] = array
    return plain


def _encode_mixed(rows: Packed[np.float32], narrow: Collection[str]) -> tuple[Packed[np.float16], Packed[np.float32]]:
    parts: list[WireRows] = []
    scales: dict[str, Floats] = {}
    for name, array in rows.items():
        if name in narrow:
            parts.append(array.view(np.float16))
        else:
            encoded, scales[name] = encode_rows(array)
            parts.append(encoded)
    buffer: Any = parts[0] if len(parts) == 1 else np.concatenate([part.reshape(-1) for part in parts])
    widths = [part.shape[1] for part in parts]
    return Packed(rows.names, rows.counts, buffer.reshape(-1), widths), Packed.of(scales, np.float32)


def _runs(rows: Packed[Any]) -> Iterator[tuple[int, int, int, int, int]]:
    """Neighbouring tables of one width: first row and end, first value and end, width."""
    row = first = 0
    pairs = zip(rows.widths or [], rows.counts, strict=False)
    for width, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        count = sum(n for _, n in run)
        if count * width:
            yield row, row + count, first, first + count * width, width
        row, first = row + count, first + count * width
