"""The batch path on packed arrays: all tables of a batch in one call (docs/decisions/0004-packed-arrays.md)."""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from persia.batching.id_column import IdColumn
from persia.batching.native import Scratch, ThreadPool, as_data_error, core
from persia.batching.row_codec import encode_rows
from persia.errors import DataError
from persia.schema import Table
from persia.types import BucketMap, Int64Array, Inverse
from persia.types.half_floats import words_of
from persia.types.packed import Packed

__all__ = [
    "RoutedBatch",
    "check_rows",
    "decode_packed",
    "encode_packed",
    "plain_packed",
    "put_part",
    "route_batch",
    "take_part",
]

S = TypeVar("S", bound=np.generic)

NO_TABLES: Mapping[str, Table] = {}

_core: Any = importlib.import_module("persia._core").packed


class RoutedBatch(NamedTuple):
    """The distinct ids of a batch, sorted by the PS that owns them, and where they occur in each feature.

    Attributes:
        ids: distinct ids by table.
        bounds: int64 `[tables, servers + 1]`: PS p owns `ids[table][bounds[t, p]:bounds[t, p + 1]]`.
        buckets: the PS of each bucket, by which they are sorted.
        narrow: inverse indices by feature (positions in the ids of its table), for tables with at most 65,536 ids.
        wide: inverse indices by feature, for the other tables.
        offsets: offsets by feature, for features whose samples have any number of ids.
        weights: weights of the ids, by feature with weights; None if there are none.
    """

    ids: Packed[np.uint64]
    bounds: Int64Array
    buckets: BucketMap
    narrow: Packed[np.uint16]
    wide: Packed[np.uint32]
    offsets: Packed[np.int64]
    weights: Packed[np.float32] | None = None

    @property
    def inverse(self) -> dict[str, Inverse]:
        """The inverse indices, by feature."""
        return {**self.narrow, **self.wide}


def route_batch(
    tables: Sequence[tuple[str, Sequence[str]]],
    columns: Mapping[str, IdColumn],
    buckets: BucketMap,
    pool: ThreadPool,
    scratch: Scratch,
) -> RoutedBatch:
    """`unique` and `group_by_owner` of all tables in one call.

    Args:
        tables: name of each table, and the names of its features.
        columns: ids by feature; the values are contiguous.
        buckets: the PS of each bucket.
        pool: threads to run on, over tables.
        scratch: memory reused from call to call. Ids and inverse indices are borrowed from it.

    Raises:
        DataError: an array has another dtype or shape, or is not contiguous; a table has 2^32 - 1 ids or more.

    Blocks until done, without the GIL. Thread-safe.
    """
    groups = [[columns[name].values for name in features] for _, features in tables]
    lengths = [[len(ids) for ids in group] for group in groups]
    total = sum(map(sum, lengths))
    block = scratch.floats(3 * total)
    ids, inverse = block[: 2 * total].view(np.uint64), block[2 * total :].view(np.uint32)
    bounds = np.empty((len(tables), buckets.servers + 1), np.int64)
    names = [name for name, _ in tables]
    with as_data_error:
        distinct, narrow, wide, are_wide = _core.pack_batch(
            names, groups, buckets.owners, ids, inverse, bounds, pool, scratch
        )
    names_of: tuple[list[str], list[str]] = [], []
    counts: tuple[list[int], list[int]] = [], []
    for (_, table_features), sizes, is_wide in zip(tables, lengths, are_wide, strict=True):
        names_of[is_wide].extend(table_features)
        counts[is_wide].extend(sizes)
    offsets = {name: column.offsets for name, column in columns.items() if column.offsets is not None}
    weights = {name: column.weights for name, column in columns.items() if column.weights is not None}
    return RoutedBatch(
        Packed(names, bounds[:, -1].tolist(), ids[:distinct]),
        bounds,
        buckets,
        Packed(names_of[0], counts[0], inverse[wide:].view(np.uint16)[:narrow]),
        Packed(names_of[1], counts[1], inverse[:wide]),
        Packed.of(offsets, np.int64),
        Packed.of(weights, np.float32) if weights else None,
    )


def take_part(whole: Packed[S], bounds: Int64Array, server: int) -> Packed[S]:
    """The rows of one PS; a copy, unless there is only one PS.

    Args:
        whole: rows of all PSs, by table.
        bounds: bounds of the tables, as in `RoutedBatch`.
        server: number of the PS.

    Raises:
        DataError: the bounds do not match the arrays.
    """
    if bounds.shape[1] == 2:
        return whole
    counts = (bounds[:, server + 1] - bounds[:, server]).tolist()
    widths = whole.widths or [1] * len(counts)
    part = np.empty(sum(count * width for count, width in zip(counts, widths, strict=True)), whole.buffer.dtype)
    with as_data_error:
        _core.move_part(whole.buffer, part, bounds, server, widths, True)
    return Packed(whole.names, counts, part, whole.widths)


def put_part(whole: Packed[S], bounds: Int64Array, server: int, part: NDArray[S]) -> None:
    """Writes the rows of one PS, table after table, to their places: the inverse of `take_part`, with its errors."""
    with as_data_error:
        _core.move_part(whole.buffer, part, bounds, server, whole.widths or [1] * len(whole), False)


def check_rows(
    rows: Packed[np.float32 | np.float16], scales: Packed[np.float32] | None, tables: Mapping[str, Table]
) -> None:
    """Checks that looked-up rows have the wire form of their tables.

    Args:
        rows: rows by table.
        scales: as in `LookedUp`.
        tables: tables of the schema, by name.

    Raises:
        DataError: a table is unknown, its rows have another width, or the scales do not match the rows.
    """
    halves = rows.buffer.dtype == np.float16
    needed: list[tuple[str, int]] = []
    for name, count, width in zip(rows.names, rows.counts, rows.widths or [0] * len(rows), strict=True):
        table = tables.get(name)
        if table is None:
            raise _unexpected(name, "there is no such table")
        expected = table.dim if table.dtype == "float32" else words_of(table.dtype, table.dim) * (1 + halves)
        if width != expected:
            raise _unexpected(
                name, f"a row of {table.dim} {table.dtype} has {expected} values of {rows.buffer.dtype}, not {width}"
            )
        if halves and table.dtype == "float32":
            needed.append((name, count))
    present = [] if scales is None else list(zip(scales.names, scales.counts, strict=True))
    if present != needed or (scales is not None and scales.widths):
        odd = [pair for pair in (*needed, *present) if pair not in needed or pair not in present] or [*needed, *present]
        raise _unexpected(odd[0][0], "compressed float32 rows need a scale each, in the order of tables; others none")


def encode_packed(
    rows: Packed[np.float32], tables: Mapping[str, Table] = NO_TABLES
) -> tuple[Packed[np.float16], Packed[np.float32]]:
    """`encode_rows` of all tables: a call for each run of tables of one width.

    Args:
        rows: rows by table.
        tables: tables by name. 16-bit rows are unchanged, without scales; other tables have float32 rows.
    """
    stored = _of_16_bits(tables)
    widths = [w * (1 + (n in stored)) for n, w in zip(rows.names, rows.widths or [], strict=False)]
    halves = np.empty(sum(map(operator.mul, rows.counts, widths)), np.float16)
    scaled = [(name, count) for name, count in zip(rows.names, rows.counts, strict=True) if name not in stored]
    scales = np.empty(sum(count for _, count in scaled), np.float32)
    row = start = 0
    for run in _runs(rows, stored):
        if run.stored is None:
            encoded, scales[row : row + run.rows] = encode_rows(run.values)
            row += run.rows
        else:
            encoded = run.values.view(np.float16)
        halves[start : start + encoded.size] = encoded.reshape(-1)
        start += encoded.size
    names, counts = [name for name, _ in scaled], [count for _, count in scaled]
    return Packed(rows.names, rows.counts, halves, widths), Packed(names, counts, scales)


def decode_packed(halves: Packed[np.float16], scales: Packed[np.float32], scratch: Scratch) -> Packed[np.float32]:
    """`decode_rows` of all tables: undoes `encode_packed` of float32 tables."""
    return plain_packed(halves, scales, NO_TABLES, scratch)


def plain_packed(
    rows: Packed[np.float32 | np.float16],
    scales: Packed[np.float32] | None,
    tables: Mapping[str, Table],
    scratch: Scratch,
) -> Packed[np.float32]:
    """Rows as float32 `[n, dim]`, from any wire form; returned as they are if they are already float32.

    A call for each run of tables of one dtype and width.

    Args:
        rows: rows by table; rows from other processes were checked by `check_rows`.
        scales: scales of the tables that `encode_packed` has encoded, in their order; None if there are none.
        tables: tables by name. 16-bit rows are as stored; other tables have float32 rows.
        scratch: memory reused from call to call.

    Raises:
        DataError: rows do not match their table.
    """
    stored = _of_16_bits(tables)
    if scales is None and not any(name in stored for name in rows.names):
        return cast("Packed[np.float32]", rows)
    dims = [stored[n].dim if n in stored else w for n, w in zip(rows.names, rows.widths or [], strict=False)]
    plain = scratch.floats(sum(map(operator.mul, rows.counts, dims)))
    row = start = 0
    for run in _runs(rows, stored):
        dim = run.values.shape[1] if run.stored is None else run.stored.dim
        end = start + run.rows * dim
        out = plain[start:end].reshape(run.rows, dim)
        with as_data_error:
            if run.stored is not None:
                core.widen_rows(run.values, out, run.stored.dtype)
            elif scales is not None:
                core.decode_fp16(run.values, scales.buffer[row : row + run.rows], out)
                row += run.rows
            else:
                out[:] = run.values
        start = end
    return Packed(rows.names, rows.counts, plain, dims)


class _Run(NamedTuple):
    """Rows of neighbouring tables of one dtype and width.

    Attributes:
        rows: number of rows.
        values: `[rows, width]`.
        stored: one of the tables if they have 16-bit rows; else None.
    """

    rows: int
    values: NDArray[Any]
    stored: Table | None


def _runs(rows: Packed[Any], stored: Mapping[str, Table]) -> Iterator[_Run]:
    def form(one: tuple[str, int, int]) -> tuple[int, str, int]:
        table = stored.get(one[0])
        return (one[1], "", 0) if table is None else (one[1], table.dtype, table.dim)

    start = 0
    parts = zip(rows.names, rows.widths or [], rows.counts, strict=False)
    for (width, _, _), run in ((key, list(group)) for key, group in itertools.groupby(parts, form)):
        count = sum(n for _, _, n in run)
        end = start + count * width
        if end > start:
            yield _Run(count, rows.buffer[start:end].reshape(count, width), stored.get(run[0][0]))
        start = end


def _of_16_bits(tables: Mapping[str, Table]) -> dict[str, Table]:
    return {name: table for name, table in tables.items() if table.dtype != "float32"}


def _unexpected(table: str, problem: str) -> DataError:
    return DataError(
        f"Rows looked up in table {table!r} have an unexpected form: {problem}. Give all processes of a run the "
        "same schema and version.",
        table=table,
    )
